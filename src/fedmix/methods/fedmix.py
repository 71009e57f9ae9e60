"""FedMix: a federated mixture of experts (Reisser, Louizos, Gavves, Welling, 2021), Algorithms 1 and 2 (eta = 0: 1).

Every parameter is an expert's. What crosses the wire: the experts w_k that a client uses, phi, and q(z|s). What stays: the gate
theta_s = (pi, A, b). What is left open in the paper is in `FedmixSettings` and docs/decisions.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
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
from fedmix.core.optim import Optimizer, keep_rows
from fedmix.core.server import server_optimizer
from fedmix.core.settings import PrivacySettings, ServerSettings, require
from fedmix.core.tree import Params, subtree
from fedmix.errors import SettingError
from fedmix.methods import gates
from fedmix.methods.fedmix_settings import FedmixSettings
from fedmix.methods.page import Page


@dataclass(frozen=True)
class Mixture:
    """FedMix for one model and federation: its settings, and what follows from them."""

    setup: Setup
    settings: FedmixSettings

    @property
    def K(self) -> int:
        return self.settings.experts

    @property
    def shares_phi(self) -> bool:
        return self.settings.phi == "global" and self.settings.objective == "bound"

    @cached_property
    def prior(self) -> Tensor:
        """p(c) of the marginal entropy [C]: uniform, or the recipe's own shares."""
        prior, categories = self.settings.prior, self.setup.categories
        if isinstance(prior, str):
            return torch.full((categories,), 1.0 / categories)
        if len(prior) != categories or min(prior) < 0 or sum(prior) <= 0:
            raise SettingError(f"fedmix.prior must be {categories} shares of c, none negative. Got {prior} instead.")
        return torch.tensor(prior) / sum(prior)

    @cached_property
    def phi_optimizer(self) -> Optimizer:
        return server_optimizer(self.setup.server, self.settings.phi_lr, rows=True)

    def uniform(self) -> Tensor:
        return posterior.uniform(self.setup.categories, self.K)


def fedmix(setup: Setup, settings: FedmixSettings) -> Method:
    mix = Mixture(setup, settings)
    fields = {"q_zs": Field((mix.K,), tells="marginal")}
    if mix.shares_phi:
        fields["phi"] = Field((setup.categories, mix.K), moved_from="phi", tells="posterior")
    if mix.shares_phi and settings.prior == "reported":
        fields["c_shares"] = Field((setup.categories,), tells="shares")
    mix.prior  # noqa: B018 (shares that do not fit are refused now)
    bound_or_direct = partial(loss, mix)
    return Method(
        loss=bound_or_direct,
        leading=bound_or_direct,
        place=lambda name: "expert",
        experts=mix.K,
        prepare=partial(prepare, mix),
        own=partial(new_client, mix),
        trains=lambda name: name.startswith("gate."),
        reply=fields,
        weigh="q_zs",
        answer=partial(answer, mix),
        init=partial(init, mix),
        sends=lambda extras: {"phi": extras["phi"]} if mix.shares_phi else {},
        select=partial(select, mix) if settings.eta else None,
        server=partial(server, mix),
        individuals=remember,
        watch=partial(watch, mix),
        describe=partial(describe, mix),
        combine=combine,
        gates=gates.shares,
        bound=partial(bound, mix) if settings.objective == "bound" else None,
        anonymous=Anonymous(
            "gates averaged with p(s)",
            partial(gates.average, setup.model),
            pool=partial(gates.pool, setup.model) if mix.shares_phi else None,
            distil=partial(gates.distil, setup.model),
        ),
        newcomer=partial(newcomer, mix),
        hand_over=lambda private: {name: value for name, value in private.items() if name.startswith("gate.")},
        longer_steps=(lambda q: float(q.sum() / q.max())) if settings.full_steps else None,
        ungroupable=ungroupable(settings),
        adapts="gate alone",
    )


def ungroupable(settings: FedmixSettings) -> str | None:
    """What reads values on the way cannot be vectorised."""
    if settings.eta:
        return "fedmix.eta leaves other experts out for each client"
    return "fedmix.skip_below leaves other points out for each client" if settings.skip_below else None


def check(settings: FedmixSettings, server: ServerSettings, protection: PrivacySettings) -> None:
    """Pruning tells who uses which expert, by what is sent and what comes back."""
    must = "0 with privacy.noise: which experts come back would tell what the noise is to hide"
    require(not settings.eta or not protection.noise, "fedmix.eta", must, settings.eta)
    must = "0 with server.aggregation = 'linear': the server does not see who uses which expert"
    require(not settings.eta or server.aggregation != "linear", "fedmix.eta", must, settings.eta)


PAGE = Page("FedMix", fedmix, FedmixSettings, "Reisser, Louizos, Gavves and Welling, 2021", check)


