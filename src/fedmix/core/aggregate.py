"""How the server averages the clients' answers (eq:fedmixPavg)."""

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
    used = total > 0
    divisor = torch.where(used, total, torch.ones_like(total))
    return torch.where(used, joint / divisor, torch.zeros_like(joint))


@dataclass(frozen=True)
class Deltas:
    """How far the clients that returned an expert moved it: w_k - w_{s,k}, a row of each tensor for each of them."""

    members: list[int]  # their places in the cohort
    tensors: Params  # [M, P]


def deltas(w: Mapping[str, Tensor], w_s: Sequence[Mapping[str, Tensor] | None]) -> Deltas:
    """How far each client of the cohort moved w. A client that did not return these weights is None in w_s."""
    returned = {i: weights for i, weights in enumerate(w_s) if weights is not None}
    rows = {}
    for name, value in w.items():
        copies = [weights[name] for weights in returned.values()]
        rows[name] = _moves(value, copies)
    return Deltas(list(returned), rows)


def _moves(value: Tensor, copies: list[Tensor]) -> Tensor:
    """A tensor minus each client's copy of it, flattened: [...], M times [...] -> [M, P]."""
    if not copies:
        return value.new_zeros(0, *value.shape).flatten(1)
    stacked = torch.stack(copies)
    # in place: the rows are as large as all clients' weights together
    return torch.sub(value, stacked, out=stacked).flatten(1)


def mean_delta(w: Mapping[str, Tensor], moved: Deltas, p_s: Tensor) -> Params:
    """Delta_k = sum_s p(s|z=k) (w_k - w_{s,k}), tensor by tensor; p_s is over the whole cohort [S']."""
    p_members = p_s[moved.members]
    mean = {}
    for name, rows in moved.tensors.items():
        weighted = p_members.to(rows.dtype) @ rows
        mean[name] = weighted.view_as(w[name])
    return mean
