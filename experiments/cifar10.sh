#!/usr/bin/env bash
# The paper's main table: CIFAR-10, label skew, 100 clients, LeNet-5. Seven hours on two cores.
. "$(dirname "$0")/common.sh"
ROUNDS=${ROUNDS:-600}
go cifar10/fedmix-gamma0.9 cifar10 --rounds "$ROUNDS" --set fedmix.gamma=0.9 "${BF16[@]}"
for method in fedavg biased-fedavg local-global; do
  go "cifar10/$method" cifar10 --rounds "$ROUNDS" --algorithm "$method"
done
go cifar10/fedmix-gamma0.99 cifar10 --rounds "$ROUNDS"
go cifar10/fedmix-full-steps cifar10 --rounds "$ROUNDS" --set fedmix.full_steps=true "${BF16[@]}"  # not in the paper
# clients' own label counts in front of what is shared: not in the paper either
go cifar10/fedmix-counts cifar10 --rounds "$ROUNDS" --set fedmix.full_steps=true --set training.label_counts=true "${BF16[@]}"
go cifar10/fedavg-counts cifar10 --rounds "$ROUNDS" --algorithm fedavg --set training.label_counts=true "${BF16[@]}"
# FedAvg with four times the parameters: the same communication as FedMix with four experts
go cifar10/fedavg-113-channels cifar10 --rounds $((ROUNDS / 4)) --algorithm fedavg --set "model.channels=[113,226]" "${BF16[@]}"
for run in fedmix-gamma0.9 fedmix-gamma0.99 fedavg; do
  look "cifar10/$run" --no-vae
  audit "cifar10/$run"
done
for run in fedmix-full-steps fedmix-counts fedavg-counts; do
  look "cifar10/$run" --no-vae
done
