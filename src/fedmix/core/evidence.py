"""Which expert a client's points speak for: mean log-likelihoods under the experts as they arrive, before any is trained.

The paper draws phi from mini-batches while the experts are being trained on this very client, so that an expert which leads at
first is trained most and leads more. Experts as they arrive are compared fairly.
"""

import torch
from torch import Tensor

SMALLEST = 1e-8


def by_category(log_lik: Tensor, c: Tensor, categories: int) -> tuple[Tensor, Tensor]:
    """r[c, k]: the mean log-likelihood of the points of each value of c under expert k, minus its mean over experts.

    log_lik [B, K], c [B] -> r [C, K], and which values of c there are [C]; rows of the others are zero.
    """
    K = log_lik.shape[1]
    values = torch.cat([log_lik, log_lik.new_ones(len(c), 1)], dim=1)  # sums and counts in one go
    sums = values.new_zeros(categories, K + 1).index_add_(0, c, values)
    count = sums[:, -1:]
    mean = sums[:, :-1] / count.clamp(min=1)
    return mean - mean.mean(dim=1, keepdim=True), count.squeeze(1) > 0


def mean_square(r: Tensor, present: Tensor) -> Tensor:
    """The mean of r^2 over the rows that are there and all experts: [C, K], [C] -> [1]. Its root is the spread of evidence."""
    return r[present].square().mean().reshape(1)


def posterior(r: Tensor, temperature: Tensor) -> Tensor:
    """q(z|c) = softmax(r / temperature): [C, K'] -> [C, K']."""
    return torch.softmax(r / temperature.clamp(min=SMALLEST), dim=1)


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
