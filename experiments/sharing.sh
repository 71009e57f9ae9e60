#!/usr/bin/env bash
# What FedMix's experts may share, against what it costs: accuracy of each form on CIFAR-10, three seeds. A LeNet of half the channels.
# Label skew: the paper's 100 clients, gamma 0.9, so that experts part. Label permutations: a quarter of the data.
. "$(dirname "$0")/common.sh"
HALF=(--set 'model.channels=[16,32]' --set 'model.hidden=[128]')
SKEW=(cifar10 --rounds "${ROUNDS:-200}" --set fedmix.gamma=0.9 --set evaluation.every=10 "${BF16[@]}")
AUTO=(--set fedmix.evidence=arriving --set fedmix.experts=auto --set fedmix.max_experts=8)
OUTPUT=(--set fedmix.shared=all-but-output)
RANK=(--set 'fedmix.shared=["conv*"]' --set 'fedmix.factor_layers=["fc"]' --set fedmix.rank=8)
PERMUTED=(cifar10-permutation --scale small --rounds "${ROUNDS_PERMUTED:-20}" "${BF16[@]}")

skew() { go "sharing/skew-$1-seed$seed" "${SKEW[@]}" --seed "$seed" "${@:2}"; }
permuted() { go "sharing/permuted-$1-seed$seed" "${PERMUTED[@]}" --seed "$seed" "${@:2}"; }
for seed in 0 1 2; do
  skew fedavg "${HALF[@]}" --algorithm fedavg
  skew output "${HALF[@]}" "${OUTPUT[@]}"
  skew output-full-steps "${HALF[@]}" "${OUTPUT[@]}" --set fedmix.full_steps=true
  skew rank "${HALF[@]}" "${RANK[@]}"
  skew whole "${HALF[@]}"
  skew whole-full-steps "${HALF[@]}" --set fedmix.full_steps=true
  permuted fedavg --algorithm fedavg
  permuted output "${AUTO[@]}" "${OUTPUT[@]}"
  permuted output-longer "${AUTO[@]}" "${OUTPUT[@]}" --rounds 70
  permuted rank "${AUTO[@]}" "${RANK[@]}"
  permuted whole "${AUTO[@]}"
  skew ensemble "${HALF[@]}" --set fedmix.gamma=1.0
done
# one seed each: the paper's step, and what is neither quicker nor better than the forms above
seed=0
permuted paper
skew output-counts "${HALF[@]}" "${OUTPUT[@]}" --set training.label_counts=true
skew fedavg-counts "${HALF[@]}" --algorithm fedavg --set training.label_counts=true
skew convolutions "${HALF[@]}" --set 'fedmix.shared=["conv*"]'
skew dropout "${HALF[@]}" --set fedmix.expert_dropout=0.8
skew pruned "${HALF[@]}" --set fedmix.eta=0.9
skew wide --set 'model.channels=[32,64]' --set 'model.hidden=[256]' --algorithm fedavg
