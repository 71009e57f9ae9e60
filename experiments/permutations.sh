#!/usr/bin/env bash
# Hidden groups: CIFAR-10 with four label permutations on 20 clients; as many experts as groups, one fewer, one more.
. "$(dirname "$0")/common.sh"
go permutations/k4-quarter cifar10-permutation --set data.share=0.25 --set fedmix.beta=1.0 "${BF16[@]}"
go permutations/k4 cifar10-permutation --set data.share=0.5 --set fedmix.beta=0.8
go permutations/k4-beta1 cifar10-permutation --set data.share=0.5 --set fedmix.beta=1.0
go permutations/k3 cifar10-permutation --set data.share=0.25 --set fedmix.beta=1.0 --set fedmix.experts=3
go permutations/k5 cifar10-permutation --set data.share=0.25 --set fedmix.beta=1.0 --set fedmix.experts=5
go permutations/fedavg cifar10-permutation --set data.share=0.25 --algorithm fedavg "${BF16[@]}"
for seed in 0 1; do  # a smaller model
  go "permutations/k4-small-seed$seed" cifar10-permutation --scale small --seed "$seed" --set data.share=0.5 --set fedmix.beta=1.0
done
