"""One truth: engines agree, with any number of workers; what dies is reported; nobody pays for clients that sit idle."""

import os
import signal
import threading
import time
from contextlib import closing

import pytest
import torch
from conftest import METHODS, small_experiment, train_serially

from fedmix.core.tree import flatten
from fedmix.core.types import Message
from fedmix.engines.arena import Arena
from fedmix.engines.client import Task
from fedmix.engines.local import LocalEngine
from fedmix.engines.serial import SerialEngine
from fedmix.engines.store import DiskStore, MemoryStore
from fedmix.errors import ClientError
from fedmix.running.loop import rounds


def train_locally(experiment, workers):
    algorithm, recipe = experiment.algorithm, experiment.recipe
    store = MemoryStore()
    with closing(LocalEngine(algorithm, experiment.federation, recipe.seed, store, workers)) as engine:
        steps = list(
            rounds(
                algorithm, engine, algorithm.init(recipe.seed), recipe.seed, 4, recipe.clients_per_round, recipe.rounds
            )
        )
    return steps, {s: store.get(s) for s in store.clients()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fedmix.eta": 0.8, "clients_per_round": 3, "fedmix.gamma": 0.5, "training.label_counts": True},
        {"training.precision": "bfloat16"},
        {"fedmix.shared": "all-but-output", "fedmix.full_steps": True, "fedmix.expert_dropout": 0.5},
        {"fedmix.factor_layers": ["fc1"], "fedmix.evidence": "arriving"},
    ],
)
def test_engines_agree(method, changes):
    experiment = small_experiment(method, **changes)
    serial, own = train_serially(experiment)
    one, one_own = train_locally(experiment, 1)
    two, two_own = train_locally(experiment, 2)
    four, four_own = train_locally(experiment, 4)
    reference = flatten(serial[-1].state)
    for name, value in flatten(one[-1].state).items():
        assert torch.equal(value, flatten(two[-1].state)[name])
        assert torch.equal(value, flatten(four[-1].state)[name])
        assert torch.allclose(value, reference[name], atol=1e-5)
    for s, private in own.items():
        for name, value in private.items():
            assert torch.equal(one_own[s][name], two_own[s][name])
            assert torch.equal(one_own[s][name], four_own[s][name])
            assert torch.allclose(one_own[s][name], value, atol=1e-5)
    for a, b, c in zip(serial, one, two, strict=True):
        assert (a.bytes_down, a.bytes_up) == (b.bytes_down, b.bytes_up) == (c.bytes_down, c.bytes_up)
        assert b.loss == c.loss


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_an_error_names_client_round_and_step(engine):
    experiment = small_experiment("fedavg", **{"training.client_lr": 1e30})
    with pytest.raises(
        ClientError, match=r"client site-0, round 1, step \d+: the loss is nan; a smaller client_lr may help"
    ):
        train_serially(experiment) if engine == "serial" else train_locally(experiment, 1)


class Clumsy:
    """Data of which one client's cannot be read."""

    def __init__(self, federation, action):
        self.federation, self.action = federation, action

    def examples(self, client, part):
        if client == 2:
            self.action()
        return self.federation.examples(client, part)


def missing():
    raise FileNotFoundError("disk of site 2")


def test_an_error_in_a_clients_data_names_the_client():
    experiment = small_experiment("fedavg")
    algorithm = experiment.algorithm
    tasks = [Task("train", 7, s, algorithm.broadcast(algorithm.init(0), s)) for s in range(4)]
    clients = Clumsy(experiment.federation, missing)
    wanted = "client 2, round 7: FileNotFoundError: disk of site 2"
    with pytest.raises(ClientError, match=wanted):
        SerialEngine(algorithm, clients, 0, MemoryStore()).run(tasks)
    with (
        closing(LocalEngine(algorithm, clients, 0, MemoryStore(), 2)) as engine,
        pytest.raises(ClientError, match=wanted),
    ):
        engine.run(tasks)


