"""How many experts there are: one is split where its clients' updates fall apart, one goes where another does as well.

The functions here know updates (as directions of a fixed length) and fits (mean log-likelihoods of clients' points under
experts as they arrive). Nothing is random but the sketch, which is the same for everybody. docs/decisions.md has the rules.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from fedmix.core.tree import Params

SKETCH = 1024  # numbers of an update's direction
# What makes clusters: how much larger the last eigenvalue that counts is than the next one, the mean cosine within clusters
# minus that across them, and the members of the smallest. Where labels are skewed, too, the drop is smaller and the clusters
# are still far apart.
FALL_APART = ((2.0, 0.2, 1), (1.4, 0.35, 2))
FEWEST = 4  # clients of an expert that can be split
UNSERVED = 0.15  # of the entropy of equally frequent labels: an expert whose clients all lose less is not split
SPARED = 0.1  # of what experts have learnt: who would lose less with another expert does not need their own


@lru_cache(maxsize=4)
def _buckets(length: int) -> tuple[Tensor, Tensor]:
    """Where each number of an update goes in its sketch, and with which sign; the same in every process."""
    generator = torch.Generator().manual_seed(length)
    index = torch.randint(0, SKETCH, (length,), generator=generator)
    sign = 2.0 * torch.randint(0, 2, (length,), generator=generator) - 1.0
    return index, sign


def direction(update: Params) -> Tensor:
    """An update's direction as a unit vector [SKETCH], a count sketch: cosines of two are about those of the updates."""
    flat = torch.cat([value.flatten().float() for value in update.values()])
    index, sign = _buckets(len(flat))
    folded = torch.zeros(SKETCH).index_add_(0, index, flat * sign)
    length: Tensor = folded.norm().clamp(min=1e-12)
    return folded / length


def clusters(directions: Tensor, most: int) -> Tensor | None:
    """Which cluster each update belongs to, or None where they do not fall apart: [n, SKETCH] -> labels 0, 1, ... [n]

    There are as many clusters as eigenvalues of the centred Gram matrix before its largest drop, and one more; `most` at most,
    and at most half as many as updates, so that there are pairs to compare.
    """
    most = min(most, len(directions) // 2)
    if len(directions) < FEWEST or most < 2:
        return None
    cosines = (directions @ directions.T).double()
    count, drop = _largest_drop(cosines, most - 1)
    labels = average_linkage(cosines, count + 1)
    seen = (drop, _gap(cosines, labels), int(labels.bincount().min()))
    return labels if any(_reaches(seen, rule) for rule in FALL_APART) else None


def _reaches(seen: tuple[float, float, int], rule: tuple[float, float, int]) -> bool:
    drop, gap, smallest = seen
    return drop > rule[0] and gap > rule[1] and smallest >= rule[2]


def _largest_drop(cosines: Tensor, most: int) -> tuple[int, float]:
    """After how many eigenvalues of the centred Gram matrix they drop most, of the first `most`, and by which factor."""
    centred = cosines - cosines.mean(0, keepdim=True) - cosines.mean(1, keepdim=True) + cosines.mean()
    values = torch.linalg.eigvalsh(centred).flip(0).clamp(min=1e-9)
    # the last eigenvalue of a centred matrix is zero: no drop is measured against it
    drops = (values[:-2] / values[1:-1])[:most]
    largest = int(drops.argmax())
    return largest + 1, float(drops[largest])


def _gap(cosines: Tensor, labels: Tensor) -> float:
    """The mean cosine of different clients in one cluster, minus that of clients in different ones."""
    same = labels[:, None] == labels[None, :]
    inside, across = cosines[same & ~torch.eye(len(labels), dtype=torch.bool)], cosines[~same]
    if not len(inside) or not len(across):
        return 0.0
    return float(inside.mean() - across.mean())


def average_linkage(similarity: Tensor, count: int) -> Tensor:
    """`count` clusters by mean similarity, the nearest two joined again and again: [n, n] -> labels [n].

    Labels are in the order of the clusters' first members.
    """
    members = [[i] for i in range(len(similarity))]
    sums = similarity.clone()
    while len(members) > count:
        sizes = torch.tensor([len(cluster) for cluster in members], dtype=sums.dtype)
        means = sums / (sizes[:, None] * sizes[None, :])
        means.fill_diagonal_(-torch.inf)
        first, second = sorted(divmod(int(means.argmax()), len(members)))
        sums[first] += sums[second]
        sums[:, first] += sums[:, second]
        rest = [k for k in range(len(members)) if k != second]
        sums = sums[rest][:, rest]
        members[first] += members.pop(second)
    labels = torch.zeros(len(similarity), dtype=torch.int64)
    for label, cluster in enumerate(sorted(members, key=min)):
        labels[cluster] = label
    return labels


def is_unserved(losses: Tensor, labels: Tensor, classes: int) -> bool:
    """Whether some cluster's mean loss says that one expert does not serve it: losses [n], labels [n]."""
    worst = max(float(losses[labels == label].mean()) for label in range(int(labels.max()) + 1))
    return worst > UNSERVED * math.log(classes)


def stand_in(fits: Tensor, known: Tensor, k: int, others: list[int], clients: Tensor, classes: int) -> int | None:
    """The expert of `others` that would do for the clients of expert k as well, or None.

    fits [S, K]: mean log-likelihoods, where they are known [S, K]; clients [S]: whose main expert is k. What experts have
    learnt is how far the best of them is above equal shares of labels, averaged over all clients that know them all.
    """
    comparable = known[:, [k, *others]].all(dim=1)
    judges = clients & comparable
    if not bool(judges.any()):
        return None
    best = fits[comparable][:, [k, *others]].max(dim=1).values
    learnt = float((best + math.log(classes)).clamp(min=0).mean())
    of_clients = fits[judges]
    lost = float((of_clients[:, k] - of_clients[:, others].max(dim=1).values).mean())
    if lost >= SPARED * learnt:
        return None
    return others[int(of_clients[:, others].mean(dim=0).argmax())]
