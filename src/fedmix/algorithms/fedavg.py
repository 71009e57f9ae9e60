"""Generalised FedAvg (Reddi et al., 2020) and its relatives: one method, and a rule of what is local.

fedavg: nothing. biased-fedavg: the output layer's bias. local-global: the input layer, or any named layers (Liang et al.,
2020). independent: everything, so nothing is exchanged.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedmix.algorithms.common import OwnLabels, client_optimizer, fitting, noise_source, server_optimizer
from fedmix.algorithms.settings import ClientSettings, LocalGlobalSettings, PrivacySettings, ServerSettings
from fedmix.core import aggregate, divergence, guard, privacy
from fedmix.core.model import Model
from fedmix.core.optim import OptState, rate_factor
from fedmix.core.training import GroupBatch, train_client, train_group
from fedmix.core.tree import Params, stack
from fedmix.core.types import Algorithm, Diagnosis, Examples, Message, Private, Reply
from fedmix.errors import ModelError, SettingError
from fedmix.rng import Stream, stream

IsLocal = Callable[[str], bool]


@dataclass(frozen=True)
class FedavgState:
    round: int
    shared: Params
    opt: OptState


@dataclass(frozen=True)
class Locality:
    """Which parameters stay with their client; and the layers whose outputs are averaged where no client is known."""

    is_local: IsLocal
    layers: Sequence[str] = ()


def fedavg(
    name: str,
    locality: Locality,
    model: Model,
    rounds: int,
    client: ClientSettings,
    server: ServerSettings,
    protection: PrivacySettings,
) -> Algorithm:
    """FedAvg in which some parameters stay with their client."""
    is_local = locality.is_local
    optimizer = client_optimizer(client)
    w_optimizer = server_optimizer(server)
    linear = server.aggregation == "linear"
    labels = OwnLabels(client, model.classes)

    def start(seed: int, local: bool) -> Params:
        params = model.init(stream(seed, "init", "expert", 0))  # FedMix's first expert starts here too
        return {n: w for n, w in params.items() if is_local(n) == local}

    local_names = list(start(0, local=True))
    layers = locality.layers
    # one linear layer: the mean of what the clients' layers give is what their mean gives
    one_linear = len(layers) == 1 and model.is_linear(layers[0]) and all(_inside(n, layers[0]) for n in local_names)
    mean_of_weights = not layers or one_linear

    def init(seed: int) -> FedavgState:
        shared = start(seed, local=False)
        return FedavgState(round=0, shared=shared, opt=w_optimizer.init(shared))

    def broadcast(state: FedavgState, s: int | None) -> Message:
        return Message(state.shared, {"round": state.round + 1})

    def _train(
        message: Message, private: Private, data: Examples, rng: Stream, epochs: int | None, frozen: IsLocal
    ) -> tuple[Message, Private]:
        own = labels.of(data.y)

        def loss_of(params: Mapping[str, Tensor], batch: Examples, carry: None) -> tuple[Tensor, None]:
            logits, _ = model.apply(params, batch.x, training=True)
            return torch.nn.functional.cross_entropy(labels.add(logits, own), batch.y), carry

        t = int(message.numbers["round"])
        factor = rate_factor(client.schedule, t, rounds) if epochs is None else 1.0  # fine-tuning has no schedule
        params = {**message.tensors, **labels.without(private)}
        trained = train_client(params, None, loss_of, data, optimizer, factor, client.passes(epochs), rng, frozen)
        shared = {n: w for n, w in trained.params.items() if not is_local(n)}
        local = {n: w for n, w in trained.params.items() if is_local(n)}
        return Message(shared, {"n": len(data), "loss": trained.loss}), local | own

    def client_update(
        message: Message, private: Private, data: Examples, rng: Stream, epochs: int | None
    ) -> tuple[Message, Private]:
        return _train(message, private, data, rng, epochs, model.frozen.__contains__)

    def adapt(message: Message, private: Private, data: Examples, rng: Stream, epochs: int) -> tuple[Message, Private]:
        if not local_names:
            return message, labels.of(data.y)
        _, local = _train(message, private, data, rng, epochs, lambda n: n in model.frozen or not is_local(n))
        return message, local

    def wrap(sent: Message, reply: Message, rng: Stream) -> Message:
        tensors = reply.tensors
        if protection.clip:
            source = noise_source(protection, rng)
            tensors = privacy.noisy_weights(sent.tensors, tensors, protection.clip, protection.noise, source)
        if linear:  # N_s Delta_s
            tensors = {n: reply.numbers["n"] * (sent.tensors[n] - w) for n, w in tensors.items()}
        return Message(tensors, reply.numbers)

    def group_update(
        messages: Sequence[Message],
        privates: Sequence[Private],
        data: Sequence[Examples],
        rngs: Sequence[Stream],
        epochs: int | None,
    ) -> list[tuple[Message, Private]] | None:
        if any(own.augment for own in data):
            return None

        owns = [labels.of(own.y) for own in data]
        stacked = {name: value.unsqueeze(1) for name, value in stack(owns).items()}  # [G, 1, classes]

        def losses_of(params: Mapping[str, Tensor], batch: GroupBatch, carry: None) -> tuple[Tensor, None]:
            logits, _ = model.apply_stacked(params, batch.x)
            log_p = torch.log_softmax(labels.add(logits, stacked), dim=2).gather(2, batch.y.unsqueeze(2)).squeeze(2)
            return -(batch.weight * log_p).sum(dim=1), carry

        t = int(messages[0].numbers["round"])
        factor = rate_factor(client.schedule, t, rounds) if epochs is None else 1.0
        params = stack(
            [{**message.tensors, **labels.without(own)} for message, own in zip(messages, privates, strict=True)]
        )
        frozen = model.frozen.__contains__
        trained, _, losses = train_group(
            params, None, losses_of, data, optimizer, factor, client.passes(epochs), rngs, frozen
        )
        answers = []
        for g, (own, loss) in enumerate(zip(data, losses, strict=True)):
            shared = {n: w[g] for n, w in trained.items() if not is_local(n)}
            local = {n: w[g] for n, w in trained.items() if is_local(n)}
            answers.append((Message(shared, {"n": len(own), "loss": loss}), local | owns[g]))
        return answers

    def check(sent: Message, back: Message) -> str | None:
        found = guard.wrong_numbers(back.numbers) or guard.wrong_weights(sent.tensors, back.tensors)
        return found or guard.missing(sent.tensors, back.tensors)

    def server_update(state: FedavgState, replies: Sequence[Reply]) -> tuple[FedavgState, Diagnosis]:
        after = replace(state, round=state.round + 1)
        if not state.shared:
            return after, Diagnosis(None)
        w_s = [reply.message.tensors for reply in replies]
        if linear:
            total = sum(reply.message.numbers["n"] for reply in replies)
            delta = {n: value / total for n, value in privacy.summed(w_s).items()}
            shared, opt = w_optimizer.update(state.shared, delta, state.opt, 1.0)
            return replace(after, shared=shared, opt=opt), Diagnosis(None)
        p_s = aggregate.client_weights(torch.tensor([reply.message.numbers["n"] for reply in replies]))
        moved = aggregate.deltas(state.shared, w_s)
        layers = divergence.expert_divergence(moved, p_s)
        delta = aggregate.mean_delta(state.shared, moved, p_s)
        shared, opt = w_optimizer.update(state.shared, delta, state.opt, 1.0)
        return replace(after, shared=shared, opt=opt), Diagnosis(sum(layers.values()), {"divergence_layers": [layers]})

    def predict(message: Message, private: Private, x: Tensor) -> Tensor:
        logits, _ = model.apply({**_weights(message), **labels.without(private)}, x, training=False)
        return torch.log_softmax(labels.add(logits, private), dim=1)

    def _weights(message: Message) -> Params:
        return {n: w for n, w in message.tensors.items() if not is_local(n)}

    def predict_anonymous(message: Message, privates: Sequence[Private], log_p_s: Tensor, x: Tensor) -> Tensor:
        """Biases are averaged over clients, other local layers by what they give (sec:NewShardInf)."""
        weights = log_p_s.exp().tolist()
        if mean_of_weights:
            mean = {n: sum(p * private[n] for p, private in zip(weights, privates, strict=True)) for n in local_names}
            return predict(message, mean, x)
        models = [{**_weights(message), **private} for private in privates]
        layer = model.layers_in_order(models[0], x[:1], among=locality.layers)[-1]
        outputs = (p * model.layer_output(w, x, layer) for p, w in zip(weights, models, strict=True))
        representation = sum(outputs, torch.zeros(()))
        return torch.log_softmax(model.apply_from(models[0], x, layer, representation), dim=1)

    def warm_start(state: FedavgState, experts: Sequence[Params], rng: Stream) -> FedavgState:
        if len(experts) != 1:
            raise SettingError(f"a warm start of {name} needs one model. The other run has {len(experts)} experts.")
        found = {n: w for n, w in experts[0].items() if not is_local(n)}
        return replace(state, shared=fitting(found, state.shared))

    def describe(state: FedavgState) -> dict[str, Any]:
        return {}

    return Algorithm(
        name=name,
        init=init,
        new_client=lambda seed: start(seed, local=True) | labels.new(),
        broadcast=broadcast,
        client_update=client_update,
        adapt=adapt,
        newcomer=lambda state, _: broadcast(state, None),
        wrap=wrap,
        check=check,
        server_update=server_update,
        predict=predict,
        predict_anonymous=predict_anonymous,
        warm_start=warm_start,
        describe=describe,
        experts=lambda state: (state.shared,),
        uses_private=bool(local_names),
        counted=labels.counted if labels.on else None,
        hand_over=labels.without,
        group_update=group_update if model.stackable else None,
    )


def nothing_local() -> Locality:
    """fedavg."""
    return Locality(lambda _: False)


def everything_local(model: Model) -> Locality:
    """independent: nothing is exchanged."""
    return Locality(lambda _: True, [model.output])


def output_bias(model: Model) -> Locality:
    """biased-fedavg: each client has an output bias of its own."""
    bias = f"{model.output}.bias"
    if bias not in dict(model.module.named_parameters()):
        raise ModelError(f"biased-fedavg needs an output layer with a bias. {model.output!r} has none; give it one.")
    return Locality(lambda name: name == bias)


def named_layers(model: Model, settings: LocalGlobalSettings, example: Tensor) -> Locality:
    """local-global: the layers that the recipe names, else the input layer."""
    params = dict(model.module.named_parameters())
    layers = settings.layers or model.layers_in_order(params, example)[:1]
    for layer in layers:
        if not any(_inside(name, layer) for name in params):
            known = ", ".join(n for n, _ in model.module.named_modules() if n)
            raise SettingError(f"local_global.layers must name layers of the model ({known}). Got {layer!r} instead.")
    if all(any(_inside(name, layer) for layer in layers) for name in params):
        raise SettingError("local_global.layers names every layer; use the method 'independent' for that.")
    return Locality(lambda name: any(_inside(name, layer) for layer in layers), layers)


def _inside(name: str, layer: str) -> bool:
    return name == layer or name.startswith(layer + ".")
