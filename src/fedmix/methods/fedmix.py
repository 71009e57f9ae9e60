"""FedMix: a federated mixture of experts (Reisser, Louizos, Gavves, Welling, 2021), Algorithm 2; with eta = 0, Algorithm 1.

Every parameter is an expert's, unless the recipe says what experts share. The experts w_k that a client uses, what they share,
phi and q(z|s) cross the wire. The gate theta_s = (pi, A, b) stays with the client. What the paper leaves open is in
`FedmixSettings` and docs/decisions.md.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedmix.core import gate, health, objective, posterior, prune
from fedmix.core.method import (
    Aggregate,
    Anonymous,
    Answer,
    Arrival,
    Batch,
    Departure,
    Extras,
    Field,
    Fixed,
    Method,
    Parts,
    Setup,
    outputs,
    with_labels,
)
from fedmix.core.optim import keep_rows
from fedmix.core.placement import Unpacked
from fedmix.core.server import State
from fedmix.core.settings import PrivacySettings, ServerSettings, require
from fedmix.core.tree import Params, subtree
from fedmix.errors import SettingError
from fedmix.methods import fedavg, fedmix_evidence, fedmix_growth, fedmix_network, fedmix_sharing, gates
from fedmix.methods.fedmix_mixture import Mixture
from fedmix.methods.fedmix_settings import FedmixSettings, recommended
from fedmix.methods.page import Page


def fedmix(setup: Setup, settings: FedmixSettings) -> Method:
    """FedMix as a method."""
    mix = Mixture(setup, settings)
    mix.prior  # noqa: B018 (shares that do not fit are refused now)
    if mix.shares_everything:
        _refuse_nothing_to_choose(settings.shared, setup.model.output)
        # one model for all: nothing is left that a gate could choose between
        return fedavg.fedavg(setup)
    bound_or_direct = partial(loss, mix)
    return Method(
        loss=bound_or_direct,
        leading=bound_or_direct,
        place=mix.place,
        experts=mix.K,
        prepare=partial(prepare, mix),
        own=partial(new_client, mix),
        trains=of_gate,
        reply=reply_fields(mix),
        weigh="q_zs",
        answer=partial(answer, mix),
        init=partial(init, mix),
        sends=partial(sends, mix),
        select=partial(select, mix) if settings.eta else None,
        chances=partial(fedmix_sharing.chances, settings) if settings.expert_dropout else None,
        stacks=not settings.eta and not settings.skip_below,
        alive=fedmix_growth.alive if mix.grows else None,
        restructure=partial(restructure, mix) if mix.grows else None,
        migrate=fedmix_growth.migrate if mix.grows else None,
        needs_clients="experts are split by the updates of single clients" if mix.grows else None,
        server=partial(server, mix),
        individuals=remember,
        watch=partial(watch, mix),
        describe=partial(describe, mix),
        combine=combine,
        gates=gates.shares,
        bound=partial(bound, mix) if settings.objective == "bound" else None,
        anonymous=without_identity(mix),
        newcomer=partial(newcomer, mix),
        hand_over=hand_over,
        longer_steps=longer_steps if settings.full_steps else None,
        ungroupable=ungroupable(settings),
        adapts="gate alone",
    )


def _refuse_nothing_to_choose(shared: str | list[str], output: str) -> None:
    """A list may name everything; a word that leaves the output layer to experts must find one that is trained."""
    if isinstance(shared, str) and shared != "none":
        raise SettingError(
            f"fedmix.shared = {shared!r} leaves nothing to experts: the output layer {output!r} is not trained. Name what they "
            "share, or 'none'."
        )


def reply_fields(mix: Mixture) -> dict[str, Field]:
    """What a client says beside weights."""
    categories = mix.setup.categories
    fields = {"q_zs": Field((mix.K,), tells="marginal")}
    if mix.arriving:
        fields["evidence"] = Field((1,), kind="numbers")
    if mix.pools:
        fields["r"] = Field((categories, mix.K), kind="numbers", moved_from="r")
    if mix.grows:
        fields["fit"] = Field((mix.K,), kind="numbers")
    if mix.network:
        return fields | fedmix_network.fields(mix)
    if not mix.shares_phi:
        return fields
    fields["phi"] = Field((categories, mix.K), moved_from="phi", tells="posterior")
    if mix.settings.prior == "reported":
        fields["c_shares"] = Field((categories,), tells="shares")
    return fields


def without_identity(mix: Mixture) -> Anonymous:
    model = mix.setup.model
    return Anonymous(
        "gates averaged with p(s)",
        partial(gates.average, model),
        pool=partial(gates.pool, model) if mix.shares_phi else None,
        distil=partial(gates.distil, model),
    )


def longer_steps(q_zs: Any) -> float:
    """How much longer the steps of all experts together are than one model's, with full_steps."""
    return float(q_zs.sum() / q_zs.max())


