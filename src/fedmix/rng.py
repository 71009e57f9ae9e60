"""Randomness with an address: `stream(seed, "round", t, "client", s)` is the same wherever and whenever it is drawn.

Nothing depends on the order of clients, on the number of workers or on what ran before. No global seed is left changed.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt


class Stream:
    """A source of randomness derived from its address alone. `child` addresses are independent of each other."""

    def __init__(self, *address: int | str) -> None:
        self.address = address
        digest = hashlib.blake2b(repr(address).encode(), digest_size=8).digest()
        self.seed = int.from_bytes(digest, "little") >> 1  # 63 bits: torch takes a signed integer
        self.numpy = np.random.Generator(np.random.PCG64(self.seed))

    def child(self, *address: int | str) -> "Stream":
        return Stream(*self.address, *address)

    def permutation(self, n: int) -> npt.NDArray[np.int64]:
        return self.numpy.permutation(n)

    @contextmanager
    def torch(self) -> Iterator[None]:
        """Seed torch's global generator (dropout and initialisers know no other) inside the block, restore it after."""
        import torch

        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self.seed)
            yield


def stream(seed: int, *address: int | str) -> Stream:
    return Stream(int(seed), *address)


def cohort(seed: int, t: int, clients: int, size: int) -> list[int]:
    """The clients of round t: `size` of them without replacement, in ascending order; a function of (seed, t)."""
    if size >= clients:
        return list(range(clients))
    return sorted(int(s) for s in stream(seed, "round", t, "cohort").numpy.choice(clients, size, replace=False))


def cohort_by_size(seed: int, t: int, sizes: Sequence[int], size: int) -> list[int]:
    """The clients of round t where large ones are drawn more often, without replacement; a function of (seed, t)."""
    if size >= len(sizes):
        return list(range(len(sizes)))
    shares = np.asarray(sizes, dtype=np.float64) / sum(sizes)
    drawn = stream(seed, "round", t, "cohort").numpy.choice(len(sizes), size, replace=False, p=shares)
    return sorted(int(s) for s in drawn)
