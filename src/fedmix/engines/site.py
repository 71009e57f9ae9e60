"""What a machine does that clients live on: orders in, outcomes out, private states on its own disk."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedmix.core.algorithm import Algorithm
from fedmix.core.types import Clients, Message
from fedmix.engines.client import CPU, informed, named, one_thread, perform
from fedmix.engines.flower import Order, Outcome
from fedmix.engines.store import SiteStore
from fedmix.errors import ClientError


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
        private = self.store.get(task.client, order.state) or self.algorithm.new_client(self.seed, task.client)
        if task.kind == "share":
            if not self.share:
                raise ClientError(f"client {task.client} does not share its private state (evaluation.share_private)")
            return Message(self.algorithm.hand_over(private))
        if self.keep and task.kind in ("train", "evaluate"):
            with named(task):
                known = informed(self.algorithm, self.clients, task.client, private)
            self.store.keep(task.client, task.message, known, task.round - (task.kind == "train"))
        answer, after = perform(self.algorithm, self.clients, self.seed, task, private, self.device)
        if task.kind == "train":
            self.store.put(task.client, task.round, after, before=order.state)
        return answer
