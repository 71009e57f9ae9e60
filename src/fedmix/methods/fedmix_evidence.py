"""phi from the experts as they arrive, before this round trains them (`fedmix.evidence = "arriving"`; not in the paper)."""

import torch
from torch import Tensor

from fedmix.core import evidence, objective, posterior
from fedmix.core.method import Aggregate, Arrival, Extras, Fixed, outputs
from fedmix.core.optim import keep_rows
from fedmix.core.types import Examples
from fedmix.methods.fedmix_mixture import Mixture


def arriving_phi(mix: Mixture, arrival: Arrival, phi: Tensor) -> tuple[Tensor, Fixed]:
    """phi of this round from the experts as they arrive, and what the server is told of the evidence.

    What the client is not sent keeps its share of phi.
    """
    held = arrival.parts.held
    points = _some_points(arrival, mix.settings.evidence_points)
    with torch.no_grad():
        logits, _ = outputs(mix.setup.model, arrival.parts, points.x, training=False)
        log_lik = objective.log_likelihood(logits, points.y)
    r, count = evidence.by_category(log_lik, points.c, mix.setup.categories)
    present = count > 0
    about: Fixed = {}
    penalty: Tensor | float = 0.0
    if mix.pools:
        everybodys = arrival.sent["r"]
        full = evidence.full_width(r, everybodys, held)
        about["r"] = torch.where(present.unsqueeze(1), full, everybodys)
        r = evidence.pooled(full, count, everybodys, mix.settings.evidence_pool)[:, held]
        use = posterior.expert_marginal(phi, mix.prior.to(phi.device))
        penalty = evidence.use_penalty(use, mix.settings.entropy)[held]
    about["evidence"] = evidence.mean_square(r, present)
    # in round 1 the server does not know yet how far clients' evidence goes
    spread = arrival.sent["spread"] if bool(arrival.sent["spread"] > 0) else about["evidence"].sqrt()
    q = evidence.posterior(r, mix.settings.evidence_temperature * spread, penalty)
    if mix.grows:
        about["fit"] = log_lik.new_zeros(mix.K).index_copy_(0, torch.tensor(held), log_lik.mean(dim=0))
        about["round"] = torch.tensor(arrival.round)
    return torch.where(present.unsqueeze(1), evidence.among(q, phi, held), phi), about


def _some_points(arrival: Arrival, most: int) -> Examples:
    data = arrival.data
    if not 0 < most < len(data):
        return data
    index = torch.from_numpy(arrival.rng.child("evidence").permutation(len(data))[:most]).to(data.x.device)
    return Examples(data.x[index], data.y[index], data.c[index])


def after_evidence(mix: Mixture, extras: Extras, seen: Aggregate) -> Extras:
    """What evidence changes at the server: its spread, everybody's evidence, and phi.

    phi goes half of the way to the mean of what clients return: p(z) of this round weighs on the evidence of the next one, and
    without that it would swing to and fro.
    """
    changed: Extras = {"spread": seen.mean["evidence"].sqrt().to(extras["spread"].dtype)}
    if mix.pools:
        changed["r"] = seen.mean["r"].to(extras["r"].dtype)
    if mix.shares_phi:
        phi = extras["phi"]
        changed["phi"] = keep_rows(seen.touched["phi"], (phi + seen.mean["phi"].to(phi.dtype)) / 2, phi)
    return changed
