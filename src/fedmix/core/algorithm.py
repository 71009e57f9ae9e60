"""A method brought to life: everything that engines, runs and readers of runs need of it, derived from its page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedmix.core.client import DIGEST, FROZEN, START, ClientSide
from fedmix.core.method import LABELS, Method, Parts, Setup, with_labels
from fedmix.core.placement import Layout, digest_of, lay_out
from fedmix.core.server import ServerSide, State, server_optimizer
from fedmix.core.tree import Params, flatten, subtree, unflatten
from fedmix.core.types import Diagnosis, Examples, Message, Private, Reply
from fedmix.errors import ModelError, SettingError, StepError
from fedmix.rng import Stream, stream

PARTING_NOISE = 0.1  # of each tensor's standard deviation: experts that start equal would never part


@dataclass(frozen=True)
class Algorithm:
    """One method for one model, federation and seed.

    A message is what crosses the wire, a private state what a client keeps. `name` is what errors and files call it.
    """

    name: str
    setup: Setup
    method: Method
    seed: int

    def __post_init__(self) -> None:
        self.layout.refuse_equal_names(sorted({*self.method.reply, *self.method.sends(self.method.init())}))
        both = sorted(self.method.reply.keys() & {*self.layout.private, *self.client.own_names})
        if both:
            raise ModelError(
                f"{self.name}: {both[0]!r} must be the name of what is private or of what is sent, not of both."
            )
        free = [name for name, declared in self.method.reply.items() if declared.kind != "simplex"]
        if free and self.setup.privacy.noise:
            raise SettingError(
                f"privacy.noise must be 0 with {self.name}: it sends {free[0]!r}, which has no bound that noise could hide."
            )
        if self.layout.experts and self.method.weigh not in self.method.reply:
            raise ModelError(f"{self.name}: a method with experts must name the field of its reply that weighs them.")
        why = self.method.needs_clients or ("clients are sent different experts" if self.method.select else None)
        if why and self.setup.server.aggregation == "linear":
            raise SettingError(f"server.aggregation must be 'clients' with {self.name}: {why}. Got 'linear' instead.")

    @cached_property
    def layout(self) -> Layout:
        """Where each parameter of the model lives."""
        model = self.setup.model
        names = [name for name, _ in model.module.named_parameters()]
        return lay_out(names, sorted(model.frozen), self.method.place, self.method.experts, self.name)

    @cached_property
    def client(self) -> ClientSide:
        frozen = self.layout.pick(self._drawn[0], "frozen")
        return ClientSide(self.name, self.setup, self.method, self.layout, frozen)

    @cached_property
    def server(self) -> ServerSide:
        return ServerSide(self.setup, self.method, self.layout)

    # -- before training -----------------------------------------------------------------------------------------------

    @cached_property
    def _drawn(self) -> tuple[Params, ...]:
        """The K models that the run of this seed starts from, drawn once: server, clients and checkpoints ask for them."""
        return self._draw(self.seed)

    def _draw(self, seed: int) -> tuple[Params, ...]:
        model = self.setup.model
        return tuple(model.init(stream(seed, "init", "expert", k)) for k in range(max(self.layout.experts, 1)))

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
        """Whether experts would start from the same weights, and so are given a little noise."""
        return _all_equal(self._experts_of(self._drawn))

    def _state(self, shared: Params, experts: tuple[Params, ...]) -> State:
        optimizer = server_optimizer(self.setup.server)
        opts = tuple(optimizer.init(w) for w in experts)
        return State(0, shared, optimizer.init(shared) if shared else {}, experts, opts, self.method.init())

    def new_client(self, seed: int, client: int | None = None) -> Private:
        """The private state that a client starts from: the same for all, unless the method starts them apart."""
        counts = {LABELS: torch.zeros(self.setup.model.classes)} if self.setup.training.label_counts else {}
        if not self.keeps_something:
            return counts
        drawn = self._first_model(seed, client)
        return {**self.layout.pick(drawn, "private"), **self.method.own(drawn), **counts}

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
        return replace(state, once=subtree(flat, "once") or self._once(self._frozen_of_before(flat), {}))

    def _frozen_of_before(self, flat: Mapping[str, Tensor]) -> Params:
        """Frozen tensors of a checkpoint of schema 1, which had them in the model or in every expert."""
        found: Params = {}
        for name in self.layout.frozen:
            copies = [flat[key] for key in (f"shared.{name}", *self._expert_keys(name)) if key in flat]
            if any(not torch.equal(copies[0], other) for other in copies[1:]):
                raise ValueError(f"{name} is frozen and differs between experts, as older versions drew it; train anew")
            found |= {name: copies[0]} if copies else {}
        return found

    def _expert_keys(self, name: str) -> list[str]:
        return [f"experts.{k}.{name}" for k in range(self.layout.experts)]

    def warm_start(self, state: State, models: Sequence[Params], rng: Stream) -> State:
        """Weights of another run's models: one for each expert, or one for all, which then part by a little noise.

        Private layers come along: clients are sent them once, and start from there. So are frozen tensors that differ.
        """
        layout, wanted = self.layout, max(self.layout.experts, 1)
        if len(models) not in (1, wanted):
            raise SettingError(
                f"a warm start of {self.name} needs {' or '.join(map(str, sorted({1, wanted})))} models. "
                f"The other run has {len(models)}."
            )
        _refuse_other_model(models[0], self.setup.model.shapes, layout)
        experts = tuple(layout.pick(w, "expert") for w in models) if layout.experts else ()
        if len(models) == 1 < layout.experts:
            experts = _parted(experts * layout.experts, rng)
        copied = replace(
            state,
            shared={name: w.clone() for name, w in layout.pick(models[0], "shared").items()},
            experts=tuple({name: w.clone() for name, w in expert.items()} for expert in experts),
        )
        return replace(copied, once=self._once(layout.pick(models[0], "frozen"), self._private_of(models[0])))

    def _private_of(self, model: Params) -> Params:
        return {name: model[name] for name in self.layout.private if name in model}

    def _once(self, frozen: Params, start: Params) -> Params:
        """What each client is sent once: frozen tensors that it cannot make itself, private layers to start from."""
        if all(torch.equal(value, self.client.frozen[name]) for name, value in frozen.items()):
            frozen = {}
        if not frozen and not start:
            return {}
        once = {f"{START}.{name}": value.clone() for name, value in start.items()}
        once |= {f"{FROZEN}.{name}": value.clone() for name, value in frozen.items()}
        digest = digest_of({**self.setup.model.buffers, **self.client.frozen, **frozen})
        delivered = torch.zeros(self.setup.clients, dtype=torch.bool)
        return once | {"delivered": delivered, "digest": torch.tensor(digest)}

    # -- rounds --------------------------------------------------------------------------------------------------------

    def broadcast(self, state: State, s: int | None) -> Message:
        """What client s is sent; None: everything, for an evaluation at the server."""
        chosen = list(range(self.layout.experts))
        if s is not None and self.method.select is not None:
            chosen = self.method.select(state.extras, s)
        return self._message(state, {k: state.experts[k] for k in chosen}, self.method.sends(state.extras), s)

    def newcomer(self, state: State, known: bool) -> Message:
        """What a client is sent that never took part. known: whether training knows its values of c."""
        everybody = dict(enumerate(state.experts))
        sent = self.method.sends(state.extras)
        if self.method.newcomer is not None:
            sent = sent | self.method.newcomer(state.extras, known)
        return self._message(state, everybody, sent, None)

    def _message(self, state: State, experts: Mapping[int, Params], sent: Params, s: int | None) -> Message:
        once = {name: value for name, value in state.once.items() if name.startswith((START, FROZEN))}
        if s is not None and once and bool(state.once["delivered"][s]):
            once = {}
        numbers: dict[str, float] = {"round": state.round + 1}
        if self.layout.frozen:
            numbers[DIGEST] = int(state.once["digest"]) if state.once else self.client.own_digest
        return Message({**self.layout.pack(state.shared, experts), **sent, **once}, numbers)

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
        """How many things of an answer get noise: its weights together, and each field."""
        weights = bool(self.layout.shared or self.layout.expert)
        return weights + len(self.method.reply)

    # -- prediction ----------------------------------------------------------------------------------------------------

    def predict(self, message: Message, private: Private, x: Tensor) -> Tensor:
        """log p(y|x, s) [B, classes] with the weights of a message or a reply."""
        parts = self.client.parts(message, private)
        return self.method.combine(*self._outputs(parts, x), self._own(private), parts.held)

    def predict_with_bound(
        self, message: Message, private: Private, x: Tensor, y: Tensor, c: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The same, and the method's objective of each point [B] where it has one to report."""
        parts, own = self.client.parts(message, private), self._own(private)
        logits, features = self._outputs(parts, x)
        log_p = self.method.combine(logits, features, own, parts.held)
        if self.method.bound is None:
            return log_p, None
        return log_p, self.method.bound(logits, features, own, message.tensors, y, c, parts.held)

    def _outputs(self, parts: Parts, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, features = self.setup.model.apply_all(self.method.models(parts), x, training=False)
        return with_labels(parts, logits), features

    def _own(self, private: Private) -> Params:
        return self.client.beside(private)

    def predict_anonymous(self, message: Message, privates: Sequence[Private], log_p_s: Tensor, x: Tensor) -> Tensor:
        """log p(y|x) without client identity; log_p_s: log p(s) [S] or log p(s|x) [B, S]."""
        if self.method.anonymous is None:
            if not self.predicts_anonymously:
                raise ModelError(f"{self.name} has no predictions without client identity.")
            return self.predict(message, {}, x)
        return self.method.anonymous.predict(self.client.parts(message, {}), privates, log_p_s, x)

    @property
    def uses_private(self) -> bool:
        """Whether predictions without identity need anything private: if not, clients hand nothing over for them."""
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
        return self.method.hand_over({name: value for name, value in private.items() if not name.startswith(".")})

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
        """One private state that does in place of all of them."""
        distil = self.method.anonymous.distil if self.method.anonymous else None
        assert distil is not None
        return distil(self.client.parts(message, {}), privates, log_p_s, x)

    # -- for readers ---------------------------------------------------------------------------------------------------

    def describe(self, state: State) -> dict[str, Any]:
        return self.method.describe(state.extras)

    def experts(self, state: State) -> tuple[Params, ...]:
        """The models that are shared, each as a dict of parameters; private ones are missing."""
        alike = {**self.client.frozen, **subtree(state.once, FROZEN), **state.shared}
        models = [{**alike, **w} for w in state.experts] or [alike]
        order = list(self.layout.places)
        return tuple({name: w[name] for name in order if name in w} for w in models)


def _all_equal(experts: Sequence[Params]) -> bool:
    """Whether there are several experts, and they cannot be told apart."""
    if len(experts) < 2:
        return False
    first, second = experts[:2]
    return all(torch.equal(value, second[name]) for name, value in first.items())


def _parted(experts: Sequence[Params], rng: Stream) -> tuple[Params, ...]:
    """Experts from equal weights, told apart by a little noise on what is trained."""
    return tuple(_with_noise(w, rng.child("expert", k)) for k, w in enumerate(experts))


def _with_noise(w: Params, rng: Stream) -> Params:
    with rng.torch():
        return {
            name: value + PARTING_NOISE * value.std(correction=0) * torch.randn_like(value) for name, value in w.items()
        }


def _refuse_other_model(model: Params, wanted: Mapping[str, tuple[int, ...]], layout: Layout) -> None:
    """The other run's model must have this one's parameters; private ones it may lack."""
    shapes = {name: tuple(value.shape) for name, value in model.items()}
    needed = {name: shape for name, shape in wanted.items() if name in shapes or name not in layout.private}
    if shapes != needed:
        wrong = sorted(name for name in shapes.keys() | needed.keys() if shapes.get(name) != needed.get(name))
        raise ModelError(
            f"a warm start needs the same model. {', '.join(wrong[:3])} differ: "
            f"{shapes.get(wrong[0], 'missing')} in the other run, {needed.get(wrong[0], 'not there')} here."
        )
