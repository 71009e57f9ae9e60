"""Who holds what, before anything is trained: clients by classes as a table for a terminal and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedmix.errors import SettingError, one_of
from fedmix.report.tables import SHADES
from fedmix.report.words import scaled_down

PICTURES = (".png", ".svg", ".pdf")
MOST_ROWS = 40
MOST_CLASSES = 62


def split_table(split: Mapping[str, Any]) -> RenderableType:
    """One row for each client: sizes, and the share of each class in its training points as shaded blocks."""
    rows: Sequence[Mapping[str, Any]] = split["clients"]
    grouped = any(row["group"] is not None for row in rows)
    wide = split["classes"] <= MOST_CLASSES
    table = Table(title=Text(f"{split['recipe']}: who holds what (seed {split['seed']})"), caption_justify="left")
    columns = ["client", "train", "validation", "test", *(["group"] if grouped else []), "classes"]
    for column in columns:
        table.add_column(column, justify="right")
    if wide:
        table.add_column("share of each class, 0 first", no_wrap=True)
    for row in rows[:MOST_ROWS]:
        group = [chr(ord("A") + row["group"] % 26)] if grouped else []
        held = sum(1 for n in row["labels"] if n)
        blocks = [Text(_blocks(row["labels"]))] if wide else []
        sizes = [str(row[part]) for part in ("train", "validation", "test")]
        table.add_row(Text(row["client"]), *sizes, *group, str(held), *blocks)
    facts = Text("\n".join(f"{what}: {much}" for what, much in _facts(split).items()))
    more = [Text(f"... and {len(rows) - MOST_ROWS} more clients")] if len(rows) > MOST_ROWS else []
    if split["scale"] != "full":
        more.append(Text(scaled_down(split["scale"])))
    return Group(table, *more, facts)


def _blocks(counts: Sequence[int]) -> str:
    """Blank: none; a full block: the most that the client has of any class."""
    most = max([*counts, 1])
    return "".join(SHADES[-(-n * (len(SHADES) - 1) // most)] for n in counts)


def _facts(split: Mapping[str, Any]) -> dict[str, str]:
    rows = split["clients"]
    sizes = sorted(row["train"] for row in rows)
    total = {part: sum(row[part] for row in rows) for part in ("train", "validation", "test")}
    facts = {
        "clients": f"{len(rows):,}"
        + (f", and {split['held_out']:,} that never take part" if split["held_out"] else ""),
        "points": ", ".join(f"{n:,} {part}" for part, n in total.items()),
        "points to train on a client": f"{sizes[0]:,} to {sizes[-1]:,}, median {sizes[len(sizes) // 2]:,}",
        "distance of a client's labels from everybody's": f"{split['distance']:.2f} (mean total variation; 0 alike, 1 apart)",
    }
    if split["left_out"]:
        facts["left out"] = f"{split['left_out']:,} owners with fewer points than data.min_size"
    return facts


def draw_split(split: Mapping[str, Any], path: Path) -> None:
    """Clients by classes, and by side information where that is something else, as shares in shades."""
    if path.suffix not in PICTURES:
        raise SettingError(one_of("the picture's ending", path.suffix, PICTURES))
    from matplotlib.figure import Figure

    rows = split["clients"]
    if any(row["group"] is not None for row in rows):
        rows = sorted(rows, key=lambda row: row["group"])
    panels = {"class": [_shares(row["labels"]) for row in rows]}
    if rows[0]["side"] is not None:
        panels[split["side"]] = [_shares(row["side"]) for row in rows]
    figure = Figure(figsize=(2.0 + 4.4 * len(panels) + 1.8, 6.4), layout="constrained")
    axes = figure.subplots(1, len(panels) + 1, sharey=True, width_ratios=[*[3] * len(panels), 1])
    for axis, (what, shares) in zip(axes, panels.items(), strict=False):
        shown = axis.imshow(shares, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0.0)
        axis.set_xlabel({"rotation": "rotation, in multiples of 45°"}.get(what, what))
        if len(shares[0]) <= 12:
            axis.set_xticks(range(len(shares[0])))
        figure.colorbar(shown, ax=axis, label=f"share of the client's points with this {what}", shrink=0.8)
    axes[0].set_ylabel("client" + (", in the order of the true groups" if rows[0]["group"] is not None else ""))
    axes[-1].barh(range(len(rows)), [row["train"] for row in rows], height=1.0, color="#4c72b0")
    axes[-1].set_xlabel("points to train")
    figure.suptitle(f"{split['recipe']}: {len(rows):,} clients by {' and by '.join(panels)} (seed {split['seed']})")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _shares(counts: Sequence[int]) -> list[float]:
    total = sum(counts)
    return [n / total if total else 0.0 for n in counts]
