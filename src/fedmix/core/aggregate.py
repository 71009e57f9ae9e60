"""What the server makes of the clients' answers (eq:fedmixPavg)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmix.core.tree import Params


def client_weights(n_s: Tensor) -> Tensor:
    """p(s) = N_s / N_S' over the cohort: [S'] -> [S']."""
    n = n_s.to(torch.float64)
    return n / n.sum()


def expert_weights(q_zs: Tensor, n_s: Tensor) -> Tensor:
    """p(s|z=k), proportional to q(z=k|s) p(s) (eq:fedmixPavg): [S', K], [S'] -> [S', K].

    An expert that nobody kept weighs zero, not NaN.
    """
    joint = q_zs.to(torch.float64) * client_weights(n_s).unsqueeze(1)
    total = joint.sum(dim=0, keepdim=True)
    return torch.where(
        total > 0, joint / torch.where(total > 0, total, torch.ones_like(total)), torch.zeros_like(joint)
    )


@dataclass(frozen=True)
class Deltas:
    """How far the clients that returned an expert moved it: w_k - w_{s,k}, a row of each tensor for each of them."""

    members: list[int]  # their places in the cohort
    tensors: Params  # [M, P]


def deltas(w: Mapping[str, Tensor], w_s: Sequence[Mapping[str, Tensor] | None]) -> Deltas:
    """None: a client that did not return this expert."""
    returned = [(i, client) for i, client in enumerate(w_s) if client is not None]
    rows = {}
    for name, value in w.items():
        moved = torch.stack([client[name] for _, client in returned]) if returned else value.new_zeros(0, *value.shape)
        rows[name] = torch.sub(value, moved, out=moved).flatten(1)
    return Deltas([i for i, _ in returned], rows)


def mean_delta(w: Mapping[str, Tensor], moved: Deltas, p_s: Tensor) -> Params:
    """Delta_k = sum_s p(s|z=k) (w_k - w_{s,k}), tensor by tensor; p_s over the whole cohort [S']."""
    return {name: (p_s[moved.members].to(rows.dtype) @ rows).view_as(w[name]) for name, rows in moved.tensors.items()}
