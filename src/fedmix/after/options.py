"""What evaluate and audit are asked: where they run, on which clients; and how they are watched."""

from collections.abc import Callable
from dataclasses import dataclass, field

from fedmix.errors import SettingError
from fedmix.rng import stream
from fedmix.running.where import Where

# what is being done, how much of it is done, of how much
Stages = Callable[[str, int, int], None]


def nobody(stage: str, done: int, total: int) -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class Options:
    """clients: look at this many, drawn at random; 0: all.

    densities: train a generative model on each client for p(s|x); None: where that is quick. points: a new client's inputs for
    p(s|x), whose cost is clients x points; 0: all.
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
        """The clients to look at, of `total`."""
        if not 0 < self.clients < total:
            return list(range(total))
        return sorted(stream(seed, "evaluate", "clients").permutation(total)[: self.clients].tolist())
