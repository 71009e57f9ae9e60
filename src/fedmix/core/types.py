"""The words that every room shares: what crosses the wire, what stays with a client, what points are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fedmix.core.tree import Params, nbytes, placed
from fedmix.rng import Stream

Private = Params  # theta_s, local layers, local biases: named tensors that stay with their client


@dataclass(frozen=True)
class Message:
    """What crosses the wire, in either direction: named tensors and a few numbers."""

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return nbytes(self.tensors)

    def to(self, device: torch.device) -> "Message":
        return Message(placed(self.tensors, device), self.numbers)


@dataclass(frozen=True)
class Examples:
    """Data points of one client: inputs x [N, ...], labels y [N], side information c [N] (a category of each point)."""

    x: Tensor
    y: Tensor
    c: Tensor
    augment: Callable[[Tensor, Stream], Tensor] | None = None  # new views of a mini-batch's inputs, for training

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, index: Tensor, rng: Stream) -> "Examples":
        """Some of the points, as they are trained on."""
        x = self.x[index]
        if self.augment:
            x = self.augment(x, rng)
        return Examples(x, self.y[index], self.c[index])


class Clients(Protocol):
    """Where an engine finds a client's data. `part` is 'train', 'validation' or 'test'."""

    def examples(self, client: int, part: str) -> Examples: ...
    def unit(self, x: Tensor) -> Tensor:
        """A model's inputs brought back to numbers in [0, 1], as a density model of pixels takes them."""
        ...

    def to(self, device: torch.device) -> "Clients":
        """The same data, placed on a device."""
        ...


@dataclass(frozen=True)
class Reply:
    """A client's answer in a round, as the server sees it."""

    client: int
    message: Message


@dataclass(frozen=True)
class Refusal:
    """A reply that the server does not work with: whose, which part of it, and why."""

    client: int
    field: str
    reason: str


@dataclass(frozen=True)
class Diagnosis:
    """What a server update has measured on the way: numbers, and small lists, for metrics."""

    divergence: float | None
    detail: Mapping[str, Any] = field(default_factory=dict)
