"""Ways in which clients' data differ beyond their share of each label: rotated inputs, permuted labels.

F. Sattler, K.-R. Müller, W. Samek (2019): Clustered federated learning, for the permuted labels.
"""

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
    """Give each client one of a few label permutations (Sattler et al., 2019): new y, and each client's group.

    Groups are of equal size, or differ by one.
    """
    if permutations > math.factorial(classes):
        raise DataError(f"data.permutations must be at most {classes}! different ones. Got {permutations}.")
    tables = _different_permutations(classes, permutations, rng)
    groups = [int(group) for group in rng.numpy.permutation(np.arange(len(parts)) % permutations)]
    new_y = y.clone()
    for client_points, group in zip(parts, groups, strict=True):
        index = torch.from_numpy(client_points)
        table = torch.tensor(tables[group])
        new_y[index] = table[y[index]]
    return new_y, groups


def _different_permutations(classes: int, count: int, rng: Stream) -> list[tuple[int, ...]]:
    """Draw permutations of the classes until there are `count` different ones."""
    tables: list[tuple[int, ...]] = []
    while len(tables) < count:
        table = tuple(int(k) for k in rng.permutation(classes))
        if table not in tables:
            tables.append(table)
    return tables


def rotate(x: Tensor, parts: list[Indices], concentration: float, rng: Stream) -> tuple[Tensor, Tensor]:
    """Turn each image by a multiple of 45 degrees, drawn once from its client's own Dir(concentration) over the 8.

    x [N, C, H, W] -> rotated x, and the multiple [N].
    """
    if x.dim() != 4 or x.shape[2] != x.shape[3]:
        raise DataError(f"data.shift = 'rotate' needs square images [N, C, H, H]. Got {list(x.shape)} instead.")
    angle = _drawn_angles(len(x), parts, concentration, rng)
    new_x = x.clone()
    for multiple in range(1, ANGLES):
        index = (angle == multiple).nonzero().squeeze(1)
        if len(index):
            turned = rotated(x[index].float(), 45.0 * multiple)
            new_x[index] = turned if x.is_floating_point() else turned.round().to(x.dtype)
    return new_x, angle


def _drawn_angles(points: int, parts: list[Indices], concentration: float, rng: Stream) -> Tensor:
    """Draw the multiple of 45 degrees of every point [N]; points that no client holds are not turned."""
    angle = torch.zeros(points, dtype=torch.int64)
    for client_points in parts:
        shares = rng.numpy.dirichlet(np.full(ANGLES, concentration))
        drawn = rng.numpy.choice(ANGLES, size=len(client_points), p=shares)
        angle[torch.from_numpy(client_points)] = torch.from_numpy(drawn)
    return angle


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Turn images [N, C, H, W] counter-clockwise about their centre, bilinear, zero outside. Right angles are exact."""
    if degrees % 90 == 0:
        quarters = int(degrees // 90) % 4
        return torch.rot90(x, quarters, dims=(2, 3))
    angle = math.radians(degrees)
    cos, sin = math.cos(angle), math.sin(angle)
    matrix = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]])
    grid = torch.nn.functional.affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return torch.nn.functional.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
