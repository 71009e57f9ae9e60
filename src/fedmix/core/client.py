"""The client's side of any method, derived from it: training alone or side by side, adapting, what leaves the client."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedmix.core import guard, privacy
from fedmix.core.method import LABELS, Answer, Arrival, Departure, Fixed, Loss, Method, Parts, Setup
from fedmix.core.objective import label_offset
from fedmix.core.optim import rate_factor, sgd
from fedmix.core.placement import Layout, digest_of
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
START, FROZEN = ".start", ".frozen"  # before names of tensors that a client is sent once
STARTED = ".started"  # of a private state: it has gone on from what it was sent to start from
DIGEST = "frozen"  # of a message's numbers: which frozen tensors it is about


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
        """A message and a private state, by place."""
        found = self.layout.unpack(message.tensors)
        device = next((value.device for value in (*message.tensors.values(), *private.values())), CPU)
        frozen = self.frozen | subtree(private, FROZEN) | subtree(found.beside, FROZEN)
        start = {} if STARTED in private else subtree(found.beside, START)
        beside = self.beside(private)
        return Parts(
            shared=found.shared,
            experts=found.experts,
            private=self.layout.pick({**private, **start}, "private") if self._holds_private(private) else start,
            frozen=placed(frozen, device),
            own={name: value for name, value in beside.items() if self.method.trains(name)},
            kept={name: value for name, value in beside.items() if not self.method.trains(name)},
            labels={LABELS: private[LABELS]} if LABELS in private else {},
            stacked={},
        )

    def _holds_private(self, private: Mapping[str, Tensor]) -> bool:
        return all(name in private for name in self.layout.private)

    def beside(self, private: Mapping[str, Tensor]) -> Params:
        """What the method keeps at a client beside weights."""
        weights = set(self.layout.private)
        return {name: value for name, value in private.items() if name not in weights and not name.startswith(".")}

    def _refuse_other_frozen(self, message: Message, private: Mapping[str, Tensor]) -> None:
        named = message.numbers.get(DIGEST)
        frozen = self.frozen | subtree(private, FROZEN) | subtree(message.tensors, FROZEN)
        if named is not None and int(named) != self._digest(frozen):
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
        """Of the frozen tensors that a client can make itself, and of the module's buffers."""
        return digest_of({**self.setup.model.buffers, **self.frozen})

    @cached_property
    def own_names(self) -> frozenset[str]:
        """What the method keeps at a client beside weights."""
        return frozenset(self.method.own(self.setup.model.template))

    def own_labels(self, y: Tensor) -> Private:
        """training.label_counts: a client's label counts in front of what is shared, which then learns p(y|x) of labels in
        equal shares (in a loss: Menon et al., 2021). Private state; zeros, where nothing is known, change nothing."""
        if not self.setup.training.label_counts:
            return {}
        counts = torch.bincount(y, minlength=self.setup.model.classes).to(torch.float32)
        return {LABELS: label_offset(counts, torch.full_like(counts, 1 / self.setup.model.classes))}

    # -- training ------------------------------------------------------------------------------------------------------

    def update(
        self, message: Message, private: Private, data: Examples, rng: Stream, epochs: int | None
    ) -> tuple[Message, Private]:
        """One client alone. epochs None: the recipe's own number, and its schedule of rates."""
        return self._train(message, private, data, rng, epochs, everything)

    def adapt(
        self, message: Message, private: Private, data: Examples, rng: Stream, epochs: int
    ) -> tuple[Message, Private]:
        """Private parts alone, on labelled points of a client that never took part; what is shared stays as it is."""
        if not self.layout.private and not self.own_names:
            return message, self.own_labels(data.y)
        reply, after = self._train(message, private, data, rng, epochs, private_alone)
        moved: dict[str, Tensor] = {
            field.moved_from: reply.tensors[name]
            for name, field in self.method.reply.items()
            if field.moved_from and name in reply.tensors
        }
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
            return self._in_phases(arrival, schedule, trains, fixed_epochs=epochs is not None)
        fixed, carry = self.method.prepare(arrival)

        def loss_of(params: Mapping[str, Tensor], batch: Batch, carry: Carry) -> tuple[Tensor, Tensor | float, Carry]:
            return self.method.loss(from_flat(params, arrival.parts), fixed, batch, carry)

        trained = train_client(to_flat(arrival.parts), carry, loss_of, data, schedule, rng, trains)
        parts = from_flat(trained.params, arrival.parts)
        return self._leave(arrival, Departure(parts, arrival.sent, fixed, trained.carry, data), trained.loss)

    def _in_phases(
        self, arrival: Arrival, schedule: Schedule, trains: Callable[[str], bool], fixed_epochs: bool
    ) -> tuple[Message, Private]:
        """The method's own programme. What it calls to train something is the same loop as everybody's (`method.Fit`).

        fixed_epochs: whoever fine-tunes or adapts has said how many there are.
        """
        assert self.method.train is not None
        losses: list[float] = []

        def fit(
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
            recipes = epochs is None or fixed_epochs
            passes = schedule.passes if recipes else replace(schedule.passes, epochs=epochs or 1)
            rng = arrival.rng.child(phase) if phase else arrival.rng
            trained = train_client(
                flat,
                carry if carry is not None else {},
                lambda params, batch, carry: loss(from_flat(params, parts), fixed or {}, batch, carry),
                arrival.data,
                replace(schedule, passes=passes),
                rng,
                lambda name: trains(name) and only(name),
            )
            losses.append(trained.loss)
            return from_flat(trained.params, parts), trained.carry

        departure = self.method.train(fit, arrival)
        return self._leave(arrival, departure, losses[-1] if losses else 0.0)

    def _arrive(self, message: Message, private: Private, data: Examples, rng: Stream) -> Arrival:
        self._refuse_other_frozen(message, private)
        known = {**private, **self.own_labels(data.y)}
        beside = self.layout.unpack(message.tensors).beside
        sent = {name: value for name, value in beside.items() if not name.startswith(".")}
        once = {name: value for name, value in beside.items() if name.startswith((START, FROZEN))}
        t = int(message.numbers["round"])
        return Arrival(
            self.parts(message, known), sent, self.beside(private), data, t, rng, self._to_keep(private, once)
        )

    def _to_keep(self, private: Private, once: Params) -> Params:
        """What a client keeps of what it is sent once: frozen tensors, and that it has started from there."""
        kept = {name: value for name, value in {**private, **once}.items() if name.startswith(FROZEN)}
        started = STARTED in private or any(name.startswith(START) for name in once)
        return kept | ({STARTED: torch.ones(())} if started else {})

    def _schedule(self, t: int, epochs: int | None) -> Schedule:
        training = self.setup.training
        # fine-tuning has no schedule of rates
        factor = rate_factor(training.schedule, t, self.setup.rounds) if epochs is None else 1.0
        optimizer = sgd(training.client_lr, training.momentum, training.weight_decay)
        return Schedule(optimizer, factor, training.passes(epochs))

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
        noisy, linear = self.setup.privacy.noise > 0, self.setup.server.aggregation == "linear"
        if noisy or linear:
            why = (
                "which of them come back would tell what the noise is to hide" if noisy else "sums are over all of them"
            )
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
        """Several clients at once, each as it would be alone up to rounding; an error where a client's training failed."""
        arrivals = [self._arrive(*own) for own in zip(messages, privates, data, rngs, strict=True)]
        prepared = [self.method.prepare(arrival) for arrival in arrivals]
        trained = self._fit_group(arrivals, prepared, self._schedule(arrivals[0].round, epochs), rngs)
        outcomes: list[tuple[Message, Private] | StepError] = []
        for arrival, (fixed, _), found in zip(arrivals, prepared, trained, strict=True):
            if isinstance(found, StepError):
                outcomes.append(found)
                continue
            parts = from_flat(_unstacked(found.params, arrival.parts.held), arrival.parts)
            departure = Departure(parts, arrival.sent, fixed, found.carry, arrival.data)
            outcomes.append(self._leave(arrival, departure, found.loss))
        return outcomes

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
        """Everybody's tensors as one each: weights [G, ...] and, of experts, [G, K, ...]."""
        params = stack_trees([_with_stacked_experts(to_flat(arrival.parts), arrival.parts) for arrival in arrivals])
        constant = [
            fixed | {LABELS: arrival.parts.labels} for arrival, (fixed, _) in zip(arrivals, prepared, strict=True)
        ]
        return params, stack_trees(constant), stack_trees([carry for _, carry in prepared])

    def _group_losses(self, like: Parts, clients: int, params: Params, fixed: Fixed, carry: Carry) -> GroupLosses:
        """The loss of all clients of a group: vectorised, or as it is where it takes a dimension for them."""

        def loss_of(
            params: Mapping[str, Tensor], fixed: Fixed, batch: Batch, carry: Carry
        ) -> tuple[Tensor, Tensor | float, Carry]:
            own = {name: value for name, value in fixed.items() if name != LABELS}
            parts = from_flat(params, like)._replace(
                labels=fixed[LABELS],
                stacked=subtree(params, "stacked"),
                experts={k: {} for k in like.experts},
                group=clients if self.method.takes_groups else 0,
            )
            return self.method.loss(parts, own, batch, carry)

        return (
            with_leading_dimension(loss_of) if self.method.takes_groups else Vectorised(loss_of, params, fixed, carry)
        )

    @cached_property
    def one_by_one(self) -> str | None:
        """Why this method's clients are trained one after the other, or None; found out before anything is trained."""
        if self.method.train is not None:
            return "it trains in phases of its own"
        different = "clients hold different experts" if self.method.select is not None else None
        return self.method.ungroupable or different or self.setup.model.ungroupable or self._differs_side_by_side()

    def _differs_side_by_side(self) -> str | None:
        """Two made-up clients, one of whose mini-batches is filled up: the loss alone against the loss side by side."""
        arrivals = self._made_up_clients()
        prepared = [self.method.prepare(arrival) for arrival in arrivals]
        for _, carry in prepared:
            if not only_tensors(carry):
                return "what its steps carry is not made of tensors alone"
        alone = [self._first_loss(*both) for both in zip(arrivals, prepared, strict=True)]
        if any(
            carried.keys() != tensors_of(carry).keys() for (_, carried), (_, carry) in zip(alone, prepared, strict=True)
        ):
            return "what its steps carry changes its form"
        if self.setup.training.weight_decay and self._leaves_experts_out(arrivals[0], prepared[0]):
            return "experts that its loss leaves out would decay in a group"
        try:
            params, fixed, carry = self._stacked(arrivals, prepared)
            batch = _filled_batch([arrival.data for arrival in arrivals])
            losses_of = self._group_losses(arrivals[0].parts, len(arrivals), params, fixed, carry)
            losses, after = losses_of(params, fixed, batch, carry)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            return f"its loss cannot be vectorised ({str(error).splitlines()[0][:120]})"
        together = [(losses[g], {n: v[g] for n, v in tensors_of(after).items()}) for g in range(len(arrivals))]
        for (loss, carried), (wanted, own) in zip(together, alone, strict=True):
            same = torch.allclose(loss, wanted, rtol=1e-3, atol=1e-4)
            if not same or not all(torch.allclose(carried[n], v, rtol=1e-3, atol=1e-4) for n, v in own.items()):
                return "points that only fill a group up would count in its loss"
        return None

    def _leaves_experts_out(self, arrival: Arrival, prepared: tuple[Fixed, Carry]) -> bool:
        """Whether some expert gets no gradient at all, and so no step."""
        flat = {name: value.detach().requires_grad_() for name, value in to_flat(arrival.parts).items()}
        loss, _ = self._first_loss(arrival._replace(parts=from_flat(flat, arrival.parts)), prepared)
        return any(g is None for g in torch.autograd.grad(loss, list(flat.values()), allow_unused=True))

    def _first_loss(self, arrival: Arrival, prepared: tuple[Fixed, Carry]) -> tuple[Tensor, Params]:
        fixed, carry = prepared
        batch = _filled_batch([arrival.data])
        first = Batch(*(value[0] for value in batch))
        points, penalty, after = self.method.loss(arrival.parts, fixed, first, carry)
        return mean_loss(points, penalty, first.weight), tensors_of(after)

    def _made_up_clients(self) -> list[Arrival]:
        """Clients of two points and of one, with weights apart from each other and from zero."""
        setup, arrivals = self.setup, []
        for g, size in enumerate((2, 1)):
            rng = stream(0, "probe", g)
            drawn = [setup.model.init(rng.child(k)) for k in range(max(self.layout.experts, 1))]
            experts = {k: self.layout.pick(w, "expert") for k, w in enumerate(drawn) if k < self.layout.experts}
            tensors = self.layout.pack(self.layout.pick(drawn[0], "shared"), experts)
            private = {**self.layout.pick(drawn[0], "private"), **self.method.own(drawn[0])}
            x = setup.example[:1].expand(size, *setup.example.shape[1:]) * (1.0 if g else 0.5)
            y = torch.arange(size) % setup.model.classes
            data = Examples(x.to(setup.example.dtype), y, torch.arange(size) % setup.categories)
            message = Message({**tensors, **self.method.sends(self.method.init())}, {"round": 1})
            arrivals.append(self._arrive(message, private, data, rng))
        return arrivals

    # -- what leaves a client ------------------------------------------------------------------------------------------

    def wrap(self, sent: Message, reply: Message, rng: Stream) -> Message:
        """The reply as it crosses the wire: clipped, noisy, in a form of which only sums are needed, as the recipe says."""
        protection = self.setup.privacy
        weights = {name: w for name, w in reply.tensors.items() if name not in self.method.reply}
        fields = {name: value for name, value in reply.tensors.items() if name in self.method.reply}
        if protection.clip:
            source = self._noise(rng)
            weights = privacy.noisy_weights(sent.tensors, weights, protection.clip, protection.noise, source)
        if protection.noise:
            wrong = guard.off_simplex(fields)
            if wrong:
                raise ModelError(f"{self.name}: what noise is to protect must be distributions: {wrong}.")
            for name, value in fields.items():
                fields[name] = privacy.noisy_rows(value, protection.noise, self._noise(rng.child(name)))
        if self.setup.server.aggregation == "linear":
            weights, fields = self._for_sums(sent, reply.numbers["n"], weights, fields)
        return Message({**fields, **weights}, reply.numbers)

    def _noise(self, rng: Stream) -> privacy.Noise:
        """A client's noise comes from its own machine, or from the recipe's seed where a simulation asks for that."""
        reproducible = self.setup.privacy.reproducible
        return privacy.repeatable_noise(rng) if reproducible else privacy.noise_of_this_machine

    def _for_sums(self, sent: Message, n: float, weights: Params, fields: Params) -> tuple[Params, Params]:
        """N_s Delta_s, N_s q(z=k|s) Delta_{k,s}, and N_s times each field, or times how far it moved."""
        found = self.layout.unpack(weights)
        moved = {name: n * (sent.tensors[name] - w) for name, w in found.shared.items()}
        for k, expert in found.experts.items():
            share = n * fields[self.method.weigh][k]
            packed = self.layout.pack(found.shared, {k: expert})
            moved |= {name: share * (sent.tensors[name] - w) for name, w in packed.items() if name not in found.shared}
        summed = {}
        for name, value in fields.items():
            base = self.method.reply[name].moved_from
            summed[name] = n * (value - sent.tensors[base] if base else value)
        return moved, summed


def everything(name: str) -> bool:
    """Of the loop's parameters, all are trained; frozen tensors are not among them."""
    return True


def private_alone(name: str) -> bool:
    return name.startswith(("private.", "own."))


def to_flat(parts: Parts) -> Params:
    """What a loop may train, under names that say what each tensor is: shared.NAME, expert.K.NAME, private.NAME, own.NAME."""
    flat = {f"shared.{name}": w for name, w in parts.shared.items()}
    for k, expert in parts.experts.items():
        flat |= {f"expert.{k}.{name}": w for name, w in expert.items()}
    flat |= {f"private.{name}": w for name, w in parts.private.items()}
    return flat | {f"own.{name}": w for name, w in parts.own.items()}


def from_flat(flat: Mapping[str, Tensor], like: Parts) -> Parts:
    """Parts of the same form with other tensors."""
    return like._replace(
        shared={name: flat[f"shared.{name}"] for name in like.shared},
        experts={
            k: {name: flat[f"expert.{k}.{name}"] for name in expert if f"expert.{k}.{name}" in flat}
            for k, expert in like.experts.items()
        },
        private={name: flat[f"private.{name}"] for name in like.private},
        own={name: flat[f"own.{name}"] for name in like.own},
    )


def _with_stacked_experts(flat: Params, parts: Parts) -> Params:
    """expert.K.NAME of all experts as one tensor stacked.NAME [K, ...]."""
    if not parts.experts:
        return flat
    plain = {name: w for name, w in flat.items() if not name.startswith("expert.")}
    first = next(iter(parts.experts.values()))
    return plain | {f"stacked.{name}": torch.stack([w[name] for w in parts.experts.values()]) for name in first}


def _unstacked(flat: Params, held: Sequence[int]) -> Params:
    plain = {name: w for name, w in flat.items() if not name.startswith("stacked.")}
    for name, w in subtree(flat, "stacked").items():
        plain |= {f"expert.{k}.{name}": w[j] for j, k in enumerate(held)}
    return plain


def _filled_batch(data: Sequence[Examples]) -> Batch:
    """Whole data of a few clients as one mini-batch, filled up to the length of the longest."""
    longest = max(map(len, data))
    rows = []
    for own in data:
        more = longest - len(own)
        weight = torch.cat([torch.full((len(own),), 1 / len(own)), torch.zeros(more)])
        padded = (torch.cat([v, v.new_zeros(more, *v.shape[1:])]) for v in (own.x, own.y, own.c))
        rows.append((*padded, weight))
    return Batch(*(torch.stack(column) for column in zip(*rows, strict=True)))
