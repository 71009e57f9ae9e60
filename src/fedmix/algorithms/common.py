"""What the methods share: optimisers from settings, and weights taken over from another run."""

from fedmix.algorithms.settings import ClientSettings, ServerSettings
from fedmix.core.optim import Optimizer, adam, sgd
from fedmix.core.tree import Params
from fedmix.errors import ModelError


def client_optimizer(settings: ClientSettings) -> Optimizer:
    return sgd(settings.client_lr, settings.momentum, settings.weight_decay)


def server_optimizer(settings: ServerSettings, lr: float | None = None, rows: bool = False) -> Optimizer:
    """The optimiser of generalised FedAvg; 'average' is SGD with rate 1, whatever the rate that was set."""
    if settings.optimizer == "average":
        return sgd(1.0)
    rate = lr or settings.server_lr
    return adam(rate, rows=rows) if settings.optimizer == "adam" else sgd(rate)


def fitting(w: Params, like: Params) -> Params:
    """The weights w, if they are of the same model as `like`."""
    shapes, wanted = ({name: tuple(value.shape) for name, value in p.items()} for p in (w, like))
    if shapes != wanted:
        raise ModelError(f"a warm start needs the same model. The other run's has {shapes}, this one's {wanted}.")
    return {name: w[name].clone() for name in like}
