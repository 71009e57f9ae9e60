"""The client's side of any method, derived from it: training alone or in a group, adapting, what leaves the client."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fedmix.core import guard, privacy
from fedmix.core.method import (
    LABELS,
    Answer,
    Arrival,
    Departure,
    Fixed,
    Loss,
    Method,
    Parts,
    Setup,
    stack_experts,
    weights_and_fields,
)
from fedmix.core.objective import label_offset
from fedmix.core.optim import Optimizer, adam, rate_factor, sgd
from fedmix.core.placement import Layout, digest_of, wire_name
from fedmix.core.settings import ClientSettings
from fedmix.core.training import (
    Batch,
    Carry,
    GroupLosses,
    Schedule,
    Trained,
    Vectorised,
    mean_loss,
    train_client,
    train_group,
    with_leading_dimension,
)
from fedmix.core.tree import Params, only_tensors, placed, stack_trees, subtree, tensors_of
from fedmix.core.types import Examples, Message, Private
from fedmix.errors import ModelError, StepError
from fedmix.rng import Stream, stream

# Names that begin with a dot are the house's own: no parameter of a module has such a name.
START, FROZEN = ".start", ".frozen"  # prefixes of tensors that a client is sent once
STARTED = ".started"  # in a private state: it has gone on from what it was sent to start from
DIGEST = "frozen"  # among a message's numbers: which frozen tensors it is about

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ClientSide:
    """What a client does with a message, for one method."""

    name: str
    setup: Setup
    method: Method
    layout: Layout
    frozen: Params  # as every client can make them itself, from the recipe's seed

    # -- what a client has ---------------------------------------------------------------------------------------------

    def parts(self, message: Message, private: Mapping[str, Tensor]) -> Parts:
        """The tensors of a message and of a private state, by place."""
        private = self.up_to_date(message, private)
        unpacked = self.layout.unpack(message.tensors)
        frozen = self.frozen | subtree(private, FROZEN) | subtree(unpacked.beside, FROZEN)
        beside = self.beside(private)
        return Parts(
            shared=unpacked.shared,
            experts=unpacked.experts,
            private=self._private_weights(private, unpacked.beside),
            frozen=placed(frozen, _device_of(message, private)),
            own={name: value for name, value in beside.items() if self.method.trains(name)},
            kept={name: value for name, value in beside.items() if not self.method.trains(name)},
            labels={LABELS: private[LABELS]} if LABELS in private else {},
            stacked={},
        )

    def up_to_date(self, message: Message, private: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A private state that knows of every expert that the message knows of."""
        beside = self.beside(private)
        if self.method.migrate is None or not beside:
            return private
        return {**private, **self.method.migrate(beside, dict(message.tensors))}

    def _private_weights(self, private: Mapping[str, Tensor], sent: Params) -> Params:
        """Private layers: the client's, or until it has started from them, those that it is sent."""
        start = {} if STARTED in private else subtree(sent, START)
        if not self._holds_private(private):
            return start
        return self.layout.pick({**private, **start}, "private")

    def _holds_private(self, private: Mapping[str, Tensor]) -> bool:
        return all(name in private for name in self.layout.private)

    def beside(self, private: Mapping[str, Tensor]) -> Params:
        """What the method keeps at a client beside weights."""
        weights = set(self.layout.private)
        return {name: value for name, value in private.items() if name not in weights and not name.startswith(".")}

    def _refuse_other_frozen(self, message: Message, private: Mapping[str, Tensor]) -> None:
        wanted = message.numbers.get(DIGEST)
        frozen = self.frozen | subtree(private, FROZEN) | subtree(message.tensors, FROZEN)
        if wanted is not None and int(wanted) != self._digest(frozen):
            raise ModelError(
                "the model's frozen weights must be the server's. They are not: what builds the model must give the same "
                "pretrained weights everywhere."
            )

    def _digest(self, frozen: Params) -> int:
        if all(frozen[name] is value for name, value in self.frozen.items()):
            return self.own_digest
        return digest_of({**self.setup.model.buffers, **frozen})

    @cached_property
    def own_digest(self) -> int:
        """The digest of the frozen tensors that a client can make itself, and of the module's buffers."""
        return digest_of({**self.setup.model.buffers, **self.frozen})

    @cached_property
    def own_names(self) -> frozenset[str]:
        """The names of what the method keeps at a client beside weights."""
        return frozenset(self.method.own(self.setup.model.template))

    def own_labels(self, y: Tensor) -> Private:
        """What a client's labels add to its logits (training.label_counts), or nothing.

        What is shared then learns p(y|x) as if labels were equally frequent (in a loss: Menon et al., 2021). The counts
        are private state. Zeros, where nothing is known, change nothing.
        """
        if not self.setup.training.label_counts:
            return {}
        counts = torch.bincount(y, minlength=self.setup.model.classes).to(torch.float32)
        equal_shares = torch.full_like(counts, 1 / self.setup.model.classes)
        return {LABELS: label_offset(counts, equal_shares)}

    # -- training ------------------------------------------------------------------------------------------------------

    def update(
        self, message: Message, private: Private, data: Examples, rng: Stream, epochs: int | None
    ) -> tuple[Message, Private]:
        """Train one client alone. epochs None: the recipe's number, and its schedule of rates."""
        return self._train(message, private, data, rng, epochs, everything)

    def adapt(
        self, message: Message, private: Private, data: Examples, rng: Stream, epochs: int
    ) -> tuple[Message, Private]:
        """Train private parts alone, on labelled points of a client that never took part; what is shared stays."""
        if not self.layout.private and not self.own_names:
            return message, self.own_labels(data.y)
        reply, after = self._train(message, private, data, rng, epochs, private_alone)
        moved: Params = {}
        for name, declared in self.method.reply.items():
            if declared.moved_from and name in reply.tensors:
                moved[declared.moved_from] = reply.tensors[name]
        return Message({**message.tensors, **moved}, message.numbers), after

    def _train(
        self,
        message: Message,
        private: Private,
        data: Examples,
        rng: Stream,
        epochs: int | None,
        trains: Callable[[str], bool],
    ) -> tuple[Message, Private]:
        arrival = self._arrive(message, private, data, rng)
        schedule = self._schedule(arrival.round, epochs)
        if self.method.train is not None:
            by_gradient = self._without_statistics(trains)
            return self._in_phases(arrival, _Phases(arrival, schedule, by_gradient, epochs is not None))
        fixed, carry = self.method.prepare(arrival)
        stacked = self._stacks(arrival.parts)
        flat = to_flat(arrival.parts)
        if stacked:
            flat = _with_stacked_experts(flat, arrival.parts)

        def loss_of(params: Mapping[str, Tensor], batch: Batch, carry: Carry) -> tuple[Tensor, Tensor | float, Carry]:
            parts = from_flat(params, arrival.parts)
            if stacked:
                parts = _in_stacks(parts, params)
            return self.method.loss(parts, fixed, batch, carry)

        trained = train_client(flat, carry, loss_of, data, schedule, rng, self._without_statistics(trains))
        parts = from_flat(_unstacked(trained.params, arrival.parts.held), arrival.parts)
        departure = Departure(parts, arrival.sent, fixed, trained.carry, data)
        return self._leave(arrival, departure, trained.loss)

    def _without_statistics(self, trains: Callable[[str], bool]) -> Callable[[str], bool]:
        """What is trained by gradients: all but statistics of batch normalisation, which change in the forward pass."""
        statistics = {f"private.{name}" for name in self.setup.model.statistics}
        return lambda name: trains(name) and name not in statistics

    def _stacks(self, parts: Parts) -> bool:
        """Whether the experts are trained as one tensor each, so that what they share is computed once a step."""
        if not self.method.stacks or not parts.experts:
            return False
        return self.setup.model.stacks(next(iter(parts.experts.values())))

    def _in_phases(self, arrival: Arrival, phases: "_Phases") -> tuple[Message, Private]:
        """The method's own programme in place of the loop."""
        assert self.method.train is not None
        departure = self.method.train(phases, arrival)
        loss = phases.losses[-1] if phases.losses else 0.0
        return self._leave(arrival, departure, loss)

    def _arrive(self, message: Message, private: Private, data: Examples, rng: Stream) -> Arrival:
        self._refuse_other_frozen(message, private)
        known = {**private, **self.own_labels(data.y)}
        beside = self.layout.unpack(message.tensors).beside
        sent = {name: value for name, value in beside.items() if not name.startswith(".")}
        once = {name: value for name, value in beside.items() if name.startswith((START, FROZEN))}
        return Arrival(
            parts=self.parts(message, known),
            sent=sent,
            private=self.beside(self.up_to_date(message, private)),
            data=data,
            round=int(message.numbers["round"]),
            rng=rng,
            house=self._to_keep(private, once),
        )

    def _to_keep(self, private: Private, once: Params) -> Params:
        """What a client keeps of what it is sent once: frozen tensors, and that it has started from there."""
        kept = {name: value for name, value in {**private, **once}.items() if name.startswith(FROZEN)}
        started = STARTED in private or any(name.startswith(START) for name in once)
        if started:
            kept[STARTED] = torch.ones(())
        return kept

    def _schedule(self, t: int, epochs: int | None) -> Schedule:
        training = self.setup.training
        # Fine-tuning, which says how many epochs there are, has no schedule of rates.
        factor = rate_factor(training.schedule, t, self.setup.rounds) if epochs is None else 1.0
        classes = self.setup.model.classes
        return Schedule(
            client_optimizer(training),
            factor,
            training.passes(epochs),
            lambda y: training.weights_of_classes(y, classes),
        )

    def _leave(self, arrival: Arrival, departure: Departure, loss: float) -> tuple[Message, Private]:
        """What a client sends after training, and what it keeps."""
        answer: Answer = self.method.answer(departure)
        self._refuse_what_was_not_declared(answer)
        parts = departure.parts
        returned = parts.held if answer.experts is None else answer.experts
        weights = self.layout.pack(parts.shared, {k: parts.experts[k] for k in returned})
        kept = {**arrival.private, **parts.own, **answer.keeps}
        message = Message({**answer.fields, **weights}, {"n": len(arrival.data), "loss": loss})
        return message, {**parts.private, **kept, **parts.labels, **arrival.house}

    def _refuse_what_was_not_declared(self, answer: Answer) -> None:
        strange = sorted(answer.keeps.keys() - self.own_names)
        if strange:
            raise ModelError(f"{self.name}: what a client keeps must be of its `own`. {strange[0]!r} is not.")
        if answer.experts is None:
            return
        if self.setup.privacy.noise > 0:
            why = "which of them come back would tell what the noise is to hide"
        elif self.setup.server.aggregation == "linear":
            why = "sums are over all of them"
        else:
            return
        raise ModelError(f"{self.name}: a client must send all experts back with this recipe: {why}.")

    # -- side by side --------------------------------------------------------------------------------------------------

    def update_group(
        self,
        messages: Sequence[Message],
        privates: Sequence[Private],
        data: Sequence[Examples],
        rngs: Sequence[Stream],
        epochs: int | None,
    ) -> list[tuple[Message, Private] | StepError]:
        """Train several clients at once, each as it would be alone up to rounding. Where training failed there is an error."""
        clients = zip(messages, privates, data, rngs, strict=True)
        arrivals = [self._arrive(*client) for client in clients]
        prepared = [self.method.prepare(arrival) for arrival in arrivals]
        schedule = self._schedule(arrivals[0].round, epochs)
        outcomes = self._fit_group(arrivals, prepared, schedule, rngs)
        return [
            self._leave_group(arrival, fixed, outcome)
            for arrival, (fixed, _), outcome in zip(arrivals, prepared, outcomes, strict=True)
        ]

    def _leave_group(
        self, arrival: Arrival, fixed: Fixed, outcome: Trained | StepError
    ) -> tuple[Message, Private] | StepError:
        """`_leave` for one client of a group."""
        if isinstance(outcome, StepError):
            return outcome
        parts = from_flat(_unstacked(outcome.params, arrival.parts.held), arrival.parts)
        departure = Departure(parts, arrival.sent, fixed, outcome.carry, arrival.data)
        return self._leave(arrival, departure, outcome.loss)

    def _fit_group(
        self,
        arrivals: Sequence[Arrival],
        prepared: Sequence[tuple[Fixed, Carry]],
        schedule: Schedule,
        rngs: Sequence[Stream],
    ) -> list[Trained | StepError]:
        params, fixed, carry = self._stacked(arrivals, prepared)
        data = [arrival.data for arrival in arrivals]
        losses_of = self._group_losses(arrivals[0].parts, len(arrivals), params, fixed, carry)
        return train_group(params, fixed, carry, losses_of, data, schedule, rngs, everything)

    def _stacked(
        self, arrivals: Sequence[Arrival], prepared: Sequence[tuple[Fixed, Carry]]
    ) -> tuple[Params, Fixed, Carry]:
        """The tensors of all clients as one each: weights [G, ...], and [G, K, ...] where they are experts'."""
        params = [_with_stacked_experts(to_flat(arrival.parts), arrival.parts) for arrival in arrivals]
        fixed, carry = [], []
        for arrival, (fixed_of_client, carry_of_client) in zip(arrivals, prepared, strict=True):
            fixed.append(fixed_of_client | {LABELS: arrival.parts.labels})
            carry.append(carry_of_client)
        return stack_trees(params), stack_trees(fixed), stack_trees(carry)

    def _group_losses(self, like: Parts, clients: int, params: Params, fixed: Fixed, carry: Carry) -> GroupLosses:
        """The loss of all clients of a group: vectorised, or as it is where it takes a dimension for them."""
        takes_groups = self.method.takes_groups

        def loss_of(
            params: Mapping[str, Tensor], fixed: Fixed, batch: Batch, carry: Carry
        ) -> tuple[Tensor, Tensor | float, Carry]:
            of_method = {name: value for name, value in fixed.items() if name != LABELS}
            parts = _in_stacks(from_flat(params, like), params)
            parts = parts._replace(labels=fixed[LABELS], group=clients if takes_groups else 0)
            return self.method.loss(parts, of_method, batch, carry)

        if takes_groups:
            return with_leading_dimension(loss_of)
        return Vectorised(loss_of, params, fixed, carry)

    @cached_property
    def one_by_one(self) -> str | None:
        """Why this method's clients are trained one after the other, or None; found out before anything is trained."""
        if self.method.train is not None:
            return "it trains in phases of its own"
        if self.setup.training.optimizer != "sgd":
            return "Adam counts the steps of each client"
        chosen = self.method.select is not None or self.method.chances is not None
        different = "clients hold different experts" if chosen else None
        return self.method.ungroupable or different or self.setup.model.ungroupable or self._differs_side_by_side()

    def _differs_side_by_side(self) -> str | None:
        """Why a group would not give what each client gives alone, or None.

        It is tried out on two made-up clients, one of whose mini-batches is filled up.
        """
        arrivals = self._made_up_clients()
        prepared = [self.method.prepare(arrival) for arrival in arrivals]
        if not all(only_tensors(carry) for _, carry in prepared):
            return "what its steps carry is not made of tensors alone"
        alone = [self._first_loss(*client) for client in zip(arrivals, prepared, strict=True)]
        return self._cannot_be_grouped(arrivals, prepared, alone) or self._group_differs(arrivals, prepared, alone)

    def _cannot_be_grouped(
        self,
        arrivals: Sequence[Arrival],
        prepared: Sequence[tuple[Fixed, Carry]],
        alone: Sequence[tuple[Tensor, Params]],
    ) -> str | None:
        """What is known without a group. alone: the loss of each client, and what it carries after a step."""
        for (_, carried), (_, carry) in zip(alone, prepared, strict=True):
            if carried.keys() != tensors_of(carry).keys():
                return "what its steps carry changes its form"
        if self.setup.training.weight_decay and self._leaves_experts_out(arrivals[0], prepared[0]):
            return "experts that its loss leaves out would decay in a group"
        return None

    def _group_differs(
        self,
        arrivals: Sequence[Arrival],
        prepared: Sequence[tuple[Fixed, Carry]],
        alone: Sequence[tuple[Tensor, Params]],
    ) -> str | None:
        """The first step of the group against that of each client alone."""
        try:
            losses, carried = self._first_group_loss(arrivals, prepared)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            return f"its loss cannot be vectorised ({str(error).splitlines()[0][:120]})"
        for g, (loss_alone, carried_alone) in enumerate(alone):
            same_loss = _nearly_equal(losses[g], loss_alone)
            if not same_loss or not all(_nearly_equal(carried[n][g], v) for n, v in carried_alone.items()):
                return "points that only fill a group up would count in its loss"
        return None

    def _first_group_loss(
        self, arrivals: Sequence[Arrival], prepared: Sequence[tuple[Fixed, Carry]]
    ) -> tuple[Tensor, Params]:
        params, fixed, carry = self._stacked(arrivals, prepared)
        batch = _filled_batch([arrival.data for arrival in arrivals])
        losses_of = self._group_losses(arrivals[0].parts, len(arrivals), params, fixed, carry)
        losses, after = losses_of(params, fixed, batch, carry)
        return losses, tensors_of(after)

    def _leaves_experts_out(self, arrival: Arrival, prepared: tuple[Fixed, Carry]) -> bool:
        """Whether some expert gets no gradient at all, and so no step."""
        flat = {name: value.detach().requires_grad_() for name, value in to_flat(arrival.parts).items()}
        loss, _ = self._first_loss(arrival._replace(parts=from_flat(flat, arrival.parts)), prepared)
        grads = torch.autograd.grad(loss, list(flat.values()), allow_unused=True)
        return any(g is None for g in grads)

    def _first_loss(self, arrival: Arrival, prepared: tuple[Fixed, Carry]) -> tuple[Tensor, Params]:
        fixed, carry = prepared
        batch = _filled_batch([arrival.data])
        first = Batch(*(value[0] for value in batch))
        points, penalty, after = self.method.loss(arrival.parts, fixed, first, carry)
        return mean_loss(points, penalty, first.weight), tensors_of(after)

    def _made_up_clients(self) -> list[Arrival]:
        """Clients with two points and with one, their weights apart from each other and from zero."""
        return [self._made_up_client(g, size) for g, size in enumerate((2, 1))]

    def _made_up_client(self, g: int, size: int) -> Arrival:
        model, example = self.setup.model, self.setup.example
        rng = stream(0, "probe", g)
        drawn = [_near(model.template, rng.child(k)) for k in range(max(self.layout.experts, 1))]
        shared = self.layout.pick(drawn[0], "shared")
        experts = {k: self.layout.pick(w, "expert") for k, w in enumerate(drawn[: self.layout.experts])}
        sent = self.method.sends(self.method.init())
        message = Message({**self.layout.pack(shared, experts), **sent}, {"round": 1})
        private = {**self.layout.pick(drawn[0], "private"), **self.method.own(drawn[0])}
        x = example[:1].expand(size, *example.shape[1:]) * (1.0 if g else 0.5)
        y = torch.arange(size) % model.classes
        c = torch.arange(size) % self.setup.categories
        return self._arrive(message, private, Examples(x.to(example.dtype), y, c), rng)

    # -- what leaves a client ------------------------------------------------------------------------------------------

    def wrap(self, sent: Message, reply: Message, rng: Stream) -> Message:
        """The reply as it crosses the wire, as the recipe says: clipped, noisy, or in a form of which only sums are needed."""
        protection = self.setup.privacy
        weights, fields = weights_and_fields(self.method, reply.tensors)
        if protection.clip:
            source = self._noise(rng)
            weights = privacy.noisy_weights(sent.tensors, weights, protection.clip, protection.noise, source)
        if protection.noise:
            fields = self._noisy_fields(fields, rng)
        if self.setup.server.aggregation == "linear":
            n = reply.numbers["n"]
            weights = self._weights_for_sums(sent, n, weights, fields)
            fields = self._fields_for_sums(sent, n, fields)
        return Message({**fields, **weights}, reply.numbers)

    def _noisy_fields(self, fields: Params, rng: Stream) -> Params:
        wrong = guard.off_simplex(fields)
        if wrong:
            raise ModelError(f"{self.name}: what noise is to protect must be distributions: {wrong}.")
        noisy = {}
        for name, value in fields.items():
            noisy[name] = privacy.noisy_rows(value, self.setup.privacy.noise, self._noise(rng.child(name)))
        return noisy

    def _noise(self, rng: Stream) -> privacy.Noise:
        """A client's noise comes from its own machine, or from the recipe's seed where a simulation asks for that."""
        if self.setup.privacy.reproducible:
            return privacy.repeatable_noise(rng)
        return privacy.noise_of_this_machine

    def _weights_for_sums(self, sent: Message, n: float, weights: Params, fields: Params) -> Params:
        """N_s Delta_s of what is shared, N_s q(z=k|s) Delta_{k,s} of experts."""
        unpacked = self.layout.unpack(weights)
        moved = {name: n * (sent.tensors[name] - w) for name, w in unpacked.shared.items()}
        for k, expert in unpacked.experts.items():
            share = n * fields[self.method.weigh][k]
            for name in self.layout.expert:
                on_the_wire = wire_name(k, name)
                moved[on_the_wire] = share * (sent.tensors[on_the_wire] - expert[name])
        return moved

    def _fields_for_sums(self, sent: Message, n: float, fields: Params) -> Params:
        """N_s times each field, or times how far it moved from what was sent."""
        summed = {}
        for name, value in fields.items():
            base = self.method.reply[name].moved_from
            summed[name] = n * (value - sent.tensors[base] if base else value)
        return summed


