"""The loop that every client runs: mini-batches in an order of the client's own, an SGD step on each.

One client (`train_client`), or several side by side (`train_group`): the same loss, for one client, is given to both.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmix.core.optim import Optimizer, keep_rows
from fedmix.core.tree import Params, all_finite, like_tree, tensors_of
from fedmix.core.types import Examples
from fedmix.errors import StepError
from fedmix.rng import Stream

Carry = Any  # what a step hands to the next beside parameters: a tree of tensors


class Batch(NamedTuple):
    """A mini-batch: x [B, ...], y [B], c [B]. weight [B] is 1/B for points that are really there, 0 for what fills up."""

    x: Tensor
    y: Tensor
    c: Tensor
    weight: Tensor


# (parameters, mini-batch, carry) -> (loss of each point [B], penalty, carry)
PointLoss = Callable[[Mapping[str, Tensor], Batch, Carry], tuple[Tensor, "Tensor | float", Carry]]
# (parameters, what stays the same while clients train, mini-batches, carry) -> (loss of each client [G], carry)
GroupLosses = Callable[[Mapping[str, Tensor], Any, Batch, Carry], tuple[Tensor, Carry]]
# a PointLoss for one client among several, which is also given what stays the same while it trains
GroupLoss = Callable[[Mapping[str, Tensor], Any, Batch, Carry], tuple[Tensor, "Tensor | float", Carry]]


@dataclass(frozen=True)
class Passes:
    """How a client goes over its points: in mini-batches of at most `batch_size`, `epochs` times.

    even: as many mini-batches as are needed, with sizes that differ by one at most; otherwise full ones, then what is left.
    """

    batch_size: int
    epochs: int
    even: bool

    def batches(self, n: int, rng: Stream, device: torch.device | None = None) -> Iterator[Tensor]:
        """Indices of the mini-batches, each pass over the n points in a new order."""
        for _ in range(self.epochs):
            order = torch.from_numpy(rng.permutation(n)).to(device)
            if self.even:
                parts = max(math.ceil(n / self.batch_size), 1)
                yield from torch.tensor_split(order, parts)
            else:
                yield from torch.split(order, self.batch_size)


@dataclass(frozen=True)
class Trained:
    """What a client has after training."""

    params: Params
    carry: Carry
    loss: float  # mean over the steps of the last epoch


@dataclass(frozen=True)
class Schedule:
    """How a client steps: the optimiser, what its rate is multiplied with, and how often it goes over its points."""

    optimizer: Optimizer
    factor: float
    passes: Passes
    # How much a point of each class counts, from a client's labels [classes]; None: all alike.
    weights: Callable[[Tensor], Tensor | None] = lambda y: None


def mean_of_last_epoch(losses: list[float], epochs: int) -> float:
    last = losses[-max(len(losses) // max(epochs, 1), 1) :]
    return sum(last) / max(len(last), 1)


def mean_loss(points: Tensor, penalty: Tensor | float, weight: Tensor) -> Tensor:
    """What is minimised, from the loss of each point [..., B]; points that only fill a group up weigh nothing. -> [...]"""
    if points.shape != weight.shape:
        raise ValueError(
            f"a loss must give one number for each of {weight.shape[-1]} points. Got {list(points.shape)}."
        )
    return (weight * points).sum(dim=-1) + penalty


def train_client(
    params: Mapping[str, Tensor],
    carry: Carry,
    loss_of: PointLoss,
    data: Examples,
    schedule: Schedule,
    rng: Stream,
    trains: Callable[[str], bool],
) -> Trained:
    """SGD on the loss of one mini-batch after the other. An error, or a loss that is not finite, names its step.

    trains: which parameters are trained; the others are used as they are.
    """
    # copies, since a module may touch its weights, and these are the server's
    current = {name: value.clone() for name, value in params.items()}
    state = schedule.optimizer.init(current)
    class_weights = schedule.weights(data.y)
    kind = next((w.dtype for w in current.values() if w.is_floating_point()), torch.get_default_dtype())
    losses: list[Tensor] = []  # read at the end: nothing waits for the device inside the loop
    views = rng.child("augment")
    with rng.child("dropout").torch():
        batches = schedule.passes.batches(len(data), rng.child("batches"), data.x.device)
        for step, index in enumerate(batches, start=1):
            batch = _as_batch(data.batch(index, views), kind, class_weights)
            leaves = _leaves(current, trains)
            try:
                points, penalty, carry = loss_of(current | leaves, batch, carry)
                loss = mean_loss(points, penalty, batch.weight)
                grads = _gradients(loss, leaves) if leaves else {}
            except Exception as error:
                raise StepError(f"step {step}: {type(error).__name__}: {error}") from error
            losses.append(loss.detach())
            with torch.no_grad():
                current, state = schedule.optimizer.update(current, grads, state, schedule.factor)
    values = values_of(losses)
    refuse_what_is_not_finite(values, current)
    return Trained(current, carry, mean_of_last_epoch(values, schedule.passes.epochs))


def _leaves(params: Mapping[str, Tensor], trains: Callable[[str], bool]) -> Params:
    """The parameters that are trained, as leaves of a new graph."""
    return {name: value.detach().requires_grad_() for name, value in params.items() if trains(name)}


def _gradients(loss: Tensor, leaves: Params) -> Params:
    """The gradients of what the loss depends on."""
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {name: g for name, g in zip(leaves, grads, strict=True) if g is not None}


def values_of(losses: Sequence[Tensor]) -> list[float]:
    """The losses as numbers. This waits for the device."""
    values: list[float] = torch.stack(list(losses)).tolist() if losses else []
    return values


def weighed(y: Tensor, weight: Tensor, class_weights: Tensor) -> Tensor:
    """Weights of points [..., B], 1/B each, as shares of their classes' weights; a mini-batch still weighs 1."""
    together = weight * class_weights.to(weight.dtype)[y]
    return together / together.sum(dim=-1, keepdim=True).clamp(min=1e-12)


