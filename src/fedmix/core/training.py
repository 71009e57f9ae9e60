"""The loop that every method's client runs: mini-batches in an order of the client's own, an SGD step on each."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fedmix.core.optim import Optimizer
from fedmix.core.tree import Params
from fedmix.core.types import Examples
from fedmix.errors import StepError
from fedmix.rng import Stream

Carry = TypeVar("Carry")


def batches(n: int, batch_size: int, epochs: int, rng: Stream) -> Iterator[Tensor]:
    """Indices of the mini-batches of `epochs` passes over n points, each pass in a new order; the last may be smaller."""
    for _ in range(epochs):
        yield from torch.split(torch.from_numpy(rng.permutation(n)), batch_size)


@dataclass(frozen=True)
class Trained(Generic[Carry]):
    params: Params
    carry: Carry  # what else a step hands to the next: phi, for FedMix
    loss: float  # mean over the steps of the last epoch


def train_client(
    params: Mapping[str, Tensor],
    carry: Carry,
    loss_of: Callable[[Mapping[str, Tensor], Examples, Carry], tuple[Tensor, Carry]],
    data: Examples,
    optimizer: Optimizer,
    factor: float,
    batch_size: int,
    epochs: int,
    rng: Stream,
    frozen: Callable[[str], bool] = lambda _: False,
) -> Trained[Carry]:
    """SGD on the loss of one mini-batch after the other. An error, or a loss that is not finite, names its step.

    frozen: parameters that are used, but not trained.
    """
    current = {
        name: value.clone() for name, value in params.items()
    }  # a module may touch its weights: not the server's
    state = optimizer.init(current)
    losses: list[float] = []
    views = rng.child("augment")
    with rng.child("dropout").torch():
        for step, index in enumerate(batches(len(data), batch_size, epochs, rng.child("batches")), start=1):
            batch = data.batch(index, views)
            leaves = {name: value.detach().requires_grad_() for name, value in current.items() if not frozen(name)}
            try:
                loss, carry = loss_of(current | leaves, batch, carry)
                grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            except Exception as error:
                raise StepError(f"step {step}: {type(error).__name__}: {error}") from error
            losses.append(float(loss.detach()))
            if not torch.isfinite(loss.detach()):
                raise StepError(f"step {step}: the loss is {losses[-1]}; a smaller client_lr may help")
            used = {name: g for name, g in zip(leaves, grads, strict=True) if g is not None}
            with torch.no_grad():
                current, state = optimizer.update(current, used, state, factor)
    if not all(bool(torch.isfinite(value).all()) for value in current.values()):
        raise StepError(f"step {len(losses)}: the weights are not finite any more; a smaller client_lr may help")
    last = losses[-max(len(losses) // max(epochs, 1), 1) :]
    return Trained(current, carry, sum(last) / max(len(last), 1))
