#!/usr/bin/env bash
# MNIST by the people who wrote it: 539 writers train, 297 others are new.
. "$(dirname "$0")/common.sh"
for method in fedmix fedavg biased-fedavg; do
  go "writers/$method" mnist-writers --algorithm "$method" "${BF16[@]}"
done
go writers/fedmix-gamma0.9 mnist-writers --set fedmix.gamma=0.9 "${BF16[@]}"
for run in fedmix-gamma0.9 fedavg; do
  look "writers/$run" --no-vae
done
