"""Everything that is drawn, as plain numbers, thinned to what a screen shows: for the page and for a paper's figures."""

import math
from collections.abc import Sequence
from typing import Any

from fedmix.report.gather import COLUMNS, FINAL, Group, Run, differing, flat, glance, groups, table
from fedmix.report.text import GIB

POINTS = 400  # of a curve
FRAMES = 40  # of a map over rounds
ROWS = 300  # clients of a map
DIGITS = 4


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    made = groups(runs)
    title = (
        " and ".join(dict.fromkeys(run.name for run in runs)) if len({run.name for run in runs}) < 4 else "fedmix runs"
    )
    return {
        "title": title,
        "glance": glance(made),
        "columns": [*COLUMNS, "rounds", "GiB", "minutes"],
        "table": _rounded(table(made)),
        "groups": [group.name for group in made],
        "curves": [curves(group) for group in made],
        "runs": [run_data(run, group, g) for g, group in enumerate(made) for run in group.runs],
        "sweep": sweep(made),
        "paper": all(run.recipe.get("scale", "full") == "full" for run in runs),
    }


def curves(group: Group) -> list[dict[str, Any]]:
    """Of each seed: accuracies at evaluation rounds (validation data), loss and divergence of every round."""
    found = []
    for run in group.runs:
        sent, total = [], 0
        for line in run.lines:
            total += line["bytes_down"] + line["bytes_up"]
            sent.append(total / GIB)
        judged = [i for i, line in enumerate(run.lines) if isinstance(line.get("accuracy"), dict)]
        picked = _picked(judged)
        series: dict[str, Any] = {
            "seed": run.seed,
            "round": [run.lines[i]["round"] for i in picked],
            "gib": [sent[i] for i in picked],
        }
        for kind in FINAL:
            series[kind] = [_accuracy(run.lines[i], kind) for i in picked]
        series["worst decile"] = [_accuracy(run.lines[i], "local", "worst_decile") for i in picked]
        every = _buckets(len(run.lines))
        series["every"] = {
            "round": [run.lines[bucket[-1]]["round"] for bucket in every],
            "gib": [sent[bucket[-1]] for bucket in every],
            "loss": [_mean([run.lines[i].get("loss") for i in bucket]) for bucket in every],
            "divergence": [_mean([run.lines[i].get("divergence") for i in bucket]) for bucket in every],
            "mib": [
                _mean([(run.lines[i]["bytes_down"] + run.lines[i]["bytes_up"]) / 2**20 for i in bucket])
                for bucket in every
            ],
            "seconds": [_mean([run.lines[i].get("seconds") for i in bucket]) for bucket in every],
        }
        found.append(_rounded(series))
    return found


def run_data(run: Run, group: Group, number: int) -> dict[str, Any]:
    """What is shown of one run: maps of q, use of experts, clients, evaluation, audit, how to repeat it."""
    made: dict[str, Any] = _rounded(
        {
            "name": f"{group.name}, seed {run.seed}" if len(group.runs) > 1 else group.name,
            "group": number,
            "path": run.path,
            "maps": maps(run),
            "use": use(run),
            "layers": layers(run),
            "clients": clients(run),
            "new": new_clients(run),
            "evaluation": evaluation(run),
            "audit": audit(run),
            "about": about(run),
            "troubles": run.troubles,
        }
    )
    return made


def maps(run: Run) -> dict[str, Any] | None:
    """q(z|c) and q(z|s) at evaluation rounds; clients in the order of their true groups where those are known."""
    frames = [line for line in run.lines if isinstance(line.get("q_zs"), list) and line.get("q_zs")]
    if not frames:
        return None
    names = [str(name) for name in run.federation.get("clients", [])] or [str(s) for s in range(len(frames[0]["q_zs"]))]
    true = run.federation.get("groups")
    order = sorted(range(len(names)), key=lambda s: (true[s] if true else 0, s))[:ROWS]
    side = run.federation.get("side", "label")
    labels = run.federation.get("labels") if side == "label" else names if side == "client" else None
    kept = [frames[i] for i in _picked(list(range(len(frames))), FRAMES)]
    return {
        "side": side,
        "values": [str(v) for v in labels] if labels else [str(c) for c in range(len(frames[0].get("q_zc") or []))],
        "clients": [names[s] for s in order],
        "groups": [true[s] for s in order] if true else None,
        "left_out": len(names) - len(order),
        "frames": [
            {
                "round": line["round"],
                "zc": [[round(v, 3) for v in row] for row in (line.get("q_zc") or [])[:ROWS]],
                "zs": [[round(v, 3) for v in line["q_zs"][s]] for s in order if s < len(line["q_zs"])],
            }
            for line in kept
        ],
    }


