"""Ways in which clients' data differ beyond their share of each label: rotated inputs, permuted labels.

F. Sattler, K.-R. Müller, W. Samek (2019): Clustered federated learning, for the permuted labels.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedmix.data.partition import Indices
from fedmix.errors import DataError
from fedmix.rng import Stream

ANGLES = 8  # multiples of 45 degrees
Table = tuple[int, ...]  # the new label of each label


def permute_labels(y: Tensor, parts: list[Indices], tables: Sequence[Table], groups: Sequence[int]) -> Tensor:
    """Rename the labels of each client by its group's permutation (Sattler et al., 2019)."""
    new_y = y.clone()
    for client_points, group in zip(parts, groups, strict=True):
        index = torch.from_numpy(client_points)
        new_y[index] = torch.tensor(tables[group])[y[index]]
    return new_y


def deal_groups(clients: int, count: int, sizes: Sequence[int], rng: Stream) -> list[int]:
    """Draw each client's group. sizes: how many clients each has; empty: equally many, or one more."""
    if sizes and sum(sizes) != clients:
        raise DataError(f"data.group_sizes must add up to {clients} clients. Got {list(sizes)}.")
    in_order = np.repeat(np.arange(count), sizes) if sizes else np.arange(clients) % count
    return [int(group) for group in rng.numpy.permutation(in_order)]


def label_tables(classes: int, count: int, moved: int, rng: Stream) -> list[Table]:
    """Draw different permutations of the classes. moved: the first leaves all in place, each other moves this many; 0: any."""
    possible = _possible_tables(classes, moved)
    if count > possible:
        kind = f" that move {moved} labels" if moved else ""
        raise DataError(f"data.permutations must be at most {possible} for {classes} labels{kind}. Got {count}.")
    tables = [tuple(range(classes))] if moved else []
    while len(tables) < count:
        table = _moving(classes, moved, rng) if moved else _drawn_order(range(classes), rng)
        if table not in tables:
            tables.append(table)
    return tables


def _possible_tables(classes: int, moved: int) -> int:
    """How many permutations there are; with `moved`, those that move so many labels, and the one that moves none."""
    if not moved:
        return math.factorial(classes)
    derangements = 1  # those that leave no label in place: D_n = n D_{n-1} + (-1)^n
    for n in range(1, moved + 1):
        derangements = n * derangements + (1 if n % 2 == 0 else -1)
    return 1 + math.comb(classes, moved) * derangements


def _moving(classes: int, moved: int, rng: Stream) -> Table:
    """Draw a permutation in which exactly `moved` labels change places."""
    chosen = sorted(_drawn_order(range(classes), rng)[:moved])
    while True:
        order = _drawn_order(chosen, rng)
        if all(before != after for before, after in zip(chosen, order, strict=True)):
            break
    table = list(range(classes))
    for before, after in zip(chosen, order, strict=True):
        table[before] = after
    return tuple(table)


def _drawn_order(labels: Sequence[int], rng: Stream) -> Table:
    return tuple(labels[int(k)] for k in rng.permutation(len(labels)))


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