def _as_batch(points: Examples, kind: torch.dtype, class_weights: Tensor | None) -> Batch:
    weight = torch.full((len(points),), 1 / max(len(points), 1), dtype=kind, device=points.x.device)
    if class_weights is not None:
        weight = weighed(points.y, weight, class_weights)
    return Batch(points.x, points.y, points.c, weight)


def refuse_what_is_not_finite(losses: Sequence[float], params: Mapping[str, Tensor]) -> None:
    """Raise an error that names the first step whose loss is not finite, or if the weights are not finite at the end."""
    for step, value in enumerate(losses, start=1):
        if not math.isfinite(value):
            raise StepError(f"step {step}: the loss is {value}; a smaller client_lr may help")
    if not all(all_finite(value) for value in params.values()):
        raise StepError(f"step {len(losses)}: the weights are not finite any more; a smaller client_lr may help")


def train_group(
    params: Mapping[str, Tensor],
    fixed: Any,
    carry: Carry,
    losses_of: GroupLosses,
    data: Sequence[Examples],
    schedule: Schedule,
    rngs: Sequence[Stream],
    trains: Callable[[str], bool],
) -> list[Trained | StepError]:
    """`train_client` for G clients side by side: every tensor of `params`, `fixed` and `carry` has a first dimension of G.

    Each client takes the same mini-batches as it would alone. A client that has no mini-batch left keeps its weights and its
    carry. Gives what each client has after training, or an error where its training failed.
    """
    fill = _Filler(data, schedule, rngs)
    current = {name: value.clone() for name, value in params.items()}
    state = schedule.optimizer.init(current)
    losses: list[Tensor] = []
    for step in range(max(fill.steps)):
        batch = fill.batch(step)
        leaves = _leaves(current, trains)
        client_losses, new_carry = losses_of(current | leaves, fixed, batch, carry)
        grads = _gradients(client_losses.sum(), leaves)
        losses.append(client_losses.detach())
        with torch.no_grad():
            after, state_after = schedule.optimizer.update(current, grads, state, schedule.factor)
            active = fill.active(step)
            if active is not None:  # a client that is done must not step without points
                after = _only(active, after, current)
                state_after = {part: _only(active, tensors, state[part]) for part, tensors in state_after.items()}
                new_carry = like_tree(carry, _only(active, tensors_of(new_carry), tensors_of(carry)))
            current, state, carry = after, state_after, new_carry
    return _outcomes(torch.stack(losses).T.tolist(), fill.steps, current, carry, schedule.passes.epochs)


