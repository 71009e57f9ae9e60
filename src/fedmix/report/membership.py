"""Which clients belong together, as their experts say: how many groups, who is in which, since when, and how surely."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedmix.report.runs import Run
from fedmix.report.words import event_words
from fedmix.schema import MetricsLine

SURE = 0.9  # a client with less than this of q(z|s) on one expert is named as unsure


def membership(run: Run) -> dict[str, Any] | None:
    """The groups that a run's experts make of its clients; None where experts are not about clients.

    They are where the run finds out how many there are, and where the data has groups that are known.
    """
    lines = [line for line in run.lines if line.get("q_zs")]
    truth = run.federation.get("groups")
    if not lines or ("experts" not in lines[-1] and truth is None):
        return None
    names = [str(name) for name in run.federation.get("clients", [])]
    last = lines[-1]["q_zs"]
    if len(names) != len(last):
        names = [str(s) for s in range(len(last))]
    seen = _took_part(run.lines, len(last))
    if not seen:
        return None
    main = _main_experts(lines[-1])
    members = {k: [s for s in seen if main[s] == k] for k in sorted({main[s] for s in seen})}
    truth = None if truth is None else [truth[s] for s in seen]
    return {
        "groups": [_group(k, clients, names, last) for k, clients in members.items()],
        "since": _since(lines, lambda line: _groups_in(line, seen) == _groups_in(lines[-1], seen)),
        "sure": sum(max(last[s]) for s in seen) / len(seen),
        "unsure": [names[s] for s in seen if max(last[s]) < SURE],
        "unseen": len(last) - len(seen),
        "exact_since": _exact_since(lines, truth, seen),
        "truth": len(set(truth)) if truth is not None else None,
        "tree": [
            {"round": line["round"], "words": event_words(event), **event}
            for line in run.lines
            for event in line.get("structure", [])
        ],
    }


def words_of(found: Mapping[str, Any]) -> str:
    """The groups in a sentence or two."""
    count = len(found["groups"])
    sizes = ", ".join(str(len(group["clients"])) for group in found["groups"])
    groups = "one group" if count == 1 else f"{count} groups"
    words = (
        f"{groups} of {sizes} clients, unchanged since round {found['since']}; mean largest q(z|s) {found['sure']:.2f}."
    )
    if found["unseen"]:
        words += f" {found['unseen']} clients have not taken part yet."
    if found["unsure"]:
        words += f" {len(found['unsure'])} clients are unsure (below {SURE})."
    if found["truth"] is None:
        return words
    if found["exact_since"] is None:
        return f"{words} They are not the {found['truth']} true groups."
    return f"{words} They are the {found['truth']} true groups from round {found['exact_since']} on."


def _group(k: int, clients: Sequence[int], names: Sequence[str], q: Sequence[Sequence[float]]) -> dict[str, Any]:
    return {
        "expert": k,
        "clients": [names[s] for s in clients],
        "sure": sum(q[s][k] for s in clients) / len(clients),
    }


def _took_part(lines: Sequence[MetricsLine], clients: int) -> list[int]:
    """The clients that ever took part; all of them, where metrics do not tell."""
    named = [line["clients"] for line in lines if "clients" in line]
    if not named:
        return list(range(clients))
    return sorted({s for of_round in named for s in of_round if s < clients})


def _groups_in(line: MetricsLine, seen: Sequence[int]) -> list[int]:
    """The groups that main experts make of these clients after a round."""
    main = _main_experts(line)
    return _partition([main[s] for s in seen])


def _main_experts(line: MetricsLine) -> list[int]:
    """The expert that each client uses most."""
    return [max(range(len(row)), key=row.__getitem__) for row in line["q_zs"]]


def _partition(labels: Sequence[int]) -> list[int]:
    """The same groups with numbers in the order in which they first occur, whatever they were called."""
    order: dict[int, int] = {}
    return [order.setdefault(label, len(order)) for label in labels]


def _exact_since(lines: Sequence[MetricsLine], truth: Sequence[int] | None, seen: Sequence[int]) -> int | None:
    """The round from which on main experts are the true groups to the end; None: at the end they are not."""
    if truth is None:
        return None
    return _since(lines, lambda line: _groups_in(line, seen) == _partition(truth))


def _since(lines: Sequence[MetricsLine], holds: Any) -> int | None:
    """The first round of the last stretch of evaluations in which something holds; None: it does not at the end."""
    since = None
    for line in reversed(lines):
        if not holds(line):
            break
        since = line["round"]
    return since
