"""Several clients side by side are the same as one after the other; points that do not matter cost no backward pass."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import METHODS, small_experiment, small_federation, small_recipe, train_serially
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedmix.core.types import Examples
from fedmix.engines.client import Task, perform, perform_group
from fedmix.errors import ClientError, SettingError
from fedmix.methods import Page, fedavg
from fedmix.rng import stream
from fedmix.settings.build import build


def frozen_net():
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3))
    net[0].bias.requires_grad = False
    return net


def tasks_after_two_rounds(experiment, kind="train", finetune=0):
    """Clients with private states of their own, phi off its start: tasks and private states."""
    steps, privates = train_serially(experiment, last=2)
    algorithm, state = experiment.algorithm, steps[-1].state
    tasks = [Task(kind, 3, s, algorithm.broadcast(state, s), finetune=finetune) for s in sorted(privates)]
    return tasks, [privates[s] for s in sorted(privates)]


def assert_same(one, other):
    for (message, private), (wanted, kept) in zip(one, other, strict=True):
        assert message.numbers.keys() == wanted.numbers.keys()
        assert [message.numbers[n] for n in message.numbers] == pytest.approx(list(wanted.numbers.values()), abs=1e-4)
        for got, want in ((message.tensors, wanted.tensors), (private, kept)):
            assert got.keys() == want.keys()
            for name in got:
                assert got[name].shape == want[name].shape
                assert torch.allclose(got[name], want[name], atol=2e-6), name


@pytest.mark.parametrize(
    ("changes", "model"),
    [
        ({}, None),
        ({"training.momentum": 0.9, "training.weight_decay": 0.01, "training.epochs": 3}, None),
        ({"data.side": "column", "fedmix.gate_through_features": False, "fedmix.beta": 1.3}, None),
        ({"fedmix.phi": "private"}, None),
        ({"training.label_counts": True}, None),
        ({"fedmix.full_steps": True, "fedmix.gamma": 0.5}, None),
        ({"fedmix.prior": "reported", "training.schedule": "cosine", "rounds": 5}, None),
        ({"model.output": "2"}, frozen_net),
    ],
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("kind", "finetune"), [("train", 0), ("evaluate", 2)])
def test_side_by_side_is_one_after_the_other(method, changes, model, kind, finetune):
    experiment = small_experiment(method, model=model, **changes)
    tasks, privates = tasks_after_two_rounds(experiment, kind, finetune)
    answered = []
    group_update = experiment.algorithm.group_update

    def watched(*args):
        answered.append(group_update(*args))  # nothing is added where it fails, and the clients are taken one by one
        return answered[-1]

    object.__setattr__(experiment.algorithm, "group_update", watched)
    args = (experiment.algorithm, experiment.federation, 0)
    together = perform_group(*args, tasks, privates)
    assert [len(found) for found in answered] == [len(tasks)]
    assert_same(together, [perform(*args, task, own) for task, own in zip(tasks, privates, strict=True)])


@pytest.mark.parametrize("method", METHODS)
def test_names_decide_who_is_stacked_with_whom_not_their_order(method):
    """A state that was read from a file has its tensors in another order than one that is new."""
    experiment = small_experiment(method)
    tasks, privates = tasks_after_two_rounds(experiment)
    args = (experiment.algorithm, experiment.federation, 0)
    turned = [dict(sorted(own.items(), reverse=bool(s % 2))) for s, own in enumerate(privates)]
    assert_same(perform_group(*args, tasks, turned), perform_group(*args, tasks, privates))


class Unlucky(nn.Sequential):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


@pytest.mark.parametrize(
    ("changes", "model", "why"),
    [
        ({"model.dropout": [0.3]}, None, "dropout"),
        ({"fedmix.eta": 0.5}, None, "fedmix.eta"),
        ({"fedmix.skip_below": 0.1, "fedmix.gate_through_features": False}, None, "fedmix.skip_below"),
        ({"model.hidden": [4000, 100]}, None, "fills the cores"),
        ({"training.precision": "bfloat16"}, None, "bfloat16"),
        ({"model.output": "2"}, lambda: Unlucky(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)), "dropout"),
    ],
)
def test_what_cannot_be_taken_together_is_known_beforehand_and_said(changes, model, why):
    assert why in small_experiment("fedmix", model=model, **changes).algorithm.one_by_one


@pytest.mark.parametrize(
    "changes", [{}, {"fedmix.marginal": "exact"}, {"fedmix.objective": "direct", "fedmix.marginal": "exact"}]
)
def test_what_can_be_taken_together_is(changes):
    assert small_experiment("fedmix", **changes).algorithm.one_by_one is None


def careless(kind):
    """FedAvg with a loss that forgets what fills a group up, or that reads values on the way."""

    def build(setup, settings):
        def loss(parts, fixed, batch, carry):
            points, _, carry = fedavg.loss(setup.model, parts, fixed, batch, carry)
            if kind == "mean":
                return points, batch.x.mean(), carry
            if kind == "reads":
                return points * (2.0 if float(points.detach().sum()) > 0 else 1.0), 0.0, carry
            return points.mean(), 0.0, carry

        return replace(fedavg.fedavg(setup), loss=loss)

    return Page(kind, build)


@pytest.mark.parametrize(("kind", "why"), [("mean", "only fill a group up"), ("reads", "cannot be vectorised")])
def test_a_loss_that_would_be_wrong_in_a_group_is_not_taken_together(kind, why):
    experiment = build(small_recipe("own"), small_federation(), page=careless(kind))
    assert why in experiment.algorithm.one_by_one
    steps, _ = train_serially(experiment)
    assert steps[-1].loss > 0


def test_a_loss_must_give_a_number_for_each_point():
    experiment = build(small_recipe("own"), small_federation(), page=careless("scalar"))
    with pytest.raises(ClientError, match="one number for each of 6 points"):
        train_serially(experiment)


def test_an_error_in_a_group_names_its_client():
    experiment = small_experiment("fedmix", federation=small_federation(clients=6))
    tasks, privates = tasks_after_two_rounds(experiment)
    whole = experiment.federation.examples

    def examples(client, part):
        data = whole(client, part)
        return Examples(data.x * (float("inf") if client == 4 else 1.0), data.y, data.c)

    object.__setattr__(experiment.federation, "examples", examples)
    with pytest.raises(ClientError, match="client site-4, round 3, step 1: the loss is nan"):
        perform_group(experiment.algorithm, experiment.federation, 0, tasks, privates)


def specialised(skip):
    """A client whose phi says clearly which of three experts each label belongs to, and an update of it."""
    changes = {"fedmix.gate_through_features": False, "fedmix.gamma": 1.0}  # phi stays as it is
    experiment = small_experiment("fedmix", **changes, **{"fedmix.skip_below": skip})
    algorithm = experiment.algorithm
    message = algorithm.broadcast(algorithm.init(0), 0)
    phi = torch.full((3, 3), 2e-4).fill_diagonal_(1 - 4e-4)
    message.tensors["phi"] = phi
    data = experiment.federation.examples(3, "train")
    reply, _ = algorithm.client_update(message, algorithm.new_client(0), data, stream(0, "skip"), None)
    return message, reply, len(data)


def test_skipping_what_hardly_matters_changes_hardly_anything():
    message, exact, _ = specialised(0.0)
    _, tiny, _ = specialised(1e-9)
    _, skipped, _ = specialised(1e-3)
    moved = {n: (exact.tensors[n] - w).abs().max().item() for n, w in message.tensors.items() if "expert" in n}
    for name in moved:
        assert torch.allclose(tiny.tensors[name], exact.tensors[name], atol=1e-7)
        apart = (skipped.tensors[name] - exact.tensors[name]).abs().max().item()
        assert 0 < apart < 0.02 * max(moved.values()), name  # weights below 1e-3 on two thirds of the points
    assert torch.allclose(skipped.tensors["phi"], exact.tensors["phi"], atol=1e-5)


def test_the_error_of_a_step_is_at_most_the_skipped_weights():
    """One step: the gradient of expert k misses sum_i q_ik grad log p_i / B over points with q_ik < skip_below."""
    skip = 0.2
    changes = {"fedmix.gate_through_features": False, "training.batch_size": 1000, "fedmix.gamma": 1.0}
    both = []
    for below in (0.0, skip):
        experiment = small_experiment("fedmix", **changes, **{"fedmix.skip_below": below})
        algorithm, model = experiment.algorithm, experiment.model
        message = algorithm.broadcast(algorithm.init(0), 0)
        message.tensors["phi"] = torch.tensor([[0.85, 0.14, 0.01], [0.1, 0.6, 0.3], [0.19, 0.21, 0.6]])
        data = experiment.federation.examples(0, "train")
        both.append(algorithm.client_update(message, algorithm.new_client(0), data, stream(0), None)[0])
    phi = message.tensors["phi"]
    for k in range(3):
        w = {n.removeprefix(f"expert.{k}."): v for n, v in message.tensors.items() if n.startswith(f"expert.{k}.")}
        leaves = {n: v.clone().requires_grad_() for n, v in w.items()}
        missing = {n: torch.zeros_like(v) for n, v in w.items()}
        for x, y in zip(data.x, data.y, strict=True):
            if phi[y, k] < skip:
                logits, _ = model.apply(leaves, x.unsqueeze(0), training=True)
                log_p = torch.log_softmax(logits, dim=1)[0, y]
                for n, g in zip(leaves, torch.autograd.grad(log_p, list(leaves.values())), strict=True):
                    missing[n] += phi[y, k] * g / len(data)
        for n in w:
            apart = both[0].tensors[f"expert.{k}.{n}"] - both[1].tensors[f"expert.{k}.{n}"]
            assert torch.allclose(apart, 0.1 * missing[n], atol=1e-6), (k, n)  # client_lr = 0.1


@pytest.mark.parametrize("more", [{}, {"training.label_counts": True, "fedmix.full_steps": True}])
def test_points_that_come_to_matter_in_a_step_are_learnt_from_in_that_step(more):
    """gamma = 0: phi is what the mini-batch says, whatever it was; skipping by the old phi alone would lose points."""
    changes = {"fedmix.gate_through_features": False, "training.batch_size": 1000, "fedmix.gamma": 0.0, **more}
    answers = []
    for below in (0.0, 0.05):
        experiment = small_experiment("fedmix", **changes, **{"fedmix.skip_below": below})
        algorithm = experiment.algorithm
        message = algorithm.broadcast(algorithm.init(0), 0)
        message.tensors["phi"] = torch.tensor([[0.98, 0.01, 0.01]] * 3)
        data = experiment.federation.examples(0, "train")
        answers.append(algorithm.client_update(message, algorithm.new_client(0), data, stream(0), None)[0])
    assert float(answers[0].tensors["phi"].min()) > 0.05
    for name, value in answers[0].tensors.items():
        assert torch.allclose(value, answers[1].tensors[name], atol=1e-6), name


def test_skipping_saves_the_backward_pass():
    def flop(skip):
        with FlopCounterMode(display=False) as counter:
            specialised(skip)
        return counter.get_total_flops()

    assert flop(1e-3) < 0.75 * flop(0.0)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"fedmix.skip_below": 0.1}, r"fedmix.gate_through_features must be false with fedmix.skip_below"),
        ({"fedmix.skip_below": 1.0, "fedmix.gate_through_features": False}, r"fedmix.skip_below must be in \[0, 1\)"),
    ],
)
def test_settings_that_would_not_be_exact_are_refused(changes, wrong):
    with pytest.raises(SettingError, match=wrong):
        small_experiment("fedmix", **changes)


class Views(nn.Module):
    """Depends on how images lie in memory: `view` refuses channels last."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.out = nn.Linear(4 * 36, 3)

    def forward(self, x):
        return self.out(self.conv(x).view(len(x), -1))


class Flattens(Views):
    def forward(self, x):
        return self.out(self.conv(x).flatten(1))


def test_images_lie_channels_last_where_the_model_allows_it():
    from fedmix.core.model import Model

    x = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 1, 8, 8))).float()
    views, flattens = (Model(kind, "out", x, 3) for kind in (Views, Flattens))
    assert flattens.channels_last
    w = flattens.init(stream(0))
    assert torch.allclose(views.apply(w, x, True)[0], flattens.apply(w, x, True)[0], atol=1e-5)
