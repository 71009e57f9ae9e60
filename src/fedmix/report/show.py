"""A run on a terminal: where it is, how it went, who uses which expert."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fedmix.report.curves import curves
from fedmix.report.groups import groups
from fedmix.report.membership import membership, words_of
from fedmix.report.runs import Run, part_of
from fedmix.report.tables import q_map
from fedmix.report.thinning import picked
from fedmix.report.verdict import glance
from fedmix.schema import MetricsLine

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 50


def sparkline(values: Sequence[float | None], width: int = WIDTH) -> str:
    """A line of bars, from the smallest to the largest of the values."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    shown = picked(known, width)
    low, high = min(shown), max(shown)
    if not low < high:
        return BARS[0] * len(shown)
    heights = [int((value - low) / (high - low) * (len(BARS) - 1)) for value in shown]
    return "".join(BARS[height] for height in heights)


def show(run: Run) -> RenderableType:
    """The essentials of one run directory."""
    members = groups([run])
    (series,) = curves(members[0])
    first = glance(members)
    parts: list[RenderableType] = [
        Text(f"{run.name}: {run.method}, seed {run.seed}", style="bold"),
        Text(first["verdict"]),
        Text(first["spent"], style="dim"),
        *(Text(f"! {row['what']}", style="yellow") for row in first["wrong"]),
        *(Text(note, style="dim") for note in first["notes"]),
        _sparklines(series),
    ]
    last = next((line for line in reversed(run.lines) if line.get("q_zs")), None)
    if last is not None:
        parts += part_of(run, "metrics.jsonl", _groups, [])
        parts += part_of(run, "federation.json", lambda run: [_map(run, last)], [])
    return Lines(*parts)


def _sparklines(series: Mapping[str, Any]) -> Table:
    """How the run went: for each measure its first value, a line of bars, and its last value."""
    measures = {
        "loss": series["every"]["loss"],
        "as sent %, validation": series["as_sent"],
        "server %, validation": series["server"],
        "no identity %, validation": series["no_identity"],
        "divergence": series["every"]["divergence"],
        "MiB a round": series["every"]["mib"],
    }
    table = Table(show_header=False, box=None, padding=(0, 1))
    for name, values in measures.items():
        known = [value for value in values if value is not None]
        if known:
            table.add_row(name, f"{known[0]:.4g}", sparkline(values), f"{known[-1]:.4g}")
    return table


def _groups(run: Run) -> list[RenderableType]:
    """How many groups of clients there are, who is in which, since when and how surely; how experts were split and merged."""
    found = membership(run)
    if found is None:
        return []
    rows = [
        Text(f"expert {group['expert']}: {', '.join(group['clients'])} (q {group['sure']:.2f})")
        for group in found["groups"]
    ]
    events = [Text(f"round {event['round']}: {event['words']}", style="dim") for event in found["tree"]]
    return [Text(words_of(found), style="bold"), *rows, *events]


def _map(run: Run, line: MetricsLine) -> RenderableType:
    names = [str(name) for name in run.federation.get("clients", [])]
    return q_map(line["q_zs"], run.federation.get("groups"), names)
