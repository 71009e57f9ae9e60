#!/usr/bin/env bash
# How many experts, how much pruning, and the claims without a figure: CIFAR-10, LeNet of half the channels, gamma 0.9.
. "$(dirname "$0")/common.sh"
HALF=(--rounds "${ROUNDS:-300}" --set "model.channels=[16,32]" --set fedmix.gamma=0.9 "${BF16[@]}")
go ablation/k4 cifar10 "${HALF[@]}"
for k in 1 2 8; do
  go "ablation/k$k" cifar10 "${HALF[@]}" --set "fedmix.experts=$k"
done
for eta in 0.5 0.75; do
  go "ablation/eta$eta" cifar10 "${HALF[@]}" --set "fedmix.eta=$eta"
done
go ablation/direct cifar10 "${HALF[@]}" --set fedmix.objective=direct --set fedmix.marginal=exact
go ablation/k4-full-steps cifar10 "${HALF[@]}" --set fedmix.full_steps=true  # not in the paper
go ablation/no-entropy cifar10 "${HALF[@]}" --set fedmix.entropy=0
for k in 4 8; do
  look "ablation/k$k" --no-vae
done