def ungroupable(settings: FedmixSettings) -> str | None:
    """Why clients cannot be trained side by side: what depends on values on the way cannot be vectorised."""
    if settings.eta:
        return "fedmix.eta leaves other experts out for each client"
    if settings.skip_below:
        return "fedmix.skip_below leaves other points out for each client"
    if settings.phi == "network":
        return "q(z|c) is a network, which is trained in a step of its own"
    return None


def check(settings: FedmixSettings, server: ServerSettings, protection: PrivacySettings) -> None:
    """Refuse pruning where it would tell who uses which expert, by what is sent and what comes back."""
    must = "0 with privacy.noise: which experts come back would tell what the noise is to hide"
    require(not settings.eta or not protection.noise, "fedmix.eta", must, settings.eta)
    must = "0 with server.aggregation = 'linear': the server does not see who uses which expert"
    require(not settings.eta or server.aggregation != "linear", "fedmix.eta", must, settings.eta)
    dropout = settings.expert_dropout
    require(not dropout or server.aggregation != "linear", "fedmix.expert_dropout", must, dropout)
    seen = not protection.noise and server.aggregation != "linear"
    must = "named, not 'auto', with privacy.noise or sums: the short run that decides sees single clients' updates"
    require(seen or settings.shared != "auto", "fedmix.shared", must, settings.shared)


PAPER = "Reisser, Louizos, Gavves and Welling, 2021"
SHARING = (fedmix_sharing.with_factors, fedmix_sharing.SETTLE)
PAGE = Page("FedMix", fedmix, FedmixSettings, PAPER, check, *SHARING, recommended)


# -- a client ----------------------------------------------------------------------------------------------------------


def new_client(mix: Mixture, weights: Params) -> Params:
    """What a client keeps beside weights, before it has trained: its gate, and phi where it is private."""
    theta = gate.new_gate(mix.setup.model.features, mix.K)
    private = {f"gate.{name}": value for name, value in theta.items()}
    if mix.settings.phi == "private":
        private["phi"] = mix.uniform()
    if mix.grows:
        # the round that the client last took part in: it knows the experts that there were then
        private["known"] = torch.zeros((), dtype=torch.int64)
    return private


def of_gate(name: str) -> bool:
    """Whether this part of a client's private state is its gate's: only that is trained by gradients."""
    return name.startswith("gate.")


def hand_over(private: Params) -> Params:
    """What predictions without identity need: the gate, and of when it is."""
    return {name: value for name, value in private.items() if of_gate(name) or name == "known"}


def prepare(mix: Mixture, arrival: Arrival) -> tuple[Fixed, Any]:
    """This round's beta and the client's p(c|s), which stay the same; phi, which is carried from step to step."""
    settings = mix.settings
    beta = posterior.temperature(settings.beta, settings.beta_start, settings.beta_rounds, arrival.round)
    if mix.network:
        network = {name: arrival.sent[name] for name in fedmix_network.fields(mix)}
        return {"beta": beta, "use": arrival.sent["use"]}, network
    shares = posterior.category_shares(arrival.data.c, mix.setup.categories)
    phi = arrival.sent["phi"] if mix.shares_phi else arrival.private.get("phi", mix.uniform().to(shares.device))
    fixed: Fixed = {"beta": beta, "shares": shares}
    if mix.arriving:
        phi, about = fedmix_evidence.arriving_phi(mix, arrival, phi)
        fixed |= about
    return fixed, phi


