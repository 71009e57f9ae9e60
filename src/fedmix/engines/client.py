"""The client's side of the wire: what a client does with a message. Every engine runs exactly this."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedmix.core.score import score
from fedmix.core.tree import placed
from fedmix.core.types import Algorithm, Clients, Examples, Message, Private
from fedmix.core.vae import train_vae
from fedmix.errors import ClientError, StepError
from fedmix.rng import Stream, stream

CHUNK = 512  # points of a forward pass without gradients
CPU = torch.device("cpu")
ADAPTED = "adapted_"  # a score of the adapted private parts with the server's weights


@dataclass(frozen=True)
class Task:
    """What the server asks of one client.

    train: an update, and a score of the updated weights on validation data (the proxy of the learning curves).
    evaluate: a score on `part`, after `adapt` epochs of its private parts alone and `finetune` epochs of everything, on
    `points` of its labelled points (0: all), all of which is then forgotten. With both, names that begin with ADAPTED
    have the score between the two.
    density: a generative model of the client's inputs (core.vae).
    share: the client's private state; only where clients are somewhere else, and allow it.
    """

    kind: Literal["train", "evaluate", "density", "share"]
    round: int
    client: int
    message: Message
    part: str = "validation"
    finetune: int = 0
    adapt: int = 0
    points: int = 0

    @property
    def trains(self) -> bool:
        return self.kind == "train" or self.finetune > 0

    @property
    def alone(self) -> bool:
        """Whether it is for one client by itself, whatever others do at the same time."""
        return self.kind == "density" or self.adapt > 0 or self.points > 0 or not self.trains

    def stream(self, seed: int) -> Stream:
        rng = stream(seed, "round", self.round, "client", self.client)
        return rng if self.kind == "train" else rng.child("finetune" if self.kind == "evaluate" else self.kind)


@dataclass(frozen=True)
class Absent:
    """No answer: a client that could not be reached, was too late, or failed on a machine of its own."""

    reason: str


Answer = tuple[Message, Private]  # what goes to the server, and the client's private state after it


def perform(
    algorithm: Algorithm, clients: Clients, seed: int, task: Task, private: Private, device: torch.device = CPU
) -> Answer:
    """What a client answers. An error names client, round and step. `clients` are on the device already."""
    with named(task):
        rng = task.stream(seed)
        if task.kind == "density":
            return _density(clients, task, rng), private
        learns = task.trains or task.adapt > 0
        known = private if learns else informed(algorithm, clients, task.client, private)
        updated = task.message.to(device), placed(known, device)
        between = dict[str, float]()
        if learns:
            train = labelled(clients.examples(task.client, "train"), task.points, rng.child("points"))
            if task.adapt:
                updated = algorithm.adapt(*updated, train, rng.child("adapt"), task.adapt)
            if task.adapt and task.trains:
                scored = _score(algorithm, clients.examples(task.client, task.part), updated)
                between = {ADAPTED + name: value for name, value in scored.items()}
            if task.trains:
                updated = algorithm.client_update(*updated, train, rng, task.finetune or None)
        answer, after = _answer(algorithm, clients, seed, task, private, updated)
        return Message(answer.tensors, {**answer.numbers, **between}), after


@contextmanager
def named(task: Task) -> Iterator[None]:
    """Whatever goes wrong is said of this client, in this round."""
    try:
        yield
    except StepError as error:
        raise ClientError(f"client {task.client}, round {task.round}, {error}") from error
    except Exception as error:
        where, kind = f"client {task.client}, round {task.round}", type(error).__name__
        raise ClientError(f"{where}: {kind}: {error}", f"{where}: {kind}; its site's log says more") from error


def informed(algorithm: Algorithm, clients: Clients, client: int, private: Private) -> Private:
    """With what a client knows of itself before it has trained: how often each label occurs (training.label_counts)."""
    if algorithm.counted is None:
        return private
    return algorithm.counted(private, clients.examples(client, "train").y.to(CPU))


def labelled(train: Examples, points: int, rng: Stream) -> Examples:
    """Some of a client's points; fewer of them are always among more of them."""
    if not 0 < points < len(train):
        return train
    index = torch.from_numpy(rng.permutation(len(train))[:points]).to(train.x.device)
    return Examples(train.x[index], train.y[index], train.c[index], train.augment)


def _density(clients: Clients, task: Task, rng: Stream) -> Message:
    train, judged = (clients.unit(clients.examples(task.client, part).x).flatten(1) for part in ("train", "validation"))
    weights, epochs = train_vae(train, judged, rng)
    return Message(placed(weights, CPU), {"epochs": epochs})


def perform_group(
    algorithm: Algorithm,
    clients: Clients,
    seed: int,
    tasks: Sequence[Task],
    privates: Sequence[Private],
    device: torch.device = CPU,
) -> list[Answer]:
    """The same for several clients with tasks of one kind, side by side where the method can; else one after the other."""
    if len(tasks) > 1 and not tasks[0].alone and algorithm.group_update:
        data = [clients.examples(task.client, "train") for task in tasks]
        messages, rngs = [task.message.to(device) for task in tasks], [task.stream(seed) for task in tasks]
        own = [placed(private, device) for private in privates]
        try:
            updated = algorithm.group_update(messages, own, data, rngs, tasks[0].finetune or None)
            if updated is not None:
                return [
                    _answer(algorithm, clients, seed, task, private, each)
                    for task, private, each in zip(tasks, privates, updated, strict=True)
                ]
        except Exception:  # one of them fails: taken one by one, the error names it
            pass
    return [perform(algorithm, clients, seed, task, own, device) for task, own in zip(tasks, privates, strict=True)]


def _answer(algorithm: Algorithm, clients: Clients, seed: int, task: Task, private: Private, updated: Answer) -> Answer:
    """Training: the reply with a score. Evaluation: the score alone, and the private state as it was."""
    message, after = updated
    data = clients.examples(task.client, task.part)
    scored = _score(algorithm, data, updated)
    if task.kind != "train":
        return Message({}, scored), private
    sent = task.message.to(data.x.device)
    reply = algorithm.wrap(sent, message, task.stream(seed).child("noise")).to(CPU)
    return Message(reply.tensors, {**reply.numbers, **scored}), placed(after, CPU)


def _score(algorithm: Algorithm, data: Examples, updated: Answer) -> dict[str, float]:
    return score(predict(algorithm, *updated, data.x) if len(data) else data.x, data.y)


@contextmanager
def one_thread() -> Iterator[None]:
    """As in a worker: sums in the same order on machines of any number of cores, and no threads that wait for each other."""
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
    """log p(y|x) from what is shared alone, x -> [N, classes]; None: private parts decide."""
    pool = algorithm.pool
    if not algorithm.uses_private:
        return lambda x: predict(algorithm, message, {}, x)
    return None if pool is None or side != "label" else lambda x: in_chunks(lambda part: pool(message, part), x)


def in_chunks(log_prob: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([log_prob(part) for part in torch.split(x, CHUNK)])
