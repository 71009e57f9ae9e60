#!/usr/bin/env bash
# Which temperature finds hidden groups: CIFAR-10 with four label permutations, a small LeNet, a quarter of the data, three seeds.
. "$(dirname "$0")/common.sh"
for seed in 0 1 2; do
  for beta in 1.0 0.8 1.2; do
    go "temperature/beta$beta-seed$seed" cifar10-permutation --scale small --seed "$seed" \
      --set data.share=0.25 --set "fedmix.beta=$beta" "${BF16[@]}"
  done
done