def loss(mix: Mixture, parts: Parts, fixed: Fixed, batch: Batch, phi: Any) -> tuple[Tensor, float, Any]:
    """-L_s of each point (Algorithm 2's client). phi' comes first, from the same forward pass, with no gradient through it.

    phi: q(z|c) as a table [C, K], or the parameters of a network.
    """
    settings = mix.settings
    parts = _pruned(mix, parts, fixed, phi)
    if settings.full_steps and mix.shares:
        parts = _with_full_steps(parts, _q_of_points(mix, phi, batch.c), batch.weight)
    keep = parts.held
    all_kept = len(keep) == mix.K
    matter = _points_that_matter(mix, phi, keep, batch.c)
    logits, features = _outputs(mix, parts, batch.x, matter)
    if not settings.gate_through_features:
        features = features.detach()
    # pruned experts keep their share of the gate; slots without an expert have none
    over = keep if mix.grows else None
    log_gate = gate.log_gate(subtree(parts.own, "gate"), features, keep, over)  # [B, K]
    log_lik = objective.log_likelihood(logits, batch.y)  # [B, K']
    joint = objective.log_joint(log_lik, log_gate if all_kept or over else log_gate[..., keep])
    if settings.objective == "direct":
        return objective.direct_losses(joint), 0.0, phi
    with torch.no_grad():
        if mix.network:
            phi = fedmix_network.step(mix, phi, joint, batch, fixed["beta"], fixed["use"])
        elif not mix.arriving:
            phi = _step_phi(mix, phi, joint, batch, fixed["beta"], keep)
        q_gate = _q_of_points(mix, phi, batch.c)
        if over:
            q_gate = q_gate[..., over]
        q_lik = q_gate if all_kept or over else posterior.of_points(prune.renormalise(phi, keep), batch.c)
    if matter is not None:
        log_lik = _learn_late(mix, parts, batch, log_lik, (q_lik >= settings.skip_below) & ~matter)
    if settings.full_steps and not mix.shares:
        log_lik = objective.full_steps(log_lik, q_lik, batch.weight)
    return objective.bound_losses(log_lik, log_gate, q_lik, q_gate), 0.0, phi


def _q_of_points(mix: Mixture, phi: Any, c: Tensor) -> Tensor:
    """q(z|c) of each point: [..., B] -> [..., B, K]."""
    return fedmix_network.of_points(mix, phi, c) if mix.network else posterior.of_points(phi, c)


def _pruned(mix: Mixture, parts: Parts, fixed: Fixed, phi: Tensor) -> Parts:
    """The parts with the experts that the client still uses (Algorithm 2); all of them with eta = 0."""
    if not mix.settings.eta:
        return parts
    q_zs = posterior.expert_marginal(phi, fixed["shares"])
    keep = prune.kept(q_zs, mix.settings.eta, parts.held)
    return parts._replace(experts={k: parts.experts[k] for k in keep})


def _with_full_steps(parts: Parts, q: Tensor, weight: Tensor) -> Parts:
    """The parts, with gradients of experts, and not of what they share, as long as full steps make them.

    Everybody's q sums to one over experts, so what is shared steps as one model would. q: as it was before the mini-batch.
    """
    q_held = q[..., parts.held]
    # left-out experts leave their share to the others, as in the loss
    q_held = q_held / q_held.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
    times = objective.longer(q_held, weight)
    experts = {k: objective.scaled_gradients(expert, times) for k, expert in parts.experts.items()}
    return parts._replace(experts=experts, stacked=objective.scaled_gradients(parts.stacked, times))


def _points_that_matter(mix: Mixture, phi: Tensor, keep: list[int], c: Tensor) -> Tensor | None:
    """The points that each expert is to learn from [B, K'], with skip_below; None: all of them."""
    if not mix.settings.skip_below:
        return None
    return prune.renormalise(phi, keep)[c] >= mix.settings.skip_below


def _step_phi(mix: Mixture, phi: Tensor, joint: Tensor, batch: Batch, beta: float, keep: list[int]) -> Tensor:
    """phi after this mini-batch: solved in closed form over the experts kept, reweighed, dampened."""
    there = batch.weight > 0
    phi_bar, present = posterior.solve_phi(joint, batch.c, mix.setup.categories, beta, there)
    return posterior.dampen(phi, prune.reweigh(phi_bar, phi, keep), present, mix.settings.gamma)


def _outputs(mix: Mixture, parts: Parts, x: Tensor, matter: Tensor | None) -> tuple[Tensor, Tensor]:
    """matter: the points that each expert is to learn from; the others take no part in its backward pass."""
    if matter is None:
        return outputs(mix.setup.model, parts, x)
    models = [parts.whole(k) for k in parts.held]
    logits, features = mix.setup.model.apply_all(models, x, training=True, where=matter)
    return with_labels(parts, logits), features


