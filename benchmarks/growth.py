"""How cost grows: with experts, cohort, registered clients and model size; and what a start, an evaluation and a
checkpoint of the cifar10 recipe take (where its files are at hand). Prints tables; --json for the numbers."""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmix.core import aggregate
from fedmix.core.divergence import expert_divergence
from fedmix.core.tree import subtree
from fedmix.data.federation import PARTS, Federation
from fedmix.engines.store import MemoryStore
from fedmix.errors import DataMissing
from fedmix.running import evaluate
from fedmix.running.checkpoint import Checkpoints
from fedmix.running.loop import rounds
from fedmix.running.where import Stage, Where
from fedmix.settings.build import Experiment, build
from fedmix.settings.reading import make_recipe, read_recipe


def federation(clients: int, points: int, shape: tuple[int, ...] = (3, 32, 32)) -> Federation:
    """Clients that share a pool of random points: memory does not grow with them."""
    rng = np.random.default_rng(0)
    pool = 2000
    y = torch.from_numpy(rng.integers(0, 10, size=pool))
    x = torch.from_numpy(rng.normal(size=(pool, *shape)).astype(np.float32))
    own = [np.arange(s, s + points) % pool for s in range(clients)]
    nothing = [np.zeros(0, np.int64)] * clients
    parts = dict(zip(PARTS, (own, nothing, nothing), strict=True))
    return Federation(x, y, y, parts, [str(s) for s in range(clients)], 10, 10)


def experiment(method: str, data: Federation, **changes: Any) -> Experiment:
    settings = {"data.source": "own", "model.name": "lenet5", "training.batch_size": 64, "training.client_lr": 0.05}
    return build(make_recipe({"name": "bench", "rounds": 10_000}, method, settings | changes), data)


def seconds_a_round(made: Experiment, cohort: int = 0, count: int = 3) -> float:
    algorithm = made.algorithm
    with Where("local").open(Stage(made, MemoryStore)) as engine:
        steps = rounds(algorithm, engine, algorithm.init(0), 0, len(made.federation), cohort, count + 1)
        return statistics.median([step.seconds for step in steps][1:])


def resident() -> float:
    """MB of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def experts() -> list[dict[str, Any]]:
    data = federation(10, 450)
    base = seconds_a_round(experiment("fedavg", data))
    rows = [{"what": "FedAvg", "seconds": base, "FedAvg rounds": 1.0}]
    for k in (1, 2, 4, 8, 16):
        seconds = seconds_a_round(experiment("fedmix", data, **{"fedmix.experts": k}), count=2 if k > 4 else 3)
        rows.append({"what": f"FedMix, K = {k}", "seconds": seconds, "FedAvg rounds": seconds / base})
    return rows


def skipping() -> list[dict[str, Any]]:
    """skip_below where phi is specialised: 1.5 experts a sample are above it."""
    data = federation(10, 450)
    base = seconds_a_round(experiment("fedavg", data))
    rows = []
    for skip in (0.0, 1e-3):
        changes = {"fedmix.skip_below": skip, "fedmix.gate_through_features": False, "fedmix.gamma": 1.0}
        made = experiment("fedmix", data, **changes)
        algorithm = made.algorithm
        state = algorithm.init(0)
        phi = torch.full((10, 4), 1e-4)
        phi[torch.arange(10), torch.arange(10) % 4] = 1.0
        phi[torch.arange(5), (torch.arange(5) + 1) % 4] = 1.0
        object.__setattr__(state, "phi", phi / phi.sum(dim=1, keepdim=True))
        with Where("local").open(Stage(made, MemoryStore)) as engine:
            steps = list(rounds(algorithm, engine, state, 0, 10, 0, 4))
        seconds = statistics.median([step.seconds for step in steps][1:])
        rows.append(
            {"what": f"FedMix, K = 4, skip_below = {skip}", "seconds": seconds, "FedAvg rounds": seconds / base}
        )
    return rows


def cohorts() -> list[dict[str, Any]]:
    data = federation(200, 64)
    rows = []
    for cohort in (10, 50, 100, 200):
        seconds = seconds_a_round(experiment("fedavg", data), cohort)
        rows.append({"what": f"cohort {cohort}", "seconds": seconds, "ms a client": 1000 * seconds / cohort})
    return rows


def registered() -> list[dict[str, Any]]:
    rows = []
    for clients in (100, 1_000, 10_000, 100_000):
        made = experiment("fedavg", federation(clients, 64))
        seconds = seconds_a_round(made, 10)
        rows.append({"what": f"{clients:,} registered, 10 a round", "seconds": seconds, "resident MB": resident()})
    return rows


def sizes() -> list[dict[str, Any]]:
    data = federation(10, 128)
    rows = []
    for channels in ([8, 16], [16, 32], [32, 64], [64, 128], [113, 226]):
        made = experiment("fedavg", data, **{"model.channels": channels})
        seconds = seconds_a_round(made)
        rows.append({"what": f"LeNet-5 {channels}", "parameters": made.model.parameters, "seconds": seconds})
    return rows


def precisions() -> list[dict[str, Any]]:
    """A FedAvg round in float32 and bfloat16, in turns; the ratio is the median of the turns' own."""
    rows = []
    for channels, points in (([16, 32], 450), ([32, 64], 450), ([113, 226], 128)):
        data, seconds = federation(10, points), []
        for _ in range(3):
            kinds = [
                experiment("fedavg", data, **{"model.channels": channels, "training.precision": precision})
                for precision in ("float32", "bfloat16")
            ]
            seconds.append([seconds_a_round(made, count=2) for made in kinds])
        full, half = (statistics.median(column) for column in zip(*seconds, strict=True))
        ratio = statistics.median(a / b for a, b in seconds)
        rows.append({"what": f"LeNet-5 {channels}", "float32": full, "bfloat16": half, "times as fast": ratio})
    return rows


