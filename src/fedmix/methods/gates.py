"""Predictions of a mixture for somebody who is none of its clients: all gates averaged, no gate, or one gate in place of all.

For methods whose clients keep a gate over experts as `gate.pi`, `gate.A`, `gate.b` (core.gate).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedmix.core import gate, objective
from fedmix.core.method import Parts, outputs
from fedmix.core.model import Model
from fedmix.core.tree import Params, subtree


def shares(features: Tensor, own: Params, held: list[int]) -> Tensor:
    """p(z|x,s) over the experts that a client holds: features [K', B, H] -> [B, K']."""
    return gate.log_gate(subtree(own, "gate"), features, held, over=held).exp()


def average(model: Model, parts: Parts, privates: Sequence[Params], log_p_s: Tensor, x: Tensor) -> Tensor:
    """The clients' gates averaged with p(s) or p(s|x) (Inference at test time; sec:NewShardInf)."""
    logits, features = outputs(model, parts, x, training=False)
    thetas = [subtree(private, "gate") for private in privates]
    return objective.log_mixture(logits, gate.mean_log_gate(thetas, log_p_s, features, parts.held))


def pool(model: Model, parts: Parts, sent: Params, x: Tensor) -> Tensor:
    """Experts pooled without any gate, q(z|y) divided out, where c is the label."""
    logits, _ = outputs(model, parts, x, training=False)
    return objective.log_pooled(logits, sent["phi"])


def distil(model: Model, parts: Parts, privates: Sequence[Params], log_p_s: Tensor, x: Tensor) -> Params:
    """One gate for the clients' gates averaged with p(s), from inputs that the server may have."""
    thetas = [subtree(private, "gate") for private in privates]
    chunks = []
    with torch.no_grad():
        for part in torch.split(x, 512):
            _, features = outputs(model, parts, part, training=False)
            chunks.append((features, gate.mean_log_gate(thetas, log_p_s, features, parts.held).exp()))
    features = torch.cat([own for own, _ in chunks], dim=1)
    theta = gate.distil(features, torch.cat([target for _, target in chunks]))
    return {f"gate.{name}": value for name, value in theta.items()}
