"""What a method is: one loss, a rule of where tensors live, and what it adds. Everything else is derived from that.

A page of `fedmix.methods` gives a `Method`, built for a `Setup`. Only `loss` is required; FedAvg is little more. The house
derives broadcast, training of one client or of several side by side, checks of replies, noise, sums, aggregation, bytes,
warm starts, divergence, prediction and an exported module (core.algorithm).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fedmix.core.model import Model
from fedmix.core.placement import Place
from fedmix.core.score import Measure
from fedmix.core.settings import ClientSettings, PrivacySettings, ServerSettings
from fedmix.core.training import Batch as Batch
from fedmix.core.training import Carry
from fedmix.core.tree import Params
from fedmix.core.types import Examples
from fedmix.rng import Stream

Extras = dict[str, Any]  # what the server keeps beside weights: a tree of tensors and whole numbers
Fixed = dict[str, Any]  # what stays the same while a client trains: a tree of tensors and numbers
VECTORS = ("vector", "angle")  # kinds of side information c that are numbers [D] of each point, and not categories
LABELS = ".labels"  # a name in a client's private state that no parameter of a module has


@dataclass(frozen=True)
class Setup:
    """What a method is built for."""

    model: Model
    clients: int
    categories: int  # how many values side information c can have; where c is a vector, how many numbers it has
    rounds: int
    training: ClientSettings
    server: ServerSettings
    privacy: PrivacySettings
    example: Tensor  # a few inputs [B, ...]
    side: str  # what side information c is: "label", "client", "rotation", ...
    measures: Mapping[str, Measure] = field(default_factory=dict)  # of the user's own, beside those of core.score


class Parts(NamedTuple):
    """A client's weights as its method sees them: by place, and what the method itself trains at the client."""

    shared: Params
    experts: dict[int, Params]  # those that the client holds, by number; or, side by side, see `stacked`
    private: Params
    frozen: Params
    own: Params  # what the method keeps at the client and trains: gates
    kept: Params  # what it keeps there and does not train
    labels: Params  # the client's own label counts as an offset of logits, under one name, or nothing
    stacked: Params  # experts [K, ...] in place of `experts`, where they share layers or clients train side by side
    group: int = 0  # how many clients these are, where tensors have a first dimension for them (`Method.leading`)

    def whole(self, k: int | None = None) -> Params:
        """All parameters of one model: expert k's, or of the only one there is."""
        experts = {} if k is None else self.experts[k]
        return {**self.frozen, **self.shared, **self.private, **experts}

    @property
    def held(self) -> list[int]:
        return list(self.experts)


class Arrival(NamedTuple):
    """What a client has before it trains."""

    parts: Parts  # the weights, as they arrived
    sent: Params  # what the server sent beside weights
    private: Params  # all that the method keeps at this client, trained or not
    data: Examples
    round: int
    rng: Stream
    # What the client keeps whatever the method is: names that begin with a dot.
    house: Params = {}  # noqa: RUF012 (never changed)

    def done(self, parts: Parts, fixed: Fixed | None = None, carry: Carry = None) -> "Departure":
        """What a programme of phases gives back: these parts, after training."""
        carry = {} if carry is None else carry
        return Departure(parts, self.sent, fixed or {}, carry, self.data)


class Departure(NamedTuple):
    """What a client has after it trained."""

    parts: Parts
    sent: Params
    fixed: Fixed
    carry: Carry
    data: Examples


class Answer(NamedTuple):
    """What a client says beside its weights, and what it keeps."""

    fields: Params = {}  # noqa: RUF012 (never changed)
    experts: list[int] | None = None  # those whose weights it sends back; None: all that it holds
    keeps: Params = {}  # noqa: RUF012


@dataclass(frozen=True)
class Field:
    """A tensor that every reply holds beside weights: rows [..., n] that are distributions, or any finite numbers.

    kind: "simplex" for distributions, "numbers" for anything else; noise can protect the first alone.
    moved_from: the name of what was sent that it is a new value of; sums are then over how far it moved.
    tells: for audits, what it says of a client: its "marginal" q(z|s), the "posterior" q(z|c) or the "shares" of c.
    """

    shape: tuple[int, ...]
    moved_from: str = ""
    tells: str = ""
    kind: Literal["simplex", "numbers"] = "simplex"


class Aggregate(NamedTuple):
    """What the server knows after a round, from sums over the cohort alone."""

    clients: int
    use: Tensor  # p(z) over the cohort [K]
    mean: Params  # for each field: sum_s p(s) value_s
    moved: Params  # for each field that is a new value of something sent: sum_s p(s) (sent - value_s)
    touched: Params  # for the same fields: the rows that some client changed


# (parts, fixed, mini-batch, carry) -> (loss of each point [B], penalty, carry)
Loss = Callable[[Parts, Fixed, Batch, Carry], tuple[Tensor, Tensor | float, Carry]]


