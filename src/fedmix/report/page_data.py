"""Everything that is drawn, as plain numbers, thinned to what a screen shows: for the page and for a paper's figures."""

import math
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from fedmix.report.runs import COLUMNS, FINAL, Group, Run, called, differing, flat, glance, groups, part_of, table
from fedmix.report.tables import GIB, WITH_LABELS

POINTS = 400  # of a curve
FRAMES = 40  # of a map over rounds
ROWS = 300  # clients of a map
DIGITS = 4


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    made = groups(runs)
    title = (
        " and ".join(dict.fromkeys(run.name for run in runs)) if len({run.name for run in runs}) < 4 else "fedmix runs"
    )
    data = {
        "title": title,
        "columns": [*COLUMNS, "rounds", "GiB", "minutes"],
        "table": _rounded(table(made)),
        "groups": [group.name for group in made],
        "short": short_names([group.name for group in made]),
        "curves": [curves(group) for group in made],
        "runs": [run_data(run, group, g) for g, group in enumerate(made) for run in group.runs],
        "sweep": sweep(made),
        "missing": missing(runs),
    }
    return data | {"glance": glance(made)}  # last: what could not be read is known now


def short_names(names: Sequence[str], most: int = 44) -> list[str]:
    """For legends: beginning and end of a long name, with a number where that is not enough to tell them apart."""
    head = most * 3 // 5
    made = [name if len(name) <= most else f"{name[:head]}…{name[-(most - head - 1) :]}" for name in names]
    return [name if made.count(name) == 1 else f"{i + 1}: {name}" for i, name in enumerate(made)]


def missing(runs: Sequence[Run]) -> list[str]:
    """What these runs could show and do not, and what to type for it."""
    told = []
    for name, command in (("evaluation", "evaluate"), ("audit", "audit")):
        ended = [run for run in runs if run.ended]
        if ended and not any(getattr(run, name) for run in ended):
            told.append(f"no {name} of these runs: fedmix {command} RUN makes it")
    return told


def curves(group: Group) -> list[dict[str, Any]]:
    """Of each seed: accuracies at evaluation rounds (validation data), loss and divergence of every round.

    Seeds share their rounds, so that what is averaged over seeds is of the same rounds: a long run's rounds are taken in
    stretches of `step`, which end at the same places for all seeds.
    """
    last = max((line["round"] for run in group.runs for line in run.lines), default=0)
    judged = {line["round"] for run in group.runs for line in run.lines if isinstance(line.get("accuracy"), dict)}
    step = max(1, math.ceil(last / POINTS))
    picked = set(_picked(sorted(judged)))
    empty = _series(Run("", "", {}, []), picked, step, last)
    return [
        part_of(run, "metrics.jsonl", lambda run: _rounded(_series(run, picked, step, last)), empty)
        for run in group.runs
    ]


def _series(run: Run, picked: set[int], step: int, last: int) -> dict[str, Any]:
    total, sent = 0, {}
    stretches: dict[int, list[dict[str, Any]]] = {}
    for line in run.lines:
        total += line["bytes_down"] + line["bytes_up"]
        sent[line["round"]] = total / GIB
        stretches.setdefault(min(last, step * math.ceil(line["round"] / step)), []).append(line)
    shown = [line for line in run.lines if line["round"] in picked and isinstance(line.get("accuracy"), dict)]
    series: dict[str, Any] = {
        "seed": run.seed,
        "round": [line["round"] for line in shown],
        "gib": [sent[line["round"]] for line in shown],
    }
    for kind in FINAL:
        series[kind] = [_accuracy(line, kind) for line in shown]
    series["worst decile"] = [_accuracy(line, "local", "worst_decile") for line in shown]
    ways: dict[str, Callable[[dict[str, Any]], Any]] = {
        "loss": lambda line: line.get("loss"),
        "divergence": lambda line: line.get("divergence"),
        "mib": lambda line: (line["bytes_down"] + line["bytes_up"]) / 2**20,
        "seconds": lambda line: line.get("seconds"),
    }
    series["every"] = {
        "step": step,
        "round": list(stretches),
        "gib": [sent[lines[-1]["round"]] for lines in stretches.values()],
        **{name: [_mean([way(line) for line in lines]) for lines in stretches.values()] for name, way in ways.items()},
    }
    return series


