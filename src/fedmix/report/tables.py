"""Run directories as text for a terminal: the paper's table, and q(z|s) as shaded blocks."""

import math
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedmix.catalogue import TITLES

GIB = 2**30
SHADES = " ░▒▓█"
WITH_LABELS = {  # what a new client may do with the labelled points it has
    "counts": "own label counts",
    "private_parts": "private parts alone",
    "finetuned": "then fine-tuned",
}
COLUMNS = {
    "local": ("accuracy", "local", "mean"),
    "server": ("accuracy", "server", "mean"),
    "global": ("accuracy", "global"),
    "worst decile": ("accuracy", "local", "worst_decile"),
}


def comparison(summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each method: mean and standard deviation over seeds of the paper's columns."""
    by_method: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for summary in summaries:
        by_method[summary["algorithm"]].append(summary)
    return [{"algorithm": method, "title": title_of(runs[0]), **over_seeds(runs)} for method, runs in by_method.items()]


def title_of(about: Mapping[str, Any]) -> str:
    """What a method is called: as its run says, or, of older files, as shipped methods are called."""
    name = str(about.get("algorithm"))
    return str(about.get("title") or TITLES.get(name, name))


def over_seeds(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The paper's columns of runs that differ in their seed alone: mean and standard deviation."""
    row: dict[str, Any] = {key: runs[0][key] for key in ("recipe", "scale", "rounds")}
    row["seeds"] = [run["seed"] for run in runs]
    for column, path in COLUMNS.items():
        row[column.replace(" ", "_")] = _spread([_at(run, path) for run in runs])
    row["gib"] = _spread([(run["bytes_down"] + run["bytes_up"]) / GIB for run in runs])
    found = [run["clusters"]["adjusted_rand_index"] for run in runs if "clusters" in run]
    if found:
        row["adjusted_rand_index"] = _spread(found)
    return row


def scores_cells(row: Mapping[str, Any]) -> list[str]:
    """Of a row over seeds: accuracies, rounds, GiB."""
    gib = row["gib"]["mean"]
    cells = [percent(row[column.replace(" ", "_")]) for column in COLUMNS]
    return [*cells, str(row["rounds"]), f"{gib:.4f}" if gib < 1 else f"{gib:.2f}"]


def comparison_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The paper's table (tab:acc_comm_res), with server accuracy and the worst decile beside it."""
    title = Text(f"{rows[0]['recipe']}: test accuracy and communication")
    table = Table(title=title, caption=caption(rows), caption_justify="left")
    table.add_column("method")
    for column in (*COLUMNS, "rounds", "GiB"):
        table.add_column(column, justify="right")
    clusters = any("adjusted_rand_index" in row for row in rows)
    if clusters:
        table.add_column("groups found", justify="right")
    for row in rows:
        last = [_number(row.get("adjusted_rand_index"))] if clusters else []
        table.add_row(title_of(row), *scores_cells(row), *last)
    return table


def caption(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the columns mean."""
    seeds = max(len(row["seeds"]) for row in rows)
    lines = [
        "local: after fine-tuning on the client; server: server weights with the client's private parts;",
        "global: no client identity; worst decile: of local, over clients" + (f"; {seeds} seeds" if seeds > 1 else ""),
    ]
    if any("adjusted_rand_index" in row for row in rows):
        lines.append("groups found: adjusted Rand index of the clients' groups, 1.00 = exactly")
    if rows[0]["scale"] != "full":
        lines.append(scaled_down(rows[0]["scale"]))
    return "\n".join(lines)


def printable(value: Any) -> Any:
    """The same without control characters in any text of it: names come from others, and a terminal obeys them."""
    if isinstance(value, str):
        return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in value)
    if isinstance(value, Mapping):
        return {printable(key): printable(own) for key, own in value.items()}
    return [printable(own) for own in value] if isinstance(value, list) else value


def scaled_down(scale: str) -> str:
    """What every output says of a run that is not its recipe at full size."""
    return f"scaled down (--scale {scale}): fewer clients, points or rounds and a smaller model than the recipe's own"


def how_much(result: Mapping[str, Any], looked_at: int) -> list[str]:
    """What a table of a run says where it is not all of it: a sample of the clients, a smaller recipe."""
    sample = (
        [f"{looked_at:,} of {result['clients']:,} clients, drawn at random"] if looked_at < result["clients"] else []
    )
    return sample + ([scaled_down(result["scale"])] if result["scale"] != "full" else [])


def summary_table(summary: Mapping[str, Any]) -> RenderableType:
    """One run's result."""
    parts: list[RenderableType] = [comparison_table(comparison([summary]))]
    parts += [Text(f"! {warning}", style="yellow") for warning in summary.get("warnings", [])]
    if "privacy" in summary:
        noise = summary["privacy"].get("noise")
        parts.append(Text(f"privacy: {noise_words(noise, summary['privacy'])}"))
    if "q_zs" in summary:
        parts.append(q_map(summary))
    return Group(*parts)


def noise_words(noise: float | None, protection: Mapping[str, Any]) -> str:
    """What a run's noise guarantees, or why it guarantees nothing. noise: its size; None: older files do not say it."""
    if noise == 0:
        return "no noise, so no guarantee"
    size = "noise" if noise is None else f"noise {noise:g}"
    if protection["epsilon"] is None:
        return f"{size}, but no guarantee: {protection.get('why_none') or 'this file does not say why'}"
    return (
        f"{size}: epsilon {protection['epsilon']:.3g} at delta {protection['delta']:g} for a client that answered "
        f"{protection['rounds_of_a_client']} times (client-level, local; N_s, losses and scores are not covered)"
    )


def q_map(summary: Mapping[str, Any], most: int = 60, names: Sequence[str] = ()) -> RenderableType:
    """q(z|s), what each client returned last, client by expert as shaded blocks, beside the true groups if known.

    names: of the clients, in place of their numbers.
    """
    q: list[list[float]] = summary["q_zs"]
    groups = summary.get("groups")
    order = sorted(range(len(q)), key=lambda s: (groups[s] if groups else 0, s))[:most]
    experts = _by_group(q, groups) if groups else list(range(len(q[0])))
    text = Text()
    text.append("q(z|s), client by expert", style="bold")
    text.append("   blank 0, full block 1\n" if not groups else "   beside the true groups\n")
    called = [name if len(name) <= 20 else name[:19] + "…" for name in (names or [str(s) for s in range(len(q))])]
    width = max(6, *(len(called[s]) for s in order))
    heads = "".join(f"{k:^5}" for k in experts)
    text.append(f"{'client':>{width}}  {'group  ' if groups else ''}{heads}\n", style="dim")
    for s in order:
        text.append(f"{called[s]:>{width}}  ")
        if groups:
            text.append(f"{chr(ord('A') + groups[s] % 26):^5}  ")
        for k in experts:
            text.append(" " + SHADES[min(int(q[s][k] * len(SHADES)), len(SHADES) - 1)] * 3 + " ")
        text.append("\n")
    if len(q) > most:
        text.append(f"... and {len(q) - most} more clients\n")
    return text


def _by_group(q: list[list[float]], groups: Sequence[int]) -> list[int]:
    """Experts in the order of the group that uses them most: their numbers are arbitrary."""

    def main_group(k: int) -> tuple[int, float]:
        use: dict[int, float] = defaultdict(float)
        for s, row in enumerate(q):
            use[groups[s]] += row[k]
        best = max(use, key=lambda g: use[g])
        return best, -use[best]

    return sorted(range(len(q[0])), key=main_group)


def plan_table(plan: Mapping[str, Any]) -> Table:
    table = Table(title=Text(f"{plan['recipe']}, {title_of(plan)}: what it will cost"), show_header=False)
    table.add_column("what")
    table.add_column("how much", justify="right")
    each = plan["bytes"]
    for what, much in (
        ("rounds x clients a round", f"{plan['rounds']:,} x {plan['clients_per_round']} of {plan['clients']:,}"),
        ("points, steps of a client in a round", f"{plan['points_per_client']:,.1f}, {plan['steps_per_client']:,}"),
        ("parameters of one model", f"{plan['parameters']:,}"),
        ("parameters shared, private to a client", f"{plan['parameters_shared']:,}, {plan['parameters_private']:,}"),
        *(
            [("parameters frozen, which are not sent", f"{frozen:,}")]
            if (frozen := plan.get("parameters_frozen"))
            else []
        ),
        ("weights sent, down + up", f"{each['weights']:,} bytes = {size(each['weights'])}"),
        ("phi and q(z|s) sent", f"{each['posterior']:,} bytes = {size(each['posterior'])}"),
        ("a round sends", size(each["weights_per_round"] + each["posterior_per_round"])),
        ("computation of a round", f"{plan['flop_per_round'] / 1e9:,.2f} GFLOP"),
        ("memory: server, each worker", f"{size(plan['memory']['server'])}, {size(plan['memory']['worker'])}"),
        ("time of a round, of the run", f"{duration(plan['seconds_per_round'])}, {duration(plan['seconds'])}"),
    ):
        table.add_row(what, much)
    small = "" if plan["scale"] == "full" else "; " + scaled_down(plan["scale"])
    table.caption = Text(f"{plan['note']} ({plan['workers']} clients side by side){small}")
    return table


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _at(summary: Mapping[str, Any], path: Sequence[str]) -> float | None:
    value: Any = summary
    for key in path:
        value = value[key]
    return None if value is None else float(value)


def _spread(values: Sequence[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return {"mean": None, "std": None}
    mean = sum(known) / len(known)
    return {
        "mean": mean,
        "std": math.sqrt(sum((v - mean) ** 2 for v in known) / len(known)) if len(known) > 1 else None,
    }


def percent(value: Mapping[str, float | None]) -> str:
    if value["mean"] is None:
        return "-"
    return f"{100 * value['mean']:.1f}" + (f" ± {100 * value['std']:.1f}" if value["std"] is not None else "")


def _number(value: Mapping[str, float | None] | None) -> str:
    if value is None or value["mean"] is None:
        return "-"
    return f"{value['mean']:.2f}" + (f" ± {value['std']:.2f}" if value["std"] is not None else "")
