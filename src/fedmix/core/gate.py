"""The private gate p(z|x,s) over the experts' own features (eq:gate_design).

theta_s = (pi_s, A_s, b_s): pi_s on the simplex as a softmax of free numbers, A_s and b_s start at zero, so p(z|x,s) = 1/K.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedmix.core.tree import Params


def new_gate(features: int, experts: int) -> Params:
    """theta_s of a client that has not trained yet: pi [K], A [H, K], b [K], all zero."""
    return {"pi": torch.zeros(experts), "A": torch.zeros(features, experts), "b": torch.zeros(experts)}


def mean_features(pi: Tensor, features: Tensor) -> Tensor:
    """h_s(x) = sum_k pi_{k,s} h_k(x): free numbers [K'], features [K', B, H] -> [B, H]. pi renormalised over K'."""
    return torch.einsum("k,kbh->bh", torch.softmax(pi, dim=0), features)


def gate_logits(theta: Mapping[str, Tensor], features: Tensor, held: list[int]) -> Tensor:
    """A_s^T h_s(x) + b_s over all K experts: features of the held experts [K', B, H] -> [B, K]."""
    pi = theta["pi"] if len(held) == len(theta["pi"]) else theta["pi"][held]
    return mean_features(pi, features) @ theta["A"] + theta["b"]


def log_gate(theta: Mapping[str, Tensor], features: Tensor, held: list[int], over: list[int] | None = None) -> Tensor:
    """log p(z|x,s) (eq:gate_design): the softmax over all K experts, or over those of `over` alone. [B, K or len(over)]"""
    logits = gate_logits(theta, features, held)
    return torch.log_softmax(logits if over is None else logits[:, over], dim=1)


def log_gates(theta: Mapping[str, Tensor], features: Tensor) -> Tensor:
    """log p(z|x,s) of G clients at once, each with all K experts: theta [G, ...], features [G, K, B, H] -> [G, B, K]."""
    h = torch.einsum("gk,gkbh->gbh", torch.softmax(theta["pi"], dim=1), features)
    return torch.log_softmax(torch.baddbmm(theta["b"].unsqueeze(1), h, theta["A"]), dim=2)


def mean_log_gate(
    thetas: list[Mapping[str, Tensor]], p_s: Tensor, features: Tensor, held: list[int], chunk: int = 64
) -> Tensor:
    """log sum_s p(s) p(z|x,s): the gates of all clients averaged (Inference at test time). -> [B, K']

    One batched product over clients, `chunk` of them at a time so that memory does not grow with S.
    """
    total: Tensor | None = None
    for start in range(0, len(thetas), chunk):
        part = thetas[start : start + chunk]
        pi = torch.softmax(torch.stack([theta["pi"][held] for theta in part]), dim=1)  # [S, K']
        A = torch.stack([theta["A"][:, held] for theta in part])  # [S, H, K']
        b = torch.stack([theta["b"][held] for theta in part])  # [S, K']
        h = torch.einsum("sk,kbh->sbh", pi, features)
        log_p = torch.log_softmax(torch.baddbmm(b.unsqueeze(1), h, A), dim=2)  # [S, B, K']
        log_w = torch.log(p_s[start : start + chunk].to(log_p.dtype)).view(-1, 1, 1)
        mean = torch.logsumexp(log_p + log_w, dim=0)
        total = mean if total is None else torch.logaddexp(total, mean)
    if total is None:
        raise ValueError("no client's gate was given to average")
    return total
