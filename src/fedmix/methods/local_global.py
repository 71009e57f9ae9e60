"""Local/Global (Liang et al., 2020): some layers are each client's own, the input layer if none is named; the rest is FedAvg's.

Without identity the clients' representations are averaged before the shared layers see them (the paper, sec:NewShardInf).
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
    layers = private_layers(setup, settings)
    averaged = partial(average_representations, setup.model, layers, settings.average)
    method = with_private(
        setup,
        lambda name: any(inside(name, layer) for layer in layers),
        Anonymous("representations averaged", averaged),
    )
    return replace(method, apart=settings.start == "apart")


def private_layers(setup: Setup, settings: LocalGlobalSettings) -> list[str]:
    """The layers that the recipe names, else the input layer."""
    params = dict(setup.model.module.named_parameters())
    layers = settings.layers or setup.model.layers_in_order(params, setup.example)[:1]
    for layer in layers:
        if not any(inside(name, layer) for name in params):
            known = ", ".join(name for name, _ in setup.model.module.named_modules() if name)
            raise SettingError(f"local_global.layers must name layers of the model ({known}). Got {layer!r} instead.")
    if all(any(inside(name, layer) for layer in layers) for name in params):
        raise SettingError("local_global.layers names every layer; use the method 'independent' for that.")
    return list(layers)


def average_representations(
    model: Model,
    layers: Sequence[str],
    average: str,
    parts: Parts,
    privates: Sequence[Params],
    log_p_s: Tensor,
    x: Tensor,
) -> Tensor:
    """log p(y|x) from what the clients' private layers give, averaged with p(s): [B, ...] -> [B, classes]."""
    models = [{**parts.whole(), **private} for private in privates]
    last = model.layers_in_order(models[0], x[:1], among=layers)[-1]
    place = model.where_after(models[0], x[:1], last) if average == "after" else model.where_of(last)
    weights = log_p_s.exp().tolist()
    values = (p * model.value_at(w, x, place) for p, w in zip(weights, models, strict=True))
    representation = sum(values, torch.zeros(()))
    return torch.log_softmax(model.apply_from(models[0], x, place, representation), dim=1)


PAGE = Page("Local/Global", local_global, LocalGlobalSettings, "Liang et al., 2020")
