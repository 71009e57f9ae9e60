"""A run on a terminal: where it is, how it went, who uses which expert."""

from collections.abc import Sequence

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fedmix.report.curves import curves
from fedmix.report.groups import groups
from fedmix.report.runs import Run, part_of
from fedmix.report.tables import q_map
from fedmix.report.verdict import glance
from fedmix.schema import MetricsLine

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
    parts += [Text(note, style="dim") for note in first["notes"]]
    table = Table(show_header=False, box=None, padding=(0, 1))
    for name, values in (
        ("loss", series["every"]["loss"]),
        ("as sent %, validation", series["as_sent"]),
        ("server %, validation", series["server"]),
        ("no identity %, validation", series["no_identity"]),
        ("divergence", series["every"]["divergence"]),
        ("MiB a round", series["every"]["mib"]),
    ):
        known = [value for value in values if value is not None]
        if known:
            table.add_row(name, f"{known[0]:.4g}", sparkline(values), f"{known[-1]:.4g}")
    parts.append(table)
    last = next((line for line in reversed(run.lines) if line.get("q_zs")), None)
    if last is not None:
        parts += part_of(run, "federation.json", lambda run: [_map(run, last)], [])
    return Lines(*parts)


def _map(run: Run, line: MetricsLine) -> RenderableType:
    names = [str(name) for name in run.federation.get("clients", [])]
    return q_map(line["q_zs"], run.federation.get("groups"), names)
