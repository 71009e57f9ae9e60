"""Gradient divergence of a cohort (sec:grad_alignment)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def tensor_divergence(deltas: Tensor, p_s: Tensor) -> float:
    """GD = sum_ij p(i) p(j) (1 - cos(Delta_i, Delta_j)) / 2 for one parameter tensor: deltas [S', P], p_s [S'].

    A Gram matrix, not a double loop. A zero delta has no direction: its terms are left out of the sum.
    """
    norms = deltas.norm(dim=1).to(torch.float64)
    alive = (norms > 0) & (p_s > 0)
    if not bool(alive.any()):
        return 0.0
    p = p_s[alive].to(torch.float64)
    unit = deltas[alive] / norms[alive].to(deltas.dtype).unsqueeze(1)
    cosine = (unit @ unit.T).to(torch.float64).clamp(-1, 1).fill_diagonal_(1)
    return float(0.5 * (p @ (1 - cosine) @ p))


def expert_divergence(
    w: Mapping[str, Tensor], w_s: Sequence[Mapping[str, Tensor] | None], p_s: Tensor
) -> dict[str, float]:
    """GD(Delta_k) of every parameter tensor of one expert; the paper plots their sum."""
    members = [i for i, client in enumerate(w_s) if client is not None]
    if not members:
        return dict.fromkeys(w, 0.0)
    result = {}
    for name, value in w.items():
        deltas = torch.stack([(value - w_s[i][name]).flatten() for i in members])  # type: ignore[index]
        result[name] = tensor_divergence(deltas, p_s[members])
    return result
