#!/usr/bin/env bash
# Clients' own label counts in front of what is shared: CIFAR-10, LeNet of half the channels, three seeds. FedAvg without: batches.sh.
. "$(dirname "$0")/common.sh"
HALF=(--rounds "${ROUNDS:-150}" --set "model.channels=[16,32]" --set fedmix.gamma=0.9)
for seed in 0 1 2; do
  go "counts/fedavg-$seed" cifar10 "${HALF[@]}" --seed "$seed" --algorithm fedavg --set training.label_counts=true
  go "counts/fedmix-$seed" cifar10 "${HALF[@]}" --seed "$seed" --set training.label_counts=true
  go "counts/fedmix-plain-$seed" cifar10 "${HALF[@]}" --seed "$seed"
done
