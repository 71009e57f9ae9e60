"""Generalised FedAvg (McMahan et al., 2017; Reddi et al., 2020): one model, which every client trains and the server averages.

Everything is shared, which is a method's default, so only a loss is to be given. Relatives keep some parameters private
(`with_private`), and start from the same draw.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fedmix.core.method import Anonymous, Batch, Method, Parts, Setup, cross_entropy, outputs
from fedmix.core.model import Model
from fedmix.core.placement import Place
from fedmix.core.training import Carry
from fedmix.core.tree import Params
from fedmix.methods.page import NoSettings, Page


def loss(
    model: Model, parts: Parts, fixed: dict[str, object], batch: Batch, carry: Carry
) -> tuple[Tensor, float, Carry]:
    """-log p(y|x) of each point, without a penalty."""
    logits, _ = outputs(model, parts, batch.x)
    return cross_entropy(logits[..., 0, :, :], batch.y), 0.0, carry


def fedavg(setup: Setup, settings: NoSettings | None = None) -> Method:
    """FedAvg as a method."""
    plain = partial(loss, setup.model)
    return Method(loss=plain, leading=plain)


def with_private(setup: Setup, is_private: Callable[[str], bool], anonymous: Anonymous) -> Method:
    """FedAvg in which some parameters stay with their client."""

    def place(name: str) -> Place:
        return "private" if is_private(name) else "shared"

    return replace(fedavg(setup), place=place, anonymous=anonymous)


def average_weights(model: Model, parts: Parts, privates: Sequence[Params], log_p_s: Tensor, x: Tensor) -> Tensor:
    """log p(y|x) without identity: of one model, with the clients' private parameters averaged with p(s)."""
    p_s = log_p_s.exp().tolist()
    mean = {}
    for name in privates[0]:
        weighted = [p * private[name] for p, private in zip(p_s, privates, strict=True)]
        mean[name] = sum(weighted, torch.zeros(()))
    logits, _ = model.apply({**parts.whole(), **mean}, x, training=False)
    return torch.log_softmax(logits, dim=1)


def inside(name: str, layer: str) -> bool:
    """Whether a parameter belongs to a layer, by their names."""
    return name == layer or name.startswith(layer + ".")


PAGE = Page("FedAvg", fedavg, paper="McMahan et al., 2017; Reddi et al., 2020")
