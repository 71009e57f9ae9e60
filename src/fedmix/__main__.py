from fedmix.cli import main

main()
