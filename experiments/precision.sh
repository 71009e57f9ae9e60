#!/usr/bin/env bash
# FedAvg in bfloat16, to lay beside cifar10/fedavg, which is the same in float32.
. "$(dirname "$0")/common.sh"
go precision/fedavg-bfloat16 cifar10 --algorithm fedavg --rounds 300 "${BF16[@]}"
