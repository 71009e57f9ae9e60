"""What the server makes of the clients' answers (eq:fedmixPavg)."""

from collections.abc import Mapping, Sequence

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


def mean_delta(w: Mapping[str, Tensor], w_s: Sequence[Mapping[str, Tensor] | None], p_s: Tensor) -> Params:
    """Delta_k = sum_s p(s|z=k) (w_k - w_{s,k}), tensor by tensor. None: a client that did not return this expert."""
    delta = {name: torch.zeros_like(value) for name, value in w.items()}
    for weight, client in zip(p_s.tolist(), w_s, strict=True):
        if client is not None and weight > 0:
            for name, value in w.items():
                delta[name].add_(value - client[name], alpha=weight)
    return delta
