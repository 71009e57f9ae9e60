"""Splits: labels and a random stream -> the indices that each client owns. No index is used twice."""

import numpy as np
import numpy.typing as npt

from fedmix.errors import DataError
from fedmix.rng import Stream

Indices = npt.NDArray[np.int64]
ATTEMPTS = 100  # a random split that misses its minimum size is drawn again, but not for ever


def iid(labels: Indices, clients: int, rng: Stream) -> list[Indices]:
    """Every client draws from the same distribution; sizes differ by one at most."""
    _enough(len(labels), clients)
    return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


def hsu(labels: Indices, clients: int, concentration: float, rng: Stream) -> list[Indices]:
    """Hsu et al. (2019): each client's label distribution is Dir(concentration * prior); equal sizes, no replacement.

    The last clients get what is left: where a client wants a class that has run out, its shares are renormalised.
    """
    _enough(len(labels), clients)
    prior = np.bincount(labels) / len(labels)
    pools = [list(rng.numpy.permutation(np.flatnonzero(labels == k))) for k in range(len(prior))]
    size = len(labels) // clients
    parts = []
    for _ in range(clients):
        shares = np.zeros_like(prior)
        shares[prior > 0] = rng.numpy.dirichlet(concentration * prior[prior > 0])
        counts = draw_counts(shares, np.array([len(pool) for pool in pools]), size, rng)
        parts.append(np.sort(np.array([pool.pop() for k, pool in enumerate(pools) for _ in range(counts[k])])))
    return parts


def draw_counts(shares: npt.NDArray[np.float64], available: Indices, size: int, rng: Stream) -> Indices:
    """How many points of each class a client of `size` gets: multinomial in its shares, never more than there are."""
    counts = np.zeros_like(available)
    while (missing := size - counts.sum()) > 0:
        left = available - counts
        weights = np.where(left > 0, shares, 0.0)
        if weights.sum() <= 0:
            weights = left.astype(np.float64)  # none of its classes is left: what remains, in proportion
        drawn = rng.numpy.multinomial(missing, weights / weights.sum())
        counts += np.minimum(drawn, left)  # each pass fills the client or empties a class, so this ends
    return counts


def pachinko(
    fine: Indices, coarse: Indices, clients: int, concentration: float, fine_concentration: float, rng: Stream
) -> list[Indices]:
    """Reddi et al. (2020): Dir(concentration) over the coarse labels, Dir(fine_concentration) over the fine ones in each.

    A client draws a coarse label, then a fine one in it, then a point; equal sizes, no replacement. Labels that have run
    out are left out and the shares renormalised.
    """
    _enough(len(fine), clients)
    families = [np.unique(fine[coarse == c]) for c in range(int(coarse.max()) + 1)]
    pools = [list(rng.numpy.permutation(np.flatnonzero(fine == k))) for k in range(int(fine.max()) + 1)]
    size = len(fine) // clients
    parts = []
    for _ in range(clients):
        left = np.array([len(pool) for pool in pools])
        shares = rng.numpy.dirichlet(np.full(len(families), concentration))
        counts = draw_counts(shares, np.array([left[family].sum() for family in families]), size, rng)
        own: list[int] = []
        for family, count in zip(families, counts, strict=True):
            within = rng.numpy.dirichlet(np.full(len(family), fine_concentration)) if len(family) else np.zeros(0)
            if count:
                taken = draw_counts(within, left[family], count, rng)
                own += [pools[k].pop() for k, n in zip(family, taken, strict=True) for _ in range(n)]
        parts.append(np.sort(np.array(own)))
    return parts


def by_owner(owner: Indices, owners: int) -> list[Indices]:
    """Every owner's own points, in the order of the owners' numbers; some may have none."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.searchsorted(owner[order], np.arange(1, owners)))


def dirichlet(labels: Indices, clients: int, concentration: float, min_size: int, rng: Stream) -> list[Indices]:
    """Each class is dealt to the clients in shares drawn from Dir(concentration); sizes differ."""
    _enough(len(labels), clients * min_size)
    for _ in range(ATTEMPTS):
        parts: list[list[Indices]] = [[] for _ in range(clients)]
        for k in np.unique(labels):
            pool = rng.numpy.permutation(np.flatnonzero(labels == k))
            cuts = np.cumsum(rng.numpy.dirichlet(np.full(clients, concentration)))[:-1] * len(pool)
            for part, piece in zip(parts, np.split(pool, cuts.astype(np.int64)), strict=True):
                part.append(piece)
        joined = [np.sort(np.concatenate(part)) for part in parts]
        if min(map(len, joined)) >= min_size:
            return joined
    raise DataError(
        f"a dirichlet split of {len(labels)} points must give each of {clients} clients at least {min_size}; "
        f"{ATTEMPTS} draws with concentration {concentration} did not. Raise data.concentration, or lower data.clients "
        "or data.min_size."
    )


def shards(labels: Indices, clients: int, per_client: int, rng: Stream) -> list[Indices]:
    """McMahan et al. (2017), Liang et al. (2020): points sorted by label, cut into shards, `per_client` of them each."""
    total = clients * per_client
    _enough(len(labels), total)
    order = rng.permutation(len(labels))
    pieces = np.array_split(order[np.argsort(labels[order], kind="stable")], total)
    deal = rng.permutation(total).reshape(clients, per_client)
    return [np.sort(np.concatenate([pieces[i] for i in own])) for own in deal]


def like_training(labels: Indices, pool: Indices, train: list[Indices], rng: Stream) -> list[Indices]:
    """Points of a pool for every client, in the proportions of its own training labels: equal sizes, no replacement.

    Where a class of the pool has run out, the client's shares are renormalised over what is left.
    """
    classes = int(labels.max()) + 1
    piles = [list(rng.numpy.permutation(pool[labels[pool] == k])) for k in range(classes)]
    size = len(pool) // len(train)
    parts: list[Indices] = [np.zeros(0, np.int64)] * len(train)
    for s in rng.permutation(len(train)):  # in random order: it is not always the same clients that come last
        shares = np.bincount(labels[train[s]], minlength=classes) / len(train[s])
        counts = draw_counts(shares, np.array([len(pile) for pile in piles]), size, rng)
        parts[s] = np.sort(
            np.array([pile.pop() for k, pile in enumerate(piles) for _ in range(counts[k])], dtype=np.int64)
        )
    return parts


def three_parts(
    own: Indices, validation: float, test: float, rng: Stream, client: int | str
) -> tuple[Indices, Indices, Indices]:
    """A client's own points as train, validation and test: drawn at random, so all three have its distribution."""
    n_val, n_test = (max(round(len(own) * share), 1) if share > 0 else 0 for share in (validation, test))
    if len(own) - n_val - n_test < 1:
        raise DataError(
            f"client {client} must have points for training, validation ({validation}) and test ({test}). It has "
            f"{len(own)} in all; use fewer clients, more data, or a larger data.min_size."
        )
    order = own[rng.permutation(len(own))]
    return np.sort(order[n_val + n_test :]), np.sort(order[:n_val]), np.sort(order[n_val : n_val + n_test])


def _enough(points: int, wanted: int) -> None:
    if points < wanted:
        raise DataError(f"a split needs at least {wanted} points. The data has {points}; use fewer clients.")
