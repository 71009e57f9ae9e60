"""What changes from round to round: accuracies, loss, divergence, use of experts, q."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedmix.report.groups import Group
from fedmix.report.runs import Run, part_of
from fedmix.report.thinning import POINTS, picked, rounded, stretches
from fedmix.report.words import GIB
from fedmix.schema import VALIDATION_KINDS, MetricsLine, mean_of

FRAMES = 40  # of a map over rounds
ROWS = 300  # clients of a map
LAYER_POINTS = 150


def curves(group: Group) -> list[dict[str, Any]]:
    """Of each seed: accuracies at evaluation rounds (validation data), loss and divergence of every round.

    Seeds share their rounds, so that what is averaged over seeds is of the same rounds: a long run's rounds are taken in
    stretches of `step`, which end at the same places for all seeds.
    """
    last = max((line["round"] for run in group.runs for line in run.lines), default=0)
    evaluated = {line["round"] for run in group.runs for line in run.lines if _is_evaluated(line)}
    step = max(1, math.ceil(last / POINTS))
    shown = set(picked(sorted(evaluated)))
    empty = _series(Run("", "", {}, []), shown, step, last)
    return [
        part_of(run, "metrics.jsonl", lambda run: rounded(_series(run, shown, step, last)), empty) for run in group.runs
    ]


def _is_evaluated(line: MetricsLine) -> bool:
    accuracy = line.get("accuracy")
    return isinstance(accuracy, dict) and isinstance(accuracy.get("validation"), dict)


def _series(run: Run, shown: set[int], step: int, last: int) -> dict[str, Any]:
    sent = _sent(run.lines)
    lines = [line for line in run.lines if line["round"] in shown and _is_evaluated(line)]
    series: dict[str, Any] = {
        "seed": run.seed,
        "round": [line["round"] for line in lines],
        "gib": [sent[line["round"]] for line in lines],
    }
    for kind in VALIDATION_KINDS:
        series[kind] = [_accuracy(line, kind) for line in lines]
    series["worst_decile"] = [_accuracy(line, "as_sent", "worst_decile") for line in lines]
    series["every"] = _every_round(run.lines, sent, step, last)
    return series


def _sent(lines: Sequence[MetricsLine]) -> dict[int, float]:
    """GiB that were sent up to each round."""
    total = 0
    sent = {}
    for line in lines:
        total += line["bytes_down"] + line["bytes_up"]
        sent[line["round"]] = total / GIB
    return sent


def _every_round(lines: Sequence[MetricsLine], sent: Mapping[int, float], step: int, last: int) -> dict[str, Any]:
    """Means over stretches of rounds."""
    of_stretch: dict[int, list[MetricsLine]] = {}
    for line in lines:
        end = min(last, step * math.ceil(line["round"] / step))
        of_stretch.setdefault(end, []).append(line)
    ways: dict[str, Callable[[MetricsLine], float | None]] = {
        "loss": lambda line: line.get("loss"),
        "divergence": lambda line: line.get("divergence"),
        "mib": lambda line: (line["bytes_down"] + line["bytes_up"]) / 2**20,
        "seconds": lambda line: line.get("seconds"),
    }
    every: dict[str, Any] = {"step": step, "round": list(of_stretch)}
    every["gib"] = [sent[stretch[-1]["round"]] for stretch in of_stretch.values()]
    for name, way in ways.items():
        every[name] = [mean_of([way(line) for line in stretch]) for stretch in of_stretch.values()]
    return every


def _accuracy(line: MetricsLine, kind: str, what: str = "mean") -> float | None:
    validation: Mapping[str, Any] = line["accuracy"]["validation"]
    value = validation.get(kind)
    if isinstance(value, Mapping):
        value = value.get(what)
    return None if value is None else 100 * float(value)


def maps(run: Run) -> dict[str, Any] | None:
    """q(z|c) and q(z|s) at evaluation rounds; clients in the order of their true groups where those are known."""
    lines = [line for line in run.lines if isinstance(line.get("q_zs"), list) and line.get("q_zs")]
    if not lines:
        return None
    first = lines[0]
    values = len(first.get("q_zc") or [])
    names = [str(name) for name in run.federation.get("clients", [])] or [str(s) for s in range(len(first["q_zs"]))]
    groups = run.federation.get("groups")
    order = sorted(range(len(names)), key=lambda s: (groups[s] if groups else 0, s))[:ROWS]
    side = run.federation.get("side", "label")
    rows = order if side == "client" else range(min(ROWS, values))
    shown = [lines[i] for i in picked(list(range(len(lines))), FRAMES)]
    return {
        "side": side,
        "values": _names_of_values(run, side, values, [names[s] for s in order]),
        "clients": [names[s] for s in order],
        "groups": [groups[s] for s in order] if groups else None,
        "left_out": len(names) - len(order),
        "frames": [_frame(line, rows, order) for line in shown],
    }


def _names_of_values(run: Run, side: str, count: int, clients: list[str]) -> list[str]:
    if side == "client":
        return clients
    labels = run.federation.get("labels") if side == "label" else None
    return [str(value) for value in labels or range(count)]


def _frame(line: MetricsLine, values: Sequence[int], clients: Sequence[int]) -> dict[str, Any]:
    return {
        "round": line["round"],
        "zc": _some_rows(line.get("q_zc") or [], values),
        "zs": _some_rows(line["q_zs"], clients),
    }


def _some_rows(q: Sequence[Sequence[float]], rows: Sequence[int]) -> list[list[float]]:
    return [[round(value, 3) for value in q[row]] for row in rows if row < len(q)]


def use(run: Run) -> dict[str, Any] | None:
    """How much each expert is used, and by how many clients it came back, over rounds."""
    lines = [line for line in run.lines if line.get("expert_use")]
    if not lines:
        return None
    parts = [[lines[i] for i in stretch] for stretch in stretches(len(lines))]
    experts = range(len(lines[0]["expert_use"]))
    return {
        "round": [part[-1]["round"] for part in parts],
        "use": [[mean_of([line["expert_use"][k] for line in part]) for part in parts] for k in experts],
        "returned": [[mean_of([_returned(line, k) for line in part]) for part in parts] for k in experts],
    }


def _returned(line: MetricsLine, k: int) -> float | None:
    counts = line.get("experts_returned")
    return counts[k] if counts else None


def layers(run: Run) -> dict[str, Any] | None:
    """Gradient divergence layer by layer, experts averaged."""
    lines = [line for line in run.lines if line.get("divergence_layers")]
    if not lines:
        return None
    parts = [[lines[i] for i in stretch] for stretch in stretches(len(lines), LAYER_POINTS)]
    names = list(_layers_of(lines[0])[0])
    return {
        "step": len(parts[0]),
        "round": [part[-1]["round"] for part in parts],
        "layers": {name: [mean_of([_of_layer(line, name) for line in part]) for part in parts] for name in names},
    }


def _layers_of(line: MetricsLine) -> list[dict[str, float]]:
    """The divergence of each layer, expert by expert; older runs have one table where there is one model."""
    tables: Any = line["divergence_layers"]
    return tables if isinstance(tables, list) else [tables]


def _of_layer(line: MetricsLine, name: str) -> float | None:
    return mean_of([table.get(name) for table in _layers_of(line)])
