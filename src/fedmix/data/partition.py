"""Splits: labels and a random stream -> the indices that each client owns. No index is used twice.

    parts = hsu(labels, clients=100, concentration=1.0, rng=stream(seed, "split"))
    train, validation, test = three_parts(parts[0], 0.1, 0.2, stream(seed, "parts", 0), client=0)

The papers that the splits are from:
B. McMahan et al. (2017): Communication-efficient learning of deep networks from decentralized data.
T.-M. H. Hsu, H. Qi, M. Brown (2019): Measuring the effects of non-identical data distribution for federated visual
classification.
P. P. Liang et al. (2020): Think locally, act globally: federated learning with local and global representations.
S. Reddi et al. (2020): Adaptive federated optimization.
"""

import numpy as np
import numpy.typing as npt

from fedmix.errors import DataError
from fedmix.rng import Stream

Indices = npt.NDArray[np.int64]
ATTEMPTS = 100  # a random split that misses its minimum size is drawn again, but not for ever


def iid(labels: Indices, clients: int, rng: Stream) -> list[Indices]:
    """Deal points so that every client draws from the same distribution; sizes differ by one at most."""
    _require_points(len(labels), clients)
    shuffled = rng.permutation(len(labels))
    return [np.sort(part) for part in np.array_split(shuffled, clients)]


def hsu(labels: Indices, clients: int, concentration: float, rng: Stream) -> list[Indices]:
    """Hsu et al. (2019): each client's label distribution is Dir(concentration * prior); equal sizes, no replacement.

    The last clients get what is left: where a client wants a class that has run out, its shares are renormalised.
    """
    _require_points(len(labels), clients)
    prior = np.bincount(labels) / len(labels)
    piles = _shuffled_piles(labels, len(prior), rng)
    size = len(labels) // clients
    parts = []
    for _ in range(clients):
        shares = np.zeros_like(prior)
        shares[prior > 0] = rng.numpy.dirichlet(concentration * prior[prior > 0])
        counts = draw_counts(shares, _heights(piles), size, rng)
        parts.append(_taken(piles, counts))
    return parts


def draw_counts(shares: npt.NDArray[np.float64], available: Indices, size: int, rng: Stream) -> Indices:
    """Draw how many points of each class a client of `size` gets: multinomial in its shares, never more than there are."""
    counts = np.zeros_like(available)
    while (missing := size - counts.sum()) > 0:
        left = available - counts
        weights = np.where(left > 0, shares, 0.0)
        if weights.sum() <= 0:
            # None of the client's classes is left: it gets of what remains, in proportion.
            weights = left.astype(np.float64)
        drawn = rng.numpy.multinomial(missing, weights / weights.sum())
        # Each pass fills the client or empties a class, so this ends.
        counts += np.minimum(drawn, left)
    return counts


def pachinko(
    fine: Indices, coarse: Indices, clients: int, concentration: float, fine_concentration: float, rng: Stream
) -> list[Indices]:
    """Reddi et al. (2020): Dir(concentration) over the coarse labels, Dir(fine_concentration) over the fine ones in each.

    A client draws a coarse label, then a fine one in it, then a point; equal sizes, no replacement. Labels that have run
    out are left out and the shares renormalised.
    """
    _require_points(len(fine), clients)
    families = [np.unique(fine[coarse == c]) for c in range(int(coarse.max()) + 1)]
    piles = _shuffled_piles(fine, int(fine.max()) + 1, rng)
    size = len(fine) // clients
    parts = []
    for _ in range(clients):
        counts = _pachinko_counts(families, _heights(piles), size, concentration, fine_concentration, rng)
        parts.append(_taken(piles, counts))
    return parts


def _pachinko_counts(
    families: list[Indices],
    available: Indices,
    size: int,
    concentration: float,
    fine_concentration: float,
    rng: Stream,
) -> Indices:
    """Draw how many points of each fine label a client of `size` gets. families: the fine labels in each coarse one."""
    shares = rng.numpy.dirichlet(np.full(len(families), concentration))
    available_in_family = np.array([available[family].sum() for family in families])
    family_counts = draw_counts(shares, available_in_family, size, rng)
    counts = np.zeros_like(available)
    for family, count in zip(families, family_counts, strict=True):
        if not len(family):
            continue
        # Drawn for a family that the client takes nothing of, too: what comes after must not depend on that.
        shares_within = rng.numpy.dirichlet(np.full(len(family), fine_concentration))
        if count:
            counts[family] += draw_counts(shares_within, available[family], count, rng)
    return counts


def by_owner(owner: Indices, owners: int) -> list[Indices]:
    """Give every owner the points that are its own, in the order of the owners' numbers; some may have none."""
    order = np.argsort(owner, kind="stable")
    starts = np.searchsorted(owner[order], np.arange(1, owners))
    return np.split(order, starts)


