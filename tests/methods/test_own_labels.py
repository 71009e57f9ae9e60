"""training.label_counts: a client's own label counts in front of what is shared."""

import numpy as np
import pytest
import torch
from conftest import METHODS, small_experiment, small_recipe, train_serially
from torch import nn

from fedmix.after.inference import evaluate_run
from fedmix.after.options import Options
from fedmix.after.restore import restore
from fedmix.after.trained import load
from fedmix.core import objective
from fedmix.core.method import LABELS
from fedmix.core.mixture import ClientModule
from fedmix.data.federation import Federation
from fedmix.rng import stream
from fedmix.running.directory import RunDirectory
from fedmix.running.run import run
from fedmix.running.where import Where
from fedmix.settings.build import build

COUNTED = {"training.label_counts": True}


def test_a_client_step_is_autograds_with_the_counts_by_hand():
    experiment = small_experiment("fedavg", **COUNTED, **{"training.batch_size": 1000, "training.client_lr": 0.3})
    algorithm, data = experiment.algorithm, experiment.federation.examples(2, "train")
    message = algorithm.broadcast(algorithm.init(0), 2)
    reply, private = algorithm.client_update(message, algorithm.new_client(0), data, stream(0), 1)
    leaves = {name: w.clone().requires_grad_() for name, w in message.tensors.items()}
    logits, _ = experiment.model.apply(leaves, data.x, training=True)
    counts = [int((data.y == v).sum()) for v in range(3)]
    p = torch.softmax(logits, dim=1) * torch.tensor([1.0 + 3 * n for n in counts])
    p = p / p.sum(dim=1, keepdim=True)
    loss = -p.gather(1, data.y.unsqueeze(1)).log().mean()
    loss.backward()
    for name, leaf in leaves.items():
        assert torch.allclose(reply.tensors[name], leaf.detach() - 0.3 * leaf.grad, atol=1e-6), name
    assert reply.numbers["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert private[LABELS].exp().tolist() == pytest.approx([1.0 + 3 * n for n in counts], rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_counts_are_private_and_change_a_clients_predictions_alone(method):
    experiment = small_experiment(method, **COUNTED)
    steps, privates = train_serially(experiment)
    algorithm, x = experiment.algorithm, experiment.federation.x[:9]
    message = algorithm.broadcast(steps[-1].state, None)
    for reply in steps[-1].replies:
        assert LABELS not in reply.message.tensors
    assert LABELS not in algorithm.hand_over(privates[1])
    unknown = privates[1] | {LABELS: torch.zeros(3)}
    with torch.no_grad():
        own, without = algorithm.predict(message, privates[1], x), algorithm.predict(message, unknown, x)
        handed = [algorithm.hand_over(private) for private in privates.values()]
        nobody = algorithm.predict_anonymous(message, handed[1:2], torch.zeros(1), x)
    assert torch.allclose(nobody, without, atol=1e-5)
    assert not torch.allclose(own, without, atol=1e-3)
    if method != "fedmix":  # one model: Bayes
        y = experiment.federation.examples(1, "train").y
        wanted = objective.log_counted(without, torch.bincount(y, minlength=3).float(), torch.full((3,), 1 / 3))
        assert torch.allclose(own, wanted, atol=1e-5)
    new = algorithm.new_client(0)
    with torch.no_grad():
        assert torch.equal(
            algorithm.predict(message, new, x), algorithm.predict(message, algorithm.hand_over(new) or {}, x)
        )


def test_a_new_client_knows_the_counts_of_the_points_it_has():
    experiment = small_experiment("fedavg", **COUNTED)
    algorithm, data = experiment.algorithm, experiment.federation.examples(0, "train")
    message = algorithm.newcomer(algorithm.init(0), True)
    after, private = algorithm.adapt(message, algorithm.new_client(0), data, stream(0), 5)
    assert after is message
    assert private[LABELS].exp().sum().item() == pytest.approx(3 + 3 * len(data), rel=1e-5)


def test_a_clients_module_has_them():
    experiment = small_experiment("fedmix", **COUNTED)
    steps, privates = train_serially(experiment)
    algorithm, x = experiment.algorithm, experiment.federation.x[:9]
    message = algorithm.broadcast(steps[-1].state, None)
    module = ClientModule(algorithm, message, privates[1]).eval()
    with torch.no_grad():
        assert torch.allclose(module(x), algorithm.predict(message, privates[1], x), atol=1e-6)


def test_with_skewed_labels_each_client_is_better_for_it_and_what_is_shared_hardly_worse():
    """Two labels on each of six clients, inputs that overlap: a model that is pulled to every client's labels in turn."""
    rng = np.random.default_rng(0)
    clients = {}
    for s in range(6):
        y = np.array([s % 3, (s + 1) % 3])[(rng.random(120) < 0.1).astype(int)]
        x = rng.normal(size=(120, 2)) + np.array([[0, 1.2], [1.0, -0.6], [-1.0, -0.6]])[y]
        clients[str(s)] = {"x": x.astype(np.float32), "y": y}
    federation = Federation.from_clients(clients)
    found = {}
    for counted in (False, True):
        changes = {"training.label_counts": counted, "training.epochs": 5, "rounds": 20}
        experiment = small_experiment("fedavg", federation=federation, **changes)
        steps, privates = train_serially(experiment)
        algorithm, message = experiment.algorithm, experiment.algorithm.broadcast(steps[-1].state, None)
        with torch.no_grad():
            own, union = [], []
            for s in range(6):
                data = federation.examples(s, "test")
                own.append((algorithm.predict(message, privates[s], data.x).argmax(dim=1) == data.y).float().mean())
                union.append((algorithm.predict(message, {}, data.x).argmax(dim=1) == data.y).float().mean())
        found[counted] = float(np.mean(own)), float(np.mean(union))
    assert found[True][0] > found[False][0] + 0.1
    assert found[True][1] > found[False][1] - 0.02


@pytest.mark.parametrize("method", ["fedmix", "fedavg"])
def test_without_identity_everybodys_labels_are_put_back(method, tmp_path):
    """Where labels are not in equal shares, what is shared has learnt them as if they were."""
    rng = np.random.default_rng(1)
    clients = {}
    for s in range(6):
        y = rng.choice(3, size=150, p=[0.85, 0.1, 0.05] if s % 2 else [0.8, 0.05, 0.15])
        x = rng.normal(size=(150, 2)) + np.array([[0, 0.7], [0.6, -0.4], [-0.6, -0.4]])[y]
        clients[str(s)] = {"x": x.astype(np.float32), "y": y}
    federation, found = Federation.from_clients(clients), {}
    for counted in (False, True):
        recipe = small_recipe(method, **{"training.label_counts": counted, "rounds": 15, "training.epochs": 3})
        directory = RunDirectory.open(tmp_path / str(counted), recipe, resume=False, overwrite=False)
        summary = run(build(recipe, federation), directory, Where("serial"))
        directory.close()
        found[counted] = summary["scores"]["test"]["no_identity"]
        result = evaluate_run(restore(tmp_path / str(counted), federation), Options(Where("serial"), densities=False))
        assert result["no_identity"]["averaged"]["union"] == pytest.approx(found[counted])
    assert found[True]["accuracy"] > found[False]["accuracy"] - 0.01
    assert found[True]["nll"] < found[False]["nll"] + 0.01
    loaded, test = load(tmp_path / "True"), torch.from_numpy(np.concatenate(federation.parts["test"]))
    right = (loaded.predict(federation.x[test]) == federation.y[test].numpy()).mean()
    kind = "pooled" if method == "fedmix" else "averaged"
    assert right == pytest.approx(result["no_identity"][kind]["union"]["accuracy"])


class Labelled(nn.Module):
    """A model with a parameter of its own that is called `labels`."""

    def __init__(self):
        super().__init__()
        self.labels = nn.Parameter(torch.randn(4))
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x.repeat(1, 2) * self.labels)


@pytest.mark.parametrize("counted", [True, False])
def test_a_parameter_of_that_name_is_the_models(counted):
    experiment = small_experiment("independent", model=Labelled, **{"training.label_counts": counted})
    algorithm = experiment.algorithm
    _, privates = train_serially(experiment)
    assert not torch.equal(privates[0]["labels"], algorithm.new_client(0)["labels"])  # it is trained
    assert (LABELS in privates[0]) == counted
