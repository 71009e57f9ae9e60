#!/usr/bin/env bash
# CIFAR-10 with label skew for 1,000 rounds: does FedMix's lead over FedAvg grow? Full steps are not in the paper. Ninety minutes on two cores.
. "$(dirname "$0")/common.sh"
LONG=(cifar10 --rounds "${ROUNDS:-1000}" "${BF16[@]}")
go cifar10-1000/fedmix-full-steps "${LONG[@]}" --set fedmix.full_steps=true
go cifar10-1000/fedavg "${LONG[@]}" --algorithm fedavg
