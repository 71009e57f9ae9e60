"""What `fedmix evaluate` found, as a table for a terminal, and a new client's curve over its labelled points as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedmix.report.tables import WITH_LABELS
from fedmix.report.words import how_much, size, title_of
from fedmix.schema import WORDS

COLUMNS = ("accuracy", "worst", "balanced", "NLL", "ECE")


# a row of the table: for whom, how, the measures, bytes from clients, bytes to a new client
Row = tuple[str, str, list[str], str, str]


def evaluation_table(result: Mapping[str, Any]) -> RenderableType:
    """One row for each kind of inference: who predicts, and how."""
    table = Table(title=Text(_title(result)), caption=Text(_caption(result)), caption_justify="left")
    table.add_column("for whom")
    table.add_column("how")
    for column in (*COLUMNS, "up", "down"):
        table.add_column(column, justify="right", no_wrap=True)
    new = result["new_clients"]
    _add(table, _of_clients_that_took_part(result))
    _add(table, _without_labels("no identity (test)", result["no_identity"]))
    _add(table, _with_labels(new))
    # where no clients were held out, a new one's points are those of `no identity`: not twice
    shown = {} if new["held_out"] else result["no_identity"]
    unlabelled = {kind: row for kind, row in new["unlabelled"].items() if kind not in shown}
    _add(table, _without_labels("new, no labels", unlabelled))
    notes = [Text(f"{what}: {why}") for what, why in result["notes"].items()]
    return Group(table, *notes)


def _title(result: Mapping[str, Any]) -> str:
    unfinished = "" if result["round"] == result["rounds"] else f", round {result['round']} of {result['rounds']}"
    return f"{result['recipe']}, {title_of(result)}, seed {result['seed']}{unfinished}: every kind of inference"


def _add(table: Table, rows: Sequence[Row]) -> None:
    """A section of the table; `for whom` is said once."""
    before = None
    for whom, how, cells, *beside in rows:
        table.add_row("" if whom == before else whom, Text(how), *cells, *beside)
        before = whom
    if rows:
        table.add_section()


def _of_clients_that_took_part(result: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for kind in ("fine_tuned", "as_sent", "server", "label_counts"):
        if kind not in result:
            continue
        scores = result[kind]
        whom = f"{WORDS.get(kind, 'label counts')} ({scores['part']})"
        rows.append((whom, scores["what"], _spread(scores), "", ""))
    return rows


def _without_labels(whom: str, ways: Mapping[str, Mapping[str, Any] | None]) -> list[Row]:
    """The ways to predict for somebody who has no labels, as far as the method has them."""
    return [
        (whom, row["what"], _of_union(row), size(row["bytes_from_clients"]), size(row["bytes_to_new_client"]))
        for row in ways.values()
        if row
    ]


def _with_labels(new: Mapping[str, Any]) -> list[Row]:
    """The ways to predict for a new client that has labelled points, over how many it has."""
    rows: list[Row] = []
    for key, how in _ways_with_labels(new).items():
        for row in new["labelled"] or ():
            if key in row:
                rows.append(("new, labels", f"{how}, {_points(row)}", _spread(row[key]), "", ""))
    return rows


def _ways_with_labels(new: Mapping[str, Any]) -> dict[str, str]:
    """WITH_LABELS in this method's words: what of it is private, if anything is."""
    private = new.get("adapts", WITH_LABELS["private_parts"])
    is_private = new.get("private", True)
    return {**WITH_LABELS, "private_parts": private if is_private else "nothing private"}


def _points(row: Mapping[str, Any]) -> str:
    return f"{row['points']} points" if row["points"] else f"all points ({row['mean_points']:.0f})"


def _spread(row: Mapping[str, Any]) -> list[str]:
    accuracy = row["accuracy"]
    if accuracy["mean"] is None:
        return ["-"] * len(COLUMNS)
    return [
        f"{100 * accuracy['mean']:.1f} ± {100 * accuracy['std']:.1f}",
        f"{100 * accuracy['worst_decile']:.1f}",
        f"{100 * row['balanced_accuracy']['mean']:.1f}",
        f"{row['nll']['mean']:.3f}",
        f"{row['ece']['mean']:.3f}",
    ]


