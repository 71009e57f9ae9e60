"""The README's picture, from the demo's run directories: make demo, then .venv/bin/python docs/demo_figure.py"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

GROUPS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7"]  # colour-blind safe (Okabe and Ito)


def lines_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def draw(runs: Path, out: Path) -> None:
    summary = json.loads((runs / "fedmix-seed0" / "summary.json").read_text())
    evaluated = [line for line in lines_of(runs / "fedmix-seed0") if "q_zs" in line]
    groups = np.array(summary["groups"])
    order = np.argsort(groups, kind="stable")
    final = np.array(summary["q_zs"])
    experts = np.argsort([groups[final[:, k].argmax()] for k in range(final.shape[1])])
    widths = [0.25] + [0.9] * len(evaluated) + [0.5, 3.2]
    figure, axes = plt.subplots(1, len(widths), figsize=(11, 3.6), width_ratios=widths, layout="constrained")
    for s, client in enumerate(order):
        axes[0].add_patch(plt.Rectangle((0, s), 1, 1, color=GROUPS[groups[client]]))
    axes[0].set(xlim=(0, 1), ylim=(len(order), 0), xticks=[], yticks=[], ylabel="20 clients", title="true\ngroup")
    for axis, line in zip(axes[1:], evaluated, strict=False):
        q = np.array(line["q_zs"])[order][:, experts]
        axis.imshow(q, cmap="Greys", vmin=0, vmax=1, aspect="auto")
        axis.set(xticks=range(len(experts)), yticks=[], xlabel="expert", title=f"q(z|s)\nround {line['round']}")
        axis.set_xticklabels([str(k + 1) for k in range(len(experts))])
    axes[-2].axis("off")
    for method, name, colour in (("fedmix", "FedMix, K = 4", "#0072B2"), ("fedavg", "FedAvg", "#D55E00")):
        points = [line for line in lines_of(runs / f"{method}-seed0") if "accuracy" in line]
        rounds = [line["round"] for line in points]
        accuracy = [100 * line["accuracy"]["validation"]["server"]["mean"] for line in points]
        axes[-1].plot(rounds, accuracy, marker="o", color=colour, label=name)
        axes[-1].annotate(
            name, (rounds[-1], accuracy[-1]), xytext=(0, -20), textcoords="offset points", ha="right", color=colour
        )
    axes[-1].set(
        xlabel="communication round",
        ylim=(0, 100),
        title="accuracy of the server's model, %\n(clients' validation data)",
    )
    axes[-1].set_xticks(rounds)
    axes[-1].spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"), Path(__file__).with_name("demo.png"))
