"""Clients behind Flower's nodes: messages that carry tensors, states on the clients' own disk, and the same numbers."""

import json
import os
import stat
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import METHODS, small_experiment, train_serially

from fedmix.core.method import LABELS
from fedmix.core.tree import flatten
from fedmix.core.types import Message
from fedmix.engines import flower
from fedmix.engines.client import Task
from fedmix.engines.flower import FlowerEngine, Order, Outcome
from fedmix.engines.site import Site
from fedmix.engines.store import SiteStore
from fedmix.errors import ClientError
from fedmix.running.loop import rounds

pytest.importorskip("flwr")


class Grid:
    """Two nodes in this process. `lost`: nodes that never answer. `failing`: nodes that answer with Flower's error."""

    def __init__(self, site, nodes=(11, 22), lost=(), failing=(), gone=()):
        self.site, self.nodes, self.lost, self.failing, self.gone = site, nodes, lost, failing, gone
        self.sent, self.replies = [], {}

    def get_node_ids(self):
        return [node for node in self.nodes if node not in self.gone]

    def push_messages(self, messages):
        ids = []
        for message in messages:
            name = str(len(self.sent))
            self.sent.append(message)
            node = message.metadata.dst_node_id
            _, orders = flower.unpack_orders(message.content)
            reply = SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=name), content=None, error=None)
            reply.has_error = lambda reply=reply: reply.error is not None
            if node in self.failing:
                reply.error = SimpleNamespace(reason="the node broke\n", code=5)
            else:
                reply.content = flower.pack_outcomes(self.site.handle(orders))
            if node not in self.lost:
                self.replies[name] = reply
            ids.append(name)
        return ids

    def pull_messages(self, ids):
        return [self.replies.pop(name) for name in ids if name in self.replies]


@pytest.fixture(autouse=True)
def plain_messages(monkeypatch):
    """Flower makes messages only inside an app of its own."""
    monkeypatch.setattr(
        flower,
        "parcel",
        lambda content, node, *_: SimpleNamespace(content=content, metadata=SimpleNamespace(dst_node_id=node)),
    )


def site_of(experiment, folder, share=True):
    return Site(experiment.algorithm, experiment.federation, experiment.recipe.seed, SiteStore(folder), share)


def engine_of(experiment, folder, homes=None, **options):
    settings = {name: options.pop(name) for name in ("deadline", "strict") if name in options}
    grid = Grid(site_of(experiment, folder, options.pop("share", True)), **options)
    where = homes and (lambda: {s: node for node, own in homes.items() if node in grid.get_node_ids() for s in own})
    return FlowerEngine(grid, lambda _: {"about": "this"}, where, grid.nodes, **settings)


def train(experiment, engine, last=3, state=None):
    algorithm, recipe = experiment.algorithm, experiment.recipe
    state = state or algorithm.init(recipe.seed)
    clients, per_round = len(experiment.federation), recipe.clients_per_round
    return list(rounds(algorithm, engine, state, recipe.seed, clients, per_round, last, recipe.server))


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedmix", {"fedmix.eta": 0.9, "fedmix.gamma": 0.3}),
        ("fedavg", {"training.label_counts": True}),
        *((method, changes) for method in METHODS for changes in ({}, {"server.aggregation": "linear"})),
    ],
)
def test_the_same_numbers_as_the_plain_loop(method, changes, tmp_path):
    experiment = small_experiment(method, clients_per_round=3, **changes)
    plain, privates = train_serially(experiment)
    engine = engine_of(experiment, tmp_path)
    steps = train(experiment, engine)
    one, other = flatten(plain[-1].state), flatten(steps[-1].state)
    for name, value in one.items():
        assert torch.allclose(value.double(), other[name].double(), atol=1e-6), name
    assert [step.bytes_up for step in steps] == [step.bytes_up for step in plain]
    assert engine.store.clients() == sorted(privates)
    for s, found in zip(engine.store.clients(), engine.store.many(engine.store.clients()), strict=True):
        handed = experiment.algorithm.hand_over(privates[s])
        assert found.keys() == handed.keys()
        assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in handed.items())


