"""Leaving experts out where they are not used (Algorithm 2, sec:CommCosts). eta = 0 keeps all of them.

A client keeps k while q(z=k|s) >= eta/K; the server sends k again once the q that came back is at least 0.9 eta/K.
The largest is never dropped.
"""

import torch
from torch import Tensor

SERVER_SLACK = 0.9
ROUNDING = 1e-6  # a q of exactly eta/K comes out of a sum in float32 a little below it


def kept(q_zs: Tensor, eta: float, held: list[int] | None = None, slack: float = 1.0) -> list[int]:
    """K' = {k among `held` : q(z=k|s) >= slack * eta/K}, and always the largest of them. q_zs [K]."""
    experts = len(q_zs)
    candidates = list(range(experts)) if held is None else held
    values = q_zs.tolist()
    largest = max(candidates, key=lambda k: values[k])
    threshold = slack * eta / experts - ROUNDING
    return [k for k in candidates if values[k] >= threshold or k == largest]


def widen(part: Tensor, kept: list[int], experts: int) -> Tensor:
    """Columns of the kept experts laid into a table of all K, zero elsewhere: [C, K'] -> [C, K]."""
    full = part.new_zeros(part.shape[0], experts)
    full[:, kept] = part
    return full


def reweigh(phi_bar: Tensor, phi: Tensor, kept: list[int]) -> Tensor:
    """phi'_c = phi_bar_c * sum_{k in K'} phi_{c,k}; pruned experts keep their phi. [C, K'], [C, K] -> [C, K]"""
    if len(kept) == phi.shape[-1]:
        return phi_bar  # nothing pruned: Algorithm 1 to the last bit
    mass = phi[:, kept].sum(dim=1, keepdim=True)
    inside = torch.zeros(phi.shape[1], dtype=torch.bool, device=phi.device)
    inside[kept] = True
    return torch.where(inside, widen(phi_bar * mass, kept, phi.shape[1]), phi)


def renormalise(phi: Tensor, kept: list[int]) -> Tensor:
    """phi''_{c,k} = phi_{c,k} / sum_{k in K'} phi_{c,k} for k in K': [C, K] -> [C, K']."""
    if len(kept) == phi.shape[-1]:
        return phi
    part = phi[:, kept]
    return part / part.sum(dim=1, keepdim=True).clamp(min=torch.finfo(phi.dtype).tiny)
