"""What a machine does that clients live on: orders in, outcomes out, private states on its own disk."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedmix.core.algorithm import Algorithm
from fedmix.core.types import Clients, Message
from fedmix.engines.client import CPU, Task, informed, named, one_thread, perform
from fedmix.engines.flower import Order, Outcome
from fedmix.engines.store import SiteStore
from fedmix.errors import ClientError

MOST_ANSWERS = 5  # of a client in one round, where noise protects them: after crashes a round is trained again


@dataclass(frozen=True)
class Site:
    """clients: the data that is here. share: whether private states may leave, for evaluation without identity."""

    algorithm: Algorithm
    clients: Clients
    seed: int
    store: SiteStore
    share: bool
    keep: bool = (
        False  # of a real site: what clients are sent is kept for predictions, what their errors quote stays here
    )
    device: torch.device = CPU

    def handle(self, orders: Sequence[Order]) -> list[Outcome]:
        """One client's failure is its own: the others are answered for."""
        outcomes = []
        with one_thread():
            for order in orders:
                try:
                    outcomes.append(Outcome(order.task.client, self._answer(order)))
                except ClientError as error:
                    if self.keep:
                        print(f"fedmix: {error}", file=sys.stderr, flush=True)
                    outcomes.append(Outcome(order.task.client, None, error.discreet if self.keep else str(error)))
        return outcomes

    def _answer(self, order: Order) -> Message:
        task = order.task
        with named(task):
            self.clients.examples(
                task.client, "train"
            )  # whoever is not here is not answered for, and nothing is written
        if self.keep:
            self._refuse_what_owners_did_not_agree_to(task)
        private = self.store.get(task.client, order.state)
        if private is None:
            private = self.algorithm.new_client(self.seed, task.client)
        if task.kind == "share":
            if not self.share:
                raise ClientError(f"client {task.client} does not share its private state (evaluation.share_private)")
            return Message(self.algorithm.hand_over(private))
        if self.keep and task.kind in ("train", "evaluate"):
            with named(task):
                known = informed(self.algorithm, self.clients, task.client, private)
            self.store.keep(task.client, task.message, known, task.round - (task.kind == "train"))
        if self.keep and task.kind == "train" and self.algorithm.setup.privacy.noise:
            self._count_release(task)
        answer, after = perform(self.algorithm, self.clients, self.seed, task, private, self.device)
        if task.kind == "train":
            self.store.put(task.client, task.round, after, before=order.state)
        return answer

    def _refuse_what_owners_did_not_agree_to(self, task: Task) -> None:
        """A real site trains and is scored, in the rounds of its recipe; its inputs are modelled for nobody."""
        if task.kind == "density":
            raise ClientError(f"client {task.client} gives no model of its inputs away")
        if task.round > self.algorithm.setup.rounds:
            raise ClientError(
                f"client {task.client} has no round {task.round}: its recipe has {self.algorithm.setup.rounds}"
            )

    def _count_release(self, task: Task) -> None:
        """A noisy answer is given a few times at most for one round: means of many would take the noise off."""
        given = self.store.answered(task.client, task.round)
        if given >= MOST_ANSWERS:
            raise ClientError(
                f"client {task.client} has answered {given} times in round {task.round}, with noise each time"
            )
        self.store.note_answer(task.client, task.round, given + 1)
