"""What `fedmix audit` found, as a table for a terminal and as a picture: true and reconstructed label marginals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
# attacks on the side information c, which is the label or something else
OF_SIDE = ("posterior", "posterior_whole", "reported")
MOST_CLIENTS = 20
MOST_COLUMNS = 5
# colour and marker of the attacks that are drawn; safe for colour-blind readers
COLOURS = {
    "bias_single_step": ("#0072b2", "o"),
    "bias_normalised": ("#56b4e9", "s"),
    "posterior_whole": ("#009e73", "^"),
}


# -- the table ---------------------------------------------------------------------------------------------------------


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
    for row in _guess_rows(result):
        table.add_row(*row)
    for when, words in (("start", "first round"), ("end", f"after {result['round']}")):
        table.add_section()
        for row in _attack_rows(result, when, words):
            table.add_row(*row)
    notes = [Text(f"{what}: {why}") for what, why in result["notes"].items()]
    absent = [Text(words) for words in _absent_values(result["absent"])]
    return Group(table, *absent, Text(_protection(result["protection"])), *notes)


def _guess_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """The distances that an attack has to beat: those of a guess that uses nothing of the client's."""
    guesses = {"": result["guess"], f", {result['side']}": result["guess_side"]}
    return [_guess_row(what, guess) for what, guess in guesses.items() if guess]


def _guess_row(what: str, guess: Mapping[str, Any]) -> list[str]:
    distance = guess["total_variation"]
    exposed = f"{distance['most_exposed']:.2f}"
    return ["", f"nothing: everybody's average{what}", _spread(distance), exposed, "-", "-"]


def _attack_rows(result: Mapping[str, Any], when: str, words: str) -> list[list[str]]:
    """The attacks on one round; the first row alone says which round it is."""
    rows: list[list[str]] = []
    for kind, attack in result["attacks"][when].items():
        if attack:
            first_cell = "" if rows else words
            rows.append([first_cell, *_attack_cells(kind, attack, result["side"])])
    return rows


def _attack_cells(kind: str, attack: Mapping[str, Any], side: str) -> list[str]:
    distance, rank = attack["total_variation"], attack["rank_correlation"]
    of_something_else = kind in OF_SIDE and side != "label"
    return [
        f"{WHAT[kind]}: the {side}" if of_something_else else WHAT[kind],
        _spread(distance),
        f"{distance['most_exposed']:.2f}",
        "-" if rank is None else f"{rank:.2f}",
        f"{attack['exact']} of {attack['clients']}",
    ]


def _absent_values(absent: Mapping[str, Any]) -> list[str]:
    """How many of the values that clients do not have can be told from rows of phi that come back as they were sent."""
    rounds = {"first round": absent["start"], "at the end": absent["end"]}
    return [
        f"{words}, rows of phi that come back unchanged: {counts['found']:,} of {counts['absent']:,} absent values found, "
        f"{counts['wrong']:,} wrongly"
        for words, counts in rounds.items()
        if counts
    ]


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


# -- the picture -------------------------------------------------------------------------------------------------------


class _Drawn(NamedTuple):
    """An attack in the picture. of_clients: its estimate for each client, or None."""

    of_clients: Sequence[Mapping[str, Any] | None]
    colour: str
    marker: str
    label: str


def draw_audit(result: Mapping[str, Any], path: Path) -> None:
    """Each client's true label marginal, and what the server makes of it, as in the paper's figure."""
    from matplotlib.figure import Figure

    attacks = _drawn_attacks(result)
    names: Sequence[str] = result["names"][:MOST_CLIENTS]
    columns = min(MOST_COLUMNS, len(names))
    # rounded up
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(max(2.6 * columns, 9.0), max(1.7 * rows, 3.0) + 1.0), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    # there may be more axes than clients
    for i, (axis, name) in enumerate(zip(axes, names, strict=False)):
        _draw_client(axis, i, result["true"][i], attacks)
        axis.set_title(f"client {name[:20]}", fontsize=8, parse_math=False)
    for axis in axes[len(names) :]:
        axis.set_axis_off()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.suptitle(_picture_title(result, len(names), bool(attacks)))
    figure.savefig(path, dpi=120)


def _drawn_attacks(result: Mapping[str, Any]) -> list[_Drawn]:
    side = result["side"]
    rounds = {"start": "first round", "end": f"after {result['round']} rounds"}
    return [
        _Drawn(attack["of_clients"], *COLOURS[kind], f"{WHAT[kind]} ({words})")
        for when, words in rounds.items()
        for kind, attack in result["attacks"][when].items()
        if attack and _is_drawn(kind, when, side)
    ]


def _is_drawn(kind: str, when: str, side: str) -> bool:
    if kind == "posterior_whole":
        # it estimates c, so it is beside the label marginals only where c is the label
        return when == "end" and side == "label"
    return when == "start" and kind in COLOURS


def _draw_client(axis: Any, client: int, true: Sequence[float], attacks: Sequence[_Drawn]) -> None:
    classes = range(len(true))
    axis.bar(classes, true, color="#d55e00", alpha=0.55, label="true p(y|s)")
    for attack in attacks:
        estimate = attack.of_clients[client]
        if estimate:
            look = {"color": attack.colour, "ms": 4, "mfc": "none", "label": attack.label}
            axis.plot(classes, estimate["estimate"], attack.marker, **look)
    axis.set_ylim(0, 1.03)
    # at most ten of them have a number
    step = -(-len(classes) // 10)
    axis.set_xticks(range(0, len(classes), step))


def _picture_title(result: Mapping[str, Any], shown: int, attacked: bool) -> str:
    clients = len(result["names"])
    some = f", {shown} of {clients} clients" if clients > shown else ""
    what = "true and reconstructed" if attacked else "which no attack applies to"
    return f"{result['recipe']}, {title_of(result)}: label marginals, {what}{some}"
