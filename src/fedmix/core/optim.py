"""Optimisers as (init, update): pure functions over named tensors, for clients (SGD) and for the server (SGD, Adam)."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmix.core.tree import Params

OptState = dict[str, Params]
LARGE = 2**18  # numbers in a tensor from which on new memory is slow


@dataclass(frozen=True)
class Optimizer:
    """init: params -> state; update: (params, gradients, state, rate factor) -> (params, state)."""

    init: Callable[[Mapping[str, Tensor]], OptState]
    update: Callable[[Mapping[str, Tensor], Mapping[str, Tensor], OptState, float], tuple[Params, OptState]]


def sgd(lr: float, momentum: float = 0.0, weight_decay: float = 0.0, over_gradients: bool = False) -> Optimizer:
    """torch.optim.SGD's rule: g += weight_decay w; v = momentum v + g; w -= lr v. What has no gradient is left alone.

    over_gradients: large results may be written where the gradients are, which nobody needs after the step.
    """

    def init(params: Mapping[str, Tensor]) -> OptState:
        if not momentum:
            return {}
        return {"velocity": {name: torch.zeros_like(w) for name, w in params.items()}}

    def update(
        params: Mapping[str, Tensor], grads: Mapping[str, Tensor], state: OptState, factor: float
    ) -> tuple[Params, OptState]:
        new, velocity = dict(params), dict(state.get("velocity", {}))
        plain = over_gradients and not momentum and not weight_decay
        reusable = large_and_alone(grads) if plain else set()
        for name, g in grads.items():
            w = params[name]
            if weight_decay:
                g = g.add(w, alpha=weight_decay)
            if momentum:
                g = velocity[name] = velocity[name].mul(momentum).add_(g)
            memory = g if name in reusable else None
            new[name] = torch.sub(w, g, alpha=lr * factor, out=memory)
        return new, ({"velocity": velocity} if momentum else {})

    return Optimizer(init, update)


def large_and_alone(grads: Mapping[str, Tensor]) -> set[str]:
    """The large gradients whose memory holds nothing else, so that a step may write its result there.

    New memory for some megabytes costs more than the step itself. autograd may give two parameters the same gradient, or a
    view of one number; these are left out.
    """
    uses = Counter(g.untyped_storage().data_ptr() for g in grads.values())
    return {name for name, g in grads.items() if g.numel() >= LARGE and _fills_its_memory(g, uses)}


def _fills_its_memory(value: Tensor, uses: Mapping[int, int]) -> bool:
    memory = value.untyped_storage()
    whole = value.is_contiguous() and memory.nbytes() == value.numel() * value.element_size()
    return whole and uses[memory.data_ptr()] == 1


def adam(
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    rows: bool = False,
    weight_decay: float = 0.0,
    decoupled: bool = False,
) -> Optimizer:
    """torch.optim.Adam's rule; decoupled: AdamW's, whose weight decay is no part of the gradient.

    With `rows`, each row of a tensor counts its own steps, so that rows can sit a round out. What has no gradient is left
    alone.
    """

    def init(params: Mapping[str, Tensor]) -> OptState:
        return {
            "mean": {name: torch.zeros_like(w) for name, w in params.items()},
            "square": {name: torch.zeros_like(w) for name, w in params.items()},
            "step": {name: no_steps(w) for name, w in params.items()},
        }

    def no_steps(w: Tensor) -> Tensor:
        """A count of steps for each row, or one for the whole tensor."""
        shape = [w.shape[0]] + [1] * (w.dim() - 1) if rows else []
        return w.new_zeros(shape)

    def update(
        params: Mapping[str, Tensor], grads: Mapping[str, Tensor], state: OptState, factor: float
    ) -> tuple[Params, OptState]:
        new = dict(params)
        after: OptState = {part: dict(values) for part, values in state.items()}
        for name, g in grads.items():
            w = params[name]
            if weight_decay and decoupled:
                w = w * (1 - lr * factor * weight_decay)
            elif weight_decay:
                g = g.add(w, alpha=weight_decay)
            step = state["step"][name] + 1
            mean = state["mean"][name].lerp(g, 1 - beta1)
            square = state["square"][name].mul(beta2).addcmul_(g, g, value=1 - beta2)
            count = step.to(torch.float64)  # 1 - 0.999 ** t has few digits left in float32
            correct1 = (1 - beta1**count).to(w.dtype)
            correct2 = (1 - beta2**count).sqrt().to(w.dtype)
            new[name] = w - lr * factor * (mean / correct1) / (square.sqrt() / correct2 + eps)
            after["mean"][name], after["square"][name], after["step"][name] = mean, square, step
        return new, after

    return Optimizer(init, update)


def keep_rows(held: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` where a row is held, `old` where it sat the round out: [C], [C, ...], [C, ...] -> [C, ...]."""
    rows = held.view([-1] + [1] * (new.dim() - 1))
    return torch.where(rows, new, old)


def rate_factor(schedule: str, t: int, rounds: int) -> float:
    """What the client rate is multiplied with in round t = 1..rounds: 'constant', 'cosine' or 'linear' down to zero."""
    if schedule == "constant":
        return 1.0
    done = min(max(t - 1, 0) / max(rounds, 1), 1.0)
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1.0 - done
