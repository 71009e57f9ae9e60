"""What changes from round to round: accuracies, loss, divergence, use of experts, q."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from fedmix.report.groups import Group
from fedmix.report.runs import Run, part_of
from fedmix.report.thinning import POINTS, clients_by_group, of_some, picked, rounded, stretches
from fedmix.report.words import GIB
from fedmix.schema import VALIDATION_KINDS, MetricsLine, mean_of

# rounds that a map is shown at
FRAMES = 40
# clients, or values of c, in a map
ROWS = 300
LAYER_POINTS = 150
MIB = 2**20
_Figure = Callable[[MetricsLine], float | None]


# -- accuracies, loss and divergence -----------------------------------------------------------------------------------


def curves(group: Group) -> list[dict[str, Any]]:
    """For each seed: accuracies at evaluation rounds (validation data), loss and divergence of every round.

    Seeds share their rounds, so that what is averaged over seeds is of the same rounds: a long run's rounds are taken in
    stretches of `step`, which end at the same places for all seeds.
    """
    lines = list(chain.from_iterable(run.lines for run in group.runs))
    last = max((line["round"] for line in lines), default=0)
    step = max(1, math.ceil(last / POINTS))
    evaluated = {line["round"] for line in lines if _is_evaluated(line)}
    shown = set(picked(sorted(evaluated)))
    series = partial(_series, shown=shown, step=step, last=last)
    empty = series(Run("", "", {}, []))
    return [part_of(run, "metrics.jsonl", lambda run: rounded(series(run)), empty) for run in group.runs]


def _is_evaluated(line: MetricsLine) -> bool:
    accuracy = line.get("accuracy")
    return isinstance(accuracy, dict) and isinstance(accuracy.get("validation"), dict)


def _series(run: Run, shown: set[int], step: int, last: int) -> dict[str, Any]:
    """The curves of one run. shown: the evaluation rounds; step and last: of the stretches of rounds."""
    sent = _sent(run.lines)
    lines = [line for line in run.lines if line["round"] in shown and _is_evaluated(line)]
    rounds = [line["round"] for line in lines]
    accuracies: dict[str, Any] = {kind: _accuracies(lines, kind) for kind in VALIDATION_KINDS}
    return {
        "seed": run.seed,
        "round": rounds,
        "gib": [sent[t] for t in rounds],
        **accuracies,
        "worst_decile": _accuracies(lines, "as_sent", "worst_decile"),
        "every": _every_round(run.lines, sent, step, last),
    }


def _sent(lines: Sequence[MetricsLine]) -> dict[int, float]:
    """GiB that were sent up to each round."""
    total = 0
    sent = {}
    for line in lines:
        total += _bytes(line)
        sent[line["round"]] = total / GIB
    return sent


def _bytes(line: MetricsLine) -> int:
    return line["bytes_down"] + line["bytes_up"]


def _every_round(lines: Sequence[MetricsLine], sent: Mapping[int, float], step: int, last: int) -> dict[str, Any]:
    """Means over stretches of rounds."""
    of_stretch: dict[int, list[MetricsLine]] = {}
    for line in lines:
        end = min(last, step * math.ceil(line["round"] / step))
        of_stretch.setdefault(end, []).append(line)
    stretches_of_lines = list(of_stretch.values())
    return {
        "step": step,
        "round": list(of_stretch),
        "gib": [sent[stretch[-1]["round"]] for stretch in stretches_of_lines],
        "loss": _means(stretches_of_lines, lambda line: line.get("loss")),
        "divergence": _means(stretches_of_lines, lambda line: line.get("divergence")),
        "mib": _means(stretches_of_lines, lambda line: _bytes(line) / MIB),
        "seconds": _means(stretches_of_lines, lambda line: line.get("seconds")),
    }


def _means(parts: Sequence[Sequence[MetricsLine]], figure: _Figure) -> list[float | None]:
    """The mean of a figure over the rounds of each part."""
    return [mean_of([figure(line) for line in part]) for part in parts]


def _accuracies(lines: Sequence[MetricsLine], kind: str, what: str = "mean") -> list[float | None]:
    return [_accuracy(line, kind, what) for line in lines]


def _accuracy(line: MetricsLine, kind: str, what: str = "mean") -> float | None:
    """An accuracy on validation data, in per cent."""
    validation: Mapping[str, Any] = line["accuracy"]["validation"]
    value = validation.get(kind)
    if isinstance(value, Mapping):
        value = value.get(what)
    return None if value is None else 100 * float(value)


# -- maps of q ---------------------------------------------------------------------------------------------------------


def maps(run: Run) -> dict[str, Any] | None:
    """q(z|c) and q(z|s) at evaluation rounds; clients in the order of their true groups where those are known."""
    lines = [line for line in run.lines if _has_gates(line)]
    if not lines:
        return None
    names = _names_of_clients(run, len(lines[0]["q_zs"]))
    groups = run.federation.get("groups")
    order = clients_by_group(len(names), groups, ROWS)
    clients = [names[s] for s in order]
    values = len(lines[0].get("q_zc") or [])
    side = run.federation.get("side", "label")
    rows = order if side == "client" else range(min(ROWS, values))
    return {
        "side": side,
        "values": _names_of_values(run, side, values, clients),
        "clients": clients,
        "groups": of_some(groups, order),
        "left_out": len(names) - len(order),
        "frames": [_frame(line, rows, order, _experts_ever(lines)) for line in picked(lines, FRAMES)],
    }


def _has_gates(line: MetricsLine) -> bool:
    gates = line.get("q_zs")
    return isinstance(gates, list) and bool(gates)


def _names_of_clients(run: Run, count: int) -> list[str]:
    """As the federation calls them; where it does not say, their numbers."""
    names = run.federation.get("clients", [])
    return [str(name) for name in names] or [str(s) for s in range(count)]


def _names_of_values(run: Run, side: str, count: int, clients: list[str]) -> list[str]:
    """What the values of c are called."""
    if side == "client":
        return clients
    labels = run.federation.get("labels") if side == "label" else None
    return [str(value) for value in labels or range(count)]


def _frame(line: MetricsLine, values: Sequence[int], clients: Sequence[int], experts: int | None) -> dict[str, Any]:
    return {
        "round": line["round"],
        "zc": _some_rows(line.get("q_zc") or [], values, experts),
        "zs": _some_rows(line["q_zs"], clients, experts),
    }


def _some_rows(q: Sequence[Sequence[float]], rows: Sequence[int], experts: int | None) -> list[list[float]]:
    return [[round(value, 3) for value in q[row][:experts]] for row in rows if row < len(q)]


# -- experts and layers ------------------------------------------------------------------------------------------------


def _experts_ever(lines: Sequence[MetricsLine]) -> int | None:
    """Of a run that finds out how many experts it needs: the slots up to the last one that ever held one. Else None."""
    numbers = [k for line in lines for k in line.get("experts", [])]
    return max(numbers) + 1 if numbers else None


def use(run: Run) -> dict[str, Any] | None:
    """How much each expert is used, and by how many clients it came back, over rounds."""
    lines = [line for line in run.lines if line.get("expert_use")]
    if not lines:
        return None
    parts = _parts(lines, POINTS)
    experts = range(_experts_ever(run.lines) or len(lines[0]["expert_use"]))
    return {
        "round": _last_rounds(parts),
        "use": [_means(parts, partial(_share, k=k)) for k in experts],
        "returned": [_means(parts, partial(_returned, k=k)) for k in experts],
    }


def _parts(lines: Sequence[MetricsLine], most: int) -> list[list[MetricsLine]]:
    """The lines in at most this many stretches."""
    return [[lines[i] for i in stretch] for stretch in stretches(len(lines), most)]


def _last_rounds(parts: Sequence[Sequence[MetricsLine]]) -> list[int]:
    return [part[-1]["round"] for part in parts]


def _share(line: MetricsLine, k: int) -> float:
    return line["expert_use"][k]


def _returned(line: MetricsLine, k: int) -> float | None:
    counts = line.get("experts_returned")
    return counts[k] if counts else None


def layers(run: Run) -> dict[str, Any] | None:
    """Gradient divergence layer by layer, experts averaged."""
    lines = [line for line in run.lines if line.get("divergence_layers")]
    if not lines:
        return None
    parts = _parts(lines, LAYER_POINTS)
    first_expert = _layers_of(lines[0])[0]
    return {
        "step": len(parts[0]),
        "round": _last_rounds(parts),
        "layers": {name: _means(parts, partial(_of_layer, name=name)) for name in first_expert},
    }


def _layers_of(line: MetricsLine) -> list[dict[str, float]]:
    """The divergence of each layer, expert by expert; older runs have one table where there is one model."""
    tables: Any = line["divergence_layers"]
    return tables if isinstance(tables, list) else [tables]


def _of_layer(line: MetricsLine, name: str) -> float | None:
    return mean_of([table.get(name) for table in _layers_of(line)])
