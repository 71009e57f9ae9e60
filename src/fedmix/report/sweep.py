"""A grid of runs as one table, and as one picture: accuracy against what was sent, and against the setting."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedmix.report.tables import COLUMNS, caption, over_seeds, percent, scores_cells

COLOURS = {"local": "#0072b2", "server": "#d55e00", "global": "#009e73"}  # safe for colour-blind readers


def sweep_rows(runs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """From (the settings that vary, summary) of each run: a row for each point of the grid, over its seeds."""
    points: list[Mapping[str, Any]] = []
    for settings, _ in runs:
        if settings not in points:
            points.append(settings)
    rows = []
    for settings in points:
        summaries = [summary for own, summary in runs if own == settings]
        troubles = sorted({trouble for summary in summaries for trouble in summary["warnings"]})
        rows.append({"settings": dict(settings), **over_seeds(summaries), "warnings": troubles})
    return rows


def sweep_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=Text(f"{rows[0]['recipe']}: a sweep"), caption=caption(rows), caption_justify="left")
    several = len(rows[0]["settings"]) > 1
    for key in (*(["no."] if several else []), *rows[0]["settings"]):
        table.add_column(key)
    for column in (*COLUMNS, "rounds", "GiB"):
        table.add_column(column, justify="right")
    warned = any(row["warnings"] for row in rows)
    if warned:
        table.add_column("went wrong")
    for number, row in enumerate(rows, start=1):
        names = [*([Text(str(number))] if several else []), *(Text(str(value)) for value in row["settings"].values())]
        table.add_row(*names, *scores_cells(row), *([Text("; ".join(row["warnings"]))] if warned else []))
    return table


def draw_sweep(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Accuracy against GiB; beside it against the setting, where one setting of numbers varies."""
    from matplotlib.figure import Figure

    keys = list(rows[0]["settings"])
    varied = [row["settings"][keys[0]] for row in rows]
    numeric = len(keys) == 1 and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in varied)
    panels: dict[str, list[float]] = {"GiB sent, down and up": [row["gib"]["mean"] for row in rows]}
    if numeric:
        panels[keys[0]] = [float(v) for v in varied]
    figure = Figure(figsize=(5.4 * len(panels), 4.4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (what, x) in zip(axes, panels.items(), strict=True):
        for kind, colour in COLOURS.items():
            known = [(at, row[kind]) for at, row in zip(x, rows, strict=True) if row[kind]["mean"] is not None]
            if not known:
                continue
            mean = [100 * value["mean"] for _, value in known]
            std = [100 * (value["std"] or 0.0) for _, value in known]
            line = "o-" if numeric else "o"
            axis.errorbar([at for at, _ in known], mean, yerr=std, fmt=line, color=colour, label=kind, capsize=3)
        axis.set_xlabel(what)
        axis.grid(alpha=0.3)
    for number, (row, at) in enumerate(zip(rows, panels["GiB sent, down and up"], strict=True), start=1):
        words = str(number) if len(keys) > 1 else str(row["settings"][keys[0]])
        known = [100 * row[kind]["mean"] for kind in COLOURS if row[kind]["mean"] is not None]
        if not known:
            continue
        top = max(known)
        axes[0].annotate(words, (at, top), xytext=(5, 5), textcoords="offset points", ha="left", fontsize=8)
    axes[0].set_ylabel("test accuracy, %")
    if any(row[kind]["mean"] is not None for row in rows for kind in COLOURS):
        axes[0].legend(frameon=False)
    seeds = len(rows[0]["seeds"])
    numbered = " (numbers: rows of the table)" if len(keys) > 1 else ""
    more = f", {seeds} seeds" if seeds > 1 else ""
    figure.suptitle(f"{rows[0]['recipe']}: {', '.join(keys)}{numbered}, {rows[0]['rounds']} rounds{more}")
    figure.savefig(path, dpi=120)


def best(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line: which point of the grid has the best local accuracy."""
    row = max(rows, key=lambda row: row["local"]["mean"] or 0.0)
    words = ", ".join(f"{key} = {value}" for key, value in row["settings"].items())
    return f"best local accuracy: {percent(row['local'])} % with {words}"