def _learn_late(mix: Mixture, parts: Parts, batch: Batch, log_lik: Tensor, late: Tensor) -> Tensor:
    """The log-likelihoods, with a graph now for points that have come to matter in this very step: late [B, K']."""
    for j in late.any(dim=0).nonzero().flatten().tolist():
        rows = late[:, j].nonzero().flatten()
        again, _ = mix.setup.model.apply(parts.whole(parts.held[j]), batch.x[rows], training=True)
        new = objective.log_likelihood(with_labels(parts, again).unsqueeze(0), batch.y[rows]).squeeze(1)
        log_lik = log_lik.index_put((rows, torch.full_like(rows, j)), new)
    return log_lik


def answer(mix: Mixture, done: Departure) -> Answer:
    """q(z|s), phi where it is shared, and the experts that are worth sending back."""
    settings, phi = mix.settings, done.carry
    if settings.marginal == "exact":
        q_zs = _exact_marginal(mix, done.parts, done.data.x)
    elif mix.network:
        q_zs = fedmix_network.of_points(mix, phi, done.data.c).mean(dim=0)
        return Answer({"q_zs": q_zs, **phi})
    else:
        q_zs = posterior.expert_marginal(phi, done.fixed["shares"])
    # those that this recipe has: exactly what `reply_fields` declares
    values = {"q_zs": q_zs, "phi": phi, "c_shares": done.fixed["shares"], **done.fixed}
    fields = {name: values[name] for name in reply_fields(mix)}
    keep = prune.kept(q_zs, settings.eta, done.parts.held) if settings.eta else None
    kept = {"phi": posterior.to_simplex(phi, settings.phi_floor)} if settings.phi == "private" else {}
    if mix.grows:
        kept["known"] = done.fixed["round"]
    return Answer(fields, keep, kept)


def _exact_marginal(mix: Mixture, parts: Parts, x: Tensor) -> Tensor:
    """p(z|s) = E_{x ~ D_s}[p(z|x,s)], the gate's softmax over all K as in training: [K]."""
    total = torch.zeros(mix.K, device=x.device)
    with torch.no_grad():
        for chunk in torch.split(x, 256):
            _, features = outputs(mix.setup.model, parts, chunk, training=False)
            total += gate.log_gate(subtree(parts.own, "gate"), features, parts.held).exp().sum(dim=0)
    return total / len(x)


# -- the server --------------------------------------------------------------------------------------------------------


def init(mix: Mixture) -> Extras:
    """phi = q(z|c) [C, K], and what each client last returned, q(z|s) [S, K]: 1/K before it did."""
    phi = mix.uniform()
    opt = mix.phi_optimizer.init({"phi": phi})
    extras = {"phi": phi, "phi_opt": opt, "q_zs": posterior.uniform(mix.setup.clients, mix.K)}
    if mix.network:
        return {"q_zs": extras["q_zs"], "network": fedmix_network.fresh(mix), "use": posterior.uniform(1, mix.K)[0]}
    if mix.arriving:
        # of the clients' evidence in the last round; 0: there was none
        extras["spread"] = torch.zeros(1)
    if mix.pools:
        extras["r"] = torch.zeros(mix.setup.categories, mix.K)
    if not mix.grows:
        return extras
    first = mix.K if mix.settings.repair else 1
    return fedmix_growth.begin(extras, mix.setup.clients, mix.K, first)


def sends(mix: Mixture, extras: Extras) -> Params:
    """What clients are sent beside experts: phi where it is shared, the spread of evidence, where experts came from."""
    if mix.network:
        return {**extras["network"], "use": extras["use"]}
    names = ["phi"] if mix.shares_phi else []
    names += ["spread"] if mix.arriving else []
    names += ["born", "parent"] if mix.grows else []
    names += ["r"] if mix.pools else []
    return {name: extras[name] for name in names}


def select(mix: Mixture, extras: Extras, client: int) -> list[int]:
    """The experts that a client is sent, by what it last returned."""
    return prune.kept(extras["q_zs"][client], mix.settings.eta, slack=prune.SERVER_SLACK)


