"""The client's side of the wire: what a client does with a message. Every engine runs exactly this."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedmix.core.types import Algorithm, Clients, Examples, Message, Private
from fedmix.errors import ClientError, StepError
from fedmix.rng import stream

CHUNK = 512  # points of a forward pass without gradients


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


def perform(algorithm: Algorithm, clients: Clients, seed: int, task: Task, private: Private) -> tuple[Message, Private]:
    """The answer, and the client's private state after it. An error names client, round and step."""
    try:
        rng = stream(seed, "round", task.round, "client", task.client)
        if task.kind == "train":
            train = clients.examples(task.client, "train")
            reply, after = algorithm.client_update(task.message, private, train, rng, None)
            score = evaluate(algorithm, reply, after, clients.examples(task.client, task.part))
            return Message(reply.tensors, {**reply.numbers, **score}), after
        message, after = task.message, private
        if task.finetune:
            train = clients.examples(task.client, "train")
            message, after = algorithm.client_update(message, private, train, rng.child("finetune"), task.finetune)
        return Message({}, evaluate(algorithm, message, after, clients.examples(task.client, task.part))), private
    except StepError as error:
        raise ClientError(f"client {task.client}, round {task.round}, {error}") from error
    except Exception as error:
        raise ClientError(f"client {task.client}, round {task.round}: {type(error).__name__}: {error}") from error


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
