#!/usr/bin/env bash
# Where the paper is silent or a claim did not hold, and what might do better: CIFAR-10 scaled down (20 clients, a fifth of the data,
# a small LeNet), gamma 0.9, 150 rounds, three seeds. Full steps and counts are not in the paper.
. "$(dirname "$0")/common.sh"
SMALL=(cifar10 --scale small --rounds "${ROUNDS:-150}" "${BF16[@]}")
for seed in 0 1 2; do
  variant() { go "variants/$1-seed$seed" "${SMALL[@]}" --seed "$seed" "${@:2}"; }
  variant fedmix
  variant fedavg --algorithm fedavg
  variant full-steps --set fedmix.full_steps=true
  variant fedavg-quarter-rate --algorithm fedavg --set training.client_lr=0.0125  # steps as long as those of four equal experts
  variant ensemble --set fedmix.full_steps=true --set fedmix.gamma=1.0            # phi stays uniform: experts never specialise
  variant faster-phi --set fedmix.full_steps=true --set fedmix.phi_lr=0.003
  variant gate-apart --set fedmix.gate_through_features=false
  variant counts --set fedmix.full_steps=true --set training.label_counts=true
  variant fedavg-counts --algorithm fedavg --set training.label_counts=true
  for name in full-steps fedavg counts fedavg-counts; do
    look "variants/$name-seed$seed" --no-vae
  done
done