# -- a client ------------------------------------------------------------------------------------------------------------


def new_client(mix: Mixture, weights: Params) -> Params:
    theta = {f"gate.{name}": value for name, value in gate.new_gate(mix.setup.model.features, mix.K).items()}
    return theta | ({"phi": mix.uniform()} if mix.settings.phi == "private" else {})


def prepare(mix: Mixture, arrival: Arrival) -> tuple[Fixed, Tensor]:
    """beta of this round and the client's p(c|s); phi is carried from step to step."""
    settings = mix.settings
    beta = posterior.temperature(settings.beta, settings.beta_start, settings.beta_rounds, arrival.round)
    shares = posterior.category_shares(arrival.data.c, mix.setup.categories)
    phi = arrival.sent["phi"] if mix.shares_phi else arrival.private.get("phi", mix.uniform().to(shares.device))
    return {"beta": beta, "shares": shares}, phi


def loss(mix: Mixture, parts: Parts, fixed: Fixed, batch: Batch, phi: Tensor) -> tuple[Tensor, float, Tensor]:
    """-L_s of each point; phi' first, from the same forward pass, with no gradient through it (Algorithm 2's client)."""
    settings = mix.settings
    keep = parts.held
    if settings.eta:
        keep = prune.kept(posterior.expert_marginal(phi, fixed["shares"]), settings.eta, parts.held)
        parts = parts._replace(experts={k: parts.experts[k] for k in keep})
    there = batch.weight > 0
    matter = None
    if settings.skip_below:
        matter = prune.renormalise(phi, keep)[batch.c] >= settings.skip_below  # [B, K']
    logits, features = _outputs(mix, parts, batch.x, matter)
    if not settings.gate_through_features:
        features = features.detach()
    log_gate = gate.log_gate(subtree(parts.own, "gate"), features, keep)  # [B, K]
    log_lik = objective.log_likelihood(logits, batch.y)  # [B, K']
    joint = objective.log_joint(log_lik, log_gate if len(keep) == mix.K else log_gate[..., keep])
    if settings.objective == "direct":
        return objective.direct_losses(joint), 0.0, phi
    with torch.no_grad():
        phi_bar, present = posterior.solve_phi(joint, batch.c, mix.setup.categories, fixed["beta"], there)
        phi = posterior.dampen(phi, prune.reweigh(phi_bar, phi, keep), present, settings.gamma)
        q_gate = posterior.of_points(phi, batch.c)
        q_lik = q_gate if len(keep) == mix.K else posterior.of_points(prune.renormalise(phi, keep), batch.c)
    if matter is not None:
        log_lik = _learn_late(mix, parts, batch, log_lik, (q_lik >= settings.skip_below) & ~matter)
    if settings.full_steps:
        log_lik = objective.full_steps(log_lik, q_lik, batch.weight)
    return objective.bound_losses(log_lik, log_gate, q_lik, q_gate), 0.0, phi


def _outputs(mix: Mixture, parts: Parts, x: Tensor, matter: Tensor | None) -> tuple[Tensor, Tensor]:
    """matter: the points that each expert is to learn from; the others take no part in its backward pass."""
    if matter is None:
        return outputs(mix.setup.model, parts, x)
    models = [parts.whole(k) for k in parts.held]
    logits, features = mix.setup.model.apply_all(models, x, training=True, where=matter)
    return with_labels(parts, logits), features


def _learn_late(mix: Mixture, parts: Parts, batch: Batch, log_lik: Tensor, late: Tensor) -> Tensor:
    """Log-likelihoods again, with a graph, of points that have come to matter in this very step: late [B, K']."""
    for j in late.any(dim=0).nonzero().flatten().tolist():
        rows = late[:, j].nonzero().flatten()
        again, _ = mix.setup.model.apply(parts.whole(parts.held[j]), batch.x[rows], training=True)
        new = objective.log_likelihood(with_labels(parts, again).unsqueeze(0), batch.y[rows]).squeeze(1)
        log_lik = log_lik.index_put((rows, torch.full_like(rows, j)), new)
    return log_lik


def answer(mix: Mixture, done: Departure) -> Answer:
    """q(z|s), phi where it is shared, and the experts that are worth sending back."""
    settings, phi, shares = mix.settings, done.carry, done.fixed["shares"]
    q_zs = posterior.expert_marginal(phi, shares)
    if settings.marginal == "exact":
        q_zs = _exact_marginal(mix, done.parts, done.data.x)
    fields = {"q_zs": q_zs}
    if mix.shares_phi:
        fields["phi"] = phi
        if settings.prior == "reported":
            fields["c_shares"] = shares
    keep = prune.kept(q_zs, settings.eta, done.parts.held) if settings.eta else None
    kept = {"phi": posterior.to_simplex(phi, settings.phi_floor)} if settings.phi == "private" else {}
    return Answer(fields, keep, kept)


