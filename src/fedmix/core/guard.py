"""What a client's reply must be before the server works with it. A client that sends something else is left out of the round.

Each check gives 'field: reason' where something is wrong, and None where nothing is.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedmix.core.tree import all_finite
from fedmix.core.types import Message, Refusal

MOST_POINTS = 1e9  # of one client
ABSURD = 1000  # times the cohort's median of points
ON_SIMPLEX = 1e-3  # how far a row's sum may be from 1, and its values below 0


def wrong_weights(sent: Mapping[str, Tensor], back: Mapping[str, Tensor]) -> str | None:
    """Only tensors that were sent may come back, each in its shape and type, and finite."""
    for name, value in back.items():
        if name not in sent:
            return f"{name}: it was not sent to this client"
        if value.dtype != sent[name].dtype:
            return f"{name}: must be {sent[name].dtype}, is {value.dtype}"
    shapes = {name: list(value.shape) for name, value in sent.items()}
    return wrong_shapes(shapes, back) or not_finite(back)


def wrong_shapes(shapes: Mapping[str, Sequence[int]], back: Mapping[str, Tensor]) -> str | None:
    """Each tensor that came back must have the shape named for it."""
    for name, shape in shapes.items():
        if name in back and list(back[name].shape) != list(shape):
            return f"{name}: must be {list(shape)}, is {list(back[name].shape)}"
    return None


def missing(names: Iterable[str], back: Mapping[str, Tensor]) -> str | None:
    """All of these names must have come back."""
    return next((f"{name}: missing" for name in names if name not in back), None)


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """All numbers must be finite."""
    return next((f"{name}: not finite" for name, value in tensors.items() if not all_finite(value)), None)


def off_simplex(rows: Mapping[str, Tensor]) -> str | None:
    """Rows [..., K] must be distributions."""
    for name, value in rows.items():
        negative = bool((value < -ON_SIMPLEX).any())
        if negative or bool(((value.sum(dim=-1) - 1).abs() > ON_SIMPLEX).any()):
            return f"{name}: off the simplex"
    return None


def wrong_numbers(numbers: Mapping[str, float]) -> str | None:
    """N_s must be a whole number of points, and the loss finite."""
    n, loss = numbers.get("n"), numbers.get("loss")
    if not isinstance(n, (int, float)) or not 1 <= n <= MOST_POINTS or n != int(n):
        return f"n: must be a whole number of points from 1 to {MOST_POINTS:.0e}, is {n}"
    if not isinstance(loss, (int, float)) or not abs(loss) < float("inf"):
        return f"loss: must be a finite number, is {loss}"
    return None


def out_of_line(replies: Mapping[int, Message], moved: Mapping[int, float], norm_limit: float) -> list[Refusal]:
    """Replies that are sound by themselves and absurd beside the others': N_s, and with `norm_limit` the norm of the update.

    moved: the norm of each client's update.
    """
    refusals = []
    points = statistics.median(reply.numbers["n"] for reply in replies.values())
    norm = statistics.median(moved.values()) if moved else 0.0
    for client, reply in replies.items():
        n = reply.numbers["n"]
        if n > ABSURD * points:
            refusals.append(Refusal(client, "n", f"{n:.0f} points where the cohort's median is {points:.0f}"))
        elif norm_limit and moved[client] > norm_limit * norm:
            reason = f"norm {moved[client]:.3g} is over {norm_limit:g} times the cohort's median {norm:.3g}"
            refusals.append(Refusal(client, "weights", reason))
    return refusals


def norm_of_update(sent: Mapping[str, Tensor], back: Mapping[str, Tensor], linear: bool) -> float:
    """How far a client moved what it was sent. With linear aggregation the reply is the movement itself, times N_s."""
    total = 0.0
    for name in sent.keys() & back.keys():
        moved = back[name] if linear else back[name] - sent[name]
        total += float(moved.to(torch.float64).square().sum())
    return math.sqrt(total)
