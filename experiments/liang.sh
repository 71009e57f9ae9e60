#!/usr/bin/env bash
# MNIST, two label shards a client: clients that took part, and new ones without labels.
. "$(dirname "$0")/common.sh"
for method in fedmix fedavg; do
  go "liang/$method" mnist-liang --algorithm "$method" --set training.last_batch=smaller  # as it was when these were trained
  look "liang/$method" --points 0
  audit "liang/$method"
done