def client_optimizer(training: ClientSettings) -> Optimizer:
    """What a client steps with."""
    if training.optimizer == "sgd":
        return sgd(training.client_lr, training.momentum, training.weight_decay, over_gradients=True)
    decoupled = training.optimizer == "adamw"
    return adam(training.client_lr, weight_decay=training.weight_decay, decoupled=decoupled)


def everything(name: str) -> bool:
    """All of the loop's parameters are trained; frozen tensors are not among them."""
    return True


def private_alone(name: str) -> bool:
    """Only what stays with the client is trained."""
    return name.startswith(("private.", "own."))


@dataclass
class _Phases:
    """`method.Fit` for one client: the same loop as everybody's, once for each phase of a method's own programme.

    fixed_epochs: the client fine-tunes or adapts, and the schedule's epochs count, whatever a phase asks for.
    """

    arrival: Arrival
    schedule: Schedule
    trains: Callable[[str], bool]
    fixed_epochs: bool
    losses: list[float] = field(default_factory=list)  # of the phases so far

    def __call__(
        self,
        parts: Parts,
        loss: Loss,
        fixed: Fixed | None = None,
        carry: Carry = None,
        only: Callable[[str], bool] = everything,
        epochs: int | None = None,
        phase: str = "",
    ) -> tuple[Parts, Carry]:
        flat = to_flat(parts)
        if not any(map(only, flat)):
            raise ModelError(f"a phase must train something. `only` takes none of {', '.join(list(flat)[:5])}, ...")

        def loss_of(params: Mapping[str, Tensor], batch: Batch, carry: Carry) -> tuple[Tensor, Tensor | float, Carry]:
            return loss(from_flat(params, parts), fixed or {}, batch, carry)

        def trains(name: str) -> bool:
            return self.trains(name) and only(name)

        carry = {} if carry is None else carry
        schedule, rng = self._schedule(epochs), self._rng(phase)
        trained = train_client(flat, carry, loss_of, self.arrival.data, schedule, rng, trains)
        self.losses.append(trained.loss)
        return from_flat(trained.params, parts), trained.carry

    def _schedule(self, epochs: int | None) -> Schedule:
        if epochs is None or self.fixed_epochs:
            return self.schedule
        passes = replace(self.schedule.passes, epochs=epochs or 1)
        return replace(self.schedule, passes=passes)

    def _rng(self, phase: str) -> Stream:
        return self.arrival.rng.child(phase) if phase else self.arrival.rng


