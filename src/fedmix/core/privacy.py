"""Less for the server to see: clipped and noisy answers, and answers of which only the sum over clients is needed."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedmix.core.tree import Params
from fedmix.rng import Stream

SIMPLEX_DIAMETER = 2**0.5  # the largest distance of two points of a simplex


def clipped(moved: Mapping[str, Tensor], norm: float) -> Params:
    """A client's whole update, scaled down to at most this norm (over all tensors together)."""
    total = torch.sqrt(sum((value.to(torch.float64).square().sum() for value in moved.values()), torch.zeros(())))
    factor = min(1.0, norm / max(float(total), 1e-12))
    return {name: value * factor for name, value in moved.items()}


def noisy(moved: Mapping[str, Tensor], std: float, rng: Stream) -> Params:
    """Gaussian noise on every number."""
    with rng.torch():
        return {name: value + std * torch.randn(value.shape).to(value.device) for name, value in moved.items()}


def noisy_weights(
    sent: Mapping[str, Tensor], back: Mapping[str, Tensor], clip: float, noise: float, rng: Stream
) -> Params:
    """The weights that a client returns, their distance from what it was sent clipped to `clip`, with Gaussian noise of
    standard deviation noise * 2 clip: two updates of norm `clip` are at most 2 clip apart."""
    moved = clipped({name: sent[name] - value for name, value in back.items()}, clip)
    return {name: sent[name] - value for name, value in noisy(moved, noise * 2 * clip, rng).items()}


def noisy_rows(rows: Tensor, noise: float, rng: Stream) -> Tensor:
    """Points of simplices [..., K] with Gaussian noise, projected back: all rows together move by at most
    sqrt(2 rows) between two clients, which the noise's standard deviation is a multiple of."""
    far = SIMPLEX_DIAMETER * (rows.numel() // rows.shape[-1]) ** 0.5
    shifted = noisy({"rows": rows}, noise * far, rng)["rows"]
    return project_to_simplex(shifted)


def project_to_simplex(v: Tensor) -> Tensor:
    """The nearest point of the simplex (Euclidean), row by row (Held, Wolfe and Crowder, 1974): [..., K] -> [..., K]."""
    ordered = v.sort(dim=-1, descending=True).values
    count = torch.arange(1, v.shape[-1] + 1, device=v.device, dtype=v.dtype)
    excess = (ordered.cumsum(dim=-1) - 1) / count
    last = (ordered > excess).sum(dim=-1, keepdim=True) - 1
    return (v - excess.gather(-1, last)).clamp(min=0)


def summed(messages: Sequence[Mapping[str, Tensor]]) -> Params:
    """What a secure-aggregation protocol would give the server: the sum of the clients' tensors, and no more."""
    return {name: torch.stack([message[name] for message in messages]).sum(dim=0) for name in messages[0]}
