"""Tables for a terminal: methods beside each other, one run, a plan; and q(z|s) as shaded blocks."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedmix.report.comparison import Comparison, PairedDifference, SeedsRow, compared
from fedmix.report.statistics import Difference, OverSeeds
from fedmix.report.thinning import clients_by_group
from fedmix.report.words import duration, letter, noise_words, percent, scaled_down, size, title_of
from fedmix.schema import KINDS, LAST_EVALUATIONS, WORDS, Summary

SHADES = " ░▒▓█"
# what a new client may do with the labelled points it has
WITH_LABELS = {
    "label_counts": "own label counts",
    "private_parts": "private parts alone",
    "fine_tuned": "then fine-tuned",
}
# columns after the name of a method, or after the settings of a sweep
RESULT_COLUMNS = ("data", *(WORDS[kind] for kind in KINDS), "worst decile", "GiB")


def comparison_table(comparison: Comparison) -> RenderableType:
    """The paper's table (tab:acc_comm_res), with server accuracy and the worst decile, and validation figures below."""
    rows = comparison["rows"]
    title = f"{rows[0]['recipe']}: accuracy and communication, {rounds_words(rows)}"
    table = Table(title=Text(title), box=box.SIMPLE_HEAD)
    table.add_column("method")
    add_result_columns(table)
    grouped = _is_grouped(rows)
    if grouped:
        table.add_column("groups found", justify="right")
    for row in rows:
        index = [_number(row.get("adjusted_rand_index"))] if grouped else []
        test, validation = result_cells(row)
        table.add_row(title_of(row), *test, *index)
        table.add_row("", *validation, end_section=True)
    parts: list[RenderableType] = [table, Text(caption(rows), style="dim")]
    if len(rows) > 1:
        parts.append(Text("\n".join(difference_words(comparison))))
    return Group(*parts)


def _is_grouped(rows: Sequence[SeedsRow]) -> bool:
    """Whether the clients' true groups are known, and so how well they were found."""
    return any("adjusted_rand_index" in row for row in rows)


def rounds_words(rows: Sequence[SeedsRow]) -> str:
    """How many rounds these runs have; a recipe may give its methods different numbers of them."""
    counts = sorted({row["rounds"] for row in rows})
    return " or ".join(f"{count:,}" for count in counts) + " rounds"


def add_result_columns(table: Table) -> None:
    """The columns that `result_cells` fills."""
    for column in RESULT_COLUMNS:
        table.add_column(column, justify="left" if column == "data" else "right")


def result_cells(row: SeedsRow) -> tuple[list[str], list[str]]:
    """Two lines of a table: on test data, with what was spent; and on validation data."""
    gib = row["gib"]["mean"] or 0.0
    test = ["test", *(_accuracy_cell(row["test"], kind) for kind in KINDS)]
    validation = ["validation", *(_accuracy_cell(row["validation"], kind) for kind in KINDS)]
    sent = f"{gib:.4f}" if gib < 1 else f"{gib:.2f}"
    return [*test, percent(row["worst_decile"]), sent], validation


def _accuracy_cell(of_kinds: Mapping[str, OverSeeds], kind: str) -> str:
    return percent(of_kinds[kind]) if kind in of_kinds else ""


def caption(rows: Sequence[SeedsRow]) -> str:
    """What the columns mean."""
    seeds = max(len(row["seeds"]) for row in rows)
    deviation = f"; ±: sample deviation over {seeds} seeds" if seeds > 1 else ""
    lines = [
        "fine-tuned: server weights, then trained on the client (mean of up to 3 last evaluations); as sent: weights",
        "that the client sent last; server: server weights with the client's private parts; no identity: all points",
        f"together. test: after the last round; validation: mean of the last evaluations, up to {LAST_EVALUATIONS}, in the",
        f"last fifth of the run; worst decile: the worst tenth of the clients, fine-tuned{deviation}",
    ]
    if _is_grouped(rows):
        lines.append("groups found: adjusted Rand index of the clients' groups, 1.00 = exactly")
    if rows[0]["scale"] != "full":
        lines.append(scaled_down(rows[0]["scale"]))
    return "\n".join(lines)


