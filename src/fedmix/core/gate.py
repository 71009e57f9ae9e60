"""The private gate p(z|x,s) over the experts' own features (eq:gate_design).

theta_s = (pi_s, A_s, b_s): pi_s on the simplex as a softmax of free numbers, A_s and b_s start at zero, so p(z|x,s) = 1/K.
"""

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from fedmix.core.tree import Params


def new_gate(features: int, experts: int) -> Params:
    """theta_s before a client has trained: pi [K], A [H, K], b [K], all zero."""
    return {"pi": torch.zeros(experts), "A": torch.zeros(features, experts), "b": torch.zeros(experts)}


def mean_features(pi: Tensor, features: Tensor) -> Tensor:
    """h_s(x) = sum_k pi_{k,s} h_k(x): free numbers [..., K'], features [..., K', B, H] -> [..., B, H]; pi sums to 1 over K'."""
    return torch.einsum("...k,...kbh->...bh", torch.softmax(pi, dim=-1), features)


def gate_logits(theta: Mapping[str, Tensor], features: Tensor, held: list[int]) -> Tensor:
    """A_s^T h_s(x) + b_s over all K experts: features of the held experts [..., K', B, H] -> [..., B, K]."""
    pi = theta["pi"] if len(held) == theta["pi"].shape[-1] else theta["pi"][..., held]
    return mean_features(pi, features) @ theta["A"] + theta["b"].unsqueeze(-2)


def log_gate(theta: Mapping[str, Tensor], features: Tensor, held: list[int], over: list[int] | None = None) -> Tensor:
    """log p(z|x,s) (eq:gate_design): the softmax over all K experts, or over those of `over` alone. [..., B, K or len(over)]"""
    logits = gate_logits(theta, features, held)
    if over is not None:
        logits = logits[..., over]
    return torch.log_softmax(logits, dim=-1)


def mean_log_gate(
    thetas: Sequence[Mapping[str, Tensor]], log_p_s: Tensor, features: Tensor, held: list[int], chunk: int = 64
) -> Tensor:
    """log sum_s p(s) p(z|x,s): the gates of all clients averaged (Inference at test time). -> [B, K']

    log_p_s: log p(s) [S], or log p(s|x) [B, S] (sec:NewShardInf, 'Using a Generative Model').

    With pi_s folded into A_s, one matrix product is enough for `chunk` clients. Memory does not grow with S.
    """
    if not thetas:
        raise ValueError("no client's gate was given to average")
    K, B, H = features.shape
    stacked = features.transpose(0, 1).reshape(B, K * H)  # h_1(x) .. h_K(x) side by side
    weights = log_p_s.to(features.dtype).view(-1, len(thetas))  # [1 or B, S]
    sums = (
        _log_sum_of_gates(thetas[start : start + chunk], weights[:, start : start + chunk], stacked, held)
        for start in range(0, len(thetas), chunk)
    )
    return reduce(torch.logaddexp, sums)


def _log_sum_of_gates(
    thetas: Sequence[Mapping[str, Tensor]], log_p_s: Tensor, stacked: Tensor, held: list[int]
) -> Tensor:
    """log sum_s p(s) p(z|x,s) over some clients: log p(s) [1 or B, S], h_1(x) .. h_K'(x) [B, K' H] -> [B, K']."""
    pi = torch.softmax(torch.stack([theta["pi"][held] for theta in thetas]), dim=1)  # [S, K']
    A = torch.stack([theta["A"][:, held] for theta in thetas])  # [S, H, K']
    b = torch.stack([theta["b"][held] for theta in thetas])  # [S, K']
    S, K = pi.shape
    folded = torch.einsum("sk,shj->khsj", pi, A).reshape(stacked.shape[1], -1)
    log_p = torch.log_softmax((stacked @ folded).view(len(stacked), S, K) + b, dim=2)  # [B, S, K']
    return torch.logsumexp(log_p + log_p_s.unsqueeze(2), dim=1)


def distil(features: Tensor, target: Tensor, steps: int = 100) -> Params:
    """One gate theta that does what many did together: least KL(target || p(z|x)) over the points given.

    features [K, B, H], target [B, K], the gates' mean -> pi, A, b as any client has them. Every step of L-BFGS takes the
    whole batch: there is nothing to tune. A little weight decay keeps A finite where the target is all but certain.
    """
    held = list(range(len(features)))
    start = new_gate(features.shape[2], len(features))
    theta = {name: value.requires_grad_() for name, value in start.items()}
    optimizer = torch.optim.LBFGS(list(theta.values()), max_iter=steps, history_size=20, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        cross_entropy: Tensor = -(target * log_gate(theta, features, held)).sum(dim=1).mean()
        value = cross_entropy + 1e-5 * theta["A"].square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    return {name: value.detach() for name, value in theta.items()}
