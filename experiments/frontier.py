"""Accuracy against cost of what FedMix's experts may share: a table and a figure from the runs of frontier.sh.

    python experiments/frontier.py experiments/runs/frontier docs/sharing-frontier.png

Differences are paired over clients and seeds, with a bootstrap interval, and 'level' where it crosses zero. Computation is what
`fedmix plan` counts for a round, in FedAvg rounds.
"""

import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from fedmix.report.statistics import paired_difference
from fedmix.running.plan import plan_recipe
from fedmix.settings.reading import read_recipe

KINDS = {"fine_tuned": "fine-tuned", "server": "server", "no_identity": "no identity"}
NAMES = {
    "fedavg": "FedAvg",
    "output": "all but output shared",
    "output-full-steps": "all but output shared, full steps",
    "output-longer": "all but output shared, 70 rounds",
    "output-counts": "all but output shared, label counts",
    "rank": "convolutions shared, rank 8 on the hidden layer",
    "convolutions": "convolutions shared",
    "whole": "nothing shared",
    "whole-full-steps": "nothing shared, full steps",
    "ensemble": "nothing shared, gamma = 1 (never specialises)",
    "dropout": "nothing shared, drop-out 0.8",
    "pruned": "nothing shared, pruned with eta 0.9",
    "wide": "FedAvg, twice the width",
    "fedavg-counts": "FedAvg, label counts",
    "paper": "nothing shared, K = 4, the paper's step",
}


SHORT = {
    **NAMES,
    "output": "output layer",
    "output-full-steps": "output layer, full steps",
    "output-counts": "output layer, label counts",
    "rank": "rank 8 on the hidden layer",
    "convolutions": "all but convolutions",
    "whole": "whole models",
    "whole-full-steps": "whole models, full steps",
    "ensemble": "an ensemble",
    "dropout": "whole models, drop-out",
    "pruned": "whole models, pruned",
    "paper": "whole models, the paper's step",
}  # what experts have of their own


def read(folder):
    """{setting: {form: {seed: summary}}} and a recipe of each form."""
    runs, recipes = {}, {}
    for path in sorted(Path(folder).iterdir()):
        if not (path / "summary.json").exists():
            continue
        setting, _, rest = path.name.partition("-")
        form, _, seed = rest.rpartition("-seed")
        summary = json.loads((path / "summary.json").read_text())
        runs.setdefault(setting, {}).setdefault(form, {})[int(seed)] = summary
        recipes[setting, form] = read_recipe(str(path))
    return runs, recipes


def mean(summaries, kind):
    values = [summary["accuracy"]["test"][kind] for summary in summaries.values()]
    return 100 * statistics.fmean(value["mean"] if isinstance(value, dict) else value for value in values)


def validated(summaries):
    """Accuracy of the server's weights on validation data, by which forms are chosen."""
    return 100 * statistics.fmean(s["accuracy"]["validation"]["server"]["mean"] for s in summaries.values())


def gib(summaries):
    return statistics.fmean((s["bytes_up"] + s["bytes_down"]) / 2**30 for s in summaries.values())


def against(first, second, kind):
    """The difference in words: +2.3 (+0.9 to +3.9), or level."""
    pairs = [
        (first[seed]["of_clients"]["test"].get(kind, {}), second[seed]["of_clients"]["test"].get(kind, {}))
        for seed in first
        if seed in second
    ]
    found = paired_difference(pairs)
    if found is None:
        return "-"
    low, high = 100 * found["low"], 100 * found["high"]
    words = f"{100 * found['mean']:+.1f} ({low:+.1f} to {high:+.1f})"
    return f"**{words}**" if low > 0 or high < 0 else f"level, {words}"