def server(mix: Mixture, extras: Extras, seen: Aggregate) -> Extras:
    """Adam on Delta_phi, then back to the simplex. Rows that nobody in the cohort holds keep value and Adam state."""
    if mix.arriving:
        return extras | fedmix_evidence.after_evidence(mix, extras, seen)
    if mix.network:
        network = {name: seen.mean[name].to(value.dtype) for name, value in extras["network"].items()}
        return extras | {"network": network, "use": seen.use.to(extras["use"].dtype)}
    if not mix.shares_phi:
        return extras
    phi, opt, held = extras["phi"], extras["phi_opt"], seen.touched["phi"]
    p_c = seen.mean.get("c_shares", mix.prior)
    delta = posterior.phi_gradient(phi, seen.moved["phi"], p_c, mix.settings.entropy)
    stepped, stepped_opt = mix.phi_optimizer.update({"phi": phi}, {"phi": delta}, opt, 1.0)
    new_phi = posterior.to_simplex(stepped["phi"], mix.settings.phi_floor)
    new_opt = {}
    for part, tensors in stepped_opt.items():
        new_opt[part] = {"phi": keep_rows(held, tensors["phi"], opt[part]["phi"])}
    return extras | {"phi": keep_rows(held, new_phi, phi), "phi_opt": new_opt}


def remember(extras: Extras, clients: Sequence[int], fields: Params) -> Extras:
    """q(z|s) as these clients returned it."""
    q_zs = extras["q_zs"].clone()
    q_zs[list(clients)] = fields["q_zs"]
    return extras | {"q_zs": q_zs}


def restructure(
    mix: Mixture,
    before: State,
    after: State,
    clients: Sequence[int],
    replies: Sequence[Unpacked],
    fields: Params,
    points: Tensor,
) -> tuple[State, list[dict[str, Any]]]:
    """Split, merge and retire experts by what this round's clients sent (fedmix_growth)."""
    growth = fedmix_growth.Growth(before, after, clients, replies, points, mix.setup.model.classes, [])
    return growth.run(fields)


def watch(mix: Mixture, extras: Extras, seen: Aggregate, t: int) -> dict[str, Any]:
    """Metrics of a round: how much each expert is used, and warnings about them."""
    if mix.setup.server.aggregation == "linear":  # only the clients know who uses which expert
        warnings = health.of_use(seen.use)
    else:
        q_zs = extras["q_zs"][:, fedmix_growth.alive(extras)] if mix.grows else extras["q_zs"]
        warnings = health.of_clients(q_zs, mix.settings.eta, t, mix.setup.rounds)
    return {"expert_use": seen.use.tolist(), "warnings": warnings}


def describe(mix: Mixture, extras: Extras) -> dict[str, Any]:
    """Metrics of an evaluation: q(z|c) and q(z|s), where the server knows them."""
    known: dict[str, Any] = {}
    if mix.shares_phi:
        known["q_zc"] = extras["phi"].tolist()
    if mix.setup.server.aggregation != "linear":
        known["q_zs"] = extras["q_zs"].tolist()
    if mix.grows:
        known["experts"] = fedmix_growth.alive(extras)
    return known


def newcomer(mix: Mixture, extras: Extras, known: bool) -> Params:
    """Where c tells clients apart, a new one starts from the mean of what the others returned."""
    if known or not mix.shares_phi:
        return {}
    q_zs = extras["q_zs"]
    took_part = (q_zs != posterior.uniform(1, mix.K)).any(dim=1)
    # with linear aggregation no client's q(z|s) is known, only the server's phi
    rows = q_zs[took_part] if bool(took_part.any()) else extras["phi"]
    return {"phi": rows.mean(dim=0).expand(mix.setup.categories, mix.K)}


# -- prediction --------------------------------------------------------------------------------------------------------


def combine(logits: Tensor, features: Tensor, private: Params, held: list[int]) -> Tensor:
    """log p(y|x,s) = log sum_z p(y|x,z) p(z|x,s): [K', B, classes], [K', B, H] -> [B, classes]."""
    log_gate = gate.log_gate(subtree(private, "gate"), features, held, over=held)
    return objective.log_mixture(logits, log_gate)


def bound(
    mix: Mixture, logits: Tensor, features: Tensor, private: Params, sent: Params, y: Tensor, c: Tensor, held: list[int]
) -> Tensor:
    """eq:LowerBound of each point under the server's phi, or the client's, renormalised over the experts held: [B]."""
    log_gate = gate.log_gate(subtree(private, "gate"), features, held, over=held)
    joint = objective.log_joint(objective.log_likelihood(logits, y), log_gate)
    if mix.network:
        return objective.lower_bound(joint, fedmix_network.of_points(mix, sent, c), mix.settings.beta)
    phi = sent["phi"] if mix.shares_phi else private.get("phi", mix.uniform())
    return objective.lower_bound(joint, prune.renormalise(phi, held)[c], mix.settings.beta)