def run_data(run: Run, group: Group, number: int) -> dict[str, Any]:
    """What is shown of one run: maps of q, use of experts, clients, evaluation, audit, how to repeat it."""
    parts: dict[str, tuple[str, Callable[[Run], Any]]] = {
        "maps": ("metrics.jsonl", maps),
        "use": ("metrics.jsonl", use),
        "layers": ("metrics.jsonl", layers),
        "clients": ("summary.json or federation.json", clients),
        "new": ("evaluation.json", new_clients),
        "evaluation": ("evaluation.json", evaluation),
        "audit": ("audit.json", audit),
    }
    return {
        "name": f"{group.name}, seed {run.seed}" if len(group.runs) > 1 else group.name,
        "seed": run.seed,
        "group": number,
        "path": run.path,
        **{name: _rounded(part_of(run, file, work, None)) for name, (file, work) in parts.items()},
        "about": part_of(run, "environment.json", about, {"recipe": {}, "command": "", "packages": {}, "sessions": 0}),
        "troubles": run.troubles,
    }


def maps(run: Run) -> dict[str, Any] | None:
    """q(z|c) and q(z|s) at evaluation rounds; clients in the order of their true groups where those are known."""
    frames = [line for line in run.lines if isinstance(line.get("q_zs"), list) and line.get("q_zs")]
    if not frames:
        return None
    names = [str(name) for name in run.federation.get("clients", [])] or [str(s) for s in range(len(frames[0]["q_zs"]))]
    true = run.federation.get("groups")
    order = sorted(range(len(names)), key=lambda s: (true[s] if true else 0, s))[:ROWS]
    side = run.federation.get("side", "label")
    labels = (
        run.federation.get("labels") if side == "label" else [names[s] for s in order] if side == "client" else None
    )
    rows = order if side == "client" else range(min(ROWS, len(frames[0].get("q_zc") or [])))
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
                "zc": [[round(v, 3) for v in line["q_zc"][c]] for c in rows if c < len(line.get("q_zc") or [])],
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
        "step": len(every[0]),
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
        for key, what in WITH_LABELS.items()
        if rows and key in rows[0]
    ]
    without = [
        _inference("without labels", row["what"], row["clients"])
        for row in (new.get("unlabelled") or {}).values()
        if row and row["clients"]["accuracy"]["mean"] is not None
    ]
    if not curve and not without:
        return None
    notes = (run.evaluation or {}).get("notes") or {}
    return {"curve": curve, "without": without, "note": notes.get("new_clients"), "held_out": new.get("held_out")}


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
    if not run.evaluation:
        return None
    rows = []
    for kind, found in run.evaluation.items():
        if isinstance(found, dict) and isinstance(found.get("accuracy"), dict) and "mean" in found["accuracy"]:
            rows.append(_inference(kind.replace("_", " "), found.get("what", ""), found))
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
    """Accuracy against each setting of numbers that groups of one method differ in: a line for each choice of the others.

    Methods without such groups are beside it, as a line without a slope.
    """
    by_method: dict[str, list[tuple[Group, dict[str, Any]]]] = {}
    for group, row in zip(made, table(made), strict=True):
        by_method.setdefault(f"{group.runs[0].method}, {group.runs[0].name}", []).append((group, row))
    varied = max(by_method.values(), key=len)
    method = varied[0][0].runs[0].method
    keys = differing([group.runs for group, _ in varied])
    found: dict[str, list[dict[str, Any]]] = {}
    for key in keys:
        values = [group.runs[0].settings.get(key) for group, _ in varied]
        if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
            continue
        lines: dict[str, list[tuple[float, dict[str, Any]]]] = {}
        for group, row in varied:
            others = called(group.runs[0].settings, [other for other in keys if other != key])
            lines.setdefault(", ".join(others), []).append((group.runs[0].settings[key], row))
        if max(len(points) for points in lines.values()) > 1:
            ordered = {name: sorted(points, key=lambda point: point[0]) for name, points in lines.items()}
            found[key] = [
                {
                    "name": name or (method if len(ordered) > 1 else ""),
                    "values": [value for value, _ in points],
                    "rows": _rounded([row for _, row in points]),
                }
                for name, points in ordered.items()
            ]
    if not found:
        return None
    beside = [_rounded(row) for own in by_method.values() if own is not varied for _, row in own]
    return {"keys": found, "method": method, "beside": beside[:6]}


def about(run: Run) -> dict[str, Any]:
    """How to do it again."""
    sessions = run.environment.get("sessions") or []
    return {
        "recipe": {key: value for key, value in flat(run.recipe).items() if value not in ("", [], {})},
        "command": shlex.join(map(str, (sessions[-1] if sessions else {}).get("command", []))),
        "sessions": len(sessions),
        "engine": (sessions[-1] if sessions else {}).get("engine"),
        "started": (sessions[0] if sessions else {}).get("started"),
        "commits": list(dict.fromkeys(c for session in sessions if (c := session.get("commit")))),
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
