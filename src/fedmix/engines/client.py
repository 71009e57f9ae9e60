"""The client's side of the wire: what a client does with a message. Every engine runs exactly this."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedmix.core.tree import placed
from fedmix.core.types import Algorithm, Clients, Examples, Message, Private
from fedmix.errors import ClientError, StepError
from fedmix.rng import Stream, stream

CHUNK = 512  # points of a forward pass without gradients
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Task:
    """What the server asks of one client.

    train: an update, and a score of the updated weights on validation data (the proxy of the learning curves).
    evaluate: a score on `part`, after `finetune` epochs of training that are then forgotten.
    """

    kind: Literal["train", "evaluate"]
    round: int
    client: int
    message: Message
    part: str = "validation"
    finetune: int = 0

    @property
    def trains(self) -> bool:
        return self.kind == "train" or self.finetune > 0

    def stream(self, seed: int) -> Stream:
        rng = stream(seed, "round", self.round, "client", self.client)
        return rng if self.kind == "train" else rng.child("finetune")


Answer = tuple[Message, Private]  # what goes to the server, and the client's private state after it


def perform(
    algorithm: Algorithm, clients: Clients, seed: int, task: Task, private: Private, device: torch.device = CPU
) -> Answer:
    """What a client answers. An error names client, round and step. `clients` are on the device already."""
    try:
        updated = task.message.to(device), placed(private, device)
        if task.trains:
            train = clients.examples(task.client, "train")
            updated = algorithm.client_update(*updated, train, task.stream(seed), task.finetune or None)
        return _answer(algorithm, clients, task, private, updated)
    except StepError as error:
        raise ClientError(f"client {task.client}, round {task.round}, {error}") from error
    except Exception as error:
        raise ClientError(f"client {task.client}, round {task.round}: {type(error).__name__}: {error}") from error


def perform_group(
    algorithm: Algorithm,
    clients: Clients,
    seed: int,
    tasks: Sequence[Task],
    privates: Sequence[Private],
    device: torch.device = CPU,
) -> list[Answer]:
    """The same for several clients with tasks of one kind, side by side where the method can; else one after the other."""
    if len(tasks) > 1 and tasks[0].trains and algorithm.group_update:
        data = [clients.examples(task.client, "train") for task in tasks]
        messages, rngs = [task.message.to(device) for task in tasks], [task.stream(seed) for task in tasks]
        own = [placed(private, device) for private in privates]
        try:
            updated = algorithm.group_update(messages, own, data, rngs, tasks[0].finetune or None)
            if updated is not None:
                return [
                    _answer(algorithm, clients, task, private, each)
                    for task, private, each in zip(tasks, privates, updated, strict=True)
                ]
        except Exception:  # one of them fails: taken one by one, the error names it
            pass
    return [perform(algorithm, clients, seed, task, own, device) for task, own in zip(tasks, privates, strict=True)]


def _answer(algorithm: Algorithm, clients: Clients, task: Task, private: Private, updated: Answer) -> Answer:
    """Training: the reply with a score. Evaluation: the score alone, and the private state as it was."""
    message, after = updated
    score = evaluate(algorithm, message, after, clients.examples(task.client, task.part))
    if task.kind == "train":
        return Message(message.to(CPU).tensors, {**message.numbers, **score}), placed(after, CPU)
    return Message({}, score), private


def evaluate(algorithm: Algorithm, message: Message, private: Private, data: Examples) -> dict[str, float]:
    """How many of the client's points are right, of how many, and their summed negative log-likelihood."""
    if not len(data):
        return {"correct": 0.0, "points": 0.0, "nll": 0.0}
    log_p = predict(algorithm, message, private, data.x)
    return {
        "correct": float((log_p.argmax(dim=1) == data.y).sum()),
        "points": float(len(data)),
        "nll": float(-log_p.gather(1, data.y.unsqueeze(1)).sum()),
    }


def predict(algorithm: Algorithm, message: Message, private: Private, x: Tensor) -> Tensor:
    """log p(y|x,s) in chunks: [N, ...] -> [N, classes]."""
    with torch.no_grad():
        return torch.cat([algorithm.predict(message, private, part) for part in torch.split(x, CHUNK)])