def to_flat(parts: Parts) -> Params:
    """What a loop may train, named by what it is: shared.NAME, expert.K.NAME, private.NAME, own.NAME."""
    flat = {f"shared.{name}": w for name, w in parts.shared.items()}
    for k, expert in parts.experts.items():
        flat |= {f"expert.{k}.{name}": w for name, w in expert.items()}
    flat |= {f"private.{name}": w for name, w in parts.private.items()}
    return flat | {f"own.{name}": w for name, w in parts.own.items()}


def from_flat(flat: Mapping[str, Tensor], like: Parts) -> Parts:
    """Parts of the same form with other tensors."""
    return like._replace(
        shared=_under(flat, "shared", like.shared),
        experts={k: _expert_under(flat, k, expert) for k, expert in like.experts.items()},
        private=_under(flat, "private", like.private),
        own=_under(flat, "own", like.own),
    )


def _under(flat: Mapping[str, Tensor], prefix: str, names: Iterable[str]) -> Params:
    return {name: flat[f"{prefix}.{name}"] for name in names}


def _expert_under(flat: Mapping[str, Tensor], k: int, names: Iterable[str]) -> Params:
    """An expert's tensors; where clients train side by side they are stacked, and not under its name."""
    keys = {name: f"expert.{k}.{name}" for name in names}
    return {name: flat[key] for name, key in keys.items() if key in flat}


