"""The round loop: a generator. Whoever consumes it evaluates, saves and prints."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedmix.core import guard
from fedmix.core.algorithm import Algorithm
from fedmix.core.server import State
from fedmix.core.settings import ServerSettings
from fedmix.core.types import Diagnosis, Message, Refusal, Reply
from fedmix.engines.client import Absent, Task
from fedmix.engines.store import Store
from fedmix.errors import RunError
from fedmix.rng import cohort


class Engine(Protocol):
    """What the loop needs of an engine; see fedmix.engines."""

    name: str
    workers: int
    store: Store
    states_elsewhere: bool  # clients keep their private states themselves; the server's checkpoint does not hold them

    def run(self, tasks: Sequence[Task]) -> Sequence[Message | Absent]:
        """The clients' answers, in the order of the tasks."""
        ...

    def accept(self, t: int, clients: Sequence[int]) -> None:
        """The answers of these clients in round t count."""
        ...

    def memory(self) -> dict[str, Any]:
        """What a checkpoint must know beside the store."""
        ...

    def remember(self, memory: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def everyone(answers: Sequence[Message | Absent]) -> list[Message]:
    """Answers of clients that must all be there."""
    absent = [answer for answer in answers if isinstance(answer, Absent)]
    if absent:
        raise RunError(f"every client must answer. {len(absent)} of {len(answers)} did not ({absent[0].reason}).")
    return [answer for answer in answers if isinstance(answer, Message)]


@dataclass(frozen=True)
class Round:
    t: int
    state: State
    replies: Sequence[Reply]
    diagnosis: Diagnosis
    bytes_down: int
    bytes_up: int
    seconds: float
    refused: Sequence[Refusal] = ()
    absent: Mapping[int, str] = field(default_factory=dict)  # client -> why it did not answer

    @property
    def loss(self) -> float:
        """The clients' mean training loss, weighted by their points."""
        n = sum(reply.message.numbers["n"] for reply in self.replies)
        return sum(reply.message.numbers["n"] * reply.message.numbers["loss"] for reply in self.replies) / n


def rounds(
    algorithm: Algorithm,
    engine: Engine,
    state: State,
    seed: int,
    clients: int,
    per_round: int,
    last: int,
    server: ServerSettings = ServerSettings(),  # noqa: B008 (frozen)
    about_to_ask: Callable[[int, Sequence[int]], None] = lambda t, clients: None,
) -> Iterator[Round]:
    """Rounds after `state` up to round `last`: sample, send, train, check, update.

    about_to_ask: called with the round and its clients before anything is sent to them.
    """
    for t in range(state.round + 1, last + 1):
        began = time.perf_counter()
        chosen = cohort(seed, t, clients, per_round or clients)
        tasks = [Task("train", t, s, algorithm.broadcast(state, s)) for s in chosen]
        about_to_ask(t, chosen)
        answers = dict(zip(chosen, engine.run(tasks), strict=True))
        absent = {s: answer.reason for s, answer in answers.items() if isinstance(answer, Absent)}
        came = {s: answer for s, answer in answers.items() if isinstance(answer, Message)}
        refusals = _refusals(algorithm, {task.client: task.message for task in tasks}, came, server)
        turned_away = {refusal.client for refusal in refusals}
        replies = [Reply(s, answer) for s, answer in came.items() if s not in turned_away]
        if len(replies) < min(server.min_replies, len(chosen)):
            first = next(iter([*absent.values(), *(f"{r.field}: {r.reason}" for r in refusals)]), "")
            raise RunError(
                f"round {t}: {len(replies)} of {len(chosen)} clients gave an answer that can be used, and server.min_replies "
                f"asks for {server.min_replies} ({first}). The run can be resumed from its last checkpoint."
            )
        state, diagnosis = algorithm.server_update(state, replies)
        engine.accept(t, [reply.client for reply in replies])
        yield Round(
            t=t,
            state=state,
            replies=replies,
            diagnosis=diagnosis,
            bytes_down=sum(task.message.nbytes for task in tasks),
            bytes_up=sum(answer.nbytes for answer in came.values()),
            seconds=time.perf_counter() - began,
            refused=refusals,
            absent=absent,
        )


def _refusals(
    algorithm: Algorithm, sent: Mapping[int, Message], came: Mapping[int, Message], server: ServerSettings
) -> list[Refusal]:
    """Replies that are not what they must be, and those that are absurd beside the others."""
    refusals = []
    for s, reply in came.items():
        wrong = algorithm.check(sent[s], reply)
        if wrong:
            field, _, reason = wrong.partition(": ")
            refusals.append(Refusal(s, field, reason))
    sound = {s: reply for s, reply in came.items() if s not in {refusal.client for refusal in refusals}}
    if not sound:
        return refusals
    linear = server.aggregation == "linear"
    moved = {
        s: guard.norm_of_update(sent[s].tensors, reply.tensors, linear) / (reply.numbers["n"] if linear else 1)
        for s, reply in sound.items()
        if server.norm_limit
    }
    return refusals + guard.out_of_line(sound, moved, server.norm_limit)
