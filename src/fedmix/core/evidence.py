"""Which expert a client's points speak for: mean log-likelihoods under the experts as they arrive, before any is trained.

The paper draws phi from mini-batches while the experts are being trained on this very client, so that an expert which leads at
first is trained most and leads more. Experts as they arrive are compared fairly.
"""

import torch
from torch import Tensor

SMALLEST = 1e-8


def by_category(log_lik: Tensor, c: Tensor, categories: int) -> tuple[Tensor, Tensor]:
    """r[c, k]: the mean log-likelihood of the points of each value of c under expert k, minus its mean over experts.

    log_lik [B, K], c [B] -> r [C, K], and how many points each value of c has [C]; rows of values without points are zero.
    """
    K = log_lik.shape[1]
    values = torch.cat([log_lik, log_lik.new_ones(len(c), 1)], dim=1)  # sums and counts in one go
    sums = values.new_zeros(categories, K + 1).index_add_(0, c, values)
    count = sums[:, -1:]
    mean = sums[:, :-1] / count.clamp(min=1)
    return mean - mean.mean(dim=1, keepdim=True), count.squeeze(1)


def pooled(r: Tensor, count: Tensor, everybodys: Tensor, weight: float) -> Tensor:
    """A client's evidence together with everybody's of the last round, which counts as `weight` points: [C, K] -> [C, K]."""
    points = count.unsqueeze(1)
    return (points * r + weight * everybodys) / (points + weight).clamp(min=SMALLEST)


def full_width(r: Tensor, everybodys: Tensor, held: list[int]) -> Tensor:
    """The evidence of a client that holds some experts, beside everybody's for the others: [C, K'], [C, K] -> [C, K]."""
    if len(held) == everybodys.shape[1]:
        return r
    return everybodys.index_copy(1, torch.tensor(held), r + everybodys[:, held].mean(dim=1, keepdim=True))


def mean_square(r: Tensor, present: Tensor) -> Tensor:
    """The mean of r^2 over the rows that are there and all experts: [C, K], [C] -> [1]. Its root is the spread of evidence."""
    return r[present].square().mean().reshape(1)


def posterior(r: Tensor, temperature: Tensor, penalty: Tensor | float = 0.0) -> Tensor:
    """q(z|c) = softmax(r / temperature - penalty): [C, K'], penalty [K'] -> [C, K']."""
    return torch.softmax(r / temperature.clamp(min=SMALLEST) - penalty, dim=1)


def use_penalty(use: Tensor, entropy: float) -> Tensor:
    """What is taken off the evidence for experts that are used much: p(z) [K] -> [K].

    q(z|c) proportional to exp(r / temperature - entropy log p(z)) is where the mean evidence, the entropy of q and `entropy`
    times the marginal entropy H(p(z)) are largest together.
    """
    return entropy * use.clamp(min=SMALLEST).log()


def among(q: Tensor, phi: Tensor, held: list[int]) -> Tensor:
    """q over the experts that a client holds, in the share that phi leaves them; the others keep theirs.

    q [C, K'], phi [C, K] -> [C, K]
    """
    if len(held) == phi.shape[1]:
        return q
    others = phi.clone()
    others[:, held] = 0.0
    share = 1 - others.sum(dim=1, keepdim=True)
    others[:, held] = share * q
    return others