def _with_stacked_experts(flat: Params, parts: Parts) -> Params:
    """The tensors expert.K.NAME of all experts as one tensor stacked.NAME [K, ...]."""
    if not parts.experts:
        return flat
    plain = {name: w for name, w in flat.items() if not name.startswith("expert.")}
    return plain | {f"stacked.{name}": w for name, w in stack_experts(parts).items()}


def _in_stacks(parts: Parts, flat: Mapping[str, Tensor]) -> Parts:
    """The parts with their experts as one tensor each; `experts` then tells their numbers alone."""
    return parts._replace(stacked=subtree(flat, "stacked"), experts={k: {} for k in parts.experts})


def _unstacked(flat: Params, held: Sequence[int]) -> Params:
    """The opposite of `_with_stacked_experts`."""
    plain = {name: w for name, w in flat.items() if not name.startswith("stacked.")}
    for name, w in subtree(flat, "stacked").items():
        plain |= {f"expert.{k}.{name}": w[j] for j, k in enumerate(held)}
    return plain


def _filled_batch(data: Sequence[Examples]) -> Batch:
    """All points of a few clients as one mini-batch, filled up to the length of the longest."""
    longest = max(map(len, data))
    rows = []
    for points in data:
        more = longest - len(points)
        weight = torch.cat([torch.full((len(points),), 1 / len(points)), torch.zeros(more)])
        columns = [_padded(values, more) for values in (points.x, points.y, points.c)]
        rows.append((*columns, weight))
    return Batch(*(torch.stack(column) for column in zip(*rows, strict=True)))


def _padded(values: Tensor, more: int) -> Tensor:
    """[N, ...] -> [N + more, ...], filled up with zeros."""
    return torch.cat([values, values.new_zeros(more, *values.shape[1:])])


def _near(params: Params, rng: Stream) -> Params:
    """Parameters near these, and equal to none of them: building another module for a trial would take longer."""
    with rng.torch():
        return {name: value + 0.1 * torch.randn_like(value) for name, value in params.items()}


def _nearly_equal(value: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(value, wanted, rtol=1e-3, atol=1e-4)


def _device_of(message: Message, private: Mapping[str, Tensor]) -> torch.device:
    """The device that a client's tensors are on; where it has none, the CPU."""
    first = next(iter((*message.tensors.values(), *private.values())), None)
    return CPU if first is None else first.device
