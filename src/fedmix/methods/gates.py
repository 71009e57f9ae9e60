"""Predictions of a mixture for somebody who is not a client: with all gates averaged, with none, or with one for all.

For methods whose clients keep a gate over experts as `gate.pi`, `gate.A`, `gate.b` (core.gate).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedmix.core import gate, objective
from fedmix.core.method import Parts, outputs
from fedmix.core.model import Model
from fedmix.core.tree import Params, subtree


def shares(features: Tensor, private: Params, held: list[int]) -> Tensor:
    """p(z|x,s) over the experts that a client holds: features [K', B, H] -> [B, K']."""
    return gate.log_gate(subtree(private, "gate"), features, held, over=held).exp()


def average(model: Model, parts: Parts, privates: Sequence[Params], log_p_s: Tensor, x: Tensor) -> Tensor:
    """log p(y|x) with the clients' gates averaged with p(s) or p(s|x) (Inference at test time; sec:NewShardInf)."""
    logits, features = outputs(model, parts, x, training=False)
    thetas = [subtree(private, "gate") for private in privates]
    log_gate = gate.mean_log_gate(thetas, log_p_s, features, parts.held)
    return objective.log_mixture(logits, log_gate)


def pool(model: Model, parts: Parts, sent: Params, x: Tensor) -> Tensor:
    """log p(y|x) with experts pooled without any gate, and q(z|y) divided out, where c is the label."""
    logits, _ = outputs(model, parts, x, training=False)
    return objective.log_pooled(logits, sent["phi"][:, parts.held])


def distil(model: Model, parts: Parts, privates: Sequence[Params], log_p_s: Tensor, x: Tensor) -> Params:
    """One gate in place of the clients' gates averaged with p(s), learned on inputs that the server may have."""
    thetas = [subtree(private, "gate") for private in privates]
    features, targets = [], []
    with torch.no_grad():
        for chunk in torch.split(x, 512):
            _, h = outputs(model, parts, chunk, training=False)
            features.append(h)
            targets.append(gate.mean_log_gate(thetas, log_p_s, h, parts.held).exp())
    theta = gate.distil(torch.cat(features, dim=1), torch.cat(targets))
    return {f"gate.{name}": _among_all(value, thetas[0][name], parts.held) for name, value in theta.items()}


def _among_all(value: Tensor, like: Tensor, held: list[int]) -> Tensor:
    """A gate's tensor over the experts that are held, at their numbers among all experts: [..., K'] -> [..., K]."""
    return torch.zeros_like(like).index_copy_(-1, torch.tensor(held), value)