def test_private_states_are_on_the_clients_disk_for_its_owner_alone(tmp_path):
    experiment = small_experiment("fedmix")
    engine = engine_of(experiment, tmp_path)
    train(experiment, engine)
    for s in range(4):
        files = sorted((tmp_path / str(s)).iterdir())
        assert [file.name for file in files] == [
            "000002.safetensors",
            "000003.safetensors",
        ]  # this one, and the one before
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        assert stat.S_IMODE((tmp_path / str(s)).stat().st_mode) == 0o700
    assert len(engine.grid.sent) == 6  # two nodes, three rounds
    for message in engine.grid.sent:
        assert "gate" not in message.content["table"]["json"]  # theta_s is in no message


def test_what_a_site_keeps_for_predictions_knows_its_labels_from_the_first_round_on(tmp_path):
    experiment = small_experiment("fedavg", **{"training.label_counts": True})
    algorithm, federation = experiment.algorithm, experiment.federation
    order = Order(Task("train", 1, 2, algorithm.broadcast(algorithm.init(0), 2)), 0)
    site = replace(site_of(experiment, tmp_path), keep=True)
    (outcome,) = site.handle([order])
    message, kept, _ = site.store.kept(2)
    y = federation.examples(2, "train").y
    assert kept[LABELS].exp().tolist() == pytest.approx([1.0 + 3 * int((y == v).sum()) for v in range(3)])
    assert torch.equal(message.tensors["out.bias"], order.task.message.tensors["out.bias"])
    assert LABELS not in outcome.message.tensors

    def broken(client, part):
        raise OSError("the disk is full of secrets")

    unread = replace(site, clients=SimpleNamespace(examples=broken))
    (outcome,) = unread.handle([order])
    assert "client 2, round 1: OSError" in outcome.error
    assert "secrets" not in outcome.error


def test_after_a_crash_the_server_names_the_round_and_the_numbers_are_the_same(tmp_path):
    experiment = small_experiment("fedmix")
    whole = train(experiment, engine_of(experiment, tmp_path / "whole"), last=4)
    engine = engine_of(experiment, tmp_path / "cut")
    half = train(experiment, engine, last=2)
    remembered = json.loads(json.dumps(engine.memory()))
    train(experiment, engine, last=3, state=half[-1].state)  # this round's server was killed: nobody knows of it
    again = engine_of(experiment, tmp_path / "cut")
    again.remember(remembered)
    steps = train(experiment, again, last=4, state=half[-1].state)
    one, other = flatten(whole[-1].state), flatten(steps[-1].state)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_what_several_clients_are_sent_goes_once(tmp_path):
    experiment = small_experiment("fedmix")
    engine = engine_of(experiment, tmp_path, nodes=(11,))
    train(experiment, engine, last=1)
    (message,) = engine.grid.sent  # one node, one message
    sent = sum(array.numpy().nbytes for array in message.content["tensors"].values())
    assert sent == experiment.algorithm.broadcast(experiment.algorithm.init(0), None).nbytes


def test_large_parcels_are_several_messages(tmp_path, monkeypatch):
    experiment = small_experiment("fedmix")
    size = experiment.algorithm.broadcast(experiment.algorithm.init(0), None).nbytes
    monkeypatch.setattr(flower, "LARGEST", int(2.5 * size))
    engine = engine_of(experiment, tmp_path, nodes=(11,))
    (step,) = train(experiment, engine, last=1)
    assert len(engine.grid.sent) == 2
    assert len(step.replies) == 4


