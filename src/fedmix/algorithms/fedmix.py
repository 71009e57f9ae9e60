"""FedMix: a federated mixture of experts (Reisser, Louizos, Gavves, Welling, 2021), Algorithms 1 and 2 (eta = 0: 1).

What crosses the wire: the experts w_k that a client uses, phi, and q(z|s). What stays: the gate theta_s = (pi, A, b).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedmix.algorithms.common import OwnLabels, client_optimizer, fitting, noise_source, server_optimizer
from fedmix.algorithms.settings import ClientSettings, FedmixSettings, PrivacySettings, ServerSettings
from fedmix.core import aggregate, divergence, gate, guard, health, objective, posterior, privacy, prune
from fedmix.core.model import Model
from fedmix.core.optim import OptState, keep_rows, rate_factor
from fedmix.core.training import GroupBatch, train_client, train_group
from fedmix.core.tree import Params, flatten, stack, subtree
from fedmix.core.types import Algorithm, Diagnosis, Examples, Message, Private, Reply
from fedmix.errors import SettingError
from fedmix.rng import Stream, stream

POSTERIOR = {"q_zs", "phi", "c_shares"}  # what a reply holds beside weights
WARM_START_NOISE = 0.1  # of each tensor's standard deviation: equal experts would never part


@dataclass(frozen=True)
class FedmixState:
    round: int
    experts: tuple[Params, ...]  # w_1 .. w_K
    experts_opt: tuple[OptState, ...]
    phi: Tensor  # q(z|c) [C, K]
    phi_opt: OptState
    q_zs: Tensor  # [S, K]: what each client last returned, 1/K before it did


def fedmix(
    model: Model,
    clients: int,
    categories: int,
    rounds: int,
    settings: FedmixSettings,
    client: ClientSettings,
    server: ServerSettings,
    protection: PrivacySettings,
) -> Algorithm:
    """FedMix for this many clients and values of side information."""
    K = settings.experts
    optimizer = client_optimizer(client)
    w_optimizer = server_optimizer(server)
    phi_optimizer = server_optimizer(server, settings.phi_lr, rows=True)
    prior = _public_prior(settings.prior, categories)
    shared_phi = settings.phi == "global" and settings.objective == "bound"
    linear = server.aggregation == "linear"
    labels = OwnLabels(client, model.classes)
    shapes = {"q_zs": [K], "phi": [categories, K], "c_shares": [categories]}  # of what a reply holds beside weights

    def frozen(name: str) -> bool:
        return name.startswith("expert.") and name.split(".", 2)[2] in model.frozen

    def init(seed: int) -> FedmixState:
        experts = tuple(model.init(stream(seed, "init", "expert", k)) for k in range(K))
        if K > 1 and all(torch.equal(w, experts[1][name]) for name, w in experts[0].items()):
            rng = stream(
                seed, "init", "noise"
            )  # a start of the user's own (pretrained weights): equal experts never part
            experts = tuple(_with_noise(w, rng.child("expert", k)) for k, w in enumerate(experts))
        phi = posterior.uniform(categories, K)
        return FedmixState(
            round=0,
            experts=experts,
            experts_opt=tuple(w_optimizer.init(w) for w in experts),
            phi=phi,
            phi_opt=phi_optimizer.init({"phi": phi}),
            q_zs=posterior.uniform(clients, K),
        )

    def new_client(seed: int) -> Private:
        private = {f"gate.{name}": value for name, value in gate.new_gate(model.features, K).items()} | labels.new()
        return private | ({"phi": posterior.uniform(categories, K)} if settings.phi == "private" else {})

    def broadcast(state: FedmixState, s: int | None) -> Message:
        sent = list(range(K)) if s is None else prune.kept(state.q_zs[s], settings.eta, slack=prune.SERVER_SLACK)
        tensors = flatten({str(k): state.experts[k] for k in sent}, "expert")
        if shared_phi:
            tensors["phi"] = state.phi
        return Message(tensors, {"round": state.round + 1})

    def newcomer(state: FedmixState, known: bool) -> Message:
        """Where c tells clients apart, a new one starts from the mean of what the others returned."""
        message = broadcast(state, None)
        if known or not shared_phi:
            return message
        returned = state.q_zs[(state.q_zs != posterior.uniform(1, K)).any(dim=1)]
        rows = returned if len(returned) else state.phi  # linear aggregation: only the server's own phi is known
        return Message({**message.tensors, "phi": rows.mean(dim=0).expand(categories, K)}, message.numbers)

    def client_update(
        message: Message, private: Private, data: Examples, rng: Stream, epochs: int | None
    ) -> tuple[Message, Private]:
        return _train(message, private, data, rng, epochs, frozen)

    def adapt(message: Message, private: Private, data: Examples, rng: Stream, epochs: int) -> tuple[Message, Private]:
        """The gate, and with it phi, by the local objective (Inference at test time, second case)."""
        reply, theta = _train(message, private, data, rng, epochs, lambda name: name.startswith("expert."))
        phi = {"phi": reply.tensors["phi"]} if "phi" in reply.tensors else {}
        return Message({**message.tensors, **phi}, message.numbers), theta

    def _train(
        message: Message,
        private: Private,
        data: Examples,
        rng: Stream,
        epochs: int | None,
        frozen: Callable[[str], bool],
    ) -> tuple[Message, Private]:
        held = held_experts(message.tensors)
        t = int(message.numbers["round"])
        beta = posterior.temperature(settings.beta, settings.beta_start, settings.beta_rounds, t)
        shares = posterior.category_shares(data.c, categories)
        phi = message.tensors["phi"] if shared_phi else private.get("phi", posterior.uniform(categories, K))
        params = {name: w for name, w in message.tensors.items() if name.startswith("expert.")}
        params |= _gate_of(private)
        own = labels.of(data.y)

        def loss_of(params: Mapping[str, Tensor], batch: Examples, phi: Tensor) -> tuple[Tensor, Tensor]:
            keep = held
            if settings.eta:
                keep = prune.kept(posterior.expert_marginal(phi, shares), settings.eta, held)
            experts = [subtree(params, f"expert.{k}") for k in keep]
            matter = None  # [B, K']
            if settings.skip_below:
                matter = prune.renormalise(phi, keep)[batch.c] >= settings.skip_below
            logits, features = model.apply_all(experts, batch.x, training=True, where=matter)
            if not settings.gate_through_features:
                features = features.detach()
            log_gate = gate.log_gate(subtree(params, "gate"), features, keep)  # [B, K]
            log_lik = objective.log_likelihood(labels.add(logits, own), batch.y)  # [B, K']
            joint = objective.log_joint(log_lik, log_gate if len(keep) == K else log_gate[:, keep])
            if settings.objective == "direct":
                return objective.direct_loss(joint), phi
            with torch.no_grad():  # phi first, from the same forward pass, without a gradient through it
                phi_bar, present = posterior.solve_phi(joint, batch.c, categories, beta)
                phi = posterior.dampen(phi, prune.reweigh(phi_bar, phi, keep), present, settings.gamma)
                q_lik, q_gate = prune.renormalise(phi, keep)[batch.c], phi[batch.c]
                late = _come_late(q_lik, matter)
            for j, rows in late:  # points that have come to matter in this very step
                again, _ = model.apply(experts[j], batch.x[rows], training=True)
                new = objective.log_likelihood(labels.add(again, own).unsqueeze(0), batch.y[rows]).squeeze(1)
                log_lik = log_lik.index_put((rows, torch.full_like(rows, j)), new)
            if settings.full_steps:
                log_lik = objective.full_steps(log_lik, q_lik, torch.full_like(q_lik[:, 0], 1 / len(q_lik)))
            return objective.bound_loss(log_lik, log_gate, q_lik, q_gate), phi

        factor = rate_factor(client.schedule, t, rounds) if epochs is None else 1.0  # fine-tuning has no schedule
        trained = train_client(params, phi, loss_of, data, optimizer, factor, client.passes(epochs), rng, frozen)
        q_zs = posterior.expert_marginal(trained.carry, shares)
        if settings.marginal == "exact":
            q_zs = _exact_marginal(trained.params, held, data.x)
        keep = prune.kept(q_zs, settings.eta, held) if settings.eta else held
        experts = flatten({str(k): subtree(trained.params, f"expert.{k}") for k in keep}, "expert")
        theta = _gate_of(trained.params) | own
        return _answer(experts, theta, trained.carry, data, trained.loss, q_zs)

    def _come_late(q: Tensor, matter: Tensor | None) -> list[tuple[int, Tensor]]:
        """Experts, and points whose weight is not below `skip_below` any more, although it was before this step."""
        if matter is None:
            return []
        late = (q >= settings.skip_below) & ~matter
        return [(j, late[:, j].nonzero().flatten()) for j in late.any(dim=0).nonzero().flatten().tolist()]

    plain = settings.eta == 0 and settings.skip_below == 0
    together = plain and settings.objective == "bound" and settings.marginal == "posterior"

    def group_update(
        messages: Sequence[Message],
        privates: Sequence[Private],
        data: Sequence[Examples],
        rngs: Sequence[Stream],
        epochs: int | None,
    ) -> list[tuple[Message, Private]] | None:
        if any(own.augment for own in data):
            return None
        G = len(data)
        t = int(messages[0].numbers["round"])
        beta = posterior.temperature(settings.beta, settings.beta_start, settings.beta_rounds, t)
        new = posterior.uniform(categories, K)
        phis = [m.tensors["phi"] if shared_phi else p.get("phi", new) for m, p in zip(messages, privates, strict=True)]
        names = list(subtree(messages[0].tensors, "expert.0"))
        experts = {
            f"expert.{name}": torch.stack([m.tensors[f"expert.{k}.{name}"] for m in messages for k in range(K)])
            for name in names
        }  # [G K, ...]
        gates = stack([_gate_of(own) for own in privates])
        owns = [labels.of(own.y) for own in data]
        stacked = {name: value.unsqueeze(1).unsqueeze(1) for name, value in stack(owns).items()}  # [G, 1, 1, classes]
        params = {name: value.view(G, K, *value.shape[1:]) for name, value in experts.items()} | gates

        def losses_of(params: Mapping[str, Tensor], batch: GroupBatch, phi: Tensor) -> tuple[Tensor, Tensor]:
            w = {name: value.flatten(0, 1) for name, value in subtree(params, "expert").items()}
            x = batch.x.unsqueeze(1).expand(G, K, *batch.x.shape[1:]).flatten(0, 1)
            logits, features = (value.view(G, K, *value.shape[1:]) for value in model.apply_stacked(w, x))
            if not settings.gate_through_features:
                features = features.detach()
            log_gate = gate.log_gates(subtree(params, "gate"), features)  # [G, B, K]
            log_lik = objective.log_likelihoods(labels.add(logits, stacked), batch.y)  # [G, B, K]
            with torch.no_grad():
                joint = objective.log_joint(log_lik, log_gate)
                phi_bar, present = posterior.solve_phis(joint, batch.c, batch.weight > 0, categories, beta)
                phi = torch.where(present.unsqueeze(2), settings.gamma * phi + (1 - settings.gamma) * phi_bar, phi)
                q = phi.gather(1, batch.c.unsqueeze(2).expand(-1, -1, K))
            if settings.full_steps:
                log_lik = objective.full_steps(log_lik, q, batch.weight)
            return -(batch.weight * (q * log_lik + q * log_gate).sum(dim=2)).sum(dim=1), phi

        factor = rate_factor(client.schedule, t, rounds) if epochs is None else 1.0
        trained, phi, losses = train_group(
            params,
            torch.stack(phis),
            losses_of,
            data,
            optimizer,
            factor,
            client.passes(epochs),
            rngs,
            lambda name: name.startswith("expert.") and name.removeprefix("expert.") in model.frozen,
        )
        answers = []
        for g, (own, loss) in enumerate(zip(data, losses, strict=True)):
            experts = {f"expert.{k}.{name}": trained[f"expert.{name}"][g, k] for k in range(K) for name in names}
            theta = {name: value[g] for name, value in _gate_of(trained).items()} | owns[g]
            answers.append(_answer(experts, theta, phi[g], own, loss))
        return answers

    def _answer(
        experts: Mapping[str, Tensor],
        theta: Params,
        phi: Tensor,
        data: Examples,
        loss: float,
        q_zs: Tensor | None = None,
    ) -> tuple[Message, Private]:
        """What a client sends after training, and what it keeps."""
        shares = posterior.category_shares(data.c, categories)
        tensors = {"q_zs": posterior.expert_marginal(phi, shares) if q_zs is None else q_zs, **experts}
        if settings.phi == "private":
            theta = theta | {"phi": posterior.to_simplex(phi, settings.phi_floor)}
        elif shared_phi:
            tensors["phi"] = phi
            if settings.prior == "reported":
                tensors["c_shares"] = shares
        return Message(tensors, {"n": len(data), "loss": loss}), theta

    def wrap(sent: Message, reply: Message, rng: Stream) -> Message:
        tensors = dict(reply.tensors)
        weights = {name: w for name, w in tensors.items() if name.startswith("expert.")}
        if protection.clip:
            source = noise_source(protection, rng)
            weights = privacy.noisy_weights(sent.tensors, weights, protection.clip, protection.noise, source)
            tensors |= weights
        if protection.noise:
            for name in POSTERIOR & tensors.keys():
                source = noise_source(protection, rng.child(name))
                tensors[name] = privacy.noisy_rows(tensors[name], protection.noise, source)
        if linear:
            n = reply.numbers["n"]
            q = n * tensors["q_zs"]
            for name, w in weights.items():  # N_s q(z=k|s) Delta_{k,s}
                tensors[name] = q[int(name.split(".")[1])] * (sent.tensors[name] - w)
            for name in POSTERIOR & tensors.keys():
                tensors[name] = n * (tensors[name] - sent.tensors["phi"] if name == "phi" else tensors[name])
        return Message(tensors, reply.numbers)

    def _exact_marginal(params: Mapping[str, Tensor], held: list[int], x: Tensor) -> Tensor:
        """p(z|s) = E_{x ~ D_s}[p(z|x,s)], the gate's softmax over all K as in training: [K]."""
        total = torch.zeros(K)
        with torch.no_grad():
            for part in torch.split(x, 256):
                _, features = model.apply_all([subtree(params, f"expert.{k}") for k in held], part, training=False)
                total += gate.log_gate(subtree(params, "gate"), features, held).exp().sum(dim=0)
        return total / len(x)

    def check(sent: Message, back: Message) -> str | None:
        tensors, held = back.tensors, held_experts(back.tensors)
        weights = {name: w for name, w in tensors.items() if name not in shapes}
        wanted = [f"expert.{k}.{name}" for k in held or [0] for name in subtree(sent.tensors, f"expert.{k}")]
        found = guard.wrong_numbers(back.numbers) or guard.wrong_weights(sent.tensors, weights)
        found = found or guard.missing([*wanted, "q_zs", *(["phi"] if shared_phi else [])], tensors)
        rows = {name: tensors[name] for name in shapes if name in tensors}
        found = found or guard.wrong_shapes(shapes, rows) or guard.not_finite(rows)
        if found:
            return found
        if linear:
            rows = {name: value / back.numbers["n"] for name, value in rows.items()}
            rows |= {"phi": rows["phi"] + sent.tensors["phi"]} if "phi" in rows else {}
        return guard.off_simplex(rows)

    def server_update(state: FedmixState, replies: Sequence[Reply]) -> tuple[FedmixState, Diagnosis]:
        messages = [reply.message.tensors for reply in replies]
        if linear:
            return _update_from_sums(state, privacy.summed(messages))
        n_s = torch.tensor([reply.message.numbers["n"] for reply in replies])
        returned = torch.tensor([[k in held for k in range(K)] for held in map(held_experts, messages)])
        q_s = torch.stack([m["q_zs"] for m in messages])  # [S', K]
        p_sz = aggregate.expert_weights(torch.where(returned, q_s, torch.zeros_like(q_s)), n_s)
        p_s = aggregate.client_weights(n_s)

        experts, experts_opt, per_expert, per_layer = [], [], [], []
        for k, (w, opt) in enumerate(zip(state.experts, state.experts_opt, strict=True)):
            w_s = [subtree(m, f"expert.{k}") or None for m in messages]
            moved = aggregate.deltas(w, w_s)
            layers = divergence.expert_divergence(moved, p_sz[:, k])
            if bool(p_sz[:, k].sum() > 0):  # an expert that nobody returned keeps its weights and its Adam state
                w, opt = w_optimizer.update(w, aggregate.mean_delta(w, moved, p_sz[:, k]), opt, 1.0)
            experts.append(w)
            experts_opt.append(opt)
            per_layer.append(layers)
            per_expert.append(sum(layers.values()))

        q_zs = state.q_zs.clone()
        q_zs[[reply.client for reply in replies]] = q_s
        after = replace(state, round=state.round + 1, experts=tuple(experts), experts_opt=tuple(experts_opt), q_zs=q_zs)
        if shared_phi:
            phi_s = torch.stack([m["phi"] for m in messages])
            moved_phi = posterior.mean_move(state.phi, phi_s, p_s)
            after = _phi_update(after, moved_phi, posterior.rows_held(state.phi, phi_s), _prior(messages, p_s))
        use = (p_s @ q_s.to(p_s.dtype)).tolist()  # p(z) over the cohort
        detail = {
            "divergence_experts": per_expert,
            "divergence_layers": per_layer,
            "expert_use": use,
            "experts_returned": returned.sum(dim=0).tolist(),
            "warnings": health.of_clients(q_zs, settings.eta, after.round, rounds),
        }
        return after, Diagnosis(sum(p * d for p, d in zip(use, per_expert, strict=True)), detail)

    def _prior(messages: Sequence[Mapping[str, Tensor]], p_s: Tensor) -> Tensor:
        if settings.prior != "reported":
            return prior
        return p_s @ torch.stack([m["c_shares"] for m in messages]).to(p_s.dtype)

    def _update_from_sums(state: FedmixState, total: Params) -> tuple[FedmixState, Diagnosis]:
        """The same update from sums over the cohort alone: of N_s q(z=k|s) Delta_{k,s}, N_s q(z=k|s), N_s (phi_s - phi)."""
        of_experts = total["q_zs"]
        n = of_experts.sum()
        updated = []
        for k, (w, opt) in enumerate(zip(state.experts, state.experts_opt, strict=True)):
            moved = subtree(total, f"expert.{k}")
            delta = {name: value / of_experts[k] for name, value in moved.items()}
            updated.append(w_optimizer.update(w, delta, opt, 1.0) if of_experts[k] > 0 else (w, opt))
        experts, experts_opt = (tuple(each) for each in zip(*updated, strict=True))
        after = replace(state, round=state.round + 1, experts=experts, experts_opt=experts_opt)
        if shared_phi:
            p_c = total["c_shares"] / n if "c_shares" in total else prior
            after = _phi_update(after, -total["phi"] / n, (total["phi"] != 0).any(dim=1), p_c)
        return after, Diagnosis(
            None, {"expert_use": (of_experts / n).tolist(), "warnings": health.of_use(of_experts / n)}
        )

    def _phi_update(state: FedmixState, moved: Tensor, held: Tensor, p_c: Tensor) -> FedmixState:
        """Adam on Delta_phi, back to the simplex; rows that nobody of the cohort holds keep value and Adam state."""
        delta = posterior.phi_gradient(state.phi, moved, p_c, settings.entropy)
        new, opt = phi_optimizer.update({"phi": state.phi}, {"phi": delta}, state.phi_opt, 1.0)
        phi = keep_rows(held, posterior.to_simplex(new["phi"], settings.phi_floor), state.phi)
        phi_opt = {
            part: {"phi": keep_rows(held, value["phi"], state.phi_opt[part]["phi"])} for part, value in opt.items()
        }
        return replace(state, phi=phi, phi_opt=phi_opt)

    def predict(message: Message, private: Private, x: Tensor) -> Tensor:
        held = held_experts(message.tensors)
        logits, features = model.apply_all([subtree(message.tensors, f"expert.{k}") for k in held], x, training=False)
        log_gate = gate.log_gate(subtree(private, "gate"), features, held, over=held)
        return objective.log_mixture(labels.add(logits, private), log_gate)

    def predict_anonymous(message: Message, privates: Sequence[Private], log_p_s: Tensor, x: Tensor) -> Tensor:
        logits, features = model.apply_all(_experts(message), x, training=False)
        thetas = [subtree(private, "gate") for private in privates]
        return objective.log_mixture(logits, gate.mean_log_gate(thetas, log_p_s, features, list(range(K))))

    def pool(message: Message, x: Tensor) -> Tensor:
        logits, _ = model.apply_all(_experts(message), x, training=False)
        return objective.log_pooled(logits, message.tensors["phi"])

    def distil(message: Message, privates: Sequence[Private], log_p_s: Tensor, x: Tensor) -> Private:
        """One gate for the clients' gates averaged with p(s), from inputs that the server may have."""
        thetas = [subtree(private, "gate") for private in privates]
        parts = []
        with torch.no_grad():
            for part in torch.split(x, 512):
                features = model.apply_all(_experts(message), part, training=False)[1]
                parts.append((features, gate.mean_log_gate(thetas, log_p_s, features, list(range(K))).exp()))
        features = torch.cat([features for features, _ in parts], dim=1)
        theta = gate.distil(features, torch.cat([target for _, target in parts]))
        return {f"gate.{name}": value for name, value in theta.items()}

    def _experts(message: Message) -> list[Params]:
        return [subtree(message.tensors, f"expert.{k}") for k in range(K)]

    def warm_start(state: FedmixState, experts: Sequence[Params], rng: Stream) -> FedmixState:
        if len(experts) not in (1, K):
            raise SettingError(
                f"a warm start needs 1 or {K} experts. The other run has {len(experts)}; set fedmix.experts."
            )
        if len(experts) == 1 < K:
            experts = [_with_noise(experts[0], rng.child("expert", k)) for k in range(K)]
        return replace(state, experts=tuple(fitting(w, like) for w, like in zip(experts, state.experts, strict=True)))

    def describe(state: FedmixState) -> dict[str, Any]:
        q_zs = {} if linear else {"q_zs": state.q_zs.tolist()}  # linear: known to the clients alone
        return ({"q_zc": state.phi.tolist()} if shared_phi else {}) | q_zs

    return Algorithm(
        name="fedmix",
        init=init,
        new_client=new_client,
        broadcast=broadcast,
        client_update=client_update,
        adapt=adapt,
        newcomer=newcomer,
        wrap=wrap,
        check=check,
        server_update=server_update,
        predict=predict,
        predict_anonymous=predict_anonymous,
        warm_start=warm_start,
        describe=describe,
        experts=lambda state: state.experts,
        uses_private=True,
        hand_over=_gate_of,
        counted=labels.counted if labels.on else None,
        pool=pool if shared_phi else None,
        distil=distil,
        group_update=group_update if together and model.stackable else None,
    )


def _gate_of(tensors: Mapping[str, Tensor]) -> Params:
    return {name: value for name, value in tensors.items() if name.startswith("gate.")}


def held_experts(tensors: Mapping[str, Tensor]) -> list[int]:
    """The experts that a message carries."""
    return sorted({int(name.split(".")[1]) for name in tensors if name.startswith("expert.")})


def _public_prior(prior: str | list[float], categories: int) -> Tensor:
    """p(c) of the marginal entropy [C]: uniform, or the recipe's own shares."""
    if isinstance(prior, str):
        return torch.full((categories,), 1.0 / categories)
    if len(prior) != categories or min(prior) < 0 or sum(prior) <= 0:
        raise SettingError(f"fedmix.prior must be {categories} shares of c, none negative. Got {prior} instead.")
    return torch.tensor(prior) / sum(prior)


def _with_noise(w: Params, rng: Stream) -> Params:
    with rng.torch():
        return {
            name: value + WARM_START_NOISE * value.std(correction=0) * torch.randn_like(value)
            for name, value in w.items()
        }
