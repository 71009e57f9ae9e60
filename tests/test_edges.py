"""Edges that users meet: frozen weights, odd modules, other data on resume, bytes as inputs, clients without points."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import small_experiment, small_federation, train_serially
from torch import nn

import fedmix
from fedmix.core import prune
from fedmix.errors import ClientError, DataError, ModelError, RunError, SettingError
from fedmix.rng import stream
from fedmix.running.directory import RunDirectory
from fedmix.running.run import run
from fedmix.running.where import Where
from fedmix.settings.build import build
from fedmix.settings.reading import make_recipe


class Net(nn.Module):
    def __init__(self, norm=None, classes=3):
        super().__init__()
        self.body, self.norm, self.out = nn.Linear(2, 4), norm or nn.Identity(), nn.Linear(4, classes)

    def forward(self, x):
        return self.out(self.norm(self.body(x.view(x.size(0), -1)).unsqueeze(1)).squeeze(1).relu())


def trained(path, resume=False, federation=None, model=Net, **changes):
    settings = {"rounds": 2, "engine": "serial", "fedmix": {"experts": 2}} | changes
    return fedmix.train(
        federation=federation or small_federation(), model=model, output="out", out=path, resume=resume, **settings
    )


@pytest.mark.parametrize("method", ["fedmix", "fedavg"])
def test_fine_tuning_after_the_last_round_has_no_schedule(method):
    experiment = small_experiment(method, **{"training.schedule": "cosine", "rounds": 1})
    steps, privates = train_serially(experiment)
    message = experiment.algorithm.broadcast(steps[-1].state, 0)
    data = experiment.federation.examples(0, "train")
    reply, _ = experiment.algorithm.client_update(message, privates[0], data, stream(0), 1)
    name = next(name for name in reply.tensors if name.endswith("out.weight"))
    assert not torch.equal(reply.tensors[name], message.tensors[name])


def test_running_statistics_of_any_kind_are_refused():
    norm = nn.InstanceNorm1d(1, track_running_stats=True)
    with pytest.raises(ModelError, match=r"buffer 'norm.* changes in a forward pass"):
        small_experiment(model=lambda: Net(norm), **{"model.output": "out"})


@pytest.mark.parametrize("method", ["fedmix", "fedavg"])
def test_frozen_weights_stay_as_they_are(method):
    def net():
        module = Net()
        module.body.weight.requires_grad_(False)
        return module

    experiment = small_experiment(method, model=net, **{"model.output": "out"})
    start = experiment.algorithm.init(0)
    steps, _ = train_serially(experiment, start)
    before, after = (experiment.algorithm.experts(state)[0] for state in (start, steps[-1].state))
    assert torch.equal(before["body.weight"], after["body.weight"])
    assert not torch.equal(before["body.bias"], after["body.bias"])


def test_experts_that_would_start_equal_are_told_apart():
    def pretrained():
        torch.manual_seed(5)
        return Net()

    experts = small_experiment(model=pretrained, **{"model.output": "out"}).algorithm.init(0).experts
    assert not torch.equal(experts[0]["out.weight"], experts[1]["out.weight"])


def test_weights_that_blow_up_in_the_last_step_are_noticed():
    federation = small_federation()
    settings = {"training.client_lr": 1e38, "training.batch_size": 1000}
    experiment = small_experiment("fedavg", replace(federation, x=1000 * federation.x), **settings)
    with pytest.raises(ClientError, match=r"client site-0, round 1, step 1: the weights are not finite"):
        train_serially(experiment)


def test_a_client_without_validation_points_is_fine():
    federation = small_federation()
    parts = dict(federation.parts) | {"validation": [np.arange(0), *federation.parts["validation"][1:]]}
    experiment = small_experiment(model=Net, federation=replace(federation, parts=parts), **{"model.output": "out"})
    steps, _ = train_serially(experiment)
    assert steps[-1].replies[0].message.numbers["points"] == 0


def test_other_data_and_other_models_are_not_taken_for_a_runs_own(tmp_path):
    trained(tmp_path / "r")
    listing = {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file() and p.name != "recipe.toml"}
    with pytest.raises(RunError, match="resumed with its own data"):
        trained(tmp_path / "r", True, small_federation(seed=1), rounds=3)
    with pytest.raises(RunError, match="of another model or federation"):
        trained(tmp_path / "r", True, model=lambda: Net(nn.LayerNorm(4)), rounds=3)
    assert {
        p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file() and p.name != "recipe.toml"
    } == listing
    assert trained(tmp_path / "r", True, rounds=3).round == 3


def test_what_is_refused_leaves_the_run_as_it_was(tmp_path):
    trained(tmp_path / "r")
    before = {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()}
    with pytest.raises(RunError, match="cannot end at round 1"):
        trained(tmp_path / "r", True, rounds=1)
    for wrong in ({"engine": "quantum"}, {"workers": 0}, {"warm_start": str(tmp_path / "nowhere")}):
        with pytest.raises((SettingError, RunError)):
            trained(tmp_path / "r", overwrite=True, **wrong)
    assert {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()} == before


def test_a_run_that_goes_on_has_no_summary_until_it_ends_again(tmp_path):
    trained(tmp_path / "r")

    def stop(step):
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        trained(tmp_path / "r", True, rounds=4, watch=stop)
    with pytest.raises(RunError, match="has no summary"):
        _ = fedmix.load(tmp_path / "r", model=Net).summary


def test_what_a_killed_process_leaves_before_its_recipe_is_written_can_be_used(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "recipe.toml.part").write_text("rou")
    (tmp_path / "r" / "lock").touch()
    assert trained(tmp_path / "r", True).round == 2


def test_warm_start_from_a_model_that_was_handed_over(tmp_path):
    first = trained(tmp_path / "first")
    second = trained(tmp_path / "second", warm_start=str(tmp_path / "first"), rounds=1)
    moved = (second.experts[0]["out.weight"] - first.experts[0]["out.weight"]).abs().max()
    assert moved < 0.01  # one round of Adam from there, not from a new start


def test_local_global_averages_whole_blocks_with_their_shortcuts():
    """The order of clients must not matter: nothing of a single client may leak past the layers that are averaged."""
    layers = {"local_global.layers": ["stem", "stage1"]}
    from fedmix.data.federation import Federation

    rng = np.random.default_rng(0)
    arrays = {s: {"x": rng.normal(size=(12, 3, 16, 16)), "y": rng.integers(0, 3, 12)} for s in range(2)}
    federation = Federation.from_clients(arrays, classes=3)
    recipe = make_recipe({}, "local-global", {"model.name": "resnet20", "model.channels": [8], "rounds": 1} | layers)
    experiment = build(recipe, federation)
    steps, privates = train_serially(experiment)
    message = experiment.algorithm.broadcast(steps[-1].state, None)
    p_s, x = torch.tensor([0.5, 0.5]), federation.x[:4]
    with torch.no_grad():
        one = experiment.algorithm.predict_anonymous(message, [privates[0], privates[1]], p_s.log(), x)
        other = experiment.algorithm.predict_anonymous(message, [privates[1], privates[0]], p_s.log(), x)
    assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "y", "wrong"),
    [
        ([[0.0], [1.0]], 1, "a value for each point. Got a single value, 1"),
        (3.0, [0, 1], "a value for each point. Got a single value, 3.0"),
        ([["tall"], ["short"]], [0, 1], "x must be numbers, one row a point. Got <U5"),
        ([[[0.0]], [[1.0, 2.0]]], [0, 1], "an array of numbers, one row a point"),
    ],
)
def test_arrays_that_are_none_are_refused(x, y, wrong):
    from fedmix.data.federation import Federation

    with pytest.raises(DataError, match=wrong):
        Federation.from_clients({"a": {"x": x, "y": y}})


def test_images_of_bytes_are_normalised_after_loading_too(small_files, tmp_path):
    changes = {"rounds": 1, "clients_per_round": 2, "data.clients": 5, "model.hidden": [8], "evaluation.every": 1}
    recipe = make_recipe({}, "fedavg", {"data.source": "mnist"} | changes)
    experiment = build(recipe)
    directory = RunDirectory.open(tmp_path / "r", recipe, resume=False, overwrite=False)
    summary = run(experiment, directory, Where("serial"))
    directory.close()
    index = experiment.federation.parts["test"][3]
    raw, y = experiment.federation.x[index], experiment.federation.y[index]
    accuracy = (fedmix.load(tmp_path / "r").client(3).predict(raw) == np.asarray(y)).mean()
    assert raw.dtype == torch.uint8
    assert accuracy == pytest.approx(summary["of_clients"]["test"]["server"]["3"])


def test_exactly_the_threshold_is_kept_in_spite_of_rounding():
    shares = torch.tensor([0.1, 0.2, 0.7])
    q = shares @ torch.full((3, 4), 0.25)
    assert prune.kept(q * (1 - 1e-7), 1.0) == [0, 1, 2, 3]


def test_clusters_are_of_clients_that_took_part(tmp_path):
    settings = {"data.clients": 8, "data.permutations": 2, "clients_per_round": 2, "rounds": 1, "fedmix.experts": 2}
    recipe = make_recipe({}, changes=settings | {"data.shift": "permute-labels", "data.side": "client"})
    directory = RunDirectory.open(tmp_path / "r", recipe, resume=False, overwrite=False)
    summary = run(build(recipe), directory, Where("serial"))
    directory.close()
    assert len(summary["clusters"]["found"]) == 2
    assert len(json.loads((tmp_path / "r" / "summary.json").read_text())["q_zs"]) == 8


def test_what_is_not_used_is_not_sent():
    direct = small_experiment(**{"fedmix.objective": "direct", "fedmix.marginal": "exact"})
    assert "phi" not in direct.algorithm.broadcast(direct.algorithm.init(0), 0).tensors
    assert "q_zc" not in direct.algorithm.describe(direct.algorithm.init(0))
    private = small_experiment(**{"fedmix.phi": "private", "fedmix.prior": "reported"})
    steps, _ = train_serially(private)
    assert "c_shares" not in steps[0].replies[0].message.tensors
