"""Local/Global (Liang et al., 2020): each client has some layers of its own, by default the input layer.

The rest is FedAvg's.

Without identity the clients' representations are averaged before the shared layers see them (sec:NewShardInf).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from fedmix.core.method import Anonymous, Method, Parts, Setup
from fedmix.core.model import Model
from fedmix.core.tree import Params
from fedmix.errors import SettingError, one_of
from fedmix.methods.fedavg import inside, with_private
from fedmix.methods.page import Page


@dataclass(frozen=True)
class LocalGlobalSettings:
    """Local/Global: which layers stay with the client, how they start, and what is averaged where no client is known."""

    layers: list[str] = field(default_factory=list)  # names of modules; none: the input layer
    start: str = "alike"  # private layers of all clients start from the same draw, or "apart"
    average: str = "after"  # representations after the activation, as the shared layers see them, or "before" it

    def __post_init__(self) -> None:
        for name, known in (("start", ("alike", "apart")), ("average", ("after", "before"))):
            if getattr(self, name) not in known:
                raise SettingError(one_of(f"local_global.{name}", getattr(self, name), known))


def local_global(setup: Setup, settings: LocalGlobalSettings) -> Method:
    """FedAvg in which some layers are private."""
    layers = private_layers(setup, settings)
    averaged = partial(average_representations, setup.model, layers, settings.average)
    anonymous = Anonymous("representations averaged", averaged)
    method = with_private(setup, partial(in_some, layers), anonymous)
    return replace(method, apart=settings.start == "apart")


def in_some(layers: Sequence[str], name: str) -> bool:
    """Whether a parameter belongs to one of these layers."""
    return any(inside(name, layer) for layer in layers)


def private_layers(setup: Setup, settings: LocalGlobalSettings) -> list[str]:
    """The layers that the recipe names, else the input layer."""
    params = dict(setup.model.module.named_parameters())
    layers = settings.layers or setup.model.layers_in_order(params, setup.example)[:1]
    for layer in layers:
        _refuse_unknown(layer, setup.model, list(params))
    if all(in_some(layers, name) for name in params):
        raise SettingError("local_global.layers names every layer; use the method 'independent' for that.")
    return list(layers)


def _refuse_unknown(layer: str, model: Model, params: Sequence[str]) -> None:
    if not any(inside(name, layer) for name in params):
        known = ", ".join(name for name, _ in model.module.named_modules() if name)
        raise SettingError(f"local_global.layers must name layers of the model ({known}). Got {layer!r} instead.")


def average_representations(
    model: Model,
    layers: Sequence[str],
    average: str,
    parts: Parts,
    privates: Sequence[Params],
    log_p_s: Tensor,
    x: Tensor,
) -> Tensor:
    """log p(y|x) from the outputs of the clients' private layers, averaged with p(s): [B, ...] -> [B, classes]."""
    models = [{**parts.whole(), **private} for private in privates]
    last = model.layers_in_order(models[0], x[:1], among=layers)[-1]
    place = model.where_after(models[0], x[:1], last) if average == "after" else model.where_of(last)
    p_s = log_p_s.exp().tolist()
    # one client after the other: a list would hold all of their representations at once
    weighted = (p * model.value_at(w, x, place) for p, w in zip(p_s, models, strict=True))
    representation = sum(weighted, torch.zeros(()))
    logits = model.apply_from(models[0], x, place, representation)
    return torch.log_softmax(logits, dim=1)


PAGE = Page("Local/Global", local_global, LocalGlobalSettings, "Liang et al., 2020")
