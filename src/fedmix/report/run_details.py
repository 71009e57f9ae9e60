"""What is shown of one run at its end: its clients, kinds of inference, what leaked, how to repeat it."""

import shlex
from collections.abc import Mapping
from typing import Any

from fedmix.report.curves import ROWS
from fedmix.report.runs import Run, flat
from fedmix.report.tables import WITH_LABELS
from fedmix.schema import WORDS


def clients(run: Run) -> dict[str, Any] | None:
    """Accuracy of each client at the end, on test data, its labels, and its gate."""
    if run.summary is None or not run.of_clients("test", "fine_tuned"):
        return None
    tuned, server = run.of_clients("test", "fine_tuned"), run.of_clients("test", "server")
    federation = run.federation
    names = [str(name) for name in federation.get("clients", [])]
    shown = [s for s, name in enumerate(names) if name in tuned]
    counts, groups = federation.get("label_counts"), federation.get("groups")
    return {
        "names": [names[s] for s in shown],
        "points": [_training_points(run, s) for s in shown],
        "fine_tuned": [tuned[names[s]] for s in shown],
        "server": [server.get(names[s]) for s in shown],
        "labels": [counts[s] for s in shown] if counts else None,
        "classes": [str(value) for value in federation.get("labels") or range(federation.get("classes", 0))],
        "q": _gates(run, shown, len(names)),
        "groups": [groups[s] for s in shown] if groups else None,
    }


def _training_points(run: Run, client: int) -> int | None:
    points = (run.federation.get("points") or {}).get("train")
    return points[client] if points else None


def _gates(run: Run, shown: list[int], clients: int) -> list[list[float]] | None:
    q = run.summary.get("q_zs") if run.summary else None
    if not q or len(q) != clients:
        return None
    return [[round(value, 3) for value in q[s]] for s in shown]


def new_clients(run: Run) -> dict[str, Any] | None:
    """Clients that never took part: accuracy over labelled points, and without any."""
    evaluation = run.evaluation or {}
    new = evaluation.get("new_clients") or {}
    rows = [row for row in new.get("labelled") or [] if row["fine_tuned"]["accuracy"]["mean"] is not None]
    curve = [_labelled_curve(rows, key, what) for key, what in WITH_LABELS.items() if rows and key in rows[0]]
    without = [
        _inference("without labels", row["what"], row["clients"])
        for row in (new.get("unlabelled") or {}).values()
        if row and row["clients"]["accuracy"]["mean"] is not None
    ]
    if not curve and not without:
        return None
    note = (evaluation.get("notes") or {}).get("new_clients")
    return {"curve": curve, "without": without, "note": note, "held_out": new.get("held_out")}


def _labelled_curve(rows: list[dict[str, Any]], key: str, what: str) -> dict[str, Any]:
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
        "ece": (scores.get("ece") or {}).get("mean"),
    }


def evaluation(run: Run) -> list[dict[str, Any]] | None:
    """Kinds of inference of `fedmix evaluate`, one row each."""
    rows = []
    for kind, scores in (run.evaluation or {}).items():
        if _is_over_clients(scores):
            part = scores.get("part") or ("validation" if kind == "as_sent" else "test")
            name = WORDS.get(kind, kind.replace("_", " "))
            rows.append(_inference(f"{name} ({part})", scores.get("what", ""), scores))
    return rows or None


def _is_over_clients(scores: Any) -> bool:
    accuracy = scores.get("accuracy") if isinstance(scores, Mapping) else None
    return isinstance(accuracy, Mapping) and "mean" in accuracy


def audit(run: Run) -> dict[str, Any] | None:
    """True label marginals beside what the best attack makes of them, for the clients that are shown."""
    audited = run.audit
    if not audited or not audited.get("true"):
        return None
    attacks = [
        _attack(when, name, attack)
        for when, of_round in (audited.get("attacks") or {}).items()
        for name, attack in of_round.items()
        if _distance(attack).get("mean") is not None
    ]
    return {
        "names": [str(name) for name in audited.get("names", [])][:ROWS],
        "true": audited["true"][:ROWS],
        "guess": _distance(audited.get("guess")).get("mean"),
        "attacks": attacks,
    }


def _distance(attack: dict[str, Any] | None) -> dict[str, Any]:
    return (attack or {}).get("total_variation") or {}


def _attack(when: str, name: str, attack: dict[str, Any]) -> dict[str, Any]:
    of_clients = attack.get("of_clients") or []
    return {
        "when": when,
        "attack": name.replace("_", " "),
        "distance": _distance(attack)["mean"],
        "most exposed": _distance(attack).get("most_exposed"),
        "found": [of_client and of_client.get("estimate") for of_client in of_clients][:ROWS],
    }


def about(run: Run) -> dict[str, Any]:
    """How to do it again."""
    environment = run.environment
    sessions = environment.get("sessions") or [{}]
    first, last = sessions[0], sessions[-1]
    commits = [session.get("commit") for session in sessions]
    return {
        "recipe": {key: value for key, value in flat(run.recipe).items() if value not in ("", [], {})},
        "command": shlex.join(map(str, last.get("command", []))),
        "sessions": len(environment.get("sessions") or []),
        "engine": last.get("engine"),
        "started": first.get("started"),
        "commits": list(dict.fromkeys(commit for commit in commits if commit)),
        "packages": environment.get("packages", {}),
        "python": environment.get("python"),
        "platform": environment.get("platform"),
        "cores": environment.get("cores"),
    }
