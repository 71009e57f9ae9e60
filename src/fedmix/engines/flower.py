"""Clients somewhere else: Flower carries messages, everything else is ours.

A node is one of Flower's SuperNodes. It serves one client or many; what it is asked goes to it in one message, tensors that
several clients are sent only once. Clients' private states stay where the clients are: the server only names the round whose
state each of them is to start from.
"""

import importlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fedmix.core.types import Message, Private
from fedmix.engines.client import Absent, Task
from fedmix.engines.store import Store
from fedmix.errors import ClientError, SettingError

POLL_SECONDS = 0.05
LARGEST = 256 << 20  # bytes of tensors in one message, a little more or less
ASK = "train"  # Flower's kind of message


def flwr() -> Any:
    """Flower's classes, or one line that says how to get them. It is told to report on nobody, and to ask nobody for news."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    try:
        import flwr.app
    except ModuleNotFoundError as error:
        raise SettingError("--engine flower needs Flower; install it with: pip install 'fedmix[flower]'.") from error
    return flwr.app


@dataclass(frozen=True)
class Order:
    """What one client behind a node is asked: a task, and the round whose private state it starts from (0: a new one)."""

    task: Task
    state: int


@dataclass(frozen=True)
class Outcome:
    """What one client behind a node answers: a message, or why there is none."""

    client: int
    message: Message | None
    error: str = ""


class _Laid:
    """Tensors for a message, each of them once."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self._known: dict[int, tuple[Tensor, str]] = {}

    def lay(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        where = {}
        for name, value in tensors.items():
            if id(value) not in self._known:
                key = str(len(self.arrays))
                self.arrays[key] = flwr().Array(value.detach().cpu().contiguous().numpy())
                self._known[id(value)] = (value, key)
            where[name] = self._known[id(value)][1]
        return where


def _packed(laid: _Laid, table: Any) -> Any:
    app = flwr()
    return app.RecordDict(
        {"tensors": app.ArrayRecord(laid.arrays), "table": app.ConfigRecord({"json": json.dumps(table)})}
    )


def _unpacked(content: Any) -> tuple[Any, Callable[[Mapping[str, str]], dict[str, Tensor]]]:
    arrays = content["tensors"]
    known: dict[str, Tensor] = {}

    def take(where: Mapping[str, str]) -> dict[str, Tensor]:
        for key in where.values():
            if key not in known:
                known[key] = torch.from_numpy(arrays[key].numpy().copy())
        return {name: known[key] for name, key in where.items()}

    return json.loads(content["table"]["json"]), take


def pack_orders(about: Mapping[str, Any], orders: Sequence[Order]) -> Any:
    """A node's orders, and what they are about (the run, its recipe), as Flower's records."""
    laid = _Laid()
    rows = []
    for order in orders:
        task = {f.name: getattr(order.task, f.name) for f in fields(Task) if f.name != "message"}
        message = order.task.message
        rows.append(
            {
                "task": task,
                "tensors": laid.lay(message.tensors),
                "numbers": dict(message.numbers),
                "state": order.state,
            }
        )
    return _packed(laid, {"about": dict(about), "orders": rows})


def unpack_orders(content: Any) -> tuple[dict[str, Any], list[Order]]:
    table, take = _unpacked(content)
    orders = [
        Order(Task(**row["task"], message=Message(take(row["tensors"]), row["numbers"])), row["state"])
        for row in table["orders"]
    ]
    return table["about"], orders


def pack_outcomes(outcomes: Sequence[Outcome]) -> Any:
    laid = _Laid()
    rows = []
    for outcome in outcomes:
        message = outcome.message or Message({})
        rows.append(
            {
                "client": outcome.client,
                "tensors": laid.lay(message.tensors),
                "numbers": dict(message.numbers),
                "error": outcome.error,
            }
        )
    return _packed(laid, rows)


def unpack_outcomes(content: Any) -> list[Outcome]:
    rows, take = _unpacked(content)
    return [
        Outcome(
            int(row["client"]), None if row["error"] else Message(take(row["tensors"]), row["numbers"]), row["error"]
        )
        for row in rows
    ]


def simulate(nodes: int, client_app: str, serve: Callable[[Any], None]) -> None:
    """Flower's simulation on Ray: `serve(grid)` runs as the server, `client_app` ("module:name") on this many nodes."""
    flwr()
    try:
        import ray
    except ModuleNotFoundError as error:
        raise SettingError("--engine flower needs Ray; install it with: pip install 'fedmix[flower]'.") from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    server = ServerApp()
    failed: list[BaseException] = []

    @server.main()
    def main(grid: Any, context: Any) -> None:
        try:
            serve(grid)
        except BaseException as error:  # for whoever started the simulation, as it is
            failed.append(error)

    module, _, name = client_app.partition(":")
    client = getattr(importlib.import_module(module), name)
    with tempfile.TemporaryDirectory(prefix="fedmix-", ignore_cleanup_errors=True) as scratch:
        init: Any = {"num_cpus": nodes, "include_dashboard": False, "log_to_driver": False, "_temp_dir": scratch}
        try:
            run_simulation(
                server, client, nodes, backend_config={"init_args": init, "client_resources": {"num_cpus": 1}}
            )
        finally:
            import ray

            ray.shutdown()
    if failed:
        raise failed[0]


def nodes_of(grid: Any, count: int, seconds: float = 300.0) -> list[int]:
    """The nodes that are connected, once there are this many."""
    until = time.monotonic() + seconds
    while len(found := list(grid.get_node_ids())) < count:
        if time.monotonic() > until:
            raise ClientError(f"{count} nodes must be connected. After {seconds:g} s there are {len(found)}.")
        time.sleep(POLL_SECONDS)
    return found


def parcel(content: Any, node: int, group: str, ttl: float | None = None) -> Any:
    """A message of Flower's to one node."""
    return flwr().Message(content, node, ASK, group_id=group, ttl=ttl)


class RemoteStore:
    """Clients' private states that are somewhere else. Known here: who took part, and after which round its state was kept."""

    def __init__(self, fetch: Callable[[Sequence[int]], list[Private]]) -> None:
        self.rounds: dict[int, int] = {}
        self._fetch = fetch

    def get(self, client: int, new: Private) -> Private:
        return self.many([client])[0] if client in self.rounds else new

    def many(self, clients: Sequence[int]) -> list[Private]:
        return self._fetch(clients)

    def put(self, client: int, private: Private) -> None:
        raise ClientError(f"client {client}'s private state is put where the client is, not at the server")

    def clients(self) -> list[int]:
        return sorted(self.rounds)

    def take_changed(self) -> list[int]:
        return []  # nothing for a checkpoint of the server's


class FlowerEngine:
    """Sends tasks through a Flower grid.

    about: what goes with every message. homes: the clients of each node, by node id; None: any client on any node.
    deadline: seconds until a round is closed without those who have not answered; 0: until all have.
    """

    name = "flower"

    def __init__(
        self,
        grid: Any,
        about: Mapping[str, Any],
        homes: Mapping[int, Sequence[int]] | None,
        nodes: Sequence[int],
        deadline: float = 0.0,
        strict: bool = True,
    ) -> None:
        self.grid = grid
        self.about = dict(about)
        self.homes = homes
        self.nodes = sorted(nodes)
        self.workers = len(nodes)
        self.deadline = deadline
        self.strict = strict  # a client's error ends the run, as on engines of one machine; else it is absent
        self._states = RemoteStore(self._fetch)
        self.store: Store = self._states

    def memory(self) -> dict[str, Any]:
        """What a checkpoint must know to go on: whose state of which round counts."""
        return {str(client): t for client, t in self._states.rounds.items()}

    def remember(self, memory: Mapping[str, Any]) -> None:
        self._states.rounds = {int(client): int(t) for client, t in memory.items()}

    def accept(self, t: int, clients: Sequence[int]) -> None:
        """These clients' answers of round t count: their states after it are where they go on from."""
        self._states.rounds |= dict.fromkeys(clients, t)

    def run(self, tasks: Sequence[Task]) -> list[Message | Absent]:
        orders = [Order(task, self._states.rounds.get(task.client, 0)) for task in tasks]
        answers: dict[int, Message | Absent] = {}
        sent: dict[str, list[int]] = {}
        for node, own in self._parcels(orders):
            message = parcel(pack_orders(self.about, own), node, str(tasks[0].round), self.deadline or None)
            (message_id,) = self.grid.push_messages([message])
            sent[message_id] = [order.task.client for order in own]
        for message_id, outcomes in self._collect(sent).items():
            for client in sent[message_id]:
                answers[client] = outcomes.get(client, Absent("its node left it out"))
        for task in tasks:
            answers.setdefault(task.client, Absent("its node is not connected"))
        if self.strict:
            for answer in answers.values():
                if isinstance(answer, Absent):
                    raise ClientError(answer.reason)
        return [answers[task.client] for task in tasks]

    def _parcels(self, orders: Sequence[Order]) -> list[tuple[int, list[Order]]]:
        """Orders by node: where the client lives, or in equal parts; large ones in several messages."""
        by_node: dict[int, list[Order]] = {}
        for i, order in enumerate(orders):
            node = self._home(order.task.client, i)
            if node is not None:
                by_node.setdefault(node, []).append(order)
        parcels: list[tuple[int, list[Order]]] = []
        for node, own in by_node.items():
            part: list[Order] = []
            for order in own:
                if part and sum(o.task.message.nbytes for o in part) + order.task.message.nbytes > LARGEST:
                    parcels.append((node, part))
                    part = []
                part.append(order)
            parcels.append((node, part))
        return parcels

    def _home(self, client: int, place: int) -> int | None:
        if self.homes is None:
            return self.nodes[place % len(self.nodes)]
        connected = set(self.grid.get_node_ids())
        return next((node for node, own in self.homes.items() if client in own and node in connected), None)

    def _collect(self, sent: Mapping[str, Sequence[int]]) -> dict[str, dict[int, Message | Absent]]:
        """Replies as they come, until all are there or the time is over."""
        waiting, found = set(sent), dict[str, dict[int, Message | Absent]]()
        until = time.monotonic() + self.deadline if self.deadline else None
        while waiting and (until is None or time.monotonic() < until):
            for reply in self.grid.pull_messages(sorted(waiting)):
                asked = reply.metadata.reply_to_message_id
                if asked in waiting:
                    waiting.discard(asked)
                    found[asked] = self._read(reply, sent[asked])
            if waiting:
                time.sleep(POLL_SECONDS)
        for asked in waiting:
            late = Absent(f"no answer within {self.deadline:g} s")
            found[asked] = dict.fromkeys(sent[asked], late)
        return found

    def _read(self, reply: Any, clients: Sequence[int]) -> dict[int, Message | Absent]:
        if reply.has_error():
            reason = " ".join(str(reply.error.reason or f"code {reply.error.code}").split())
            return dict.fromkeys(clients, Absent(f"its node failed: {reason[:300]}"))
        try:
            outcomes = unpack_outcomes(reply.content)
        except Exception as error:
            unreadable = Absent(f"unreadable answer ({type(error).__name__}: {error})")
            return dict.fromkeys(clients, unreadable)
        return {
            outcome.client: Absent(outcome.error) if outcome.message is None else outcome.message
            for outcome in outcomes
            if outcome.client in clients
        }

    def _fetch(self, clients: Sequence[int]) -> list[Private]:
        """Private states that clients hand over, where their recipe allows it."""
        tasks = [Task("share", self._states.rounds.get(s, 0), s, Message({})) for s in clients]
        answers = self.run(tasks)
        absent = [answer for answer in answers if isinstance(answer, Absent)]
        if absent:
            raise ClientError(
                f"{len(absent)} of {len(clients)} clients did not hand over their state ({absent[0].reason})"
            )
        return [dict(answer.tensors) for answer in answers if isinstance(answer, Message)]

    def close(self) -> None:
        pass  # the grid is Flower's
