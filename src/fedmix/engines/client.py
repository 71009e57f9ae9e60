"""The client's side of the wire: what a client does with a message. Every engine runs exactly this."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedmix.core.algorithm import Algorithm
from fedmix.core.score import score
from fedmix.core.tree import placed
from fedmix.core.types import Clients, Examples, Message, Private
from fedmix.core.vae import train_vae
from fedmix.errors import ClientError, StepError
from fedmix.rng import Stream, stream

CHUNK = 512  # points of a forward pass without gradients
CPU = torch.device("cpu")
BOUND = "bound"  # the name of the method's objective among scores, where it has one to report
ADAPTED = "adapted_"  # the prefix of scores of adapted private parts with the server's weights

Kind = Literal["train", "evaluate", "density", "share"]
PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Task:
    """What the server asks of one client.

    train: an update, and a score of the updated weights on validation data (the proxy of the learning curves).
    evaluate: a score on `part`, after `adapt` epochs of its private parts alone and `finetune` epochs of everything, on
    `points` of its labelled points (0: all); all of that is then forgotten. With both, names that begin with ADAPTED
    have the score between the two.
    density: a generative model of the client's inputs (core.vae).
    share: the client's private state; only where clients are on other machines, and allow it.
    """

    kind: Kind
    round: int
    client: int
    message: Message
    part: str = "validation"
    finetune: int = 0
    adapt: int = 0
    points: int = 0

    @property
    def trains(self) -> bool:
        """Whether the client trains all of its weights."""
        return self.kind == "train" or self.finetune > 0

    @property
    def epochs(self) -> int | None:
        """How often the client goes over its points; None: as often as the recipe says."""
        return self.finetune or None

    @property
    def alone(self) -> bool:
        """Whether the client does this by itself, never side by side with others."""
        return self.kind == "density" or self.adapt > 0 or self.points > 0 or not self.trains

    def stream(self, seed: int) -> Stream:
        """The client's randomness in this task: a function of the seed, the round, the client and what it does."""
        rng = stream(seed, "round", self.round, "client", self.client)
        if self.kind == "train":
            return rng
        if self.kind == "evaluate":
            return rng.child("finetune")
        return rng.child(self.kind)


@dataclass(frozen=True)
class Absent:
    """No answer: a client that could not be reached, was too late, or failed on a machine of its own."""

    reason: str


Answer = tuple[Message, Private]  # what goes to the server, and the client's private state after it


def perform(
    algorithm: Algorithm, clients: Clients, seed: int, task: Task, private: Private, device: torch.device = CPU
) -> Answer:
    """What a client answers. An error names client, round and step. `clients` are on the device already."""
    with named(task, names=names_of(clients)):
        rng = task.stream(seed)
        if task.kind == "density":
            return _density(clients, task, rng), private
        if task.trains or task.adapt > 0:
            start = task.message.to(device), placed(private, device)
            updated, between = _learn(algorithm, clients, task, start, rng)
        else:
            known = informed(algorithm, clients, task.client, private)
            updated, between = (task.message.to(device), placed(known, device)), {}
        answer, after = _answer(algorithm, clients, seed, task, private, updated)
        return Message(answer.tensors, {**answer.numbers, **between}), after


def _learn(
    algorithm: Algorithm, clients: Clients, task: Task, start: Answer, rng: Stream
) -> tuple[Answer, dict[str, float]]:
    """A client adapts, trains, or does both one after the other. Gives what it has then, and scores between the two."""
    updated, between = start, dict[str, float]()
    train = labelled(clients.examples(task.client, "train"), task.points, rng.child("points"))
    if task.adapt:
        updated = algorithm.adapt(*updated, train, rng.child("adapt"), task.adapt)
        if task.trains:
            scored = _score(algorithm, clients.examples(task.client, task.part), updated)
            between = {ADAPTED + name: value for name, value in scored.items()}
    if task.trains:
        updated = algorithm.client_update(*updated, train, rng, task.epochs)
    return updated, between


@contextmanager
def named(*tasks: Task, names: Sequence[str] = ()) -> Iterator[None]:
    """Whatever goes wrong becomes an error that names this client, or these, and the round."""
    called = [names[task.client] if task.client < len(names) else str(task.client) for task in tasks]
    who = ("client " if len(tasks) == 1 else "clients ") + ", ".join(called)
    where = f"{who}, round {tasks[0].round}"
    try:
        yield
    except StepError as error:
        raise ClientError(f"{where}, {error}") from error
    except Exception as error:
        kind = type(error).__name__
        raise ClientError(f"{where}: {kind}: {error}", f"{where}: {kind}; its site's log says more") from error


def names_of(clients: Clients) -> Sequence[str]:
    """What the user calls the clients, where their data says so."""
    names: Sequence[str] = getattr(clients, "names", ())
    return names


def informed(algorithm: Algorithm, clients: Clients, client: int, private: Private) -> Private:
    """The private state with what a client knows before it has trained: its label counts (training.label_counts)."""
    if not algorithm.counts_labels:
        return private
    return algorithm.counted(private, clients.examples(client, "train").y.to(CPU))


def labelled(train: Examples, points: int, rng: Stream) -> Examples:
    """Some of a client's points; fewer of them are always among more of them."""
    if not 0 < points < len(train):
        return train
    index = torch.from_numpy(rng.permutation(len(train))[:points]).to(train.x.device)
    return Examples(train.x[index], train.y[index], train.c[index], train.augment)


