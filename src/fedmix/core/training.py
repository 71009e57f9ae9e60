"""The loop that every method's client runs: mini-batches in an order of the client's own, an SGD step on each."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fedmix.core.optim import Optimizer, keep_rows
from fedmix.core.tree import Params
from fedmix.core.types import Examples
from fedmix.errors import StepError
from fedmix.rng import Stream

Carry = TypeVar("Carry")


@dataclass(frozen=True)
class Passes:
    """How a client goes over its points: in mini-batches of at most `batch_size`, `epochs` times.

    even: as many mini-batches as are needed, their sizes one apart at most; otherwise full ones, and what is left over.
    """

    batch_size: int
    epochs: int
    even: bool

    def batches(self, n: int, rng: Stream, device: torch.device | None = None) -> Iterator[Tensor]:
        """Indices of the mini-batches, each pass over the n points in a new order."""
        for _ in range(self.epochs):
            order = torch.from_numpy(rng.permutation(n)).to(device)
            parts = max(math.ceil(n / self.batch_size), 1)
            yield from torch.tensor_split(order, parts) if self.even else torch.split(order, self.batch_size)


@dataclass(frozen=True)
class Trained(Generic[Carry]):
    params: Params
    carry: Carry  # what else a step hands to the next: phi, for FedMix
    loss: float  # mean over the steps of the last epoch


def mean_of_last_epoch(losses: list[float], epochs: int) -> float:
    last = losses[-max(len(losses) // max(epochs, 1), 1) :]
    return sum(last) / max(len(last), 1)


def train_client(
    params: Mapping[str, Tensor],
    carry: Carry,
    loss_of: Callable[[Mapping[str, Tensor], Examples, Carry], tuple[Tensor, Carry]],
    data: Examples,
    optimizer: Optimizer,
    factor: float,
    passes: Passes,
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
    losses: list[Tensor] = []  # read at the end: nothing waits for the device inside the loop
    views = rng.child("augment")
    with rng.child("dropout").torch():
        for step, index in enumerate(passes.batches(len(data), rng.child("batches"), data.x.device), start=1):
            batch = data.batch(index, views)
            leaves = {name: value.detach().requires_grad_() for name, value in current.items() if not frozen(name)}
            try:
                loss, carry = loss_of(current | leaves, batch, carry)
                grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            except Exception as error:
                raise StepError(f"step {step}: {type(error).__name__}: {error}") from error
            losses.append(loss.detach())
            used = {name: g for name, g in zip(leaves, grads, strict=True) if g is not None}
            with torch.no_grad():
                current, state = optimizer.update(current, used, state, factor)
    return Trained(current, carry, mean_of_last_epoch(_finite(losses, current), passes.epochs))


def _finite(losses: Sequence[Tensor], params: Mapping[str, Tensor]) -> list[float]:
    """The losses as numbers; the first step whose loss is not finite, or weights that are not, end the training."""
    values: list[float] = torch.stack(list(losses)).tolist() if losses else []
    for step, value in enumerate(values, start=1):
        if not math.isfinite(value):
            raise StepError(f"step {step}: the loss is {value}; a smaller client_lr may help")
    if not all(bool(torch.isfinite(value).all()) for value in params.values()):
        raise StepError(f"step {len(values)}: the weights are not finite any more; a smaller client_lr may help")
    return values


@dataclass(frozen=True)
class GroupBatch:
    """A mini-batch of each of G clients: x [G, B, ...], y [G, B], c [G, B]; `weight` [G, B] is 1/B_g for the B_g points
    that client g really has and 0 for what fills its row up, so that a weighted sum is the client's mean."""

    x: Tensor
    y: Tensor
    c: Tensor
    weight: Tensor


def train_group(
    params: Mapping[str, Tensor],
    carry: Carry,
    losses_of: Callable[[Mapping[str, Tensor], GroupBatch, Carry], tuple[Tensor, Carry]],
    data: Sequence[Examples],
    optimizer: Optimizer,
    factor: float,
    passes: Passes,
    rngs: Sequence[Stream],
    frozen: Callable[[str], bool] = lambda _: False,
) -> tuple[Params, Carry, list[float]]:
    """`train_client` for G clients side by side: every tensor of `params` and `carry` has a first dimension of G.

    The same mini-batches as each client would take alone. A client that has no mini-batch left keeps what it has. Gives the
    parameters, the carry, and each client's loss.
    """
    sizes = [len(own) for own in data]
    x, y, c = (_filled([getattr(own, name) for own in data], max(sizes)) for name in ("x", "y", "c"))
    device = x.device
    plans = [list(passes.batches(n, rng.child("batches"), device)) for n, rng in zip(sizes, rngs, strict=True)]
    steps = [len(plan) for plan in plans]
    members = torch.arange(len(data), device=device).unsqueeze(1)
    current = {name: value.clone() for name, value in params.items()}
    state = optimizer.init(current)
    losses: list[Tensor] = []
    for step in range(max(steps)):
        taken = [plan[step] if step < len(plan) else plan[0][:0] for plan in plans]
        index = _filled(taken, max(map(len, taken)))
        counts = torch.tensor([len(own) for own in taken], device=device)
        weight = (torch.arange(index.shape[1], device=device) < counts.unsqueeze(1)) / counts.clamp(min=1).unsqueeze(1)
        batch = GroupBatch(x[members, index], y[members, index], c[members, index], weight)
        leaves = {name: value.detach().requires_grad_() for name, value in current.items() if not frozen(name)}
        each, carry = losses_of(current | leaves, batch, carry)
        grads = torch.autograd.grad(each.sum(), list(leaves.values()), allow_unused=True)
        losses.append(each.detach())
        used = {name: g for name, g in zip(leaves, grads, strict=True) if g is not None}
        with torch.no_grad():
            after, state_after = optimizer.update(current, used, state, factor)
            if min(map(len, taken)) == 0:  # somebody is done: no step without points
                active = counts > 0
                after = {name: keep_rows(active, value, current[name]) for name, value in after.items()}
                state_after = {
                    part: {name: keep_rows(active, value, state[part][name]) for name, value in tensors.items()}
                    for part, tensors in state_after.items()
                }
            current, state = after, state_after
    history = torch.stack(losses)
    finite = bool(torch.isfinite(history).all()) and all(bool(torch.isfinite(w).all()) for w in current.values())
    if not finite:
        raise StepError("a loss or weight of the group is not finite")
    columns = history.T.tolist()
    return current, carry, [mean_of_last_epoch(own[:n], passes.epochs) for own, n in zip(columns, steps, strict=True)]


def _filled(tensors: Sequence[Tensor], length: int) -> Tensor:
    """Tensors of different lengths as one, [G, length, ...], filled up with zeros."""
    out = tensors[0].new_zeros(len(tensors), length, *tensors[0].shape[1:])
    for row, value in zip(out, tensors, strict=True):
        row[: len(value)] = value
    return out
