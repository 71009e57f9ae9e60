"""What a machine with clients does: it takes orders, gives outcomes, and keeps private states on its own disk."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedmix.core.algorithm import Algorithm
from fedmix.core.types import Clients, Message, Private
from fedmix.engines.client import CPU, Task, informed, named, one_thread, perform
from fedmix.engines.flower import Order, Outcome
from fedmix.engines.store import SiteStore
from fedmix.errors import ClientError

# Answers of a client in one round, where noise protects them: after crashes a round is trained again.
MOST_ANSWERS = 5


@dataclass(frozen=True)
class Site:
    """A machine with clients.

    clients: the data that is here.
    share: whether private states may leave, for evaluation without identity.
    keep: whether this is a real site: it keeps what clients are sent for predictions, and what their errors quote.
    """

    algorithm: Algorithm
    clients: Clients
    seed: int
    store: SiteStore
    share: bool
    keep: bool = False
    device: torch.device = CPU

    def handle(self, orders: Sequence[Order]) -> list[Outcome]:
        """The outcome of each order. If one client fails, the others are still answered for."""
        with one_thread():
            return [self._outcome(order) for order in orders]

    def _outcome(self, order: Order) -> Outcome:
        client = order.task.client
        try:
            return Outcome(client, self._answer(order))
        except ClientError as error:
            if not self.keep:
                return Outcome(client, None, str(error))
            print(f"fedmix: {error}", file=sys.stderr, flush=True)
            return Outcome(client, None, error.discreet)

    def _answer(self, order: Order) -> Message:
        task = order.task
        # A client that is not here is not answered for, and nothing is written.
        with named(task):
            self.clients.examples(task.client, "train")
        if self.keep:
            self._refuse_what_owners_did_not_agree_to(task)
        private = self._private(order)
        if task.kind == "share":
            return self._hand_over(task, private)
        if self.keep:
            self._note(task, private)
        answer, after = perform(self.algorithm, self.clients, self.seed, task, private, self.device)
        if task.kind == "train":
            self.store.put(task.client, task.round, after, before=order.state)
        return answer

    def _private(self, order: Order) -> Private:
        """The private state that the server names, or that of a new client."""
        client = order.task.client
        private = self.store.get(client, order.state)
        if private is None:
            return self.algorithm.new_client(self.seed, client)
        return private

    def _hand_over(self, task: Task, private: Private) -> Message:
        if not self.share:
            raise ClientError(f"client {task.client} does not share its private state (evaluation.share_private)")
        return Message(self.algorithm.hand_over(private))

    def _note(self, task: Task, private: Private) -> None:
        """What a real site writes down before it answers."""
        if task.kind in ("train", "evaluate"):
            with named(task):
                known = informed(self.algorithm, self.clients, task.client, private)
            before_training = task.round - 1 if task.kind == "train" else task.round
            self.store.keep(task.client, task.message, known, before_training)
        if task.kind == "train" and self.algorithm.setup.privacy.noise:
            self._count_release(task)

    def _refuse_what_owners_did_not_agree_to(self, task: Task) -> None:
        """Owners agreed to training and to scores, in the rounds of the recipe. No model of their inputs is given away."""
        if task.kind == "density":
            raise ClientError(f"client {task.client} gives no model of its inputs away")
        if task.round > self.algorithm.setup.rounds:
            raise ClientError(
                f"client {task.client} has no round {task.round}: its recipe has {self.algorithm.setup.rounds}"
            )

    def _count_release(self, task: Task) -> None:
        """Give a noisy answer a few times at most in one round: the mean of many would take the noise off."""
        given = self.store.answered(task.client, task.round)
        if given >= MOST_ANSWERS:
            raise ClientError(
                f"client {task.client} has answered {given} times in round {task.round}, with noise each time"
            )
        self.store.note_answer(task.client, task.round, given + 1)