def _exact_marginal(mix: Mixture, parts: Parts, x: Tensor) -> Tensor:
    """p(z|s) = E_{x ~ D_s}[p(z|x,s)], the gate's softmax over all K as in training: [K]."""
    total = torch.zeros(mix.K, device=x.device)
    with torch.no_grad():
        for part in torch.split(x, 256):
            _, features = outputs(mix.setup.model, parts, part, training=False)
            total += gate.log_gate(subtree(parts.own, "gate"), features, parts.held).exp().sum(dim=0)
    return total / len(x)


# -- the server ----------------------------------------------------------------------------------------------------------


def init(mix: Mixture) -> Extras:
    """phi = q(z|c) [C, K], and what each client last returned, q(z|s) [S, K]: 1/K before it did."""
    phi = mix.uniform()
    opt = mix.phi_optimizer.init({"phi": phi})
    return {"phi": phi, "phi_opt": opt, "q_zs": posterior.uniform(mix.setup.clients, mix.K)}


def select(mix: Mixture, extras: Extras, client: int) -> list[int]:
    return prune.kept(extras["q_zs"][client], mix.settings.eta, slack=prune.SERVER_SLACK)


def server(mix: Mixture, extras: Extras, seen: Aggregate) -> Extras:
    """Adam on Delta_phi, back to the simplex; rows that nobody of the cohort holds keep value and Adam state."""
    if not mix.shares_phi:
        return extras
    phi, opt, held = extras["phi"], extras["phi_opt"], seen.touched["phi"]
    delta = posterior.phi_gradient(phi, seen.moved["phi"], seen.mean.get("c_shares", mix.prior), mix.settings.entropy)
    new, new_opt = mix.phi_optimizer.update({"phi": phi}, {"phi": delta}, opt, 1.0)
    kept_opt = {part: {"phi": keep_rows(held, own["phi"], opt[part]["phi"])} for part, own in new_opt.items()}
    return extras | {
        "phi": keep_rows(held, posterior.to_simplex(new["phi"], mix.settings.phi_floor), phi),
        "phi_opt": kept_opt,
    }


def remember(extras: Extras, clients: Sequence[int], fields: Params) -> Extras:
    q_zs = extras["q_zs"].clone()
    q_zs[list(clients)] = fields["q_zs"]
    return extras | {"q_zs": q_zs}


def watch(mix: Mixture, extras: Extras, seen: Aggregate, t: int) -> dict[str, Any]:
    if mix.setup.server.aggregation == "linear":  # who uses which expert is known to the clients alone
        warnings = health.of_use(seen.use)
    else:
        warnings = health.of_clients(extras["q_zs"], mix.settings.eta, t, mix.setup.rounds)
    return {"expert_use": seen.use.tolist(), "warnings": warnings}


def describe(mix: Mixture, extras: Extras) -> dict[str, Any]:
    linear = mix.setup.server.aggregation == "linear"
    q_zs = {} if linear else {"q_zs": extras["q_zs"].tolist()}
    return ({"q_zc": extras["phi"].tolist()} if mix.shares_phi else {}) | q_zs


def newcomer(mix: Mixture, extras: Extras, known: bool) -> Params:
    """Where c tells clients apart, a new one starts from the mean of what the others returned."""
    if known or not mix.shares_phi:
        return {}
    returned = extras["q_zs"][(extras["q_zs"] != posterior.uniform(1, mix.K)).any(dim=1)]
    rows = returned if len(returned) else extras["phi"]  # linear aggregation: only the server's own phi is known
    return {"phi": rows.mean(dim=0).expand(mix.setup.categories, mix.K)}


def combine(logits: Tensor, features: Tensor, own: Params, held: list[int]) -> Tensor:
    """log p(y|x,s) = log sum_z p(y|x,z) p(z|x,s): [K', B, classes], [K', B, H] -> [B, classes]."""
    return objective.log_mixture(logits, gate.log_gate(subtree(own, "gate"), features, held, over=held))


def bound(
    mix: Mixture, logits: Tensor, features: Tensor, own: Params, sent: Params, y: Tensor, c: Tensor, held: list[int]
) -> Tensor:
    """eq:LowerBound of each point under the server's phi (or the client's own), renormalised over the experts held: [B]."""
    log_gate = gate.log_gate(subtree(own, "gate"), features, held, over=held)
    joint = objective.log_joint(objective.log_likelihood(logits, y), log_gate)
    phi = sent["phi"] if mix.shares_phi else own.get("phi", mix.uniform())
    return objective.lower_bound(joint, prune.renormalise(phi, held)[c], mix.settings.beta)
