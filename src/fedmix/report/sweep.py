"""A grid of runs as one table, and as one picture: accuracy against what was sent, and against the setting."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedmix.report.comparison import Sweep, SweepRow
from fedmix.report.tables import add_result_columns, caption, result_cells, rounds_words
from fedmix.report.words import percent
from fedmix.schema import VALIDATION_KINDS, WORDS

COLOURS = {"as_sent": "#0072b2", "server": "#d55e00", "no_identity": "#009e73"}  # safe for colour-blind readers
SENT = "GiB sent, down and up"


def sweep_table(sweep: Sweep) -> RenderableType:
    rows = sweep["rows"]
    table = Table(title=Text(f"{rows[0]['recipe']}: a sweep, {rounds_words(rows)}"), box=box.SIMPLE_HEAD)
    several = len(rows[0]["settings"]) > 1
    for key in (*(["no."] if several else []), *rows[0]["settings"]):
        table.add_column(key)
    add_result_columns(table)
    warned = any(row["warnings"] for row in rows)
    if warned:
        table.add_column("went wrong")
    for number, row in enumerate(rows, start=1):
        names = [Text(str(value)) for value in ([number] if several else []) + list(row["settings"].values())]
        test, validation = result_cells(row)
        table.add_row(*names, *test, *([Text("; ".join(row["warnings"]))] if warned else []))
        table.add_row(*[""] * len(names), *validation, end_section=True)
    return Group(table, Text(caption(rows), style="dim"))


def best_words(sweep: Sweep) -> str:
    """One line: which point of the grid is best on validation data, and what it has there."""
    if sweep["best"] is None:
        return "no run has validation data to choose by"
    row = sweep["rows"][sweep["best"]]
    words = ", ".join(f"{key} = {value}" for key, value in row["settings"].items())
    accuracy = percent(row["validation"][sweep["by"]])
    return f"best by {WORDS[sweep['by']]} accuracy on validation data: {words}, with {accuracy} %"


def draw_sweep(sweep: Sweep, path: Path) -> None:
    """Validation accuracy against GiB; beside it against the setting, where one setting of numbers varies."""
    from matplotlib.figure import Figure

    rows = sweep["rows"]
    keys = list(rows[0]["settings"])
    numbers = _numbers(rows, keys)
    panels: dict[str, Sequence[float]] = {SENT: [row["gib"]["mean"] or 0.0 for row in rows]}
    if numbers:
        panels[keys[0]] = numbers
    figure = Figure(figsize=(5.4 * len(panels), 4.4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (what, x) in zip(axes, panels.items(), strict=True):
        for kind in VALIDATION_KINDS:
            _draw_kind(axis, rows, x, kind, "o-" if numbers else "o")
        axis.set_xlabel(what)
        axis.grid(alpha=0.3)
    _name_points(axes[0], rows, keys, panels[SENT])
    axes[0].set_ylabel("validation accuracy, %")
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(frameon=False)
    figure.suptitle(_title(rows, keys))
    figure.savefig(path, dpi=120)


def _numbers(rows: Sequence[SweepRow], keys: Sequence[str]) -> list[float]:
    """The values of the one setting that varies, if they are numbers."""
    values = [row["settings"][keys[0]] for row in rows]
    are_numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    return [float(value) for value in values] if are_numbers and len(keys) == 1 else []


def _draw_kind(axis: Any, rows: Sequence[SweepRow], x: Sequence[float], kind: str, style: str) -> None:
    points = [(at, row["validation"][kind]) for at, row in zip(x, rows, strict=True)]
    known = [(at, value["mean"], value["std"] or 0.0) for at, value in points if value["mean"] is not None]
    if known:
        places, means, deviations = zip(*known, strict=True)
        axis.errorbar(
            places,
            [100 * mean for mean in means],
            yerr=[100 * deviation for deviation in deviations],
            fmt=style,
            color=COLOURS[kind],
            label=WORDS[kind],
            capsize=3,
        )


def _name_points(axis: Any, rows: Sequence[SweepRow], keys: Sequence[str], sent: Sequence[float]) -> None:
    for number, (row, at) in enumerate(zip(rows, sent, strict=True), start=1):
        words = str(number) if len(keys) > 1 else str(row["settings"][keys[0]])
        means = [row["validation"][kind]["mean"] for kind in VALIDATION_KINDS]
        known = [100 * mean for mean in means if mean is not None]
        if known:
            axis.annotate(words, (at, max(known)), xytext=(5, 5), textcoords="offset points", ha="left", fontsize=8)


def _title(rows: Sequence[SweepRow], keys: Sequence[str]) -> str:
    seeds = len(rows[0]["seeds"])
    numbered = " (numbers: rows of the table)" if len(keys) > 1 else ""
    more = f", ± sample deviation over {seeds} seeds" if seeds > 1 else ""
    return f"{rows[0]['recipe']}: {', '.join(keys)}{numbered}, {rows[0]['rounds']} rounds{more}"