class Fit(Protocol):
    """The loop, for programmes of phases: it trains some of the parts for some epochs, and gives back parts and carry.

    only: which of them, by names such as shared.fc.weight, expert.2.fc.weight, private.out.bias or own.gate.A; all by default.
    epochs: how many in this phase; None: the recipe's. Where a client fine-tunes or adapts, that says how many there are,
    whatever a phase asks for.
    phase: a name; phases with different names go over the points in different orders.
    """

    def __call__(
        self,
        parts: Parts,
        loss: Loss,
        fixed: Fixed | None = None,
        carry: Carry = None,
        only: Callable[[str], bool] = ...,
        epochs: int | None = None,
        phase: str = "",
    ) -> tuple[Parts, Carry]: ...


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """-log p(y|x) of each point: [..., B, classes], [..., B] -> [..., B]."""
    return -torch.log_softmax(logits, dim=-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)


def every_model(parts: Parts) -> list[Params]:
    """One model for each expert that the client holds; one model where there are no experts."""
    return [parts.whole(k) for k in parts.held] if parts.experts else [parts.whole()]


def only_one(logits: Tensor, features: Tensor, private: Params, held: list[int]) -> Tensor:
    """log p(y|x) of a single model: logits [1, B, classes] -> [B, classes]."""
    return torch.log_softmax(logits[0], dim=1)


@dataclass(frozen=True)
class Anonymous:
    """Predictions without client identity, where private parts decide.

    what: how it is done, in words, for tables.
    private: whether it needs the clients' private states; otherwise what is shared is enough.
    predict: (the server's parts, private states, log p(s) [S] or log p(s|x) [B, S], x) -> log p(y|x).
    pool: (parts, what is sent beside weights, x) -> log p(y|x) from what is shared alone, where c is the label.
    distil: (parts, private states, log p(s), inputs) -> one private state in place of all of them.
    """

    what: str
    predict: Callable[[Parts, Sequence[Params], Tensor, Tensor], Tensor]
    private: bool = True
    pool: Callable[[Parts, Params, Tensor], Tensor] | None = None
    distil: Callable[[Parts, Sequence[Params], Tensor, Tensor], Params] | None = None


