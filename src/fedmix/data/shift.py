"""Ways in which clients' data differ beyond their labels: rotated inputs, permuted labels."""

import math

import numpy as np
import torch
from torch import Tensor

from fedmix.data.partition import Indices
from fedmix.errors import DataError
from fedmix.rng import Stream

ANGLES = 8  # multiples of 45 degrees


def permute_labels(
    y: Tensor, parts: list[Indices], classes: int, permutations: int, rng: Stream
) -> tuple[Tensor, list[int]]:
    """Each client has one of a few label permutations (Sattler et al., 2019): new y, and each client's group.

    Groups are of equal size, or differ by one.
    """
    if permutations > math.factorial(classes):
        raise DataError(f"data.permutations must be at most {classes}! different ones. Got {permutations}.")
    tables: list[tuple[int, ...]] = []
    while len(tables) < permutations:
        table = tuple(int(k) for k in rng.permutation(classes))
        if table not in tables:
            tables.append(table)
    groups = [int(g) for g in rng.numpy.permutation(np.arange(len(parts)) % permutations)]
    new = y.clone()
    for own, group in zip(parts, groups, strict=True):
        index = torch.from_numpy(own)
        new[index] = torch.tensor(tables[group])[y[index]]
    return new, groups


def rotate(x: Tensor, parts: list[Indices], concentration: float, rng: Stream) -> tuple[Tensor, Tensor]:
    """Each image turned by a multiple of 45 degrees, drawn once from its client's own Dir(concentration) over the 8.

    x [N, C, H, W] -> rotated x, and the multiple [N].
    """
    if x.dim() != 4 or x.shape[2] != x.shape[3]:
        raise DataError(f"data.shift = 'rotate' needs square images [N, C, H, H]. Got {list(x.shape)} instead.")
    angle = torch.zeros(len(x), dtype=torch.int64)
    for own in parts:
        shares = rng.numpy.dirichlet(np.full(ANGLES, concentration))
        angle[torch.from_numpy(own)] = torch.from_numpy(rng.numpy.choice(ANGLES, size=len(own), p=shares))
    new = x.clone()
    for k in range(1, ANGLES):
        rows = (angle == k).nonzero().squeeze(1)
        if not len(rows):
            continue
        turned = rotated(x[rows].float(), 45.0 * k)
        new[rows] = turned if x.is_floating_point() else turned.round().to(x.dtype)
    return new, angle


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Images turned counter-clockwise about their centre, bilinear, zero outside: [N, C, H, W]. Right angles are exact."""
    if degrees % 90 == 0:
        return torch.rot90(x, int(degrees // 90) % 4, dims=(2, 3))
    a = math.radians(degrees)
    matrix = torch.tensor([[math.cos(a), -math.sin(a), 0.0], [math.sin(a), math.cos(a), 0.0]])
    grid = torch.nn.functional.affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return torch.nn.functional.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
