#!/usr/bin/env bash
# Rotated MNIST, without and with label skew: q(z|rotation), q(z|label), FedAvg, biased FedAvg.
. "$(dirname "$0")/common.sh"
for recipe in rotated-mnist rotated-skewed-mnist; do
  go "$recipe/fedmix-rotation" "$recipe"
  go "$recipe/fedmix-label" "$recipe" --set data.side=label
  go "$recipe/fedavg" "$recipe" --algorithm fedavg
  go "$recipe/biased-fedavg" "$recipe" --algorithm biased-fedavg
done
