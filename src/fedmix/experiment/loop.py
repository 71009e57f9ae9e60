"""The round loop: a generator. Whoever consumes it evaluates, saves and prints."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedmix.core.types import Algorithm, Diagnosis, Message, Reply, State
from fedmix.engines.client import Task
from fedmix.engines.store import Store
from fedmix.rng import cohort


class Engine(Protocol):
    """What the loop needs of an engine; see fedmix.engines."""

    name: str
    workers: int
    store: Store

    def run(self, tasks: Sequence[Task]) -> list[Message]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Round:
    t: int
    state: State
    replies: Sequence[Reply]
    diagnosis: Diagnosis
    bytes_down: int
    bytes_up: int
    seconds: float

    @property
    def loss(self) -> float:
        """The clients' mean training loss, weighted by their points."""
        n = sum(reply.message.numbers["n"] for reply in self.replies)
        return sum(reply.message.numbers["n"] * reply.message.numbers["loss"] for reply in self.replies) / n


def rounds(
    algorithm: Algorithm, engine: Engine, state: State, seed: int, clients: int, per_round: int, last: int
) -> Iterator[Round]:
    """Rounds after `state` up to round `last`: sample, send, train, update."""
    for t in range(state.round + 1, last + 1):
        began = time.perf_counter()
        chosen = cohort(seed, t, clients, per_round or clients)
        tasks = [Task("train", t, s, algorithm.broadcast(state, s)) for s in chosen]
        answers = engine.run(tasks)
        replies = [Reply(s, answer) for s, answer in zip(chosen, answers, strict=True)]
        state, diagnosis = algorithm.server_update(state, replies)
        yield Round(
            t=t,
            state=state,
            replies=replies,
            diagnosis=diagnosis,
            bytes_down=sum(task.message.nbytes for task in tasks),
            bytes_up=sum(answer.nbytes for answer in answers),
            seconds=time.perf_counter() - began,
        )
