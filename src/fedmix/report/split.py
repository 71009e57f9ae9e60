"""Who holds what, before anything is trained: clients by classes as a table for a terminal and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedmix.errors import SettingError, one_of
from fedmix.report.tables import SHADES
from fedmix.report.words import letter, scaled_down

PICTURES = (".png", ".svg", ".pdf")
PARTS = ("train", "validation", "test")
MOST_ROWS = 40
# classes that can be shown as blocks beside each other
MOST_CLASSES = 62
# columns of a map that can each have a number
MOST_TICKS = 12


# -- the table ---------------------------------------------------------------------------------------------------------


def split_table(split: Mapping[str, Any]) -> RenderableType:
    """One row for each client: sizes, and the share of each class in its training points as shaded blocks."""
    rows: Sequence[Mapping[str, Any]] = split["clients"]
    grouped = _is_grouped(rows)
    with_blocks = split["classes"] <= MOST_CLASSES
    table = Table(title=Text(f"{split['recipe']}: who holds what (seed {split['seed']})"), caption_justify="left")
    for column in ("client", *PARTS, *(["group"] if grouped else []), "classes"):
        table.add_column(column, justify="right")
    if with_blocks:
        table.add_column("share of each class, 0 first", no_wrap=True)
    for row in rows[:MOST_ROWS]:
        table.add_row(*_cells(row, grouped, with_blocks))
    facts = [f"{what}: {much}" for what, much in _facts(split).items()]
    return Group(table, *map(Text, _left_unsaid(split)), Text("\n".join(facts)))


def _is_grouped(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the clients' true groups are known."""
    return any(row["group"] is not None for row in rows)


def _cells(row: Mapping[str, Any], grouped: bool, with_blocks: bool) -> list[RenderableType]:
    cells: list[RenderableType] = [Text(row["client"])]
    cells += [str(row[part]) for part in PARTS]
    if grouped:
        cells.append(letter(row["group"]))
    held = sum(1 for count in row["labels"] if count)
    cells.append(str(held))
    if with_blocks:
        cells.append(Text(_blocks(row["labels"])))
    return cells


def _left_unsaid(split: Mapping[str, Any]) -> list[str]:
    """What the rows of the table do not show."""
    more = len(split["clients"]) - MOST_ROWS
    lines = [f"... and {more} more clients"] if more > 0 else []
    if split["scale"] != "full":
        lines.append(scaled_down(split["scale"]))
    return lines


def _blocks(counts: Sequence[int]) -> str:
    """A block for each class; blank: none; a full block: the most that the client has of any class."""
    most = max([*counts, 1])
    # rounded up, so that no class that the client has is blank
    shades = [-(-count * (len(SHADES) - 1) // most) for count in counts]
    return "".join(SHADES[shade] for shade in shades)


def _facts(split: Mapping[str, Any]) -> dict[str, str]:
    rows = split["clients"]
    held_out = f", and {split['held_out']:,} that never take part" if split["held_out"] else ""
    totals = [f"{sum(row[part] for row in rows):,} {part}" for part in PARTS]
    sizes = sorted(row["train"] for row in rows)
    median = sizes[len(sizes) // 2]
    facts = {
        "clients": f"{len(rows):,}{held_out}",
        "points": ", ".join(totals),
        "points to train on a client": f"{sizes[0]:,} to {sizes[-1]:,}, median {median:,}",
        "distance of a client's labels from everybody's": f"{split['distance']:.2f} (mean total variation; 0 alike, 1 apart)",
    }
    if split["left_out"]:
        facts["left out"] = f"{split['left_out']:,} owners with fewer points than data.min_size"
    return facts


# -- the picture -------------------------------------------------------------------------------------------------------


def draw_split(split: Mapping[str, Any], path: Path) -> None:
    """Clients by classes, and by side information where that is something else, as shares in shades."""
    if path.suffix not in PICTURES:
        raise SettingError(one_of("the picture's ending", path.suffix, PICTURES))
    from matplotlib.figure import Figure

    grouped = _is_grouped(split["clients"])
    rows = sorted(split["clients"], key=lambda row: row["group"]) if grouped else split["clients"]
    panels = _panels(rows, split["side"])
    figure = Figure(figsize=(2.0 + 4.4 * len(panels) + 1.8, 6.4), layout="constrained")
    *maps, sizes = figure.subplots(1, len(panels) + 1, sharey=True, width_ratios=[*[3] * len(panels), 1])
    for axis, (what, shares) in zip(maps, panels.items(), strict=True):
        _draw_shares(figure, axis, what, shares)
    maps[0].set_ylabel("client, in the order of the true groups" if grouped else "client")
    sizes.barh(range(len(rows)), [row["train"] for row in rows], height=1.0, color="#4c72b0")
    sizes.set_xlabel("points to train")
    figure.suptitle(f"{split['recipe']}: {len(rows):,} clients by {' and by '.join(panels)} (seed {split['seed']})")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _panels(rows: Sequence[Mapping[str, Any]], side: str) -> dict[str, list[list[float]]]:
    """Each client's shares of the classes; and of the side information, where that is something else."""
    panels = {"class": [_shares(row["labels"]) for row in rows]}
    if rows[0]["side"] is not None:
        panels[side] = [_shares(row["side"]) for row in rows]
    return panels


def _draw_shares(figure: Any, axis: Any, what: str, shares: Sequence[Sequence[float]]) -> None:
    """A map of clients by classes, or by side information."""
    image = axis.imshow(shares, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0.0)
    axis.set_xlabel("rotation, in multiples of 45°" if what == "rotation" else what)
    columns = len(shares[0])
    if columns <= MOST_TICKS:
        axis.set_xticks(range(columns))
    figure.colorbar(image, ax=axis, label=f"share of the client's points with this {what}", shrink=0.8)


def _shares(counts: Sequence[int]) -> list[float]:
    """A client without points has no share of anything."""
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]