def _density(clients: Clients, task: Task, rng: Stream) -> Message:
    """A generative model of the client's inputs."""
    train = clients.examples(task.client, "train")
    validation = clients.examples(task.client, "validation")
    weights, epochs = train_vae(clients.unit(train.x).flatten(1), clients.unit(validation.x).flatten(1), rng)
    return Message(placed(weights, CPU), {"epochs": epochs})


def perform_group(
    algorithm: Algorithm,
    clients: Clients,
    seed: int,
    tasks: Sequence[Task],
    privates: Sequence[Private],
    device: torch.device = CPU,
) -> list[Answer]:
    """`perform` for several clients with tasks of one kind, side by side where the method can, else one by one."""
    if len(tasks) > 1 and side_by_side(algorithm, clients, tasks):
        return _perform_together(algorithm, clients, seed, tasks, privates, device)
    return [
        perform(algorithm, clients, seed, task, private, device) for task, private in zip(tasks, privates, strict=True)
    ]


def side_by_side(algorithm: Algorithm, clients: Clients, tasks: Sequence[Task]) -> bool:
    """Whether these tasks can be done at once; this is known before anything is trained."""
    if tasks[0].alone or algorithm.one_by_one is not None:
        return False
    # either all clients augment their points, or none does
    return clients.examples(tasks[0].client, "train").augment is None


def _perform_together(
    algorithm: Algorithm,
    clients: Clients,
    seed: int,
    tasks: Sequence[Task],
    privates: Sequence[Private],
    device: torch.device,
) -> list[Answer]:
    data = [clients.examples(task.client, "train") for task in tasks]
    messages = [task.message.to(device) for task in tasks]
    rngs = [task.stream(seed) for task in tasks]
    known = [placed(private, device) for private in privates]
    names = names_of(clients)
    with named(*tasks, names=names):
        outcomes = algorithm.group_update(messages, known, data, rngs, tasks[0].epochs)
    answers = []
    for task, private, outcome in zip(tasks, privates, outcomes, strict=True):
        with named(task, names=names):
            updated = _raised(outcome)
            answers.append(_answer(algorithm, clients, seed, task, private, updated))
    return answers


def _raised(outcome: Answer | StepError) -> Answer:
    """What a client has after training, unless its training failed."""
    if isinstance(outcome, StepError):
        raise outcome
    return outcome


def _answer(algorithm: Algorithm, clients: Clients, seed: int, task: Task, private: Private, updated: Answer) -> Answer:
    """Training: the reply with a score. Evaluation: the score alone, and the private state as it was."""
    message, after = updated
    data = clients.examples(task.client, task.part)
    as_sent = task.kind != "train" and not task.finetune and not task.adapt
    scored = _score_with_bound(algorithm, data, updated) if as_sent else _score(algorithm, data, updated)
    if task.kind != "train":
        return Message({}, scored), private
    sent = task.message.to(data.x.device)
    reply = algorithm.wrap(sent, message, task.stream(seed).child("noise")).to(CPU)
    return Message(reply.tensors, {**reply.numbers, **scored}), placed(after, CPU)


def _score(algorithm: Algorithm, data: Examples, updated: Answer) -> dict[str, float]:
    if not len(data):
        return score(data.x, data.y)
    return score(predict(algorithm, *updated, data.x), data.y, algorithm.setup.measures)


def _score_with_bound(algorithm: Algorithm, data: Examples, updated: Answer) -> dict[str, float]:
    """The score, and the mean of the method's objective where it has one (for FedMix eq:LowerBound)."""
    if algorithm.method.bound is None or not len(data):
        return _score(algorithm, data, updated)
    chunks = [torch.split(values, CHUNK) for values in (data.x, data.y, data.c)]
    predictions, bounds = [], []
    with torch.no_grad():
        for x, y, c in zip(*chunks, strict=True):
            log_p, bound = algorithm.predict_with_bound(*updated, x, y, c)
            predictions.append(log_p)
            if bound is not None:
                bounds.append(bound)
    mean_bound = float(torch.cat(bounds).to(torch.float64).mean())
    return score(torch.cat(predictions), data.y, algorithm.setup.measures) | {BOUND: mean_bound}


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread, as in a worker: sums have the same order whatever the number of cores, and no thread waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def predict(algorithm: Algorithm, message: Message, private: Private, x: Tensor) -> Tensor:
    """log p(y|x,s) in chunks: [N, ...] -> [N, classes]."""
    return in_chunks(lambda part: algorithm.predict(message, private, part), x)


def from_shared(algorithm: Algorithm, message: Message, side: str) -> Callable[[Tensor], Tensor] | None:
    """A function x -> log p(y|x) [N, classes] of what is shared alone; None where private parts decide."""
    if not algorithm.uses_private and algorithm.predicts_anonymously:
        return lambda x: in_chunks(lambda part: algorithm.predict_anonymous(message, [], torch.zeros(0), part), x)
    if not algorithm.pools or side != "label":
        return None
    return lambda x: in_chunks(lambda part: algorithm.pool(message, part), x)


def in_chunks(log_prob: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of inputs, on CHUNK of them at a time: [N, ...] -> [N, classes]."""
    with torch.no_grad():
        return torch.cat([log_prob(part) for part in torch.split(x, CHUNK)])
