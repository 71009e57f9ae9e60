"""Clients side by side on all cores of this machine: worker processes with one torch thread each, started once.

A worker takes whole clients: one at a time, or a group of them side by side where the model is small. Who is in a group
depends on the tasks alone, so the numbers do not depend on how many workers there are. Weights cross in shared memory:
what the server sends is laid down once for all clients of a round. Pipes carry only a few words of JSON.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch

from fedmix.core.algorithm import Algorithm
from fedmix.core.types import Clients, Message, Private
from fedmix.engines.arena import Arena
from fedmix.engines.client import CPU, Answer, Task, perform_group, side_by_side
from fedmix.engines.store import StatesHere, Store
from fedmix.errors import ClientError, FedmixError, SettingError

BATCH = 256  # tasks whose private states are in shared memory at once
GROUPS = 4  # at least this many groups of clients where small models train side by side, so that workers have work
LARGEST_GROUP = 16
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # settings of glibc's mallopt


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class LocalEngine(StatesHere):
    """Worker processes on this machine."""

    name = "local"
    states_elsewhere: bool = False

    def __init__(
        self,
        algorithm: Algorithm,
        clients: Clients,
        seed: int,
        store: Store,
        workers: int,
        device: torch.device = CPU,
    ) -> None:
        if "fork" not in multiprocessing.get_all_start_methods():
            raise SettingError("engine must be 'serial' on this system: 'local' forks its workers, which it cannot.")
        self.store = store
        self.workers = workers
        self._new = partial(algorithm.new_client, seed)
        self._side_by_side = partial(side_by_side, algorithm, clients)
        self._down = Arena()
        self._workers: list[_Worker] = []
        for _ in range(workers):
            servers_ends = [worker.pipe for worker in self._workers]
            self._workers.append(_Worker(algorithm, clients, seed, device, self._down, servers_ends))

    def run(self, tasks: Sequence[Task]) -> list[Message]:
        """The clients' answers, in the order of the tasks. Training changes their private states, evaluation does not."""
        answers: list[Message] = []
        for start in range(0, len(tasks), BATCH):
            answers += self._run(tasks[start : start + BATCH])
        return answers

    def _run(self, tasks: Sequence[Task]) -> list[Message]:
        self._down.clear()
        answers: dict[int, Message] = {}
        for group, answers_of_group in self._dispatch(self._groups(tasks)):
            for task, (answer, private) in zip(group, answers_of_group, strict=True):
                answers[task.client] = answer
                if task.kind == "train":
                    self.store.put(task.client, private)
        return [answers[task.client] for task in tasks]

    def _dispatch(self, groups: Sequence[Sequence[Task]]) -> Iterator[tuple[Sequence[Task], list[Answer]]]:
        """Groups of tasks with their answers, as they come. A worker that has answered gets another group at once."""
        orders = [self._orders(group) for group in groups]
        waiting = list(range(len(groups)))[::-1]
        busy: dict[_Worker, int] = {}

        def give(worker: _Worker) -> None:
            busy[worker] = waiting.pop()
            worker.send(orders[busy[worker]], groups[busy[worker]])

        for worker in self._workers[: len(groups)]:
            give(worker)
        while busy:
            for worker in _with_an_answer(list(busy)):
                group = groups[busy.pop(worker)]
                answers = worker.receive(group)
                if waiting:
                    give(worker)
                yield group, answers

    def _groups(self, tasks: Sequence[Task]) -> list[Sequence[Task]]:
        """Tasks that go to a worker together: a few where clients train side by side, else one."""
        together = self._side_by_side(tasks)
        size = min(-(-len(tasks) // GROUPS), LARGEST_GROUP) if together else 1
        return [tasks[start : start + size] for start in range(0, len(tasks), size)]

    def _orders(self, group: Sequence[Task]) -> bytes:
        """What a worker is told to do, as JSON; the tensors are in shared memory."""
        return json.dumps([self._order(task) for task in group]).encode()

    def _order(self, task: Task) -> dict[str, Any]:
        private = self.store.get(task.client)
        if private is None:
            private = self._new(task.client)
        return {
            "task": {
                "kind": task.kind,
                "round": task.round,
                "client": task.client,
                "part": task.part,
                "finetune": task.finetune,
                "adapt": task.adapt,
                "points": task.points,
            },
            "tensors": self._down.lay(task.message.tensors),
            "numbers": dict(task.message.numbers),
            "private": self._down.lay(private),
        }

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []
        self._down.close()


class _Worker:
    """One worker process, seen from the server."""

    def __init__(
        self,
        algorithm: Algorithm,
        clients: Clients,
        seed: int,
        device: torch.device,
        down: Arena,
        servers_ends: list[Connection],
    ) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, other = context.Pipe()
        self._up = Arena()
        self.process: ForkProcess = context.Process(
            target=_serve,
            args=(other, [*servers_ends, self.pipe], down, self._up, algorithm, clients, seed, device),
            daemon=True,
        )
        self.process.start()
        other.close()

    def send(self, orders: bytes, tasks: Sequence[Task]) -> None:
        """Give the worker something to do."""
        try:
            self.pipe.send_bytes(orders)
        except OSError as error:
            raise self._died(tasks) from error

    def receive(self, tasks: Sequence[Task]) -> list[Answer]:
        """Wait for the worker's answers."""
        try:
            answers: Any = json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._died(tasks) from error
        if isinstance(answers, str):
            raise ClientError(answers)
        return [self._taken(answer) for answer in answers]

    def _taken(self, answer: dict[str, Any]) -> Answer:
        """An answer with its tensors, out of shared memory."""
        message = Message(self._up.take(answer["tensors"], copy=True), answer["numbers"])
        return message, self._up.take(answer["private"], copy=True)

    def _died(self, tasks: Sequence[Task]) -> ClientError:
        self.process.join(timeout=5)
        code = self.process.exitcode
        how = f"exit status {code}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        who = ("client " if len(tasks) == 1 else "clients ") + ", ".join(str(task.client) for task in tasks)
        return ClientError(
            f"{who}, round {tasks[0].round}: the worker process died ({how}). If memory ran out, use fewer --workers; the "
            "run can be resumed."
        )

    def close(self) -> None:
        self.pipe.close()  # the worker reads the end of the pipe and leaves
        self.process.join(timeout=2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()
        self._up.close()


def _keep_freed_memory() -> None:
    """Let the process keep freed memory, where glibc can be told so, and not give it back to the system page by page.

    Every step frees its activations and then asks for as much memory again.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for setting, value in ((M_MMAP_THRESHOLD, 1 << 30), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 << 20)):
            mallopt(setting, value)


def _serve(
    pipe: Connection,
    servers_ends: list[Connection],
    down: Arena,
    up: Arena,
    algorithm: Algorithm,
    clients: Clients,
    seed: int,
    device: torch.device,
) -> None:
    """The life of a worker: it takes orders and answers them, until the server closes the pipe."""
    _become_worker(servers_ends)
    if device != CPU:
        clients = clients.to(device)
    perform = partial(perform_group, algorithm, clients, seed, device=device)
    while True:
        try:
            orders = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        answer: list[dict[str, Any]] | str
        try:
            answer = _follow(orders, down, up, perform)
        except FedmixError as error:
            answer = str(error)
        try:
            pipe.send_bytes(json.dumps(answer).encode())
        except OSError:
            os._exit(0)  # the server is gone


def _become_worker(servers_ends: list[Connection]) -> None:
    # These were inherited by the fork. While any process holds one, a worker would not see the server leave.
    for end in servers_ends:
        end.close()
    # Ctrl-C and SIGTERM to the group are for the server, which finishes its checkpoint.
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    _keep_freed_memory()


def _follow(
    orders: Sequence[dict[str, Any]],
    down: Arena,
    up: Arena,
    perform: Callable[[Sequence[Task], Sequence[Private]], list[Answer]],
) -> list[dict[str, Any]]:
    """The answers to orders, both as JSON, with their tensors in shared memory."""
    tasks = [_task(order, down) for order in orders]
    privates = [down.take(order["private"], copy=False) for order in orders]
    up.clear()
    answers = perform(tasks, privates)
    return [_laid(task, *answer, up) for task, answer in zip(tasks, answers, strict=True)]


def _task(order: dict[str, Any], down: Arena) -> Task:
    message = Message(down.take(order["tensors"], copy=False), order["numbers"])
    return Task(**order["task"], message=message)


def _laid(task: Task, reply: Message, after: Private, up: Arena) -> dict[str, Any]:
    """An answer as JSON, its tensors in shared memory. Only training changes a private state."""
    return {
        "tensors": up.lay(reply.tensors),
        "numbers": dict(reply.numbers),
        "private": up.lay(after) if task.kind == "train" else [],
    }


def _with_an_answer(busy: Sequence[_Worker]) -> list[_Worker]:
    """Wait until some of these workers have answered."""
    ready = wait([worker.pipe for worker in busy])
    return [worker for worker in busy if worker.pipe in ready]