def _of_union(row: Mapping[str, Any]) -> list[str]:
    union, worst = row["union"], row["clients"]["accuracy"]["worst_decile"]
    return [
        f"{100 * union['accuracy']:.1f}",
        "-" if worst is None else f"{100 * worst:.1f}",
        f"{100 * union['balanced_accuracy']:.1f}",
        f"{union['nll']:.3f}",
        f"{union['ece']:.3f}",
    ]


def _caption(result: Mapping[str, Any]) -> str:
    lines = [
        "fine-tuned, as sent, server, label counts: clients that took part, on their own data; no identity:",
        "all points together; new: clients that never took part. accuracy in %, ± over clients; worst:",
        "mean of the worst tenth of the clients; balanced: mean over classes; NLL: negative",
        "log-likelihood; ECE: calibration error; up, down: bytes beside the experts (gates, densities)",
        "that clients hand over for it, and that a new client needs to predict by itself",
    ]
    return "\n".join([*lines, *how_much(result, result["evaluated"])])


# -- the picture -------------------------------------------------------------------------------------------------------

# colours of WITH_LABELS, in its order
COLOURS = ("#56b4e9", "#0072b2", "#d55e00")
# style and colour of each way to predict without labels
STYLES = {
    "averaged": ("--", "#009e73"),
    "uniform": (":", "#999999"),
    "pooled": ((0, (5, 1)), "#e69f00"),
    "generative": ("-.", "#cc79a7"),
    "distilled": ((0, (1, 3)), "#000000"),
}


def draw_new_clients(result: Mapping[str, Any], path: Path) -> None:
    """Accuracy of clients that never took part, over the labelled points they have."""
    from matplotlib.figure import Figure

    new = result["new_clients"]
    curve = _known(new["labelled"] or ())
    if not curve:
        return
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    for key, colour in zip(WITH_LABELS, COLOURS, strict=True):
        if key in curve[0]:
            _draw_with_labels(axis, curve, key, colour)
    for kind, row in new["unlabelled"].items():
        _draw_without_labels(axis, kind, row)
    _name_points(axis, [row["mean_points"] for row in curve])
    axis.set_xlabel("labelled points of the new client")
    axis.set_ylabel("accuracy on its test points, %")
    axis.set_title(f"{result['recipe']}, {title_of(result)}: {new['evaluated']:,} clients that never took part")
    axis.legend(frameon=False, title="band: ± deviation over clients")
    figure.savefig(path, dpi=120)


def _known(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The numbers of labelled points that some client has, and test points beside them."""
    return [row for row in rows if row["fine_tuned"]["accuracy"]["mean"] is not None]


def _draw_with_labels(axis: Any, curve: Sequence[Mapping[str, Any]], key: str, colour: str) -> None:
    points = [row["mean_points"] for row in curve]
    accuracies = [row[key]["accuracy"] for row in curve]
    mean = [100 * accuracy["mean"] for accuracy in accuracies]
    low = [100 * accuracy["mean"] - 100 * accuracy["std"] for accuracy in accuracies]
    high = [min(100 * accuracy["mean"] + 100 * accuracy["std"], 100.0) for accuracy in accuracies]
    axis.plot(points, mean, "o-", color=colour, label=WITH_LABELS[key])
    axis.fill_between(points, low, high, color=colour, alpha=0.15, linewidth=0)


def _draw_without_labels(axis: Any, kind: str, row: Mapping[str, Any] | None) -> None:
    """A line without a slope, where the method has this way and the clients have points."""
    mean = row["clients"]["accuracy"]["mean"] if row else None
    if row is None or mean is None:
        return
    style, colour = STYLES[kind]
    axis.axhline(100 * mean, ls=style, color=colour, label=f"no labels: {row['what'].split(',')[0]}")


def _name_points(axis: Any, points: Sequence[float]) -> None:
    """Ticks at the numbers of points, without those that would be too near the next one to be read."""
    axis.set_xscale("log")
    nexts = [*points[1:], 2 * points[-1]]
    named = [count for count, following in zip(points, nexts, strict=True) if following > 1.3 * count]
    axis.set_xticks(named, [f"{count:.0f}" for count in named])
    axis.minorticks_off()
