#!/usr/bin/env bash
# Accuracy against cost of what FedMix's experts may share, on CIFAR-10: the figures of docs/sharing.md. A LeNet of half the channels.
# Label skew: the paper's 100 clients, gamma 0.9, so that experts part, 300 rounds. Label permutations: a quarter of the data, 40 rounds.
# The forms were chosen on validation data of seeds 0 to 2 (sharing.sh); the seeds here were used for nothing else.
. "$(dirname "$0")/common.sh"
HALF=(--set 'model.channels=[16,32]' --set 'model.hidden=[128]')
WIDE=(--set 'model.channels=[32,64]' --set 'model.hidden=[256]' --algorithm fedavg)
SKEW=(cifar10 --rounds 300 --set fedmix.gamma=0.9 --set evaluation.every=20 "${BF16[@]}")
PERMUTED=(cifar10-permutation --scale small --rounds 40 --set evaluation.every=4 "${BF16[@]}")
AUTO=(--set fedmix.evidence=arriving --set fedmix.experts=auto --set fedmix.max_experts=8)
OUTPUT=(--set fedmix.shared=all-but-output)
CONVOLUTIONS=(--set 'fedmix.shared=["conv*"]')
RANK=("${CONVOLUTIONS[@]}" --set 'fedmix.factor_layers=["fc"]' --set fedmix.rank=8)
FULL=(--set fedmix.full_steps=true)
COUNTS=(--set training.label_counts=true)

skew() { go "frontier/skew-$1-seed$seed" "${SKEW[@]}" --seed "$seed" "${@:2}"; }
permuted() { go "frontier/permuted-$1-seed$seed" "${PERMUTED[@]}" --seed "$seed" "${@:2}"; }
for seed in 3 4 5; do
  skew fedavg "${HALF[@]}" --algorithm fedavg
  skew output-full-steps "${HALF[@]}" "${OUTPUT[@]}" "${FULL[@]}"
  skew output "${HALF[@]}" "${OUTPUT[@]}"
  skew convolutions "${HALF[@]}" "${CONVOLUTIONS[@]}" "${FULL[@]}"
  skew rank "${HALF[@]}" "${RANK[@]}" "${FULL[@]}"
  skew whole-full-steps "${HALF[@]}" "${FULL[@]}"
  permuted fedavg --algorithm fedavg
  permuted output "${AUTO[@]}" "${OUTPUT[@]}"
  permuted convolutions "${AUTO[@]}" "${CONVOLUTIONS[@]}"
  permuted rank "${AUTO[@]}" "${RANK[@]}"
  permuted whole "${AUTO[@]}"
done
for seed in 3 4 5; do
  skew wide "${WIDE[@]}"
  skew pruned "${HALF[@]}" "${FULL[@]}" --set fedmix.eta=0.9
  skew dropout "${HALF[@]}" "${FULL[@]}" --set fedmix.expert_dropout=0.8
  skew ensemble "${HALF[@]}" --set fedmix.gamma=1.0
  permuted wide "${WIDE[@]}"
  permuted pruned --set fedmix.eta=0.9
  permuted dropout --set fedmix.expert_dropout=0.8
done
for seed in 3 4 5; do
  skew output-counts "${HALF[@]}" "${OUTPUT[@]}" "${FULL[@]}" "${COUNTS[@]}"
  skew fedavg-counts "${HALF[@]}" --algorithm fedavg "${COUNTS[@]}"
  skew whole "${HALF[@]}"
  permuted paper
  permuted ensemble --set fedmix.gamma=1.0
done