def test_a_worker_that_dies_is_reported_with_its_client():
    experiment = small_experiment("fedavg")
    algorithm = experiment.algorithm
    tasks = [Task("train", 7, s, algorithm.broadcast(algorithm.init(0), s)) for s in range(4)]
    clients = Clumsy(experiment.federation, lambda: os.kill(os.getpid(), signal.SIGKILL))
    began = time.monotonic()
    wanted = r"client 2, round 7: the worker process died \(killed by SIGKILL\)"
    with (
        closing(LocalEngine(algorithm, clients, 0, MemoryStore(), 2)) as engine,
        pytest.raises(ClientError, match=wanted),
    ):
        engine.run(tasks)
    assert time.monotonic() - began < 10


def test_workers_leave_when_the_engine_closes_and_leave_nothing_open():
    experiment = small_experiment("fedavg")
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        engine = LocalEngine(experiment.algorithm, experiment.federation, 0, MemoryStore(), 2)
        processes = [worker.process.pid for worker in engine._workers]
        engine.close()
        assert not any(os.path.exists(f"/proc/{pid}") for pid in processes)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert threading.active_count() <= threads


def test_evaluation_leaves_private_state_alone():
    experiment = small_experiment()
    algorithm = experiment.algorithm
    store = MemoryStore()
    with closing(LocalEngine(algorithm, experiment.federation, 0, store, 2)) as engine:
        message = algorithm.broadcast(algorithm.init(0), 0)
        (answer,) = engine.run([Task("evaluate", 1, 0, message, part="test", finetune=2)])
    assert store.clients() == []
    assert answer.numbers["points"] == experiment.federation.size(0, "test")
    assert answer.tensors == {}


def test_a_hundred_thousand_idle_clients_cost_nothing():
    """Registered is not taking part: no state for them, and a round takes as long as with four."""
    experiment = small_experiment("independent")
    algorithm = experiment.algorithm
    store = MemoryStore()
    engine = SerialEngine(algorithm, Folded(experiment.federation), 0, store)
    steps = list(rounds(algorithm, engine, algorithm.init(0), 0, clients=100_000, per_round=3, last=2))
    assert {reply.client for step in steps for reply in step.replies} == set(store.clients())
    assert len(store.clients()) == 6
    assert max(store.clients()) > 1000
    assert sum(step.seconds for step in steps) < 2


class Folded:
    def __init__(self, federation):
        self.federation = federation

    def examples(self, client, part):
        return self.federation.examples(client % 4, part)


def test_stores_hold_what_they_were_given(tmp_path):
    for store in (MemoryStore(), DiskStore(tmp_path / "clients")):
        assert store.get(3) is None
        store.put(3, {"a": torch.arange(4.0)})
        store.put(9, {"a": torch.zeros(2, 2)})
        assert store.clients() == [3, 9]
        assert torch.equal(store.get(3)["a"], torch.arange(4.0))
        assert store.take_changed() == [3, 9]
        store.put(9, {"a": torch.ones(2, 2)})
        assert store.take_changed() == [9]
        assert torch.equal(store.get(9)["a"], torch.ones(2, 2))
    assert DiskStore(tmp_path / "clients").get(3) is None  # what an earlier process left is not this run's


def test_the_arena_carries_tensors_of_every_kind_and_copies_shared_ones_once():
    arena = Arena()
    same = torch.randn(1000)
    given = {
        "a": same,
        "b": torch.tensor(5),
        "c": torch.zeros(0, 3),
        "d": torch.randn(3, 4).T,
        "e": torch.tensor([True]),
    }
    first, second = arena.lay(given), arena.lay({"again": same})
    assert second[0][3] == first[0][3]
    taken = arena.take(first, copy=True)
    assert all(torch.equal(taken[name], value) and taken[name].dtype == value.dtype for name, value in given.items())
    arena.clear()
    arena.lay({"large": torch.ones(3_000_000)})
    assert torch.equal(taken["a"], same)  # a copy outlives the arena's contents
    arena.close()


def test_a_message_counts_its_bytes():
    assert Message({"a": torch.zeros(3, 4), "b": torch.zeros(2, dtype=torch.float64)}).nbytes == 48 + 16
