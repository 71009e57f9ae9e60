"""Who finds hidden groups of clients, and how many there are: FedMix over many seeds, its number of experts found out or fixed.

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
from fedmix.running.evaluate import adjusted_rand_index
from fedmix.running.where import Where
from fedmix.schema import read_metrics
from fedmix.settings.reading import read_recipe

AUTO = {"fedmix.evidence": "arriving", "fedmix.experts": "auto", "evaluation.every": 1}
MANY = {"data.clients": 24, "rounds": 30}
COHORTS = {"clients_per_round": 5, "rounds": 60}
UNEQUAL = {"data.group_sizes": [12, 4, 2, 2]}
SKEW = {"data.split": "hsu", "data.concentration": 5.0}
REPAIR = {"fedmix.repair": True}  # experts begin at random; those that serve nobody go, others are split
OUTPUT = {"fedmix.shared": "all-but-output"}
BATCH = {"fedmix.evidence": "batch"}  # the paper's step
ROWS = {
    "4 groups": {},
    "4 groups, at most 4 experts": {"fedmix.max_experts": 4},
    "6 groups": {**MANY, "data.permutations": 6},
    "6 groups, at most 6 experts": {**MANY, "data.permutations": 6, "fedmix.max_experts": 6},
    "2 groups": {**MANY, "data.permutations": 2},
    "all alike": {**MANY, "data.permutations": 1},
    "groups of 12, 4, 2 and 2": UNEQUAL,
    "5 of 20 clients a round": COHORTS,
    "groups of 12, 4, 2 and 2, 5 of 20 clients a round": {**UNEQUAL, **COHORTS},
    "groups that differ in two labels": {"data.permuted_labels": 2},
    "label skew on top, label_counts": {**SKEW, "training.label_counts": True},
    "label skew on top": SKEW,
    "all alike, label skew, label_counts": {**SKEW, "training.label_counts": True, "data.permutations": 1},
    "K = 4, repaired": {**REPAIR, "fedmix.experts": 4},
    "6 groups, K = 6, repaired": {**MANY, **REPAIR, "data.permutations": 6, "fedmix.experts": 6},
    "K = 4 at random": {"fedmix.experts": 4},
    "4 groups, all but output shared": OUTPUT,
    "6 groups, all but output shared": {**MANY, **OUTPUT, "data.permutations": 6},
    "all alike, all but output shared": {**MANY, **OUTPUT, "data.permutations": 1},
    "groups that differ in two labels, all but output shared": {**OUTPUT, "data.permuted_labels": 2},
    "5 of 20 clients a round, all but output shared": {**COHORTS, **OUTPUT},
    "server rate 0.002": {"server.server_lr": 0.002, "rounds": 60},
    "c = label": {"data.side": "label"},
    "the paper's step, K = 4": {**BATCH, "fedmix.experts": 4},
    "the paper's step, c = label, K = 3": {**BATCH, "data.side": "label", "fedmix.experts": 3},
    "the paper's step, c = label, K = 4": {**BATCH, "data.side": "label", "fedmix.experts": 4},
    "the paper's step, c = label, K = 5": {**BATCH, "data.side": "label", "fedmix.experts": 5},
}


def main_experts(line):
    """The expert that each client uses most after this round."""
    return [max(range(len(row)), key=row.__getitem__) for row in line["q_zs"]]


def exact(line, groups):
    """Whether after this round the experts that clients use most are their groups, one each."""
    main = main_experts(line)
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
        counted, accuracies, indices, since, seconds = 0, [], [], [], 0.0
        for seed in seeds:
            recipe = read_recipe("digits-permutation", "fedmix", {**AUTO, **ROWS[name], "seed": seed})
            out = (
                Path(args.out)
                / "".join(letter for letter in name.replace(" ", "-") if letter not in ",='")
                / f"seed{seed}"
            )
            summary = train_recipe(recipe, out, Where(), HandedOver(), resume=True)
            lines = read_metrics(out)
            found = [exact(line, summary["groups"]) for line in lines]
            counted += found[-1]
            if found[-1]:
                since.append(len(found) - found[::-1].index(False) + 1 if False in found else 1)
            indices.append(adjusted_rand_index(summary["groups"], main_experts(lines[-1])))
            accuracies.append(summary["accuracy"]["test"]["server"]["mean"])
            seconds += summary["seconds"]
        row = {"row": name, "exact": counted, "seeds": len(seeds), "server, test": statistics.fmean(accuracies)}
        row["mean index"] = statistics.fmean(indices)
        row["exact from round, median and last"] = [statistics.median(since), max(since)] if since else None
        table.append(row)
        print(json.dumps(row), duration(seconds), flush=True)
    (Path(args.out) / "groups.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
