"""The words that every room shares: what crosses the wire, what stays with a client, what a method is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fedmix.core.tree import Params, nbytes, placed
from fedmix.rng import Stream

Private = Params  # theta_s, local layers, local biases: named tensors that stay with their client
State = Any  # a frozen dataclass of the method's own; `core.tree` flattens it for checkpoints


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
        return Examples(self.augment(x, rng) if self.augment else x, self.y[index], self.c[index])


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
    """What a server update found out on the way: numbers, and small lists, for metrics."""

    divergence: float | None
    detail: Mapping[str, Any] = field(default_factory=dict)


GroupUpdate = Callable[
    [Sequence[Message], Sequence[Private], Sequence[Examples], Sequence[Stream], int | None],
    list[tuple[Message, Private]] | None,
]


@dataclass(frozen=True)
class Algorithm:
    """A method as a value: pure functions, cut where the wire is.

    init               (seed) -> the server's state before round 1
    new_client         (seed) -> the private state that every client starts from
    broadcast          (state, client) -> what this client is sent; None: everything, for an evaluation at the server
    client_update      (message, private, train data, stream, epochs) -> (reply, private); epochs None: the recipe's own
    check              (what was sent, reply) -> what is wrong with the reply, as 'field: reason', or None
    server_update      (state, replies) -> (state, diagnosis)
    predict            (message or reply, private, x) -> log p(y | x, s) [B, classes]
    adapt              (message, private, labelled data, stream, epochs) -> (message, private) of a client that trains its
                       private parts alone; what is shared stays as it is
    newcomer           (state, whether its side information has values that training knows) -> what a client is sent that
                       never took part
    wrap               (what was sent, reply, stream) -> the reply as it crosses the wire: noise, weighted sums
    predict_anonymous  (message, private states, log p(s) [S] or log p(s|x) [B, S], x) -> log p(y | x) [B, classes]: no
                       client identity
    counted            (private, its labels) -> private state that knows how often each occurs, before any training; what is
                       shared then gives p(y|x) of labels in equal shares. None: training.label_counts is off
    pool               (message, x) -> log p(y | x) [B, classes] from what is shared alone, where c is the label; None: the
                       method has no posterior to do it with
    hand_over          (private) -> the part of it that predictions without identity need
    distil             (message, private states, log p(s), inputs) -> one private state that does in place of all of
                       them; None: the method has no gates
    warm_start         (state, expert parameters of another run, stream) -> state
    describe           (state) -> what a reader of metrics wants to see of the state, as plain lists
    experts            (state) -> the shared models' parameters, one dict for each expert
    uses_private       whether predictions without identity need anything private: if not, clients hand nothing over for them
    group_update       client_update of several clients at once, where that is quicker (small models), else None: the same
                       numbers up to rounding; gives None where these clients cannot be taken together
    """

    name: str
    init: Callable[[int], State]
    new_client: Callable[[int], Private]
    broadcast: Callable[[State, int | None], Message]
    client_update: Callable[[Message, Private, Examples, Stream, int | None], tuple[Message, Private]]
    adapt: Callable[[Message, Private, Examples, Stream, int], tuple[Message, Private]]
    newcomer: Callable[[State, bool], Message]
    wrap: Callable[[Message, Message, Stream], Message]
    check: Callable[[Message, Message], str | None]
    server_update: Callable[[State, Sequence[Reply]], tuple[State, Diagnosis]]
    predict: Callable[[Message, Private, Tensor], Tensor]
    predict_anonymous: Callable[[Message, Sequence[Private], Tensor, Tensor], Tensor]
    warm_start: Callable[[State, Sequence[Params], Stream], State]
    describe: Callable[[State], dict[str, Any]]
    experts: Callable[[State], tuple[Params, ...]]
    uses_private: bool
    counted: Callable[[Private, Tensor], Private] | None = None
    pool: Callable[[Message, Tensor], Tensor] | None = None
    hand_over: Callable[[Private], Private] = dict
    distil: Callable[[Message, Sequence[Private], Tensor, Tensor], Private] | None = None
    group_update: GroupUpdate | None = None
