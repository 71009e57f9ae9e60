#!/usr/bin/env bash
# Mini-batches of nearly one size against full ones and a last one of two points: CIFAR-10, LeNet of half the channels, three seeds.
. "$(dirname "$0")/common.sh"
for seed in 0 1 2; do
  for last in even smaller; do
    go "batches/fedavg-$last-$seed" cifar10 --rounds "${ROUNDS:-150}" --algorithm fedavg --seed "$seed" \
      --set "model.channels=[16,32]" --set "training.last_batch=$last"
  done
done