def digits() -> list[dict[str, Any]]:
    made = build(read_recipe("digits-permutation"))
    algorithm, seconds = made.algorithm, {}
    for name in ("serial", "local"):
        if name == "serial":
            torch.set_num_threads(1)
        with Where(name).open(Stage(made, MemoryStore)) as engine:
            steps = [step.seconds for step in rounds(algorithm, engine, algorithm.init(0), 0, 20, 0, 6)]
        seconds[name] = statistics.median(steps[1:])
    return [
        {"what": f"digits-permutation, {n}", "seconds": s, "times local": s / seconds["local"]}
        for n, s in seconds.items()
    ]


def after() -> list[dict[str, Any]]:
    """What comes beside training: divergence in a round of FedMix with K = 4, and prediction with many gates averaged."""
    made = experiment("fedmix", federation(10, 450), **{"fedmix.experts": 4})
    algorithm, state = made.algorithm, made.algorithm.init(0)
    with Where("local").open(Stage(made, MemoryStore)) as engine:
        last = list(rounds(algorithm, engine, state, 0, 10, 0, 3))[-1]
    before = [subtree(algorithm.broadcast(state, None).tensors, f"expert.{k}") for k in range(4)]
    replies = [reply.message.tensors for reply in last.replies]
    moved = [
        aggregate.deltas(w, [subtree(tensors, f"expert.{k}") for tensors in replies]) for k, w in enumerate(before)
    ]
    began = time.perf_counter()
    for each in moved:
        expert_divergence(each, torch.full((10,), 0.1))
    seconds = time.perf_counter() - began
    rows = [{"what": "divergence", "seconds": seconds, "share of": f"{100 * seconds / last.seconds:.2f} % of a round"}]
    message, new, x = algorithm.broadcast(state, None), algorithm.new_client(0), torch.randn(2_000, 3, 32, 32)
    for clients in (1, 100, 3_500):
        gates = [{name: torch.randn_like(value) for name, value in new.items()} for _ in range(clients)]
        log_p_s = torch.full((clients,), 1 / clients).log()
        began = time.perf_counter()
        with torch.no_grad():
            for part in torch.split(x, 500):
                algorithm.predict_anonymous(message, gates, log_p_s, part)
        seconds = time.perf_counter() - began
        rows.append({"what": f"{clients:,} gates averaged", "seconds": seconds, "share of": "2,000 points, K = 4"})
    return rows


def memory() -> list[dict[str, Any]]:
    """What a worker holds beyond what it shares with the server, after rounds of FedMix with K = 4 on the CIFAR-10 setting."""
    rows = []
    for method, k in (("fedavg", 1), ("fedmix", 4)):
        made = experiment(method, federation(10, 450), **{"fedmix.experts": k} if method == "fedmix" else {})
        algorithm = made.algorithm
        with Where("local").open(Stage(made, MemoryStore)) as engine:
            before = _private(engine._workers[0].process.pid)
            list(rounds(algorithm, engine, algorithm.init(0), 0, 10, 0, 3))
            after = _private(engine._workers[0].process.pid)
        experts = 4 * k * made.model.parameters / 2**20
        rows.append({"what": f"{method}, K = {k}: a worker", "MB": after - before, "MB of the experts": experts})
    return rows


def _private(pid: int) -> float:
    """MB of a process that no other process has."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


def start() -> list[dict[str, Any]]:
    began = time.perf_counter()
    made = build(read_recipe("cifar10", "fedmix"))
    data = time.perf_counter() - began
    store = MemoryStore()
    began = time.perf_counter()
    with Where("local").open(Stage(made, lambda: store)) as engine:
        workers = time.perf_counter() - began
        algorithm = made.algorithm
        first = list(rounds(algorithm, engine, algorithm.init(0), 0, 100, 10, 3))
        state, one = first[-1].state, statistics.median(step.seconds for step in first[1:])
        began = time.perf_counter()
        evaluate.client_scores(algorithm, engine, state, range(100), "validation", 3)
        evaluation = time.perf_counter() - began
        for s in range(100):
            store.put(s, algorithm.new_client(0))
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            Checkpoints(Path(folder), 3).save(state, store, {})
            checkpoint = time.perf_counter() - began
    return [
        {"what": "cifar10: data and model", "seconds": data},
        {"what": "cifar10: workers", "seconds": workers},
        {"what": "cifar10: a round of FedMix", "seconds": one},
        {"what": "cifar10: evaluation of 100 clients on 5,000 points", "seconds": evaluation},
        {"what": "cifar10: checkpoint of 100 clients", "seconds": checkpoint},
    ]


PARTS_OF_IT = {
    f.__name__: f for f in (experts, skipping, precisions, digits, cohorts, registered, sizes, after, memory, start)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS_OF_IT, []], help="some of them (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    result = {}
    for name in args.parts or PARTS_OF_IT:
        try:
            result[name] = PARTS_OF_IT[name]()
        except DataMissing as missing:
            print(f"{name}: left out. {missing}", file=sys.stderr)
            continue
        if not args.json:
            keys = list(result[name][0])
            print("| " + " | ".join(keys) + " |\n|" + "---|" * len(keys))
            for row in result[name]:
                print("| " + " | ".join(f"{v:,.2f}" if isinstance(v, float) else f"{v}" for v in row.values()) + " |")
            print(flush=True)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