def dirichlet(labels: Indices, clients: int, concentration: float, min_size: int, rng: Stream) -> list[Indices]:
    """Deal each class to the clients in shares drawn from Dir(concentration); sizes differ."""
    _require_points(len(labels), clients * min_size)
    for _ in range(ATTEMPTS):
        parts = _dirichlet_draw(labels, clients, concentration, rng)
        if min(map(len, parts)) >= min_size:
            return parts
    raise DataError(
        f"a dirichlet split of {len(labels)} points must give each of {clients} clients at least {min_size}; "
        f"{ATTEMPTS} draws with concentration {concentration} did not. Raise data.concentration, or lower data.clients "
        "or data.min_size."
    )


def _dirichlet_draw(labels: Indices, clients: int, concentration: float, rng: Stream) -> list[Indices]:
    pieces_of: list[list[Indices]] = [[] for _ in range(clients)]
    for k in np.unique(labels):
        pool = rng.numpy.permutation(np.flatnonzero(labels == k))
        shares = rng.numpy.dirichlet(np.full(clients, concentration))
        cuts = np.cumsum(shares)[:-1] * len(pool)
        dealt = np.split(pool, cuts.astype(np.int64))
        for pieces, piece in zip(pieces_of, dealt, strict=True):
            pieces.append(piece)
    return [np.sort(np.concatenate(pieces)) for pieces in pieces_of]


def shards(labels: Indices, clients: int, per_client: int, rng: Stream) -> list[Indices]:
    """McMahan et al. (2017), Liang et al. (2020): sort points by label, cut them into shards, deal `per_client` to each."""
    total = clients * per_client
    _require_points(len(labels), total)
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    pieces = np.array_split(by_label, total)
    dealt = rng.permutation(total).reshape(clients, per_client)
    return [np.sort(np.concatenate([pieces[i] for i in hand])) for hand in dealt]


def like_training(labels: Indices, pool: Indices, train: list[Indices], rng: Stream) -> list[Indices]:
    """Deal a pool so that every client gets the proportions of its training labels: equal sizes, no replacement.

    Where a class of the pool has run out, the client's shares are renormalised over what is left.
    """
    classes = int(labels.max()) + 1
    piles = [list(rng.numpy.permutation(pool[labels[pool] == k])) for k in range(classes)]
    size = len(pool) // len(train)
    parts: list[Indices] = [np.zeros(0, np.int64)] * len(train)
    # In random order, so that it is not always the same clients that come last.
    for s in rng.permutation(len(train)):
        shares = np.bincount(labels[train[s]], minlength=classes) / len(train[s])
        counts = draw_counts(shares, _heights(piles), size, rng)
        parts[s] = _taken(piles, counts)
    return parts


def three_parts(
    points: Indices, validation: float, test: float, rng: Stream, client: int | str
) -> tuple[Indices, Indices, Indices]:
    """Divide a client's points into train, validation and test at random, so that all three have its distribution."""
    n_val = _size_of_share(len(points), validation)
    n_test = _size_of_share(len(points), test)
    if not can_be_divided(len(points), validation, test):
        raise DataError(
            f"client {client} must have points for training, validation ({validation}) and test ({test}). It has "
            f"{len(points)} in all; use fewer clients, more data, or a larger data.min_size."
        )
    shuffled = points[rng.permutation(len(points))]
    for_validation = shuffled[:n_val]
    for_test = shuffled[n_val : n_val + n_test]
    for_training = shuffled[n_val + n_test :]
    return np.sort(for_training), np.sort(for_validation), np.sort(for_test)


def can_be_divided(points: int, validation: float, test: float) -> bool:
    """Say whether so many points are enough for three parts."""
    return points - _size_of_share(points, validation) - _size_of_share(points, test) >= 1


def _size_of_share(points: int, share: float) -> int:
    """Round a share of some points to a whole number; a share above 0 is never rounded to nothing."""
    return max(round(points * share), 1) if share > 0 else 0


def _require_points(points: int, wanted: int) -> None:
    if points < wanted:
        raise DataError(f"a split needs at least {wanted} points. The data has {points}; use fewer clients.")


def _shuffled_piles(labels: Indices, classes: int, rng: Stream) -> list[list[np.int64]]:
    """Put the points of each class on a pile of their own, in random order."""
    return [list(rng.numpy.permutation(np.flatnonzero(labels == k))) for k in range(classes)]


def _heights(piles: list[list[np.int64]]) -> Indices:
    return np.array([len(pile) for pile in piles])


def _taken(piles: list[list[np.int64]], counts: Indices) -> Indices:
    """Take this many points off each pile, and return them in ascending order."""
    points = [pile.pop() for pile, count in zip(piles, counts, strict=True) for _ in range(count)]
    return np.sort(np.array(points, dtype=np.int64))