def difference_words(comparison: Comparison) -> list[str]:
    """The first method against each other one, by every kind of accuracy, in points."""
    titles = {row["algorithm"]: row["title"] for row in comparison["rows"]}
    first = comparison["rows"][0]["algorithm"]
    against_first = [row for row in comparison["differences"] if row["first"] == first]
    lines = [_difference_line(row, row["difference"], titles) for row in against_first if row["difference"]]
    if not lines:
        return []
    return ["differences in points, paired over clients and seeds, with the bootstrap's 95 % interval:", *lines]


def _difference_line(row: PairedDifference, difference: Difference, titles: Mapping[str, str]) -> str:
    low, mean, high = (100 * difference[key] for key in ("low", "mean", "high"))
    seeds = f"{difference['seeds']} seeds" if difference["seeds"] > 1 else "one seed"
    what = f"{titles[row['first']]} against {titles[row['second']]}, {WORDS[row['kind']]} ({row['part']})"
    return f"  {what}: {difference['verdict']}, {mean:+.1f} ({low:+.1f} to {high:+.1f}; {seeds})"


def summary_table(summary: Summary) -> RenderableType:
    """One run's result: its figures, what it warned of, what its noise guarantees, and who uses which expert."""
    parts: list[RenderableType] = [comparison_table(compared([summary]))]
    parts += [Text(f"! {warning}", style="yellow") for warning in summary.get("warnings", [])]
    if "privacy" in summary:
        noise = summary["privacy"].get("noise")
        parts.append(Text(f"privacy: {noise_words(noise, summary['privacy'])}"))
    if "q_zs" in summary:
        parts.append(gates_of(summary))
    return Group(*parts)


def gates_of(summary: Summary) -> RenderableType:
    """Who uses which expert, clients by their names where all of them are known."""
    names = list(summary["of_clients"]["test"].get("server", {}))
    return q_map(summary["q_zs"], summary.get("groups"), names if len(names) == len(summary["q_zs"]) else ())


def q_map(
    q: Sequence[Sequence[float]], groups: Sequence[int] | None, names: Sequence[str] = (), most: int = 60
) -> RenderableType:
    """q(z|s), what each client returned last, client by expert as shaded blocks, beside the true groups if known.

    names: what the clients are called; without them, their numbers are shown.
    """
    order = clients_by_group(len(q), groups, most)
    experts = _used_experts(q, groups)
    numbers = [str(s) for s in range(len(q))]
    labels = list(map(_cut, names or numbers))
    width = max(len("client"), *(len(labels[s]) for s in order))
    text = Text()
    text.append("q(z|s), client by expert", style="bold")
    text.append("   beside the true groups\n" if groups else "   blank 0, full block 1\n")
    group_head = "group  " if groups else ""
    heads = [f"{k:^5}" for k in experts]
    text.append(f"{'client':>{width}}  {group_head}{''.join(heads)}\n", style="dim")
    for s in order:
        group = f"{letter(groups[s]):^5}  " if groups else ""
        text.append(f"{labels[s]:>{width}}  {group}{_blocks(q[s], experts)}\n")
    if len(q) > most:
        text.append(f"... and {len(q) - most} more clients\n")
    return text


def _cut(name: str, most: int = 20) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _blocks(shares: Sequence[float], experts: Sequence[int]) -> str:
    """A block for each expert, as wide as its column: the darker, the larger its share."""
    levels = [min(int(shares[k] * len(SHADES)), len(SHADES) - 1) for k in experts]
    return "".join(f" {3 * SHADES[level]} " for level in levels)


def _used_experts(q: Sequence[Sequence[float]], groups: Sequence[int] | None) -> list[int]:
    """The experts that have a column: not the empty slots, which no client uses."""
    experts = _experts_by_group(q, groups) if groups else range(len(q[0]))
    return [k for k in experts if any(row[k] > 0 for row in q)]


