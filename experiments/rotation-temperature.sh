#!/usr/bin/env bash
# Which temperature keeps experts apart where c is the rotation: MNIST scaled down, 100 rounds, three seeds; FedAvg beside it.
. "$(dirname "$0")/common.sh"
SMALL=(rotated-mnist --scale small --rounds "${ROUNDS:-100}" --set evaluation.every=20 "${BF16[@]}")
for seed in 0 1 2; do
  for beta in 0.8 1.0 1.2; do
    go "rotation-temperature/beta$beta-seed$seed" "${SMALL[@]}" --seed "$seed" --set "fedmix.beta=$beta"
  done
  go "rotation-temperature/fedavg-seed$seed" "${SMALL[@]}" --seed "$seed" --algorithm fedavg
done
