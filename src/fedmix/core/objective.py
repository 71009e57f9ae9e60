"""What a client maximises: the lower bound (eq:LowerBound), the loss of Algorithms 1 and 2, the direct objective."""

import torch
from torch import Tensor

from fedmix.core.tree import Params

SMALLEST = 1e-3  # the least q(z|y) that is divided by: below it phi says little but how it was clamped


def log_likelihood(logits: Tensor, y: Tensor) -> Tensor:
    """log p_{w_k}(y|x, z=k) for every expert: logits [..., K, B, classes], y [..., B] -> [..., B, K]."""
    log_p = torch.log_softmax(logits, dim=-1)
    index = y.unsqueeze(-2).unsqueeze(-1).expand(*logits.shape[:-1], 1)
    return log_p.gather(-1, index).squeeze(-1).transpose(-1, -2)


def log_joint(log_lik: Tensor, log_gate: Tensor) -> Tensor:
    """log p(y, z=k | x, s) = log p(y|x, z=k) + log p(z=k|x, s): [B, K], [B, K] -> [B, K]."""
    return log_lik + log_gate


def lower_bound(log_joint: Tensor, q: Tensor, beta: float) -> Tensor:
    """E_{q(z|c)}[log p(y, z|x, s)] + beta H(q(z|c)) of each point  (eq:LowerBound): [B, K], q(z|c) [B, K] -> [B]."""
    entropy: Tensor = -torch.special.xlogy(q, q).sum(dim=1)
    return (q * log_joint).sum(dim=1) + beta * entropy


def bound_losses(log_lik: Tensor, log_gate: Tensor, q_lik: Tensor, q_gate: Tensor) -> Tensor:
    """-L_s of each point: E_{q''}[log p(y|x,z)] + E_q[log p(z|x,s)]  (Algorithm 2; Algorithm 1 if q'' = q): [..., B].

    log_lik, q_lik [..., B, K'] over the experts that are kept; log_gate, q_gate [..., B, K] over all of them.
    """
    return -((q_lik * log_lik).sum(dim=-1) + (q_gate * log_gate).sum(dim=-1))


def full_steps(log_lik: Tensor, q: Tensor, weight: Tensor) -> Tensor:
    """The same log-likelihoods, their gradients times one number. This is not in the paper.

    The expert with the largest share of the mini-batch steps as far as one model would, the others in proportion. In L_s
    itself experts that are all alike step 1/K as far.

    log_lik, q(z|c) [..., B, K], weight [..., B] of each point in a mean over the mini-batch -> [..., B, K]
    """
    times = longer(q, weight)[..., None, None]
    return log_lik.detach() + times * (log_lik - log_lik.detach())


def longer(q: Tensor, weight: Tensor) -> Tensor:
    """One over the largest share of the mini-batch that an expert has: q(z|c) [..., B, K], weight [..., B] -> [...]."""
    share = (weight.unsqueeze(-1) * q).sum(dim=-2)  # [..., K]
    # the largest of K shares is 1/K or more, unless there are no points at all
    return 1 / share.amax(dim=-1).clamp(min=1 / q.shape[-1])


def scaled_gradients(weights: Params, times: Tensor) -> Params:
    """The same weights, their gradients times a number, or times one for each first index: [...], [...] -> [...]."""
    scaled = {}
    for name, w in weights.items():
        factor = times.reshape(*times.shape, *[1] * (w.dim() - times.dim()))
        scaled[name] = w.detach() + factor * (w - w.detach())
    return scaled


def direct_losses(log_joint: Tensor) -> Tensor:
    """-log sum_z p(z|x_i,s) p(y_i|x_i,z) of each point  (eq:globalObjective), without a posterior: [..., B, K] -> [..., B]."""
    return -torch.logsumexp(log_joint, dim=-1)


def log_mixture(logits: Tensor, log_gate: Tensor) -> Tensor:
    """log p(y|x,s) = log sum_z p(y|x,z) p(z|x,s)  (eq:MoEStandard): [K, B, classes], [B, K] -> [B, classes]."""
    return torch.logsumexp(torch.log_softmax(logits, dim=2) + log_gate.T.unsqueeze(2), dim=0)


def log_pooled(logits: Tensor, phi: Tensor) -> Tensor:
    """log p(y|x) without any gate, where c is the label: logits [K, B, classes], phi [classes, K] -> [B, classes].

    Expert k learns from points that count q(z=k|y), so that p(y|x,z=k) is in proportion to p(y|x) q(z=k|y). With q divided
    out each expert says something about p(y|x) itself; these are averaged as log-probabilities (normalisers cancel).
    """
    mean_log_q = phi.clamp_min(SMALLEST).log().mean(dim=1)
    return torch.log_softmax(logits.mean(dim=0) - mean_log_q, dim=1)


def log_counted(log_p: Tensor, counts: Tensor, p_y: Tensor) -> Tensor:
    """log p(y|x,s) for a client that knows its label counts: [B, classes], [classes], [classes] -> [B, classes].

    By Bayes' rule it is in proportion to p(y|x) p(y|s) / p(y). One more point, spread over labels as everybody's are, stands
    for what the client has not seen: with no point at all this is p(y|x).
    """
    return torch.log_softmax(log_p + label_offset(counts, p_y), dim=1)


def label_offset(counts: Tensor, p_y: Tensor) -> Tensor:
    """log p(y|s)/p(y) from counts and one more point, up to a constant: [classes], [classes] -> [classes]."""
    p_y = p_y.clamp_min(torch.finfo(p_y.dtype).tiny)
    return ((counts + p_y) / p_y).log()
