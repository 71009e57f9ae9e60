"""Clients on other machines: Flower carries messages, everything else is fedmix's.

A node is one of Flower's SuperNodes. It serves one client or many. Its orders go in one message, in which a tensor for
several clients is only once. Clients' private states stay where the clients are: the server only names the round whose
state each of them is to start from.
"""

import importlib
import json
import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from fedmix.core.types import Message, Private
from fedmix.engines.client import PARTS, Absent, Kind, Task
from fedmix.engines.store import Store
from fedmix.errors import ClientError, SettingError

POLL_SECONDS = 0.05  # between looks for answers, at first
LONGEST_PAUSE = 0.3  # and at last
LARGEST = 256 << 20  # bytes of tensors in one message, a little more or less
RAISED = re.compile(r"<class '[^']*'>:<[\"'](.*)[\"']>")
ASK = "train"  # Flower's kind of message


def flwr() -> Any:
    """Flower's classes, or an error that says how to get them. Its telemetry and its update check are switched off."""
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
    """Tensors for a message, each of them once, end to end in one array: Flower makes a request for each array."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._known: dict[int, tuple[Tensor, int]] = {}
        self.rows: list[tuple[str, list[int], int]] = []  # for each tensor: type, shape, where it begins

    def lay(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Add tensors, and say in which row each of them is."""
        where = {}
        for name, value in tensors.items():
            if id(value) not in self._known:
                plain = value.detach().cpu().numpy()
                self._known[id(value)] = (value, len(self.rows))
                self.rows.append((plain.dtype.str, list(plain.shape), self._size))
                self._pieces.append(plain.tobytes())
                self._size += plain.nbytes
            where[name] = self._known[id(value)][1]
        return where

    def array(self) -> Any:
        return flwr().Array(np.frombuffer(b"".join(self._pieces), dtype=np.uint8))


def _packed(laid: _Laid, table: Any) -> Any:
    """Flower's records of these tensors, and of a table that says what they are."""
    app = flwr()
    description = json.dumps({"tensors": laid.rows, "table": table})
    return app.RecordDict(
        {
            "tensors": app.ArrayRecord({"all": laid.array()}),
            "table": app.ConfigRecord({"json": description}),
        }
    )


def _unpacked(content: Any) -> tuple[Any, Callable[[Mapping[str, int]], dict[str, Tensor]]]:
    """The table of a message, and a function that gives the tensors of its rows by their names."""
    packed = json.loads(content["table"]["json"])
    rows = packed["tensors"]
    whole = content["tensors"]["all"].numpy() if rows else np.zeros(0, dtype=np.uint8)
    known: dict[int, Tensor] = {}

    def take(where: Mapping[str, int]) -> dict[str, Tensor]:
        for row in where.values():
            if row not in known:
                dtype, shape, start = rows[row]
                end = start + np.dtype(dtype).itemsize * math.prod(shape)
                known[row] = torch.from_numpy(whole[start:end].copy().view(dtype).reshape(shape))
        return {name: known[row] for name, row in where.items()}

    return packed["table"], take


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
    """What a server asks. Files are named after clients and rounds, so these must be whole numbers and nothing else."""
    table, take = _unpacked(content)
    orders = []
    for row in table["orders"]:
        asked = row["task"]
        _refuse_strange_order(asked, row["state"])
        message = Message(take(row["tensors"]), row["numbers"])
        orders.append(Order(Task(**asked, message=message), row["state"]))
    return table["about"], orders


def _refuse_strange_order(asked: Mapping[str, Any], state: Any) -> None:
    amounts = [asked.get(name, 0) for name in ("finetune", "adapt", "points")]
    for number in (asked["client"], asked["round"], state, *amounts):
        if type(number) is not int or not 0 <= number < 2**40:
            raise ClientError("an order must name clients, rounds and amounts by whole numbers. This one does not.")
    if asked["kind"] not in get_args(Kind) or asked.get("part", "train") not in PARTS:
        raise ClientError("an order must ask for something that clients do. This one does not.")


def pack_outcomes(outcomes: Sequence[Outcome]) -> Any:
    """A node's answers as Flower's records."""
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
    """What the clients behind a node answered."""
    rows, take = _unpacked(content)
    outcomes = []
    for row in rows:
        message = None if row["error"] else Message(take(row["tensors"]), row["numbers"])
        outcomes.append(Outcome(int(row["client"]), message, row["error"]))
    return outcomes


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
        except BaseException as error:  # raised again below, where the simulation was started
            failed.append(error)

    module, _, name = client_app.partition(":")
    client = getattr(importlib.import_module(module), name)
    with tempfile.TemporaryDirectory(prefix="fedmix-", ignore_cleanup_errors=True) as scratch:
        init: Any = {"num_cpus": nodes, "include_dashboard": False, "log_to_driver": False, "_temp_dir": scratch}
        backend: Any = {"init_args": init, "client_resources": {"num_cpus": 1}}
        try:
            run_simulation(server, client, nodes, backend_config=backend)
        finally:
            import ray

            ray.shutdown()
    if failed:
        raise failed[0]


