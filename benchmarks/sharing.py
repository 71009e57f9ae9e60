"""What FedMix costs beside FedAvg when its experts share: seconds and bytes of a round, in turns.

    python benchmarks/sharing.py [--turns 7] [--precision float32] [--rows "all but output" ...]

The setting is the paper's on CIFAR-10 with made-up images: LeNet-5, 10 clients of 450, mini-batches of 64, one epoch, K = 4
unless a row says otherwise. Every form trains one round in turn with two workers; the ratio to FedAvg's round of the same turn
hardly depends on what else the machine does.
"""

import argparse
import json
import statistics
from contextlib import ExitStack

import numpy as np

from fedmix.data.federation import Federation
from fedmix.engines.store import MemoryStore
from fedmix.running.loop import rounds
from fedmix.running.where import Stage, Where
from fedmix.settings.build import build
from fedmix.settings.reading import make_recipe

CONVOLUTIONS = {"fedmix.shared": ["conv*"]}
OUTPUT = {"fedmix.shared": "all-but-output"}
ARRIVING = {"fedmix.evidence": "arriving", "fedmix.evidence_points": 64}
ROWS = {
    "nothing shared": {},
    "all but output": OUTPUT,
    "all but output, K = 16": {**OUTPUT, "fedmix.experts": 16},
    "all but output, arriving": {**OUTPUT, **ARRIVING},
    "convolutions": CONVOLUTIONS,
    "convolutions, rank 8 on the hidden layer": {**CONVOLUTIONS, "fedmix.factor_layers": ["fc"], "fedmix.rank": 8},
    "rank 1 factors on all but output": {**OUTPUT, "fedmix.factor_layers": ["conv2", "fc"], "fedmix.rank": 0},
}


def made_up(clients=10, points=450):
    """Clients with random images, a tenth of whose points nobody trains on."""
    rng = np.random.default_rng(0)
    sites = {}
    for s in range(clients):
        train = {"x": rng.normal(size=(points, 3, 32, 32)).astype(np.float32), "y": rng.integers(0, 10, points)}
        few = {"x": train["x"][:1], "y": train["y"][:1]}
        sites[str(s)] = {"train": train, "validation": few, "test": few}
    return Federation.from_clients(sites, classes=10)


def start(algorithm, federation, changes, stack):
    """A generator of rounds: bytes and seconds of each."""
    base = {"rounds": 1000, "data.source": "own", "model.name": "lenet5", "training.batch_size": 64}
    experiment = build(make_recipe({"name": "sharing"}, algorithm, base | changes), federation)
    engine = stack.enter_context(Where("local").open(Stage(experiment, MemoryStore)))
    state = experiment.algorithm.init(0)
    return rounds(experiment.algorithm, engine, state, 0, len(federation), 0, 1000)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), metavar="ROW")
    args = parser.parse_args()
    federation, precision = made_up(), {"training.precision": args.precision}
    with ExitStack() as stack:
        forms = {"FedAvg": start("fedavg", federation, precision, stack)}
        forms |= {row: start("fedmix", federation, {**ROWS[row], **precision}, stack) for row in args.rows}
        seconds = {name: [] for name in forms}
        bytes_sent = {}
        for _ in range(1 + args.turns):
            for name, steps in forms.items():
                step = next(steps)
                seconds[name].append(step.seconds)
                bytes_sent[name] = step.bytes_up + step.bytes_down
    for name in forms:
        ratios = [ours / plain for ours, plain in zip(seconds[name][1:], seconds["FedAvg"][1:], strict=True)]
        row = {"form": name, "seconds": round(statistics.median(seconds[name][1:]), 3)}
        row |= {"times FedAvg": round(statistics.median(ratios), 2)}
        row |= {"bytes, times FedAvg": round(bytes_sent[name] / bytes_sent["FedAvg"], 3), "precision": args.precision}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
