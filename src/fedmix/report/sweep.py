"""A grid of runs as one table, and as one picture: accuracy against what was sent, and against the setting."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedmix.report.against_setting import is_number
from fedmix.report.comparison import Sweep, SweepRow
from fedmix.report.tables import add_result_columns, caption, result_cells, rounds_words
from fedmix.report.words import percent
from fedmix.schema import VALIDATION_KINDS, WORDS

# safe for colour-blind readers
COLOURS = {"as_sent": "#0072b2", "server": "#d55e00", "no_identity": "#009e73"}
SENT = "GiB sent, down and up"


def sweep_table(sweep: Sweep) -> RenderableType:
    """Two lines for each point of the grid: its figures on test data, and those on validation data."""
    rows = sweep["rows"]
    keys = list(rows[0]["settings"])
    # the picture names points by their numbers where a value alone does not tell them apart
    numbered = len(keys) > 1
    warned = any(row["warnings"] for row in rows)
    table = Table(title=Text(f"{rows[0]['recipe']}: a sweep, {rounds_words(rows)}"), box=box.SIMPLE_HEAD)
    for column in ["no.", *keys] if numbered else keys:
        table.add_column(column)
    add_result_columns(table)
    if warned:
        table.add_column("went wrong")
    for number, row in enumerate(rows, start=1):
        values = list(row["settings"].values())
        names = [number, *values] if numbered else values
        warnings = [Text("; ".join(row["warnings"]))] if warned else []
        test, validation = result_cells(row)
        table.add_row(*(Text(str(name)) for name in names), *test, *warnings)
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
    panels = _panels(rows, keys)
    # points in the order of a setting are a line
    style = "o-" if len(panels) > 1 else "o"
    figure = Figure(figsize=(5.4 * len(panels), 4.4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (what, places) in zip(axes, panels.items(), strict=True):
        for kind in VALIDATION_KINDS:
            _draw_kind(axis, rows, places, kind, style)
        axis.set_xlabel(what)
        axis.grid(alpha=0.3)
    _name_points(axes[0], rows, keys, panels[SENT])
    axes[0].set_ylabel("validation accuracy, %")
    handles, _ = axes[0].get_legend_handles_labels()
    if handles:
        axes[0].legend(frameon=False)
    figure.suptitle(_title(rows, keys))
    figure.savefig(path, dpi=120)


def _panels(rows: Sequence[SweepRow], keys: Sequence[str]) -> dict[str, list[float]]:
    """What accuracy is drawn against: GiB, and the setting, if one setting of numbers varies."""
    panels = {SENT: [row["gib"]["mean"] or 0.0 for row in rows]}
    values = _numbers(rows, keys)
    if values:
        panels[keys[0]] = values
    return panels


def _numbers(rows: Sequence[SweepRow], keys: Sequence[str]) -> list[float]:
    """The values of the one setting that varies; none where several vary, or where they are no numbers."""
    if len(keys) > 1:
        return []
    values = [row["settings"][keys[0]] for row in rows]
    return [float(value) for value in values] if all(map(is_number, values)) else []


def _draw_kind(axis: Any, rows: Sequence[SweepRow], places: Sequence[float], kind: str, style: str) -> None:
    """One kind of accuracy, where it is known, with its deviation over seeds."""
    known: list[tuple[float, float, float]] = []
    for place, row in zip(places, rows, strict=True):
        accuracy = row["validation"][kind]
        if accuracy["mean"] is not None:
            known.append((place, 100 * accuracy["mean"], 100 * (accuracy["std"] or 0.0)))
    if known:
        at, means, deviations = zip(*known, strict=True)
        look = {"fmt": style, "color": COLOURS[kind], "label": WORDS[kind], "capsize": 3}
        axis.errorbar(at, means, yerr=deviations, **look)


def _name_points(axis: Any, rows: Sequence[SweepRow], keys: Sequence[str], sent: Sequence[float]) -> None:
    """The value of the setting above each point of the grid; where several vary, its number in the table."""
    for number, (row, place) in enumerate(zip(rows, sent, strict=True), start=1):
        words = str(number) if len(keys) > 1 else str(row["settings"][keys[0]])
        highest = _highest(row)
        if highest is not None:
            look = {"xytext": (5, 5), "textcoords": "offset points", "ha": "left", "fontsize": 8}
            axis.annotate(words, (place, highest), **look)


def _highest(row: SweepRow) -> float | None:
    """The highest of a row's accuracies on validation data, in per cent."""
    means = [row["validation"][kind]["mean"] for kind in VALIDATION_KINDS]
    return max((100 * mean for mean in means if mean is not None), default=None)


def _title(rows: Sequence[SweepRow], keys: Sequence[str]) -> str:
    seeds = len(rows[0]["seeds"])
    numbered = " (numbers: rows of the table)" if len(keys) > 1 else ""
    more = f", ± sample deviation over {seeds} seeds" if seeds > 1 else ""
    return f"{rows[0]['recipe']}: {', '.join(keys)}{numbered}, {rows[0]['rounds']} rounds{more}"