def nodes_of(grid: Any, count: int, seconds: float = 300.0) -> list[int]:
    """The nodes that are connected, once there are this many."""
    until = time.monotonic() + seconds
    while len(nodes := list(grid.get_node_ids())) < count:
        if time.monotonic() > until:
            raise ClientError(f"{count} nodes must be connected. After {seconds:g} s there are {len(nodes)}.")
        time.sleep(POLL_SECONDS)
    return nodes


def parcel(content: Any, node: int, group: str, ttl: float | None = None, kind: str = ASK) -> Any:
    """One of Flower's messages, to one node."""
    return flwr().Message(content, node, kind, group_id=group, ttl=ttl)


class RemoteStore:
    """Clients' private states, which are on other machines. Here is only who took part, and which round's state counts."""

    def __init__(self, fetch: Callable[[Sequence[int]], list[Private]]) -> None:
        self.rounds: dict[int, int] = {}
        self._fetch = fetch

    def get(self, client: int) -> Private | None:
        return self.many([client])[0] if client in self.rounds else None

    def many(self, clients: Sequence[int]) -> list[Private]:
        return self._fetch(clients)

    def put(self, client: int, private: Private) -> None:
        raise ClientError(f"client {client}'s private state is put where the client is, not at the server")

    def clients(self) -> list[int]:
        return sorted(self.rounds)

    def take_changed(self) -> list[int]:
        return []  # the server's checkpoint holds no client's state