def use(run: Run) -> dict[str, Any] | None:
    """How much each expert is used, and by how many clients it came back, over rounds."""
    lines = [line for line in run.lines if line.get("expert_use")]
    if not lines:
        return None
    every = _buckets(len(lines))
    experts = len(lines[0]["expert_use"])
    return {
        "round": [lines[bucket[-1]]["round"] for bucket in every],
        "use": [[_mean([lines[i]["expert_use"][k] for i in bucket]) for bucket in every] for k in range(experts)],
        "returned": [
            [_mean([(lines[i].get("experts_returned") or [None] * experts)[k] for i in bucket]) for bucket in every]
            for k in range(experts)
        ],
    }


def layers(run: Run) -> dict[str, Any] | None:
    """Gradient divergence layer by layer, experts averaged."""
    lines = [line for line in run.lines if line.get("divergence_layers")]
    if not lines:
        return None
    every = _buckets(len(lines), 150)

    def of(line: dict[str, Any], name: str) -> float | None:
        found = line["divergence_layers"]
        return _mean([own.get(name) for own in (found if isinstance(found, list) else [found])])

    first = lines[0]["divergence_layers"]
    names = list((first[0] if isinstance(first, list) else first).keys())
    return {
        "round": [lines[bucket[-1]]["round"] for bucket in every],
        "layers": {name: [_mean([of(lines[i], name) for i in bucket]) for bucket in every] for name in names},
    }


def clients(run: Run) -> dict[str, Any] | None:
    """Accuracy of each client at the end, its labels, and its gate."""
    scores = (run.summary or {}).get("accuracy_of_clients")
    if not scores:
        return None
    names = [str(name) for name in run.federation.get("clients", [])]
    counts = run.federation.get("label_counts")
    q = (run.summary or {}).get("q_zs")
    known = [s for s, name in enumerate(names) if name in scores.get("local", {})]
    return {
        "names": [names[s] for s in known],
        "points": [((run.federation.get("points") or {}).get("train") or [None] * len(names))[s] for s in known],
        "local": [scores["local"][names[s]] for s in known],
        "server": [scores.get("server", {}).get(names[s]) for s in known],
        "labels": [counts[s] for s in known] if counts else None,
        "classes": [str(v) for v in run.federation.get("labels") or range(run.federation.get("classes", 0))],
        "q": [[round(v, 3) for v in q[s]] for s in known] if q and len(q) == len(names) else None,
        "groups": [run.federation["groups"][s] for s in known] if run.federation.get("groups") else None,
    }


def new_clients(run: Run) -> dict[str, Any] | None:
    """Clients that never took part: accuracy over labelled points, and without any."""
    new = (run.evaluation or {}).get("new_clients") or {}
    rows = [row for row in new.get("labelled") or [] if row["finetuned"]["accuracy"]["mean"] is not None]
    curve = [
        {
            "what": what,
            "points": [f"{row['mean_points']:.0f}" for row in rows],
            "accuracy": [row[key]["accuracy"]["mean"] for row in rows],
        }
        for key, what in (("private_parts", "private parts alone"), ("finetuned", "then fine-tuned"))
        if rows
    ]
    flat_lines = [
        {"what": row["what"], "accuracy": row["clients"]["accuracy"]["mean"]}
        for row in (new.get("unlabelled") or {}).values()
        if row and row["clients"]["accuracy"]["mean"] is not None
    ]
    return {"curve": curve, "without": flat_lines} if curve or flat_lines else None