HOMES = {11: [0, 1], 22: [2, 3]}


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ({"lost": (22,)}, "no answer within 0.3 s"),
        ({"failing": (22,)}, "its node failed: the node broke"),
        ({"gone": (22,)}, "its node is not connected"),
    ],
)
def test_clients_of_a_node_in_trouble_are_absent_and_the_round_goes_on(trouble, reason, tmp_path):
    experiment = small_experiment("fedmix")
    engine = engine_of(experiment, tmp_path, HOMES, deadline=0.3, strict=False, **trouble)
    (step,) = train(experiment, engine, last=1)
    assert [reply.client for reply in step.replies] == [0, 1]
    assert step.absent == {2: reason, 3: reason}
    assert engine.memory() == {"0": 1, "1": 1}
    for name, value in flatten(step.state).items():
        assert torch.isfinite(value.double()).all(), name


def test_one_machine_is_strict(tmp_path):
    engine = engine_of(small_experiment("fedmix"), tmp_path, failing=(11,))
    with pytest.raises(ClientError, match="the node broke"):
        train(small_experiment("fedmix"), engine, last=1)


def test_one_clients_error_is_its_own(tmp_path):
    experiment = small_experiment("fedmix")
    engine = engine_of(experiment, tmp_path, HOMES, strict=False)
    first = train(experiment, engine, last=1)
    for file in (tmp_path / "1").iterdir():
        file.unlink()  # the site lost what it knew of client 1
    (tmp_path / "3" / "000001.safetensors").write_bytes(b"nonsense")
    (step,) = train(experiment, engine, last=2, state=first[-1].state)
    assert [reply.client for reply in step.replies] == [0, 2]
    assert "has no private state of round 1" in step.absent[1]
    assert "is damaged" in step.absent[3]


def test_private_states_leave_only_where_the_site_allows_it(tmp_path):
    experiment = small_experiment("fedmix")
    engine = engine_of(experiment, tmp_path, share=False, strict=False)
    train(experiment, engine, last=1)
    with pytest.raises(ClientError, match="4 of 4 clients did not hand over their state"):
        engine.store.many([0, 1, 2, 3])


def test_an_answer_that_cannot_be_read_is_absent(tmp_path):
    experiment = small_experiment("fedmix")
    engine = engine_of(experiment, tmp_path, strict=False)
    push = engine.grid.push_messages

    def damaged(messages):
        ids = push(messages)
        for name in ids:
            engine.grid.replies[name].content["table"]["json"] = "{"
        return ids

    engine.grid.push_messages = damaged
    with pytest.raises(Exception, match="0 of 4 clients"):
        train(experiment, engine, last=1)


def test_orders_and_outcomes_survive_the_wire():
    task = Task(
        "evaluate",
        7,
        3,
        Message({"a": torch.arange(6).view(2, 3), "b": torch.tensor(2.5)}, {"x": 1.5}),
        "test",
        2,
        5,
        20,
    )
    about, (order,) = flower.unpack_orders(flower.pack_orders({"k": "v"}, [Order(task, 4)]))
    assert about == {"k": "v"}
    assert order.state == 4
    assert (order.task.kind, order.task.part, order.task.points) == ("evaluate", "test", 20)
    assert torch.equal(order.task.message.tensors["a"], torch.arange(6).view(2, 3))
    assert order.task.message.tensors["b"].shape == ()
    given = [Outcome(1, Message({"w": torch.zeros(0, 2)}, {"n": 3})), Outcome(2, None, "too bad")]
    back = flower.unpack_outcomes(flower.pack_outcomes(given))
    assert back[0].message.numbers == {"n": 3}
    assert back[0].message.tensors["w"].shape == (0, 2)
    assert back[1] == given[1]


def test_a_killed_site_leaves_no_half_state(tmp_path, monkeypatch):
    store = SiteStore(tmp_path)
    store.put(0, 1, {"a": torch.ones(3)}, before=0)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        store.put(0, 2, {"a": torch.zeros(3)}, before=1)
    monkeypatch.undo()
    assert torch.equal(store.get(0, 1)["a"], torch.ones(3))
    with pytest.raises(ClientError, match="no private state of round 2"):
        store.get(0, 2)
    store.put(0, 2, {"a": torch.zeros(3)}, before=1)
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["000001.safetensors", "000002.safetensors"]
    assert torch.equal(store.get(0, 2)["a"], torch.zeros(3))
