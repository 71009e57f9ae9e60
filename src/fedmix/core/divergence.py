"""Gradient divergence of a cohort (sec:grad_alignment)."""

import torch
from torch import Tensor

from fedmix.core.aggregate import Deltas


def tensor_divergence(deltas: Tensor, p_s: Tensor) -> float:
    """GD = sum_ij p(i) p(j) (1 - cos(Delta_i, Delta_j)) / 2 for one parameter tensor: deltas [S', P], p_s [S'].

    It comes from a Gram matrix, without a double loop. A zero delta has no direction: its terms are left out of the sum.
    """
    gram = (deltas @ deltas.T).to(torch.float64)
    norms = gram.diagonal().sqrt()
    p = torch.where(norms > 0, p_s.to(torch.float64), torch.zeros_like(norms))
    products = torch.outer(norms, norms).clamp(min=torch.finfo(torch.float64).tiny)
    cosine = (gram / products).clamp(-1, 1).fill_diagonal_(1)
    return float(0.5 * (p @ (1 - cosine) @ p))


def expert_divergence(moved: Deltas, p_s: Tensor) -> dict[str, float]:
    """GD(Delta_k) of every parameter tensor of one expert; the paper plots their sum. p_s is over the whole cohort [S']."""
    p_members = p_s[moved.members]
    return {name: tensor_divergence(rows, p_members) for name, rows in moved.tensors.items()}