@dataclass(frozen=True)
class Method:
    """A method as a value: what it does at each point, and a default for all but the loss.

    In what follows `private` is what `own` gave, as the client has trained it since.

    loss          (parts, fixed, batch, carry) -> (loss of each point [B], penalty, carry): of one client on one mini-batch.
                  Points that only fill a group up count nothing: the house weighs them. A loss that sums over points itself
                  weighs them with batch.weight
    place         (name) -> where a parameter lives
    experts       how many, where parameters are placed as "expert"
    prepare       (arrival) -> (fixed, carry): one look at a client's data and at what arrived, before it trains
    train         (fit, arrival) -> arrival.done(parts): a programme of its own in place of the loop, in phases; such clients
                  never train side by side. The loss that metrics show is then that of the last phase
    own           (the weights that the model starts from) -> what a client keeps beside weights, before it has trained
    trains        (name) -> whether the loop trains this part of `own`
    reply         what replies hold beside weights
    weigh         the name of the reply's field [K] that weighs its experts; needed where there are experts
    answer        (departure) -> what the client says and keeps
    init          () -> what the server keeps beside weights
    sends         (extras) -> the part of it that clients are sent
    select        (extras, client) -> the experts that a client is sent; None: all
    chances       (extras, client) -> the chance that each expert is sent to the client in a round [K], above 0; None: 1. What
                  comes back is weighed by one over it, so that an expert's mean update is the same in expectation
    server        (extras, aggregate) -> extras: from sums alone
    individuals   (extras, clients, fields [S', ...]) -> extras: what is kept of single clients, where the server sees them
    watch         (extras, aggregate, round) -> more metrics of a round
    describe      (extras) -> what a reader of metrics wants to see of them, at evaluations
    models        (parts) -> the models that a prediction needs, each as a whole set of parameters
    combine       (logits [M, B, classes], features [M, B, H], private, held) -> log p(y|x, s) [B, classes]
    gates         (features [M, B, H], private, held) -> p(z|x, s) [B, M]; None: there is one model
    bound         (logits, features, private, sent, y, c, held) -> the objective of each point [B], for metrics
    anonymous     predictions without client identity; None: those of the shared model where nothing is private, else none
    newcomer      (extras, whether its values of c are known) -> what a client that never took part is sent beside weights
    hand_over     (private state) -> the part of it that predictions without identity need
    longer_steps  (q(z|s)) -> how much longer all steps together are than one model's, for audits
    ungroupable   why clients cannot be trained side by side, or None
    leading       the loss again, if it takes tensors with a first dimension for several clients as they are: it is then not
                  vectorised by torch.vmap, which is quicker for small models. It is tried out before it is relied on. A
                  method that puts another loss in place of this one is vectorised again
    stacks        whether the loss takes experts as `Parts.stacked`, so that what they share is computed once
    needs_clients why the server must see single clients, which excludes sums, or None
    alive         (extras) -> the experts that there are now; None: all of them, always
    restructure   (before, after, clients, replies, fields, points) -> (state, events): changes of which experts there are, from
                  the state that clients were sent, the state after their replies, and each client's weights and fields
    migrate       (private, sent) -> private: what a client keeps, brought up to date with experts that came while it was away
    apart         whether private tensors start differently on each client
    adapts        what a new client with labels trains, in words
    """

    loss: Loss
    place: Callable[[str], Place] = lambda name: "shared"
    experts: int = 0
    prepare: Callable[[Arrival], tuple[Fixed, Carry]] = lambda arrival: ({}, {})
    train: Callable[[Fit, Arrival], Departure] | None = None
    own: Callable[[Params], Params] = lambda weights: {}
    trains: Callable[[str], bool] = lambda name: True
    reply: Mapping[str, Field] = field(default_factory=dict)
    weigh: str = ""
    answer: Callable[[Departure], Answer] = lambda departure: Answer()
    init: Callable[[], Extras] = dict
    sends: Callable[[Extras], Params] = lambda extras: {}
    select: Callable[[Extras, int], list[int]] | None = None
    chances: Callable[[Extras, int], Tensor] | None = None
    server: Callable[[Extras, Aggregate], Extras] = lambda extras, aggregate: extras
    individuals: Callable[[Extras, Sequence[int], Params], Extras] | None = None
    watch: Callable[[Extras, Aggregate, int], dict[str, Any]] = lambda extras, aggregate, t: {}
    describe: Callable[[Extras], dict[str, Any]] = lambda extras: {}
    models: Callable[[Parts], list[Params]] = every_model
    combine: Callable[[Tensor, Tensor, Params, list[int]], Tensor] = only_one
    gates: Callable[[Tensor, Params, list[int]], Tensor] | None = None
    bound: Callable[..., Tensor] | None = None
    anonymous: Anonymous | None = None
    newcomer: Callable[[Extras, bool], Params] | None = None
    hand_over: Callable[[Params], Params] = dict
    longer_steps: Callable[[Any], float] | None = None
    ungroupable: str | None = None
    leading: Loss | None = None
    stacks: bool = False
    needs_clients: str | None = None
    alive: Callable[[Extras], list[int]] | None = None
    restructure: Callable[..., tuple[Any, list[dict[str, Any]]]] | None = None
    migrate: Callable[[Params, Params], Params] | None = None
    apart: bool = False
    adapts: str = "private parts alone"

    @property
    def takes_groups(self) -> bool:
        """Whether the loss takes several clients at once by itself."""
        return self.leading is not None and self.leading is self.loss


def weights_and_fields(method: Method, tensors: Mapping[str, Tensor]) -> tuple[Params, Params]:
    """The tensors of a reply: weights, and the fields that the method declares."""
    weights: Params = {}
    fields: Params = {}
    for name, value in tensors.items():
        part = fields if name in method.reply else weights
        part[name] = value
    return weights, fields


def outputs(model: Model, parts: Parts, x: Tensor, training: bool = True) -> tuple[Tensor, Tensor]:
    """What all experts that a client holds, or its one model, give: logits [M, B, classes], features [M, B, H].

    The client's own label counts, where it has them, are added to the logits.
    """
    if parts.group:
        logits, features = model.apply_group(parts.frozen, {**parts.shared, **parts.private}, parts.stacked, x)
    elif parts.stacked:
        logits, features = model.apply_stacked(parts.whole(), parts.stacked, x, training)
    elif parts.experts and model.stacks(next(iter(parts.experts.values()))):
        logits, features = model.apply_stacked(parts.whole(), stack_experts(parts), x, training)
    else:
        logits, features = model.apply_all(every_model(parts), x, training)
    return with_labels(parts, logits), features


def stack_experts(parts: Parts) -> Params:
    """The tensors of all experts that a client holds as one each: [K', ...]."""
    experts = list(parts.experts.values())
    return {name: torch.stack([expert[name] for expert in experts]) for name in experts[0]}


def with_labels(parts: Parts, logits: Tensor) -> Tensor:
    """Logits with the client's label counts added: [..., M, B, classes] or [B, classes] -> the same shape."""
    if not parts.labels:
        return logits
    labels = parts.labels[LABELS]
    if parts.group:
        labels = labels[:, None, None]  # [G, classes] -> [G, 1, 1, classes]
    return logits + labels