def evaluation(run: Run) -> list[dict[str, Any]] | None:
    """Kinds of inference of `fedmix evaluate`, one row each."""
    if not run.evaluation:
        return None
    rows = []
    for kind, found in run.evaluation.items():
        if isinstance(found, dict) and isinstance(found.get("accuracy"), dict) and "mean" in found["accuracy"]:
            rows.append(
                {
                    "kind": kind.replace("_", " "),
                    "what": str(found.get("what", "")),
                    "accuracy": found["accuracy"]["mean"],
                    "worst": found["accuracy"].get("worst_decile"),
                    "ece": (found.get("ece") or {}).get("mean"),
                }
            )
    return rows or None


def audit(run: Run) -> dict[str, Any] | None:
    """True label marginals beside what the best attack makes of them, for the clients that are shown."""
    found = run.audit
    if not found or not found.get("true"):
        return None
    attacks = []
    for when, own in (found.get("attacks") or {}).items():
        for name, attack in own.items():
            distance = (attack or {}).get("total_variation") or {}
            if distance.get("mean") is not None:
                attacks.append(
                    {
                        "when": when,
                        "attack": name.replace("_", " "),
                        "distance": distance["mean"],
                        "most exposed": distance.get("most_exposed"),
                        "found": [own.get("estimate") for own in attack.get("of_clients") or []][:ROWS],
                    }
                )
    return {
        "names": [str(name) for name in found.get("names", [])][:ROWS],
        "true": found["true"][:ROWS],
        "guess": ((found.get("guess") or {}).get("total_variation") or {}).get("mean"),
        "attacks": attacks,
    }


def sweep(made: Sequence[Group]) -> dict[str, Any] | None:
    """Where groups of one method differ in one setting of numbers: accuracy against it."""
    keys = [key for key in differing([group.runs for group in made]) if key != "algorithm"]
    numeric = [
        key
        for key in keys
        if all(isinstance(group.runs[0].settings.get(key), (int, float)) for group in made)
        and len({group.runs[0].settings.get(key) for group in made}) > 2
    ]
    if len(numeric) != 1 or len(keys) != 1 or len({group.runs[0].method for group in made}) != 1:
        return None
    key = numeric[0]
    ordered = sorted(zip(made, table(made), strict=True), key=lambda pair: pair[0].runs[0].settings[key])
    return {
        "key": key,
        "values": [group.runs[0].settings[key] for group, _ in ordered],
        "rows": _rounded([row for _, row in ordered]),
    }


def about(run: Run) -> dict[str, Any]:
    """How to do it again."""
    sessions = run.environment.get("sessions") or []
    return {
        "recipe": {key: value for key, value in flat(run.recipe).items() if value not in ("", [], {})},
        "command": " ".join(map(str, (sessions[-1] if sessions else {}).get("command", []))),
        "sessions": len(sessions),
        "engine": (sessions[-1] if sessions else {}).get("engine"),
        "started": (sessions[0] if sessions else {}).get("started"),
        "packages": run.environment.get("packages", {}),
        "python": run.environment.get("python"),
        "platform": run.environment.get("platform"),
        "cores": run.environment.get("cores"),
    }


def _accuracy(line: dict[str, Any], kind: str, what: str = "mean") -> float | None:
    found = line["accuracy"].get(kind)
    value = found.get(what) if isinstance(found, dict) else found
    return None if value is None else 100 * float(value)


def _picked(indices: Sequence[int], most: int = POINTS) -> list[int]:
    """At most so many of them, first and last among them."""
    if len(indices) <= most:
        return list(indices)
    return [indices[round(i * (len(indices) - 1) / (most - 1))] for i in range(most)]


def _buckets(count: int, most: int = POINTS) -> list[range]:
    """0 .. count - 1 in at most so many stretches of equal length."""
    step = max(1, math.ceil(count / most))
    return [range(start, min(start + step, count)) for start in range(0, count, step)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _rounded(value: Any) -> Any:
    """Numbers of a few digits; NaN and infinity are nothing."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS + 1}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _rounded(own) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(own) for own in value]
    return value
