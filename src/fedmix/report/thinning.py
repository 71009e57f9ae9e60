"""Numbers thinned to what a screen shows."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

# points of a curve
POINTS = 400
DIGITS = 5


def picked(values: Sequence[T], most: int = POINTS) -> list[T]:
    """At most this many of the values, at equal distances, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    last = len(values) - 1
    return [values[round(i * last / (most - 1))] for i in range(most)]


def clients_by_group(clients: int, groups: Sequence[int] | None, most: int) -> list[int]:
    """The numbers of at most this many clients, those of the same true group beside each other."""
    if not groups:
        return list(range(min(clients, most)))
    return sorted(range(clients), key=lambda s: (groups[s], s))[:most]


def of_some(values: Sequence[T] | None, indices: Sequence[int]) -> list[T] | None:
    """What is known of some clients; None where it is not known of any."""
    return [values[i] for i in indices] if values else None


def stretches(count: int, most: int = POINTS) -> list[range]:
    """0 .. count - 1 in at most this many stretches of equal length."""
    step = max(1, math.ceil(count / most))
    return [range(start, min(start + step, count)) for start in range(0, count, step)]


def rounded(value: Any) -> Any:
    """The same with numbers of a few digits, however deep they lie; NaN and infinity become None."""
    if isinstance(value, float):
        return _rounded_number(value)
    if isinstance(value, dict):
        return {str(key): rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return value


def _rounded_number(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
