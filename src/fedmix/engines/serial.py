"""The plain loop over clients: the reference that the other engines agree with."""

from collections.abc import Sequence

import torch

from fedmix.core.algorithm import Algorithm
from fedmix.core.types import Clients, Message
from fedmix.engines.client import CPU, Task, one_thread, perform
from fedmix.engines.store import StatesHere, Store


class SerialEngine(StatesHere):
    """One client after the other, in this process."""

    name = "serial"
    states_elsewhere: bool = False
    workers = 1

    def __init__(
        self, algorithm: Algorithm, clients: Clients, seed: int, store: Store, device: torch.device = CPU
    ) -> None:
        self.algorithm = algorithm
        self.clients = clients if device == CPU else clients.to(device)
        self.device = device
        self.seed = seed
        self.store = store

    def run(self, tasks: Sequence[Task]) -> list[Message]:
        """The clients' answers, in the order of the tasks. Training changes their private states, evaluation does not."""
        answers = []
        with one_thread():
            for task in tasks:
                private = self.store.get(task.client)
                if private is None:
                    private = self.algorithm.new_client(self.seed, task.client)
                answer, after = perform(self.algorithm, self.clients, self.seed, task, private, self.device)
                if task.kind == "train":
                    self.store.put(task.client, after)
                answers.append(answer)
        return answers

    def close(self) -> None:
        pass