def _experts_by_group(q: Sequence[Sequence[float]], groups: Sequence[int]) -> list[int]:
    """Experts in the order of the group that uses them most: their numbers are arbitrary."""

    def main_group(k: int) -> tuple[int, float]:
        use: dict[int, float] = defaultdict(float)
        for s, row in enumerate(q):
            use[groups[s]] += row[k]
        most_used_by = max(use, key=lambda group: use[group])
        return most_used_by, -use[most_used_by]

    return sorted(range(len(q[0])), key=main_group)


def plan_table(plan: Mapping[str, Any]) -> Table:
    """What a run will cost."""
    table = Table(title=Text(f"{plan['recipe']}, {title_of(plan)}: what it will cost"), show_header=False)
    table.add_column("what")
    table.add_column("how much", justify="right")
    for what, amount in _plan_rows(plan):
        table.add_row(what, amount)
    small = "" if plan["scale"] == "full" else "; " + scaled_down(plan["scale"])
    table.caption = Text(f"{plan['note']} ({plan['workers']} clients side by side){small}")
    return table


def _plan_rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    sent, memory = plan["bytes"], plan["memory"]
    frozen = plan.get("parameters_frozen")
    return [
        ("rounds x clients a round", f"{plan['rounds']:,} x {plan['clients_per_round']} of {plan['clients']:,}"),
        ("points, steps of a client in a round", f"{plan['points_per_client']:,.1f}, {plan['steps_per_client']:,}"),
        ("parameters of one model", f"{plan['parameters']:,}"),
        ("parameters shared, private to a client", f"{plan['parameters_shared']:,}, {plan['parameters_private']:,}"),
        *([("parameters frozen, which are not sent", f"{frozen:,}")] if frozen else []),
        ("weights sent, down + up", f"{sent['weights']:,} bytes = {size(sent['weights'])}"),
        ("phi and q(z|s) sent", f"{sent['posterior']:,} bytes = {size(sent['posterior'])}"),
        ("a round sends", size(sent["weights_per_round"] + sent["posterior_per_round"])),
        ("computation of a round", f"{plan['flop_per_round'] / 1e9:,.2f} GFLOP"),
        ("memory: server, each worker", f"{size(memory['server'])}, {size(memory['worker'])}"),
        ("time of a round, of the run", f"{duration(plan['seconds_per_round'])}, {duration(plan['seconds'])}"),
    ]


def sharing_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What FedMix will cost for each choice of what its experts share; the first row is FedAvg's."""
    base = rows[0]
    table = Table(title=Text(f"{base['recipe']}: a round when FedMix's experts share"))
    for column in ("shared", "sent", "computation", "memory of a worker", "time"):
        table.add_column(column, justify="left" if column == "shared" else "right", overflow="fold")
    for row in rows:
        table.add_row(*_sharing_row(row, base))
    table.caption = Text(
        "x: times FedAvg. Choose with --set fedmix.shared=all-but-output, or a list of layers: "
        "--set 'fedmix.shared=[\"conv1\"]'"
    )
    return table


def _sharing_row(row: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    sent, of_base = (
        sum(costs["bytes"][f"{what}_per_round"] for what in ("weights", "posterior")) for costs in (row, base)
    )
    return [
        row["shared"],
        f"{size(sent)} ({sent / of_base:.2f} x)",
        f"{row['flop_per_round'] / 1e9:,.2f} GFLOP ({row['flop_per_round'] / base['flop_per_round']:.2f} x)",
        size(row["memory"]["worker"]),
        f"{duration(row['seconds_per_round'])} ({row['seconds_per_round'] / base['seconds_per_round']:.2f} x)",
    ]


def _number(value: OverSeeds | None) -> str:
    if value is None or value["mean"] is None:
        return "-"
    mean, deviation = f"{value['mean']:.2f}", value["std"]
    return mean if deviation is None else f"{mean} ± {deviation:.2f}"
