"""The plain loop over clients: the reference that the other engines agree with."""

from collections.abc import Sequence

from fedmix.core.types import Algorithm, Clients, Message
from fedmix.engines.client import Task, perform
from fedmix.engines.store import Store


class SerialEngine:
    name = "serial"
    workers = 1

    def __init__(self, algorithm: Algorithm, clients: Clients, seed: int, store: Store) -> None:
        self.algorithm = algorithm
        self.clients = clients
        self.seed = seed
        self.store = store
        self._new = algorithm.new_client(seed)

    def run(self, tasks: Sequence[Task]) -> list[Message]:
        """The clients' answers, in the order of the tasks. Training changes their private states, evaluation does not."""
        answers = []
        for task in tasks:
            answer, after = perform(
                self.algorithm, self.clients, self.seed, task, self.store.get(task.client, self._new)
            )
            if task.kind == "train":
                self.store.put(task.client, after)
            answers.append(answer)
        return answers

    def close(self) -> None:
        pass
