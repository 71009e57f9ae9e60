"""What is shown of one run at its end: its clients, kinds of inference, what leaked, how to repeat it."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from fedmix.report.curves import ROWS
from fedmix.report.runs import Run, flat
from fedmix.report.tables import WITH_LABELS
from fedmix.report.thinning import of_some
from fedmix.schema import WORDS

# -- clients that took part --------------------------------------------------------------------------------------------


def clients(run: Run) -> dict[str, Any] | None:
    """Accuracy of each client at the end, on test data, its labels, and its gate."""
    tuned, server = run.of_clients("test", "fine_tuned"), run.of_clients("test", "server")
    if not tuned:
        return None
    federation = run.federation
    names = [str(name) for name in federation.get("clients", [])]
    shown = [s for s, name in enumerate(names) if name in tuned]
    shown_names = [names[s] for s in shown]
    points = of_some(_table(federation, "points").get("train"), shown)
    return {
        "names": shown_names,
        "points": points or [None] * len(shown),
        "fine_tuned": [tuned[name] for name in shown_names],
        "server": [server.get(name) for name in shown_names],
        "labels": of_some(federation.get("label_counts"), shown),
        "classes": _classes(federation),
        "q": _gates(run, shown, len(names)),
        "groups": of_some(federation.get("groups"), shown),
    }


def _classes(federation: Mapping[str, Any]) -> list[str]:
    classes = federation.get("labels") or range(federation.get("classes", 0))
    return [str(value) for value in classes]


def _gates(run: Run, shown: Sequence[int], clients: int) -> list[list[float]] | None:
    q = run.summary.get("q_zs") if run.summary else None
    if not q or len(q) != clients:
        return None
    return [[round(value, 3) for value in q[s]] for s in shown]


# -- kinds of inference ------------------------------------------------------------------------------------------------


def new_clients(run: Run) -> dict[str, Any] | None:
    """Clients that never took part: accuracy over labelled points, and without any."""
    new = _table(run.evaluation, "new_clients")
    with_labels = _with_labels(new.get("labelled") or [])
    without_labels = _without_labels(_table(new, "unlabelled"))
    if not with_labels and not without_labels:
        return None
    notes = _table(run.evaluation, "notes")
    return {
        "curve": with_labels,
        "without": without_labels,
        "note": notes.get("new_clients"),
        "held_out": new.get("held_out"),
    }


def _table(above: Mapping[str, Any] | None, key: str) -> dict[str, Any]:
    """A table inside another; empty where there is none."""
    return (above or {}).get(key) or {}


def _with_labels(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A curve over labelled points for each way to use them."""
    known = [row for row in rows if _is_known(row["fine_tuned"])]
    if not known:
        return []
    return [_labelled_curve(known, key, what) for key, what in WITH_LABELS.items() if key in known[0]]


def _without_labels(ways: Mapping[str, dict[str, Any] | None]) -> list[dict[str, Any]]:
    rows = [row for row in ways.values() if row and _is_known(row["clients"])]
    return [_inference("without labels", row["what"], row["clients"]) for row in rows]


def _is_known(scores: Mapping[str, Any]) -> bool:
    return scores["accuracy"]["mean"] is not None


def _labelled_curve(rows: Sequence[dict[str, Any]], key: str, what: str) -> dict[str, Any]:
    return {
        "what": what,
        "points": [f"{row['mean_points']:.0f}" for row in rows],
        "accuracy": [row[key]["accuracy"]["mean"] for row in rows],
    }


def _inference(kind: str, what: str, scores: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": kind,
        "what": str(what),
        "accuracy": scores["accuracy"]["mean"],
        "worst": scores["accuracy"].get("worst_decile"),
        "ece": _table(scores, "ece").get("mean"),
    }


def evaluation(run: Run) -> list[dict[str, Any]] | None:
    """Kinds of inference of `fedmix evaluate`, one row each."""
    kinds = run.evaluation or {}
    rows = [_kind_row(kind, scores) for kind, scores in kinds.items() if _is_over_clients(scores)]
    return rows or None


def _kind_row(kind: str, scores: dict[str, Any]) -> dict[str, Any]:
    # older files do not say on which data they were measured
    part = scores.get("part") or ("validation" if kind == "as_sent" else "test")
    name = WORDS.get(kind, kind.replace("_", " "))
    return _inference(f"{name} ({part})", scores.get("what", ""), scores)


def _is_over_clients(scores: Any) -> bool:
    accuracy = scores.get("accuracy") if isinstance(scores, Mapping) else None
    return isinstance(accuracy, Mapping) and "mean" in accuracy


# -- what leaked -------------------------------------------------------------------------------------------------------


def audit(run: Run) -> dict[str, Any] | None:
    """True label marginals beside what each attack makes of them, for the clients that are shown."""
    audited = run.audit
    if not audited or not audited.get("true"):
        return None
    names = [str(name) for name in audited.get("names", [])]
    return {
        "names": names[:ROWS],
        "true": audited["true"][:ROWS],
        "guess": _distance(audited.get("guess")).get("mean"),
        "attacks": _attacks(_table(audited, "attacks")),
    }


def _attacks(by_round: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The attacks that could be made, round by round."""
    return [
        _attack(when, name, attack)
        for when, of_round in by_round.items()
        for name, attack in of_round.items()
        if _distance(attack).get("mean") is not None
    ]


def _distance(attack: Mapping[str, Any] | None) -> dict[str, Any]:
    return _table(attack, "total_variation")


def _attack(when: str, name: str, attack: Mapping[str, Any]) -> dict[str, Any]:
    distance = _distance(attack)
    of_clients = attack.get("of_clients") or []
    return {
        "when": when,
        "attack": name.replace("_", " "),
        "distance": distance["mean"],
        "most exposed": distance.get("most_exposed"),
        "found": [of_client and of_client.get("estimate") for of_client in of_clients][:ROWS],
    }


# -- how to repeat it --------------------------------------------------------------------------------------------------


def about(run: Run) -> dict[str, Any]:
    """What one needs to know to do the run again."""
    environment = run.environment
    sessions = environment.get("sessions") or []
    first, last = (sessions[0], sessions[-1]) if sessions else ({}, {})
    commits = [session.get("commit") for session in sessions]
    return {
        "recipe": {key: value for key, value in flat(run.recipe).items() if value not in ("", [], {})},
        "command": shlex.join(map(str, last.get("command", []))),
        "sessions": len(sessions),
        "engine": last.get("engine"),
        "started": first.get("started"),
        "commits": list(dict.fromkeys(filter(None, commits))),
        "packages": environment.get("packages", {}),
        "python": environment.get("python"),
        "platform": environment.get("platform"),
        "cores": environment.get("cores"),
    }
