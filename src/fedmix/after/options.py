"""Options of evaluate and audit: where they run, which clients they look at, how they are watched."""

from collections.abc import Callable
from dataclasses import dataclass, field

from fedmix.errors import SettingError
from fedmix.rng import stream
from fedmix.running.where import Where

# A function that is called with what is being done, how much of it is done, and of how much.
Stages = Callable[[str, int, int], None]


def nobody(stage: str, done: int, total: int) -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class Options:
    """Options of evaluate and audit.

    clients: how many are looked at, drawn at random; 0: all. densities: whether a generative model is trained on each client
    for p(s|x); None: where that is quick. points: how many inputs of new clients p(s|x) is asked for, whose cost is clients
    x points; 0: all.
    """

    where: Where = field(default_factory=Where)
    clients: int = 0
    densities: bool | None = None
    points: int = 2000

    def __post_init__(self) -> None:
        if self.clients < 0:
            raise SettingError(f"--clients must be 0 (for all) or more. Got {self.clients} instead.")
        if self.points < 0:
            raise SettingError(f"--points must be 0 (for all) or more. Got {self.points} instead.")

    def sample(self, total: int, seed: int) -> list[int]:
        """The clients to look at, out of `total`."""
        if not 0 < self.clients < total:
            return list(range(total))
        return sorted(stream(seed, "evaluate", "clients").permutation(total)[: self.clients].tolist())
