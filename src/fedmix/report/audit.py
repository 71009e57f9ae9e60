"""What `fedmix audit` found, as a table for a terminal and as a picture: true and reconstructed label marginals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedmix.report.words import how_much, noise_words, title_of

WHAT = {
    "bias_single_step": "output bias, one full-batch step",
    "bias_steps": "output bias, a local update, by its steps",
    "bias_normalised": "output bias, a local update, normalised",
    "bias_size": "output bias, a local update, by its size",
    "posterior": "q(z|s) and phi, least squares",
    "posterior_whole": "q(z|s) and phi, whole numbers",
    "reported": "what clients report (fedmix.prior)",
}
OF_SIDE = ("posterior", "posterior_whole", "reported")  # they tell of c, which is the label or something else
MOST_CLIENTS = 20
COLOURS = {
    "bias_single_step": ("#0072b2", "o"),
    "bias_normalised": ("#56b4e9", "s"),
    "posterior_whole": ("#009e73", "^"),
}  # safe for colour-blind readers


def audit_table(result: Mapping[str, Any]) -> RenderableType:
    """One row for each attack: how far its estimate of a client's marginal is from the truth."""
    table = Table(
        title=Text(f"{result['recipe']}, {title_of(result)}: what the server can learn of clients' labels"),
        caption=Text(_caption(result)),
        caption_justify="left",
    )
    table.add_column("when")
    table.add_column("from")
    for column in ("distance", "exposed", "ranks", "exact"):
        table.add_column(column, justify="right", no_wrap=True)
    for guess, what in ((result["guess"], ""), (result["guess_side"], f", {result['side']}")):
        if guess:
            far = guess["total_variation"]
            words = f"nothing: everybody's average{what}"
            table.add_row("", words, _spread(far), f"{far['most_exposed']:.2f}", "-", "-")
    for when, words in (("start", "first round"), ("end", f"after {result['round']}")):
        table.add_section()
        for kind, found in result["attacks"][when].items():
            if found:
                distance, rank = found["total_variation"], found["rank_correlation"]
                table.add_row(
                    words,
                    WHAT[kind] + (f": the {result['side']}" if kind in OF_SIDE and result["side"] != "label" else ""),
                    _spread(distance),
                    f"{distance['most_exposed']:.2f}",
                    "-" if rank is None else f"{rank:.2f}",
                    f"{found['exact']} of {found['clients']}",
                )
                words = ""
    notes = [Text(f"{what}: {why}") for what, why in result["notes"].items()]
    absent = [
        Text(
            f"{words}, rows of phi that come back unchanged: {found['found']:,} of {found['absent']:,} absent values found, "
            f"{found['wrong']:,} wrongly"
        )
        for words, found in (("first round", result["absent"]["start"]), ("at the end", result["absent"]["end"]))
        if found
    ]
    return Group(table, *absent, Text(_protection(result["protection"])), *notes)


def _protection(protection: Mapping[str, Any]) -> str:
    words = f"aggregation: {protection['aggregation']}"
    words += f"; updates clipped to norm {protection['clip']:g}" if protection["clip"] else "; nothing clipped"
    return f"{words}; {noise_words(protection['noise'], protection)}"


def _spread(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.3f} ± {value['std']:.3f}"


def _caption(result: Mapping[str, Any]) -> str:
    lines = [
        "distance: total variation from the client's true marginal, 0 known exactly, 1 nothing in common;",
        "exposed: of the tenth of the clients known best; ranks: rank correlation; exact: clients known exactly",
    ]
    if result["protection"]["aggregation"] == "linear":
        lines.append("the server sees sums over a cohort: one estimate for all of its members")
    return "\n".join([*lines, *how_much(result, result["audited"])])


def draw_audit(result: Mapping[str, Any], path: Path) -> None:
    """As in the paper's figure: for each client its true label marginal, and what the server makes of it."""
    from matplotlib.figure import Figure

    attacks = {
        f"{kind} {when}": (found["of_clients"], *COLOURS[kind], f"{WHAT[kind]} ({words})")
        for when, words in (("start", "first round"), ("end", f"after {result['round']} rounds"))
        for kind, found in result["attacks"][when].items()
        if found and kind in COLOURS and (when == "start") == (kind != "posterior_whole")
    }
    if result["side"] != "label":
        attacks = {key: value for key, value in attacks.items() if "posterior" not in key}
    names: Sequence[str] = result["names"][:MOST_CLIENTS]
    columns = min(5, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(max(2.6 * columns, 9.0), max(1.7 * rows, 3.0) + 1.0), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    classes = range(len(result["true"][0]))
    for i, (axis, name) in enumerate(zip(axes, names, strict=False)):
        axis.bar(classes, result["true"][i], color="#d55e00", alpha=0.55, label="true p(y|s)")
        for of_clients, colour, marker, label in attacks.values():
            if of_clients[i]:
                axis.plot(classes, of_clients[i]["estimate"], marker, color=colour, ms=4, mfc="none", label=label)
        axis.set_title(f"client {name[:20]}", fontsize=8, parse_math=False)
        axis.set_ylim(0, 1.03)
        axis.set_xticks(range(0, len(classes), -(-len(classes) // 10)))
    for axis in axes[len(names) :]:
        axis.set_axis_off()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    more = f", {len(names)} of {len(result['names'])} clients" if len(result["names"]) > len(names) else ""
    what = "true and reconstructed" if attacks else "which no attack applies to"
    figure.suptitle(f"{result['recipe']}, {title_of(result)}: label marginals, {what}{more}")
    figure.savefig(path, dpi=120)
