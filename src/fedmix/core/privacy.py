"""What hides clients from the server: clipped and noisy answers, and answers of which only the sum is needed."""

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedmix.core.tree import Params
from fedmix.rng import Stream

Noise = Callable[[Sequence[int]], Tensor]  # a shape -> independent standard normal numbers of that shape
SIMPLEX_DIAMETER = 2**0.5  # the largest distance of two points of a simplex


def clipped(moved: Mapping[str, Tensor], norm: float) -> Params:
    """A client's whole update, scaled down to at most this norm (over all tensors together)."""
    squares = [value.to(torch.float64).square().sum() for value in moved.values()]
    total = torch.sqrt(sum(squares, torch.zeros(())))
    factor = min(1.0, norm / max(float(total), 1e-12))
    return {name: value * factor for name, value in moved.items()}


def noise_of_this_machine(shape: Sequence[int]) -> Tensor:
    """Standard normal numbers made of the operating system's entropy (Box and Muller, 1958).

    Nobody else can draw them again: they depend on no seed, and no generator's state could be found out from them.
    """
    count = int(np.prod(shape, dtype=np.int64))
    pairs = -(-count // 2)
    bits = np.frombuffer(os.urandom(16 * pairs), dtype=np.uint64).reshape(2, pairs)
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 1) * 2.0**-53  # in (0, 1]: the logarithm is finite
    radius = np.sqrt(-2 * np.log(uniform[0]))
    angle = 2 * np.pi * uniform[1]
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    return torch.from_numpy(normal.astype(np.float32)).reshape(list(shape))


def repeatable_noise(rng: Stream) -> Noise:
    """The same numbers in every run: whoever knows the recipe's seed can subtract them, so they protect nobody."""
    generator = torch.Generator().manual_seed(rng.seed)
    return lambda shape: torch.randn(list(shape), generator=generator)


def noisy(moved: Mapping[str, Tensor], std: float, noise: Noise) -> Params:
    """Gaussian noise on every number."""
    return {name: value + std * noise(value.shape).to(value.device) for name, value in moved.items()}


def noisy_weights(
    sent: Mapping[str, Tensor], back: Mapping[str, Tensor], clip: float, size: float, noise: Noise
) -> Params:
    """The weights that a client returns: their distance from what it was sent is clipped to `clip`, and noise is added.

    The noise has a standard deviation of size * 2 clip: two updates of norm `clip` are at most 2 clip apart.
    """
    moved = clipped({name: sent[name] - value for name, value in back.items()}, clip)
    if size:
        moved = noisy(moved, size * 2 * clip, noise)
    return {name: sent[name] - value for name, value in moved.items()}


def noisy_rows(rows: Tensor, size: float, noise: Noise) -> Tensor:
    """Points of simplices [..., K] with Gaussian noise, projected back.

    The noise's standard deviation is `size` times sqrt(2 rows): two clients' rows together are at most that far apart.
    """
    far = SIMPLEX_DIAMETER * (rows.numel() // rows.shape[-1]) ** 0.5
    shifted = noisy({"rows": rows}, size * far, noise)["rows"]
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
    total = {}
    for name in messages[0]:
        values = [message[name] for message in messages]
        total[name] = torch.stack(values).sum(dim=0)
    return total
