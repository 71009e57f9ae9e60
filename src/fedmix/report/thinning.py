"""Numbers thinned to what a screen shows."""

import math
from collections.abc import Sequence
from typing import Any

POINTS = 400  # of a curve
DIGITS = 5


def picked(indices: Sequence[int], most: int = POINTS) -> list[int]:
    """At most this many of them, first and last among them."""
    if len(indices) <= most:
        return list(indices)
    return [indices[round(i * (len(indices) - 1) / (most - 1))] for i in range(most)]


def stretches(count: int, most: int = POINTS) -> list[range]:
    """0 .. count - 1 in at most this many stretches of equal length."""
    step = max(1, math.ceil(count / most))
    return [range(start, min(start + step, count)) for start in range(0, count, step)]


def rounded(value: Any) -> Any:
    """Numbers of a few digits; NaN and infinity are nothing."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return value
