"""What the methods share: optimisers from settings, weights taken over from another run, clients' own label counts."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedmix.algorithms.settings import ClientSettings, PrivacySettings, ServerSettings
from fedmix.core import privacy
from fedmix.core.objective import label_offset
from fedmix.core.optim import Optimizer, adam, sgd
from fedmix.core.tree import Params
from fedmix.core.types import Private
from fedmix.errors import ModelError
from fedmix.rng import Stream


def client_optimizer(settings: ClientSettings) -> Optimizer:
    return sgd(settings.client_lr, settings.momentum, settings.weight_decay)


def server_optimizer(settings: ServerSettings, lr: float | None = None, rows: bool = False) -> Optimizer:
    """The optimiser of generalised FedAvg; 'average' is SGD with rate 1, whatever the rate that was set."""
    if settings.optimizer == "average":
        return sgd(1.0)
    rate = lr or settings.server_lr
    return adam(rate, rows=rows) if settings.optimizer == "adam" else sgd(rate)


def noise_source(settings: PrivacySettings, rng: Stream) -> privacy.Noise:
    """Where a client's noise comes from: its own machine, or the recipe's seed where a simulation asks for that."""
    return privacy.repeatable_noise(rng) if settings.reproducible else privacy.noise_of_this_machine


def fitting(w: Params, like: Params) -> Params:
    """The weights w, if they are of the same model as `like`."""
    shapes, wanted = ({name: tuple(value.shape) for name, value in p.items()} for p in (w, like))
    if shapes != wanted:
        raise ModelError(f"a warm start needs the same model. The other run's has {shapes}, this one's {wanted}.")
    return {name: w[name].clone() for name in like}


class OwnLabels:
    """training.label_counts: a client's own label counts in front of what is shared, which then learns p(y|x) of labels in
    equal shares (in a loss: Menon et al., 2021). They are private state; zeros, where nothing is known, change nothing.
    """

    NAME = ".labels"  # no parameter of a module has a name like this

    def __init__(self, settings: ClientSettings, classes: int) -> None:
        self.on = settings.label_counts
        self._classes = classes

    def new(self) -> Private:
        return {self.NAME: torch.zeros(self._classes)} if self.on else {}

    def of(self, y: Tensor) -> Private:
        """From a client's labelled points."""
        if not self.on:
            return {}
        counts = torch.bincount(y, minlength=self._classes).to(torch.float32)
        return {self.NAME: label_offset(counts, torch.full_like(counts, 1 / self._classes))}

    def counted(self, private: Private, y: Tensor) -> Private:
        """The private state of a client that knows its labels, though it may not have trained yet."""
        return {**private, **self.of(y)}

    def add(self, logits: Tensor, private: Mapping[str, Tensor]) -> Tensor:
        """[..., classes] -> [..., classes]."""
        return logits + private[self.NAME] if self.NAME in private else logits

    def without(self, private: Mapping[str, Tensor]) -> Params:
        return {name: value for name, value in private.items() if name != self.NAME}