class FlowerEngine:
    """Sends tasks through a Flower grid.

    about: (node) -> what goes with every message to it.
    homes: () -> the node that each client lives on, for clients that can be reached; None: any client on any node.
    deadline: seconds until a round is closed without those who have not answered; 0: when all have.
    strict: whether a client's error ends the run, as it does on one machine; otherwise the client is absent.
    """

    name = "flower"
    # Clients keep their private states themselves; the server's checkpoint does not hold them.
    states_elsewhere: bool = True

    def __init__(
        self,
        grid: Any,
        about: Callable[[int], Mapping[str, Any]],
        homes: Callable[[], Mapping[int, int]] | None,
        nodes: Sequence[int],
        deadline: float = 0.0,
        strict: bool = True,
    ) -> None:
        self.grid = grid
        self.about = about
        self.homes = homes
        self.nodes = sorted(nodes)
        self.workers = len(nodes)
        self.deadline = deadline
        self.strict = strict
        self._states = RemoteStore(self._fetch)
        self.store: Store = self._states

    def memory(self) -> dict[str, Any]:
        """What a checkpoint must hold to go on: for each client, the round whose state counts."""
        return {str(client): t for client, t in self._states.rounds.items()}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Go on from what `memory` gave."""
        self._states.rounds = {int(client): int(t) for client, t in memory.items()}

    def accept(self, t: int, clients: Sequence[int]) -> None:
        """These clients' answers of round t count: their states after it are where they go on from."""
        self._states.rounds |= dict.fromkeys(clients, t)

    def run(self, tasks: Sequence[Task]) -> list[Message | Absent]:
        """The clients' answers, in the order of the tasks. Those of absent clients say why there is none."""
        orders = [Order(task, self._states.rounds.get(task.client, 0)) for task in tasks]
        answers = self._answers(self._send(orders))
        for task in tasks:
            answers.setdefault(task.client, Absent("its node is not connected"))
        if self.strict:
            _refuse_absent(answers.values())
        return [answers[task.client] for task in tasks]

    def _send(self, orders: Sequence[Order]) -> dict[str, list[int]]:
        """Send orders to their nodes. Gives the clients that each message is for, by the message's id."""
        sent: dict[str, list[int]] = {}
        for node, orders_of_node in self._parcels(orders):
            content = pack_orders(self.about(node), orders_of_node)
            group = str(orders[0].task.round)
            message = parcel(content, node, group, self.deadline or None)
            (message_id,) = self.grid.push_messages([message])
            sent[message_id] = [order.task.client for order in orders_of_node]
        return sent

    def _answers(self, sent: Mapping[str, Sequence[int]]) -> dict[int, Message | Absent]:
        """The answer of each client that a message was for."""
        answers: dict[int, Message | Absent] = {}
        for message_id, outcomes in self._collect(sent).items():
            for client in sent[message_id]:
                answers[client] = outcomes.get(client, Absent("its node left it out"))
        return answers

    def _parcels(self, orders: Sequence[Order]) -> list[tuple[int, list[Order]]]:
        """Orders by node; those that are too large for one message are in several."""
        parcels: list[tuple[int, list[Order]]] = []
        for node, orders_of_node in self._by_node(orders).items():
            parcels += [(node, part) for part in _in_parts(orders_of_node)]
        return parcels

    def _by_node(self, orders: Sequence[Order]) -> dict[int, list[Order]]:
        """Orders by the node that the client lives on, or in equal parts. Clients that cannot be reached are left out."""
        by_node: dict[int, list[Order]] = {}
        homes = self.homes() if self.homes else None
        for i, order in enumerate(orders):
            node = self.nodes[i % len(self.nodes)] if homes is None else homes.get(order.task.client)
            if node is not None:
                by_node.setdefault(node, []).append(order)
        return by_node

    def _collect(self, sent: Mapping[str, Sequence[int]]) -> dict[str, dict[int, Message | Absent]]:
        """Replies as they come, until all are there or the time is over."""
        waiting = set(sent)
        outcomes: dict[str, dict[int, Message | Absent]] = {}
        pause = POLL_SECONDS
        until = time.monotonic() + self.deadline if self.deadline else math.inf
        while waiting and time.monotonic() < until:
            for reply in self._pull(waiting):
                asked = reply.metadata.reply_to_message_id
                outcomes[asked] = self._read(reply, sent[asked])
            if waiting:
                time.sleep(pause)
                pause = min(1.2 * pause, LONGEST_PAUSE)
        for asked in waiting:
            late = Absent(f"no answer within {self.deadline:g} s")
            outcomes[asked] = dict.fromkeys(sent[asked], late)
        return outcomes

    def _pull(self, waiting: set[str]) -> Iterator[Any]:
        """Replies that have come since. The messages that they answer are no longer waited for."""
        for reply in self.grid.pull_messages(sorted(waiting)):
            asked = reply.metadata.reply_to_message_id
            if asked in waiting:
                waiting.discard(asked)
                yield reply

    def _read(self, reply: Any, clients: Sequence[int]) -> dict[int, Message | Absent]:
        """What each client answered, in one reply of its node."""
        if reply.has_error():
            return dict.fromkeys(clients, _reason(reply.error))
        try:
            outcomes = unpack_outcomes(reply.content)
        except Exception as error:
            unreadable = Absent(f"unreadable answer ({type(error).__name__}: {error})")
            return dict.fromkeys(clients, unreadable)
        answers: dict[int, Message | Absent] = {}
        for outcome in outcomes:
            if outcome.client in clients:
                answers[outcome.client] = Absent(outcome.error) if outcome.message is None else outcome.message
        return answers

    def _fetch(self, clients: Sequence[int]) -> list[Private]:
        """Private states that clients hand over, where their recipe allows it."""
        tasks = [Task("share", self._states.rounds.get(s, 0), s, Message({})) for s in clients]
        states, reasons = [], []
        for answer in self.run(tasks):
            if isinstance(answer, Absent):
                reasons.append(answer.reason)
            else:
                states.append(dict(answer.tensors))
        if reasons:
            raise ClientError(f"{len(reasons)} of {len(clients)} clients did not hand over their state ({reasons[0]})")
        return states

    def close(self) -> None:
        pass  # the grid is Flower's


def _in_parts(orders: Sequence[Order]) -> list[list[Order]]:
    """Orders in their order, in parts of at most LARGEST bytes; an order that is larger is a part by itself."""
    parts: list[list[Order]] = [[]]
    size = 0
    for order in orders:
        more = order.task.message.nbytes
        if parts[-1] and size + more > LARGEST:
            parts.append([])
            size = 0
        parts[-1].append(order)
        size += more
    return parts


def _refuse_absent(answers: Iterable[Message | Absent]) -> None:
    for answer in answers:
        if isinstance(answer, Absent):
            raise ClientError(answer.reason)


def _reason(error: Any) -> Absent:
    """Why a node did not answer, from what Flower says."""
    reason = " ".join(str(error.reason or f"code {error.code}").split())
    # Flower says this about a message that nobody took in time.
    if reason.startswith("Error: Message Unavailable"):
        return Absent("no answer in time")
    # Flower writes an error of fedmix's on the node like this.
    raised = RAISED.search(reason)
    words = raised[1] if raised else reason
    return Absent(f"its node failed: {words[:300]}")
