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


def evaluation_table(result: Mapping[str, Any]) -> RenderableType:
    """One row for each kind of inference: who predicts, and how."""
    name = title_of(result)
    unfinished = "" if result["round"] == result["rounds"] else f", round {result['round']} of {result['rounds']}"
    table = Table(
        title=Text(f"{result['recipe']}, {name}, seed {result['seed']}{unfinished}: every kind of inference"),
        caption=Text(_caption(result)),
        caption_justify="left",
    )
    table.add_column("for whom")
    table.add_column("how")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("up", justify="right", no_wrap=True)
    table.add_column("down", justify="right", no_wrap=True)
    _add(table, _of_clients_that_took_part(result))
    _add(table, [("no identity (test)", *_anonymous(row)) for row in result["no_identity"].values() if row])
    new = result["new_clients"]
    _add(table, _labelled(new))
    shown = {} if new["held_out"] else result["no_identity"]  # the same points: not twice
    _add(
        table,
        [("new, no labels", *_anonymous(row)) for kind, row in new["unlabelled"].items() if row and kind not in shown],
    )
    notes = [Text(f"{what}: {why}") for what, why in result["notes"].items()]
    return Group(table, *notes)


def _of_clients_that_took_part(result: Mapping[str, Any]) -> list["Row"]:
    kinds = [kind for kind in ("fine_tuned", "as_sent", "server", "label_counts") if kind in result]
    return [
        (
            f"{WORDS.get(kind, 'label counts')} ({result[kind]['part']})",
            result[kind]["what"],
            _spread(result[kind]),
            "",
            "",
        )
        for kind in kinds
    ]


Row = tuple[str, str, list[str], str, str]  # for whom, how, the measures, bytes from clients and to a new one


def _add(table: Table, rows: Sequence[Row]) -> None:
    before = None
    for whom, how, cells, *beside in rows:
        table.add_row("" if whom == before else whom, Text(how), *cells, *beside)
        before = whom
    if rows:
        table.add_section()


def _anonymous(row: Mapping[str, Any]) -> tuple[str, list[str], str, str]:
    return row["what"], _of_union(row), size(row["bytes_from_clients"]), size(row["bytes_to_new_client"])


def _labelled(new: Mapping[str, Any]) -> list[Row]:
    private = new.get("adapts", WITH_LABELS["private_parts"]) if new.get("private", True) else "nothing private"
    rows: list[Row] = []
    for key, how in {**WITH_LABELS, "private_parts": private}.items():
        for row in new["labelled"] or ():
            if key not in row:
                continue
            points = f"{row['points']} points" if row["points"] else f"all points ({row['mean_points']:.0f})"
            rows.append(("new, labels", f"{how}, {points}", _spread(row[key]), "", ""))
    return rows


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
    curve = [row for row in new["labelled"] or () if row["fine_tuned"]["accuracy"]["mean"] is not None]
    if not curve:
        return
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    points = [row["mean_points"] for row in curve]
    for (key, label), colour in zip(WITH_LABELS.items(), ("#56b4e9", "#0072b2", "#d55e00"), strict=True):
        if key in curve[0]:
            _draw_with_labels(axis, points, [row[key]["accuracy"] for row in curve], label, colour)
    for kind, row in new["unlabelled"].items():
        if row and row["clients"]["accuracy"]["mean"] is not None:
            style, colour = STYLES[kind]
            label = f"no labels: {row['what'].split(',')[0]}"
            axis.axhline(100 * row["clients"]["accuracy"]["mean"], ls=style, color=colour, label=label)
    axis.set_xscale("log")
    named = [p for p, after in zip(points, [*points[1:], 2 * points[-1]], strict=True) if after > 1.3 * p]
    axis.set_xticks(named, [f"{p:.0f}" for p in named])
    axis.minorticks_off()
    axis.set_xlabel("labelled points of the new client")
    axis.set_ylabel("accuracy on its test points, %")
    axis.set_title(f"{result['recipe']}, {title_of(result)}: {new['evaluated']:,} clients that never took part")
    axis.legend(frameon=False, title="band: ± deviation over clients")
    figure.savefig(path, dpi=120)


def _draw_with_labels(
    axis: Any, points: Sequence[float], accuracies: Sequence[Mapping[str, float]], label: str, colour: str
) -> None:
    mean = [100 * accuracy["mean"] for accuracy in accuracies]
    deviation = [100 * accuracy["std"] for accuracy in accuracies]
    low = [m - s for m, s in zip(mean, deviation, strict=True)]
    high = [min(m + s, 100.0) for m, s in zip(mean, deviation, strict=True)]
    axis.plot(points, mean, "o-", color=colour, label=label)
    axis.fill_between(points, low, high, color=colour, alpha=0.15, linewidth=0)