def table(forms, recipes, setting):
    base = plan_recipe(recipes[setting, "fedavg"])["flop_per_round"]
    rounds = recipes[setting, "fedavg"].rounds
    lines = [
        "| form | seeds | validation, server | fine-tuned | server | no identity | server against FedAvg | GiB | computation |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for form in [name for name in NAMES if name in forms]:
        runs = forms[form]
        recipe = recipes[setting, form]
        flop = plan_recipe(recipe)["flop_per_round"] / base * recipe.rounds / rounds
        if recipe.algorithm == "fedmix" and recipe.fedmix.experts == "auto":
            experts = read_recipe_with(recipe, experts=4, evidence="arriving")
            flop = plan_recipe(experts)["flop_per_round"] / base * recipe.rounds / rounds
        accuracy = " | ".join([f"{validated(runs):.1f}", *(f"{mean(runs, kind):.1f}" for kind in KINDS)])
        versus = "" if form == "fedavg" else against(runs, forms["fedavg"], "server")
        lines.append(f"| {NAMES[form]} | {len(runs)} | {accuracy} | {versus} | {gib(runs):.2f} | {flop:.2f} |")
    return lines


def read_recipe_with(recipe, **settings):
    from dataclasses import replace

    return recipe.with_method_settings(replace(recipe.fedmix, **settings))


def differences(forms, pairs):
    lines = ["| | seeds | fine-tuned | server |", "|---|---|---|---|"]
    for first, second in pairs:
        both = set(forms.get(first, {})) & set(forms.get(second, {}))
        if both:
            cells = f"{len(both)} | " + " | ".join(
                against(forms[first], forms[second], kind) for kind in ("fine_tuned", "server")
            )
            lines.append(f"| {NAMES[first]} against {NAMES[second]} | {cells} |")
    return lines


def labels_apart(points):
    """(form, whether its label stands to the right of its point, the label's height): labels of one side do not overlap."""
    widest = max(x for x, _ in points.values())
    heights = [y for _, y in points.values()]
    gap = 0.045 * (max(heights) - min(heights))
    for right in (False, True):
        last = float("-inf")
        side = [(y, form) for form, (x, y) in points.items() if (x > 0.5 * widest) == right]
        for y, form in sorted(side):
            last = max(y, last + gap)
            yield form, right, last


def draw(runs, path):
    figure, axes = plt.subplots(1, len(runs), figsize=(12.5, 4.6))
    titles = {"skew": "label skew, 300 rounds", "permuted": "label permutations, 40 rounds"}
    for axis, (setting, forms) in zip(axes, sorted(runs.items(), reverse=True), strict=True):
        points = {form: (gib(summaries), mean(summaries, "server")) for form, summaries in forms.items()}
        for form, (x, y) in points.items():
            axis.scatter(x, y, color="#0072b2" if "fedavg" not in form and form != "wide" else "#d55e00", zorder=3)
        for form, right, height in labels_apart(points):
            x = points[form][0]
            axis.annotate(
                SHORT[form],
                (x * (1.06 if right else 0.94), height),
                fontsize=8,
                ha="left" if right else "right",
                va="center",
            )
        axis.set_xscale("log")
        ticks = [tick for tick in (0.2, 0.3, 0.5, 1, 2, 3, 5, 10) if min(map(gib, forms.values())) / 1.5 < tick]
        ticks = [tick for tick in ticks if tick < 1.5 * max(map(gib, forms.values()))]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel("GiB sent in all")
        axis.set_ylabel("accuracy with the server's weights, test, %")
        axis.set_title(f"{titles[setting]}: what experts have of their own", fontsize=10)
        axis.margins(x=0.9, y=0.12)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main(folder, picture):
    runs, recipes = read(folder)
    for setting in sorted(runs, reverse=True):
        print(f"\n## {setting}\n")
        print("\n".join(table(runs[setting], recipes, setting)), "\n")
        pairs = [("output", "whole"), ("output-full-steps", "whole-full-steps"), ("output-full-steps", "output")]
        pairs += [("whole", "fedavg"), ("whole-full-steps", "fedavg"), ("ensemble", "fedavg"), ("rank", "output")]
        pairs += [("output-full-steps", "fedavg"), ("output", "fedavg"), ("convolutions", "fedavg"), ("rank", "fedavg")]
        pairs += [("convolutions", "whole-full-steps"), ("rank", "whole-full-steps"), ("convolutions", "whole")]
        pairs += [
            ("rank", "whole"),
            ("pruned", "whole-full-steps"),
            ("dropout", "whole-full-steps"),
            ("wide", "fedavg"),
        ]
        pairs += [("output-full-steps", "wide"), ("output", "wide")]
        print("\n".join(differences(runs[setting], pairs)))
    draw(runs, picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