def with_leading_dimension(loss_of: GroupLoss) -> GroupLosses:
    """The loss of each of G clients [G], from one that takes all of them at once: points [G, B], a penalty [G] or none."""

    def losses_of(params: Mapping[str, Tensor], fixed: Any, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        points, penalty, after = loss_of(params, fixed, batch, carry)
        return mean_loss(points, penalty, batch.weight), after

    return losses_of


class Vectorised:
    """The loss of each of G clients [G], and their carry, from the loss of one client.

    torch.vmap is given one flat tuple of tensors: walking through nested containers costs it more than small models do.
    """

    def __init__(self, loss_of: GroupLoss, params: Mapping[str, Tensor], fixed: Any, carry: Carry) -> None:
        self._loss_of = loss_of
        self._names = list(params)
        self._fixed = fixed
        self._fixed_names = list(tensors_of(fixed))
        self._carry = carry
        self._carry_names = list(tensors_of(carry))
        self._vectorised = torch.vmap(self._of_client)

    def _of_client(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """One client: parameters, what is fixed, the mini-batch and the carry, one after the other."""
        params_end = len(self._names)
        fixed_end = params_end + len(self._fixed_names)
        batch_end = fixed_end + len(Batch._fields)
        params = dict(zip(self._names, leaves[:params_end], strict=True))
        fixed = dict(zip(self._fixed_names, leaves[params_end:fixed_end], strict=True))
        batch = Batch(*leaves[fixed_end:batch_end])
        carry = dict(zip(self._carry_names, leaves[batch_end:], strict=True))
        points, penalty, after = self._loss_of(
            params, like_tree(self._fixed, fixed), batch, like_tree(self._carry, carry)
        )
        carried = tensors_of(after)
        return (mean_loss(points, penalty, batch.weight), *(carried[name] for name in self._carry_names))

    def __call__(self, params: Mapping[str, Tensor], fixed: Any, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        constant, carried = tensors_of(fixed), tensors_of(carry)
        losses, *after = self._vectorised(
            *(params[name] for name in self._names),
            *(constant[name] for name in self._fixed_names),
            *batch,
            *(carried[name] for name in self._carry_names),
        )
        return losses, like_tree(self._carry, dict(zip(self._carry_names, after, strict=True)))


class _Filler:
    """The mini-batches of several clients as one tensor each, filled up with zeros that weigh nothing."""

    def __init__(self, data: Sequence[Examples], schedule: Schedule, rngs: Sequence[Stream]) -> None:
        self._class_weights = [schedule.weights(points.y) for points in data]
        longest = max(len(points) for points in data)
        self._x = _filled([points.x for points in data], longest)
        self._y = _filled([points.y for points in data], longest)
        self._c = _filled([points.c for points in data], longest)
        self._device = self._x.device
        plans = self._plans(data, schedule.passes, rngs)
        self.steps = [len(plan) for plan in plans]
        self._members = torch.arange(len(data), device=self._device).unsqueeze(1)
        self._batches: list[tuple[Tensor, Tensor]] = []
        self._active: list[Tensor | None] = []
        for step in range(max(self.steps)):
            self._add_step([plan[step] if step < len(plan) else plan[0][:0] for plan in plans])

    def _plans(self, data: Sequence[Examples], passes: Passes, rngs: Sequence[Stream]) -> list[list[Tensor]]:
        """The mini-batches of each client, as indices into its points."""
        plans = []
        for points, rng in zip(data, rngs, strict=True):
            batches = passes.batches(len(points), rng.child("batches"), self._device)
            plans.append(list(batches))
        return plans

    def _add_step(self, taken: Sequence[Tensor]) -> None:
        """One more step, from the points that each client takes in it: none, if it is done."""
        lengths = [len(points) for points in taken]
        counts = torch.tensor(lengths, device=self._device)
        index = _filled(taken, max(lengths))
        there = torch.arange(index.shape[1], device=self._device) < counts.unsqueeze(1)
        weight = there / counts.clamp(min=1).unsqueeze(1)
        self._batches.append((index, weight))
        self._active.append(None if min(lengths) else counts > 0)

    def batch(self, step: int) -> Batch:
        """The mini-batches of all clients in a step."""
        index, weight = self._batches[step]
        at = (self._members, index)
        y = self._y[at]
        if self._class_weights[0] is not None:
            rows = [
                weighed(y[g], weight[g], weights)
                for g, weights in enumerate(self._class_weights)
                if weights is not None
            ]
            weight = torch.stack(rows)
        return Batch(self._x[at], y, self._c[at], weight)

    def active(self, step: int) -> Tensor | None:
        """Which clients still have a mini-batch in this step [G]; None: all of them."""
        return self._active[step]


def _outcomes(
    losses: list[list[float]], steps: Sequence[int], params: Params, carry: Carry, epochs: int
) -> list[Trained | StepError]:
    """What each client of a group has after training."""
    outcomes: list[Trained | StepError] = []
    for g, taken in enumerate(steps):
        alone = {name: value[g] for name, value in params.items()}
        values = losses[g][:taken]
        try:
            refuse_what_is_not_finite(values, alone)
            carried = like_tree(carry, {name: value[g] for name, value in tensors_of(carry).items()})
            outcomes.append(Trained(alone, carried, mean_of_last_epoch(values, epochs)))
        except StepError as error:
            outcomes.append(error)
    return outcomes


def _only(active: Tensor, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> Params:
    """The new values for clients that are still training, the old ones for those that are done."""
    return {name: keep_rows(active, value, old[name]) for name, value in new.items()}


def _filled(tensors: Sequence[Tensor], length: int) -> Tensor:
    """Tensors of different lengths as one, [G, length, ...], filled up with zeros."""
    out = tensors[0].new_zeros(len(tensors), length, *tensors[0].shape[1:])
    for row, value in zip(out, tensors, strict=True):
        row[: len(value)] = value
    return out
