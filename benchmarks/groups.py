"""Who finds hidden groups of clients, and how many there are: FedMix that chooses its number of experts, over many seeds.

    python benchmarks/groups.py --seeds 20:50 --out runs/groups [--rows "4 groups" ...]

Each row is `digits-permutation` with a few settings changed. A seed counts where the clients' main experts are exactly their
true groups and there are as many experts as groups, at the end. Runs that are there already are not trained again.
"""

import argparse
import json
import statistics
from pathlib import Path

from fedmix.api import HandedOver, train_recipe
from fedmix.report.words import duration
from fedmix.running.where import Where
from fedmix.schema import read_metrics
from fedmix.settings.reading import read_recipe

AUTO = {"fedmix.evidence": "arriving", "fedmix.experts": "auto", "evaluation.every": 1}
MANY = {"data.clients": 24, "rounds": 30}
ROWS = {
    "4 groups": (4, {}),
    "4 groups, at most 4 experts": (4, {"fedmix.max_experts": 4}),
    "6 groups": (6, {**MANY, "data.permutations": 6}),
    "6 groups, at most 6 experts": (6, {**MANY, "data.permutations": 6, "fedmix.max_experts": 6}),
    "2 groups": (2, {**MANY, "data.permutations": 2}),
    "all alike": (1, {**MANY, "data.permutations": 1}),
    "4 groups, 5 of 20 clients a round": (4, {"clients_per_round": 5, "rounds": 60}),
    "4 groups, c = label": (4, {"data.side": "label"}),
    "4 groups, server rate 0.002": (4, {"server.server_lr": 0.002, "rounds": 60}),
    "4 groups, label skew on top": (4, {"data.split": "hsu", "data.concentration": 5.0}),
    "4 groups, the paper's step, K = 4": (4, {"fedmix.evidence": "batch", "fedmix.experts": 4}),
}


def exact(line, groups):
    """Whether after this round the experts that clients use most are their groups, one each."""
    main = [max(range(len(row)), key=row.__getitem__) for row in line["q_zs"]]
    used = line.get("experts") or sorted(set(main))
    count = len(set(groups))
    return len(set(main)) == len(used) == count == len(set(zip(main, groups, strict=True)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="20:50", metavar="A:B")
    parser.add_argument("--out", default="runs/groups", metavar="DIR")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), metavar="ROW")
    args = parser.parse_args()
    seeds = range(*map(int, args.seeds.split(":")))
    table = []
    for name in args.rows:
        _, changes = ROWS[name]
        counted, accuracies, since, seconds = 0, [], [], 0.0
        for seed in seeds:
            recipe = read_recipe("digits-permutation", "fedmix", {**AUTO, **changes, "seed": seed})
            out = Path(args.out) / name.replace(" ", "-").replace(",", "").replace("=", "") / f"seed{seed}"
            summary = train_recipe(recipe, out, Where(), HandedOver(), resume=True)
            found = [exact(line, summary["groups"]) for line in read_metrics(out)]
            counted += found[-1]
            if found[-1]:
                since.append(len(found) - found[::-1].index(False) + 1 if False in found else 1)
            accuracies.append(summary["accuracy"]["test"]["server"]["mean"])
            seconds += summary["seconds"]
        row = {"row": name, "exact": counted, "seeds": len(seeds), "server, test": statistics.fmean(accuracies)}
        row["exact from round, median and last"] = [statistics.median(since), max(since)] if since else None
        table.append(row)
        print(json.dumps(row), duration(seconds), flush=True)
    (Path(args.out) / "groups.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
