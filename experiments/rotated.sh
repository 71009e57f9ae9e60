#!/usr/bin/env bash
# Rotated MNIST, without and with label skew: q(z|rotation), q(z|label), FedAvg, biased FedAvg.
. "$(dirname "$0")/common.sh"
for recipe in rotated-mnist rotated-skewed-mnist; do
  go "$recipe/fedmix-rotation" "$recipe" --set fedmix.beta=0.8 "${BF16[@]}"
  go "$recipe/fedmix-rotation-beta1" "$recipe" --set fedmix.beta=1.0 "${BF16[@]}"
  go "$recipe/fedmix-label" "$recipe" --set data.side=label "${BF16[@]}"
  go "$recipe/fedavg" "$recipe" --algorithm fedavg "${BF16[@]}"
  go "$recipe/biased-fedavg" "$recipe" --algorithm biased-fedavg "${BF16[@]}"
done
go rotated-skewed-mnist/fedmix-rotation-full-steps rotated-skewed-mnist --set fedmix.full_steps=true "${BF16[@]}"  # not in the paper
