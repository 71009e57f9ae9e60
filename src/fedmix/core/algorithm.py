"""A method at work: everything that engines, runs and readers of runs need of it, derived from its page.

algorithm = Algorithm("fedavg", setup, method, seed=0)
state = algorithm.init(0)
message = algorithm.broadcast(state, s)
reply, private = algorithm.client_update(message, algorithm.new_client(0, s), data, rng, None)
state, diagnosis = algorithm.server_update(state, [Reply(s, reply)])
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedmix.core.client import DIGEST, FROZEN, START, ClientSide
from fedmix.core.method import LABELS, Method, Parts, Setup, every_model, outputs, with_labels
from fedmix.core.placement import Layout, Place, digest_of, lay_out
from fedmix.core.server import ServerSide, State, server_optimizer
from fedmix.core.tree import Params, flatten, subtree, unflatten
from fedmix.core.types import Diagnosis, Examples, Message, Private, Reply
from fedmix.errors import ModelError, SettingError, StepError
from fedmix.rng import Stream, stream

# A share of each tensor's standard deviation: experts that start equal would never part without noise.
PARTING_NOISE = 0.1


@dataclass(frozen=True)
class Algorithm:
    """One method for one model, federation and seed.

    A message is what crosses the wire, a private state is what a client keeps. Errors and files call the method `name`.
    """

    name: str
    setup: Setup
    method: Method
    seed: int

    def __post_init__(self) -> None:
        self.layout.refuse_equal_names(sorted({*self.method.reply, *self.method.sends(self.method.init())}))
        self._refuse_private_names_in_replies()
        self._refuse_noise_on_unbounded_fields()
        if self.layout.experts and self.method.weigh not in self.method.reply:
            raise ModelError(f"{self.name}: a method with experts must name the field of its reply that weighs them.")
        self._refuse_sums_where_clients_are_needed()
        self._refuse_adam_on_experts()
        self._refuse_norms_inside_experts()

    def _refuse_norms_inside_experts(self) -> None:
        """A client's statistics are of one model: with several, each would need statistics of its own."""
        output = self.setup.model.output
        inside = [name for name in self.layout.expert if not name.startswith(f"{output}.")]
        if self.setup.model.norms and inside:
            raise SettingError(
                f"model.batchnorm = 'private' needs one model below the output layer. {self.name} has an own {inside[0]} for "
                "each expert; set fedmix.shared = 'all-but-output', or take a method without experts."
            )

    def _refuse_adam_on_experts(self) -> None:
        """A step of Adam is as long for an expert that a client hardly uses as for one that it uses most."""
        optimizer = self.setup.training.optimizer
        if optimizer != "sgd" and self.layout.expert:
            raise SettingError(
                f"training.optimizer must be 'sgd' with {self.name}: steps on experts must follow how much a client uses "
                f"each, and those of {optimizer!r} have no scale. Methods without experts (fedavg) take it."
            )

    def _refuse_private_names_in_replies(self) -> None:
        private_names = {*self.layout.private, *self.client.own_names}
        both = sorted(self.method.reply.keys() & private_names)
        if both:
            raise ModelError(
                f"{self.name}: {both[0]!r} must be the name of what is private or of what is sent, not of both."
            )

    def _refuse_noise_on_unbounded_fields(self) -> None:
        """Noise is a multiple of how far apart two clients' answers can be, which is known of distributions alone."""
        unbounded = [name for name, declared in self.method.reply.items() if declared.kind != "simplex"]
        if unbounded and self.setup.privacy.noise:
            raise SettingError(
                f"privacy.noise must be 0 with {self.name}: it sends {unbounded[0]!r}, which has no bound that noise "
                "could hide."
            )

    def _refuse_sums_where_clients_are_needed(self) -> None:
        why = self.method.needs_clients
        if not why and (self.method.select or self.method.chances):
            why = "clients are sent different experts"
        if why and self.setup.server.aggregation == "linear":
            raise SettingError(f"server.aggregation must be 'clients' with {self.name}: {why}. Got 'linear' instead.")

    @cached_property
    def layout(self) -> Layout:
        """Where each parameter of the model lives."""
        model = self.setup.model

        def place(name: str) -> Place:
            return "private" if name in model.norms else self.method.place(name)

        return lay_out(model.names, sorted(model.frozen), place, self.method.experts, self.name)

    @cached_property
    def client(self) -> ClientSide:
        """What clients do with this method."""
        frozen = self.layout.pick(self._drawn[0], "frozen")
        return ClientSide(self.name, self.setup, self.method, self.layout, frozen)

    @cached_property
    def server(self) -> ServerSide:
        """What the server does with this method."""
        return ServerSide(self.setup, self.method, self.layout)

    # -- before training -----------------------------------------------------------------------------------------------

    @cached_property
    def _drawn(self) -> tuple[Params, ...]:
        """The K models that the run starts from, drawn once: the server, the clients and checkpoints ask for them."""
        return self._draw(self.seed)

    def _draw(self, seed: int) -> tuple[Params, ...]:
        streams = [stream(seed, "init", "expert", k) for k in range(max(self.layout.experts, 1))]
        return tuple(self.setup.model.init(rng) for rng in streams)

    def init(self, seed: int) -> State:
        """The server's state before round 1."""
        drawn = self._drawn if seed == self.seed else self._draw(seed)
        shared = self.layout.pick(drawn[0], "shared")
        experts = self._experts_of(drawn)
        if _all_equal(experts):
            experts = _parted(experts, stream(seed, "init", "noise"))
        return self._state(shared, experts)

    def _experts_of(self, drawn: Sequence[Params]) -> tuple[Params, ...]:
        return tuple(self.layout.pick(w, "expert") for w in drawn[: self.layout.experts])

    def starts_equal(self) -> bool:
        """Whether experts would start from the same weights, and so need a little noise."""
        return _all_equal(self._experts_of(self._drawn))

    def _state(self, shared: Params, experts: tuple[Params, ...]) -> State:
        optimizer = server_optimizer(self.setup.server)
        shared_opt = optimizer.init(shared) if shared else {}
        expert_opts = tuple(optimizer.init(w) for w in experts)
        return State(0, shared, shared_opt, experts, expert_opts, self.method.init())

    def new_client(self, seed: int, client: int | None = None) -> Private:
        """The private state that a client starts from: the same for all, unless the method starts them apart."""
        private: Private = {}
        if self.keeps_something:
            drawn = self._first_model(seed, client)
            private = {**self.layout.pick(drawn, "private"), **self.method.own(drawn)}
        if self.setup.training.label_counts:
            private[LABELS] = torch.zeros(self.setup.model.classes)
        return private

    def _first_model(self, seed: int, client: int | None) -> Params:
        """The model whose private layers a client starts from."""
        if client is not None and self.method.apart:
            return self.setup.model.init(stream(seed, "init", "client", client))
        return self._drawn[0] if seed == self.seed else self._draw(seed)[0]

    def state_from(self, flat: Mapping[str, Tensor]) -> State:
        """A state from the tensors of a checkpoint, of this version or an older one. Raises KeyError or ValueError."""
        template = self.init(self.seed)
        names = flatten(template)
        older = {f"extras.{name}": value for name, value in flat.items() if f"extras.{name}" in names}
        state = unflatten(template, {**older, **flat})
        once = subtree(flat, "once") or self._once(self._frozen_of_before(flat), {})
        return replace(state, once=once)

    def _frozen_of_before(self, flat: Mapping[str, Tensor]) -> Params:
        """Frozen tensors of a checkpoint of schema 1, which had them in the model or in every expert."""
        frozen: Params = {}
        for name in self.layout.frozen:
            copies = self._copies_of_before(name, flat)
            if not copies:
                continue
            if not all(torch.equal(copies[0], other) for other in copies[1:]):
                raise ValueError(f"{name} is frozen and differs between experts, as older versions drew it; train anew")
            frozen[name] = copies[0]
        return frozen

    def _copies_of_before(self, name: str, flat: Mapping[str, Tensor]) -> list[Tensor]:
        of_experts = [f"experts.{k}.{name}" for k in range(self.layout.experts)]
        return [flat[key] for key in (f"shared.{name}", *of_experts) if key in flat]

    def warm_start(self, state: State, models: Sequence[Params], rng: Stream) -> State:
        """A state with weights of another run's models: one for each expert, or one for all, parted by a little noise.

        Private layers come along: clients are sent them once, and start from there. Frozen tensors that differ do, too.
        """
        self._refuse_other_number_of_models(len(models))
        models = self._with_factors(models)
        first = models[0]
        _refuse_other_model(first, self.setup.model.shapes, self.layout)
        self._refuse_different_shared(models)
        return replace(
            state,
            shared=_copied(self.layout.pick(first, "shared")),
            experts=tuple(map(_copied, self._experts_from(models, rng))),
            once=self._once(self.layout.pick(first, "frozen"), self._private_of(first)),
        )

    def _refuse_different_shared(self, models: Sequence[Params]) -> None:
        """Models that differ in what experts share here cannot be its experts: their other layers belong to other weights."""
        for name in self.layout.shared:
            if not all(torch.equal(models[0][name], other[name]) for other in models[1:]):
                raise ModelError(
                    f"a warm start needs models that agree in what experts share. {name} differs between the {len(models)} "
                    "models of the other run; start with fedmix.shared = 'none' and no factor_layers, as it did."
                )

    def _with_factors(self, models: Sequence[Params]) -> Sequence[Params]:
        """The models of a run whose experts had no factors, with those that the experts of this run are drawn with."""
        factors = self.setup.model.factors
        if factors is None or any(name in models[0] for name in factors.names):
            return models
        if len(models) == 1:
            models = list(models) * max(self.layout.experts, 1)
        pairs = zip(models, self._drawn, strict=True)
        return [{**model, **{name: drawn[name] for name in factors.names}} for model, drawn in pairs]

    def _refuse_other_number_of_models(self, given: int) -> None:
        wanted = max(self.layout.experts, 1)
        if given not in (1, wanted):
            raise SettingError(
                f"a warm start of {self.name} needs {' or '.join(map(str, sorted({1, wanted})))} models. "
                f"The other run has {given}."
            )

    def _experts_from(self, models: Sequence[Params], rng: Stream) -> tuple[Params, ...]:
        """An expert from each model, or all of them from the only one."""
        if not self.layout.experts:
            return ()
        experts = tuple(self.layout.pick(w, "expert") for w in models)
        if len(models) == 1 < self.layout.experts:
            return _parted(experts * self.layout.experts, rng)
        return experts

    def _private_of(self, model: Params) -> Params:
        return {name: model[name] for name in self.layout.private if name in model}

    def _once(self, frozen: Params, start: Params) -> Params:
        """What each client is sent once: frozen tensors that it cannot make itself, private layers to start from."""
        if self._clients_can_make(frozen):
            frozen = {}
        if not frozen and not start:
            return {}
        once = {f"{START}.{name}": value.clone() for name, value in start.items()}
        once |= {f"{FROZEN}.{name}": value.clone() for name, value in frozen.items()}
        digest = digest_of({**self.setup.model.buffers, **self.client.frozen, **frozen})
        delivered = torch.zeros(self.setup.clients, dtype=torch.bool)
        return once | {"delivered": delivered, "digest": torch.tensor(digest)}

    def _clients_can_make(self, frozen: Params) -> bool:
        return all(torch.equal(value, self.client.frozen[name]) for name, value in frozen.items())

    # -- rounds --------------------------------------------------------------------------------------------------------

    def broadcast(self, state: State, s: int | None, training: bool = False) -> Message:
        """What client s is sent; None: everything, for an evaluation at the server. training: for a round of training."""
        chosen = self.alive(state)
        if s is not None and self.method.select is not None:
            chosen = self.method.select(state.extras, s)
        if s is not None and training and self.method.chances is not None:
            drawn = stream(self.seed, "round", state.round + 1, "sent", s).numpy.random(self.layout.experts)
            chances = self.method.chances(state.extras, s).tolist()
            chosen = [k for k in chosen if drawn[k] < chances[k]]
        experts = {k: state.experts[k] for k in chosen}
        return self._message(state, experts, self.method.sends(state.extras), s)

    def alive(self, state: State) -> list[int]:
        """The experts that there are: all of them, unless the method changes their number."""
        return list(range(self.layout.experts)) if self.method.alive is None else self.method.alive(state.extras)

    def newcomer(self, state: State, known: bool) -> Message:
        """What a client that never took part is sent. known: whether its values of c occurred in training."""
        all_experts = {k: state.experts[k] for k in self.alive(state)}
        sent = self.method.sends(state.extras)
        if self.method.newcomer is not None:
            sent = sent | self.method.newcomer(state.extras, known)
        return self._message(state, all_experts, sent, None)

    def _message(self, state: State, experts: Mapping[int, Params], sent: Params, s: int | None) -> Message:
        numbers: dict[str, float] = {"round": state.round + 1}
        if self.layout.frozen:
            numbers[DIGEST] = int(state.once["digest"]) if state.once else self.client.own_digest
        weights = self.layout.pack(state.shared, experts)
        return Message({**weights, **sent, **self._once_for(state, s)}, numbers)

    def _once_for(self, state: State, s: int | None) -> Params:
        """What clients are sent once, unless client s has had it already."""
        once = {name: value for name, value in state.once.items() if name.startswith((START, FROZEN))}
        if s is not None and once and bool(state.once["delivered"][s]):
            return {}
        return once

    def client_update(
        self, message: Message, private: Private, data: Examples, rng: Stream, epochs: int | None
    ) -> tuple[Message, Private]:
        return self.client.update(message, private, data, rng, epochs)

    def group_update(
        self,
        messages: Sequence[Message],
        privates: Sequence[Private],
        data: Sequence[Examples],
        rngs: Sequence[Stream],
        epochs: int | None,
    ) -> list[tuple[Message, Private] | StepError]:
        return self.client.update_group(messages, privates, data, rngs, epochs)

    @property
    def one_by_one(self) -> str | None:
        """Why clients are not trained side by side, or None."""
        return self.client.one_by_one

    def adapt(
        self, message: Message, private: Private, data: Examples, rng: Stream, epochs: int
    ) -> tuple[Message, Private]:
        return self.client.adapt(message, private, data, rng, epochs)

    def wrap(self, sent: Message, reply: Message, rng: Stream) -> Message:
        return self.client.wrap(sent, reply, rng)

    def check(self, sent: Message, back: Message) -> str | None:
        return self.server.check(sent, back)

    def server_update(self, state: State, replies: Sequence[Reply]) -> tuple[State, Diagnosis]:
        return self.server.update(state, replies)

    @property
    def noisy_parts(self) -> int:
        """How many things in an answer get noise: its weights together, and each field."""
        weights = bool(self.layout.shared or self.layout.expert)
        return weights + len(self.method.reply)

    # -- prediction ----------------------------------------------------------------------------------------------------

    def predict(self, message: Message, private: Private, x: Tensor) -> Tensor:
        """log p(y|x, s) [B, classes] with the weights of a message or a reply."""
        parts = self.client.parts(message, private)
        logits, features = self._outputs(parts, x)
        return self.method.combine(logits, features, self._beside(message, private), parts.held)

    def _beside(self, message: Message, private: Private) -> Params:
        """What the method keeps at a client beside weights, brought up to date."""
        return self.client.beside(self.client.up_to_date(message, private))

    def predict_with_bound(
        self, message: Message, private: Private, x: Tensor, y: Tensor, c: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """log p(y|x, s) [B, classes], and the method's objective of each point [B] where it has one to report."""
        parts, beside = self.client.parts(message, private), self._beside(message, private)
        logits, features = self._outputs(parts, x)
        log_p = self.method.combine(logits, features, beside, parts.held)
        if self.method.bound is None:
            return log_p, None
        return log_p, self.method.bound(logits, features, beside, message.tensors, y, c, parts.held)

    def _outputs(self, parts: Parts, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.method.models is every_model:
            return outputs(self.setup.model, parts, x, training=False)
        logits, features = self.setup.model.apply_all(self.method.models(parts), x, training=False)
        return with_labels(parts, logits), features

    def predict_anonymous(self, message: Message, privates: Sequence[Private], log_p_s: Tensor, x: Tensor) -> Tensor:
        """log p(y|x) without client identity; log_p_s: log p(s) [S] or log p(s|x) [B, S]."""
        if not self.predicts_anonymously:
            raise ModelError(f"{self.name} has no predictions without client identity.")
        if self.method.anonymous is None:
            return self.predict(message, {}, x)
        known = self._all_up_to_date(message, privates)
        return self.method.anonymous.predict(self.client.parts(message, {}), known, log_p_s, x)

    def _all_up_to_date(self, message: Message, privates: Sequence[Private]) -> list[Private]:
        return [dict(self.client.up_to_date(message, private)) for private in privates]

    @property
    def uses_private(self) -> bool:
        """Whether predictions without identity need anything private. If not, clients hand nothing over for them."""
        if self.method.anonymous is not None and not self.method.anonymous.private:
            return False
        return self.keeps_something

    @property
    def keeps_something(self) -> bool:
        """Whether clients keep anything of their own, beside label counts."""
        return bool(self.layout.private or self.client.own_names)

    @property
    def predicts_anonymously(self) -> bool:
        return self.method.anonymous is not None or not self.keeps_something

    def hand_over(self, private: Private) -> Private:
        """The part of a private state that predictions without identity need."""
        of_method = {name: value for name, value in private.items() if not name.startswith(".")}
        return self.method.hand_over(of_method)

    @property
    def counts_labels(self) -> bool:
        return self.setup.training.label_counts

    def counted(self, private: Private, y: Tensor) -> Private:
        """The private state of a client that knows its labels, though it may not have trained yet."""
        return {**private, **self.client.own_labels(y)}

    def pool(self, message: Message, x: Tensor) -> Tensor:
        """log p(y|x) from what is shared alone, where c is the label and the method can do that (`pools`)."""
        pool = self.method.anonymous.pool if self.method.anonymous else None
        assert pool is not None
        return pool(self.client.parts(message, {}), dict(message.tensors), x)

    @property
    def pools(self) -> bool:
        return self.method.anonymous is not None and self.method.anonymous.pool is not None

    @property
    def distils(self) -> bool:
        return self.method.anonymous is not None and self.method.anonymous.distil is not None

    def distil(self, message: Message, privates: Sequence[Private], log_p_s: Tensor, x: Tensor) -> Private:
        """One private state in place of those of all clients."""
        distil = self.method.anonymous.distil if self.method.anonymous else None
        assert distil is not None
        return distil(self.client.parts(message, {}), self._all_up_to_date(message, privates), log_p_s, x)

    # -- for readers ---------------------------------------------------------------------------------------------------

    def describe(self, state: State) -> dict[str, Any]:
        return self.method.describe(state.extras)

    def experts(self, state: State) -> tuple[Params, ...]:
        """The models that are shared, each as a dict of parameters in the model's order; private ones are missing."""
        alike = {**self.client.frozen, **subtree(state.once, FROZEN), **state.shared}
        models = [{**alike, **state.experts[k]} for k in self.alive(state)] or [alike]
        order = list(self.layout.places)
        return tuple({name: w[name] for name in order if name in w} for w in models)


def _all_equal(experts: Sequence[Params]) -> bool:
    """Whether there are several experts, and they cannot be told apart."""
    if len(experts) < 2:
        return False
    first, second = experts[:2]
    return all(torch.equal(value, second[name]) for name, value in first.items())


def _parted(experts: Sequence[Params], rng: Stream) -> tuple[Params, ...]:
    """Experts from equal weights, parted by a little noise on what is trained."""
    return tuple(_with_noise(w, rng.child("expert", k)) for k, w in enumerate(experts))


def _with_noise(w: Params, rng: Stream) -> Params:
    noisy = {}
    with rng.torch():
        for name, value in w.items():
            std = value.std(correction=0)
            noisy[name] = value + PARTING_NOISE * std * torch.randn_like(value)
    return noisy


def _copied(w: Params) -> Params:
    return {name: value.clone() for name, value in w.items()}


def _refuse_other_model(model: Params, wanted: Mapping[str, tuple[int, ...]], layout: Layout) -> None:
    """The other run's model must have this one's parameters; private ones it may lack."""
    shapes = {name: tuple(value.shape) for name, value in model.items()}
    lacking = set(layout.private) - shapes.keys()
    needed = {name: shape for name, shape in wanted.items() if name not in lacking}
    if shapes == needed:
        return
    wrong = sorted({name for name, _ in shapes.items() ^ needed.items()})
    first = wrong[0]
    raise ModelError(
        f"a warm start needs the same model. {', '.join(wrong[:3])} differ: "
        f"{shapes.get(first, 'missing')} in the other run, {needed.get(first, 'not there')} here."
    )
