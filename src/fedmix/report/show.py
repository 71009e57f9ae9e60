"""A run on a terminal: where it is, how it went, who uses which expert."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fedmix.report.page_data import curves
from fedmix.report.runs import Run, glance, groups, part_of
from fedmix.report.tables import q_map

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 50


def sparkline(values: Sequence[float | None], width: int = WIDTH) -> str:
    """A line of bars, from the smallest to the largest of the values."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    if len(known) > width:
        known = [known[round(i * (len(known) - 1) / (width - 1))] for i in range(width)]
    low, high = min(known), max(known)
    return "".join(
        BARS[int((value - low) / (high - low) * (len(BARS) - 1))] if high > low else BARS[0] for value in known
    )


def show(run: Run) -> RenderableType:
    """The essentials of one run directory."""
    made = groups([run])
    (series,) = curves(made[0])
    first = glance(made)
    parts: list[RenderableType] = [Text(f"{run.name}: {run.method}, seed {run.seed}", style="bold")]
    parts += [Text(first["verdict"]), Text(first["spent"], style="dim")]
    parts += [Text(f"! {row['what']}", style="yellow") for row in first["wrong"]]
    table = Table(show_header=False, box=None, padding=(0, 1))
    for name, values in (
        ("loss", series["every"]["loss"]),
        ("local %, validation", series["local"]),
        ("server %, validation", series["server"]),
        ("global %, validation", series["global"]),
        ("divergence", series["every"]["divergence"]),
        ("MiB a round", series["every"]["mib"]),
    ):
        known = [value for value in values if value is not None]
        if known:
            table.add_row(name, f"{known[0]:.4g}", sparkline(values), f"{known[-1]:.4g}")
    parts.append(table)
    last: dict[str, Any] = next((line for line in reversed(run.lines) if line.get("q_zs")), {})
    if last:
        parts += part_of(run, "federation.json", lambda run: [_map(run, last)], [])
    return Lines(*parts)


def _map(run: Run, line: dict[str, Any]) -> RenderableType:
    names = [str(name) for name in run.federation.get("clients", [])]
    return q_map({"q_zs": line["q_zs"], "groups": run.federation.get("groups")}, names=names)
