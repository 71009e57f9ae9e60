"""The shared posterior q(z|c) = phi [C, K] over experts given side information c (Solving for phi_c, sec:fixedformmath).

c is any categorical index of a data point: its label, its rotation, its client. q(z|y) of the paper is the case c = y.
"""

import torch
from torch import Tensor


def uniform(categories: int, experts: int) -> Tensor:
    """phi before round 1: 1/K everywhere, [C, K]."""
    return torch.full((categories, experts), 1.0 / experts)


def solve_phi(
    log_joint: Tensor, c: Tensor, categories: int, beta: float, there: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """phi'_c, proportional to exp(mean over the points of c of log p(y, z | x, s) / beta)  (eq:phi_solution).

    log_joint [..., B, K], c [..., B] -> phi' [..., C, K] and which rows the batch holds [..., C]; the others are uniform, and
    nobody uses them. there: which points are really there [..., B]; None: all of them.
    """
    weight = torch.ones_like(log_joint[..., :1]) if there is None else there.unsqueeze(-1).to(log_joint.dtype)
    values = torch.cat([log_joint * weight, weight], dim=-1)  # sums and counts in one go
    row = c.unsqueeze(-1).expand(values.shape)
    sums = values.new_zeros(*values.shape[:-2], categories, values.shape[-1]).scatter_add(-2, row, values)
    total, count = sums[..., :-1], sums[..., -1]
    mean = total / count.clamp(min=1).unsqueeze(-1)  # M_{s,c} = 0 divides nothing
    return torch.softmax(mean / beta, dim=-1), count > 0


def of_points(phi: Tensor, c: Tensor) -> Tensor:
    """q(z|c_i) of each point: phi [..., C, K], c [..., B] -> [..., B, K]."""
    return phi.gather(-2, c.unsqueeze(-1).expand(*c.shape, phi.shape[-1]))


def temperature(beta: float, start: float, over: int, t: int) -> float:
    """beta in round t = 1, 2, ...: from `start` to `beta` in equal steps over some rounds; start 0: always `beta`."""
    if not start:
        return beta
    return start + (beta - start) * min((t - 1) / over, 1.0)


def dampen(phi: Tensor, phi_new: Tensor, present: Tensor, gamma: float) -> Tensor:
    """phi_c <- gamma phi_c + (1 - gamma) phi'_c for the rows that the batch holds; the others keep theirs. [..., C, K]"""
    return torch.where(present.unsqueeze(-1), gamma * phi + (1 - gamma) * phi_new, phi)


def expert_marginal(phi: Tensor, p_c: Tensor) -> Tensor:
    """q(z|s) = E_{c ~ D_s}[q(z|c)]: [C, K], [C] -> [K]. With a public p(c): the marginal use of each expert."""
    return p_c.to(phi.dtype) @ phi


def category_shares(c: Tensor, categories: int) -> Tensor:
    """p(c|s), the share of each category among a client's points: [N] -> [C]."""
    ones = torch.ones(len(c), device=c.device)
    return torch.zeros(categories, device=c.device).index_add_(0, c, ones) / max(len(c), 1)


def entropy_gradient(phi: Tensor, p_c: Tensor) -> Tensor:
    """Gradient of H(sum_c q(z|c) p(c)) with respect to phi: -p(c) (log m_k + 1), m the marginal. [C, K]"""
    m = expert_marginal(phi, p_c)
    log_m = torch.log(m.clamp(min=torch.finfo(phi.dtype).tiny))
    return -p_c.to(phi.dtype).unsqueeze(1) * (log_m + 1).unsqueeze(0)


def mean_move(phi: Tensor, phi_s: Tensor, p_s: Tensor) -> Tensor:
    """sum_s p(s) (phi - phi_s): phi [C, K] or any other shape, phi_s [S', C, K], p_s [S'] -> [C, K]."""
    weights = p_s.to(phi.dtype).view(-1, *[1] * phi.dim())
    return (weights * (phi.unsqueeze(0) - phi_s)).sum(0)


def phi_gradient(phi: Tensor, moved: Tensor, p_c: Tensor, entropy: float) -> Tensor:
    """Delta_phi of Algorithm 1: sum_s p(s) (phi - phi_s) - entropy * grad H, in the simplex's tangent space.

    phi [C, K], the first term `moved` [C, K] -> [C, K]. The mean over k is taken out: a part constant in k cannot move a
    point of the simplex, yet would drown the rest in Adam's second moment.
    """
    delta = moved
    if entropy:
        delta = delta - entropy * entropy_gradient(phi, p_c)
    return delta - delta.mean(dim=1, keepdim=True)


def rows_held(phi: Tensor, phi_s: Tensor) -> Tensor:
    """Which rows some client of the cohort changed [C]: those whose category somebody holds."""
    return (phi_s != phi.unsqueeze(0)).any(dim=-1).any(dim=0)


def to_simplex(phi: Tensor, floor: float) -> Tensor:
    """Back onto the simplex after an optimiser's step: clamp to a small floor, renormalise each row. [C, K]"""
    clamped = phi.clamp(min=floor)
    return clamped / clamped.sum(dim=1, keepdim=True)
