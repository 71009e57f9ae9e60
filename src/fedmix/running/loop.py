"""The round loop: a generator of rounds. The code that takes rounds from it evaluates, saves and prints."""

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
    """What the loop needs from an engine; see fedmix.engines.

    states_elsewhere: clients keep their private states themselves, so the server's checkpoint does not hold them.
    """

    name: str
    workers: int
    store: Store
    states_elsewhere: bool

    def run(self, tasks: Sequence[Task]) -> Sequence[Message | Absent]:
        """The clients' answers, in the order of the tasks."""
        ...

    def accept(self, t: int, clients: Sequence[int]) -> None:
        """The answers of these clients in round t count."""
        ...

    def memory(self) -> dict[str, Any]:
        """What a checkpoint must know beside the store."""
        ...

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Take up what `memory` gave before a run was interrupted."""
        ...

    def close(self) -> None: ...


def everyone(answers: Sequence[Message | Absent]) -> list[Message]:
    """The answers of clients that must all answer."""
    absent = [answer for answer in answers if isinstance(answer, Absent)]
    if absent:
        raise RunError(f"every client must answer. {len(absent)} of {len(answers)} did not ({absent[0].reason}).")
    return [answer for answer in answers if isinstance(answer, Message)]


@dataclass(frozen=True)
class Round:
    """A round that has been trained. absent: clients that did not answer, and why."""

    t: int
    state: State
    replies: Sequence[Reply]
    diagnosis: Diagnosis
    bytes_down: int
    bytes_up: int
    seconds: float
    refused: Sequence[Refusal] = ()
    absent: Mapping[int, str] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The clients' mean training loss, weighted by their points."""
        answers = [reply.message.numbers for reply in self.replies]
        points = sum(numbers["n"] for numbers in answers)
        return sum(numbers["n"] * numbers["loss"] for numbers in answers) / points


@dataclass(frozen=True)
class _Answers:
    """What clients answered in a round: replies that can be used, and who was left out."""

    replies: Sequence[Reply]
    refused: Sequence[Refusal]
    absent: Mapping[int, str]
    bytes_up: int


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
    choose: Callable[[int], list[int]] | None = None,
) -> Iterator[Round]:
    """Rounds after `state` up to round `last`: sample, send, train, check, update.

    about_to_ask: called with the round and its clients before anything is sent to them. choose: who takes part in a round;
    None: `per_round` clients, all equally likely.
    """
    for t in range(state.round + 1, last + 1):
        began = time.perf_counter()
        chosen = choose(t) if choose else cohort(seed, t, clients, per_round or clients)
        tasks = [Task("train", t, s, algorithm.broadcast(state, s, training=True)) for s in chosen]
        about_to_ask(t, chosen)
        answers = _ask(algorithm, engine, tasks, server)
        _refuse_too_few(t, answers, len(chosen), server.min_replies)
        state, diagnosis = algorithm.server_update(state, answers.replies)
        engine.accept(t, [reply.client for reply in answers.replies])
        yield Round(
            t=t,
            state=state,
            replies=answers.replies,
            diagnosis=diagnosis,
            bytes_down=sum(task.message.nbytes for task in tasks),
            bytes_up=answers.bytes_up,
            seconds=time.perf_counter() - began,
            refused=answers.refused,
            absent=answers.absent,
        )


def _ask(algorithm: Algorithm, engine: Engine, tasks: Sequence[Task], server: ServerSettings) -> _Answers:
    sent = {task.client: task.message for task in tasks}
    answers = dict(zip(sent, engine.run(tasks), strict=True))
    absent = {s: answer.reason for s, answer in answers.items() if isinstance(answer, Absent)}
    came = {s: answer for s, answer in answers.items() if isinstance(answer, Message)}
    refusals = _refusals(algorithm, sent, came, server)
    accepted = _without_refused(came, refusals)
    replies = [Reply(s, answer) for s, answer in accepted.items()]
    bytes_up = sum(answer.nbytes for answer in came.values())
    return _Answers(replies, refusals, absent, bytes_up)


def _refuse_too_few(t: int, answers: _Answers, asked: int, min_replies: int) -> None:
    usable = len(answers.replies)
    if usable < min(min_replies, asked):
        refused = [f"{refusal.field}: {refusal.reason}" for refusal in answers.refused]
        reasons = [*answers.absent.values(), *refused]
        first = reasons[0] if reasons else ""
        raise RunError(
            f"round {t}: {usable} of {asked} clients gave an answer that can be used, and server.min_replies "
            f"asks for {min_replies} ({first}). The run can be resumed from its last checkpoint."
        )


def _refusals(
    algorithm: Algorithm, sent: Mapping[int, Message], came: Mapping[int, Message], server: ServerSettings
) -> list[Refusal]:
    """Replies that are not what they must be, and those that are absurd beside the others."""
    refusals = _malformed(algorithm, sent, came)
    sound = _without_refused(came, refusals)
    if not sound:
        return refusals
    norms = _norms_of_updates(sent, sound, server) if server.norm_limit else {}
    return refusals + guard.out_of_line(sound, norms, server.norm_limit)


def _malformed(algorithm: Algorithm, sent: Mapping[int, Message], came: Mapping[int, Message]) -> list[Refusal]:
    refusals = []
    for s, reply in came.items():
        wrong = algorithm.check(sent[s], reply)
        if wrong:
            field, _, reason = wrong.partition(": ")
            refusals.append(Refusal(s, field, reason))
    return refusals


def _without_refused(answers: Mapping[int, Message], refusals: Sequence[Refusal]) -> dict[int, Message]:
    refused = {refusal.client for refusal in refusals}
    return {s: answer for s, answer in answers.items() if s not in refused}


def _norms_of_updates(
    sent: Mapping[int, Message], replies: Mapping[int, Message], server: ServerSettings
) -> dict[int, float]:
    """How far each client moved what it was sent. Where updates are summed they are weighted by points, which is undone."""
    linear = server.aggregation == "linear"
    norms = {s: guard.norm_of_update(sent[s].tensors, reply.tensors, linear) for s, reply in replies.items()}
    if not linear:
        return norms
    return {s: norm / replies[s].numbers["n"] for s, norm in norms.items()}
