"""The Python API: own data, own model, and what can be done with a trained run."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import METHODS, small_federation
from conftest import fedmix as command_line
from torch import nn

import fedmix
from fedmix.api import HandedOver, train_recipe
from fedmix.core import model as model_module
from fedmix.errors import DataError, FedmixError, RunError, SettingError
from fedmix.running.where import Where
from fedmix.settings.reading import make_recipe
from fedmix.settings.tables import flat


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.body = nn.Linear(2, width)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.body(x))))


SETTINGS = {
    "rounds": 8,
    "fedmix": {"experts": 3, "gamma": 0.5},
    "training": {"batch_size": 8, "client_lr": 0.2},
    "server": {"server_lr": 0.05},
}


@pytest.fixture(scope="module", params=METHODS)
def trained(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("api") / "run"
    run = fedmix.train(
        federation=small_federation(),
        model=Net,
        output="head",
        out=out,
        algorithm=request.param,
        engine="serial",
        **SETTINGS,
    )
    return out, run


def test_predictions_of_a_client(trained):
    _, run = trained
    federation = small_federation()
    data = federation.examples(1, "test")
    client = run.client("site-1")
    assert np.array_equal(client.predict(data.x), run.client(1).predict(data.x.numpy()))
    accuracy = (client.predict(data.x) == data.y.numpy()).mean()
    assert accuracy == pytest.approx(run.summary["of_clients"]["test"]["server"]["site-1"])
    assert client.took_part


def test_a_clients_module_predicts_the_same_and_exports(trained):
    _, run = trained
    x = small_federation().x[:9]
    client = run.client(2)
    module = client.module()
    with torch.no_grad():
        assert torch.allclose(module(x), client.log_prob(x), atol=1e-6)
        weights = client.expert_weights(x)
        exported = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
        assert torch.allclose(exported.module()(x[:5]), client.log_prob(x[:5]), atol=1e-6)
    assert weights.shape == (9, 3 if run.recipe.algorithm == "fedmix" else 1)
    assert torch.allclose(weights.sum(dim=1), torch.ones(9), atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_label_counts_are_in_a_clients_predictions_whether_it_took_part_or_not(method, tmp_path):
    federation = small_federation()
    parts = {
        part: [own[federation.y[own] != s % 3] for s, own in enumerate(federation.parts[part])]
        for part in federation.parts
    }
    federation = replace(federation, parts=parts)
    settings = SETTINGS | {"rounds": 2, "clients_per_round": 1, "evaluation": {"share_private": True}}
    settings["training"] = SETTINGS["training"] | {"label_counts": True}
    run = fedmix.train(
        federation=federation,
        model=Net,
        output="head",
        out=tmp_path / "r",
        algorithm=method,
        engine="serial",
        **settings,
    )
    found = [run.client(s).took_part for s in range(4)]
    assert set(found) == {True, False}
    for s in range(4):
        client, x = run.client(s), federation.examples(s, "test").x
        assert client.log_prob(x)[:, s % 3].max() < -1  # a label that it has not
        with torch.no_grad():
            assert torch.allclose(client.module()(x), client.log_prob(x), atol=1e-6)
        accuracy = (client.predict(x) == federation.examples(s, "test").y.numpy()).mean()
        assert accuracy == pytest.approx(run.summary["of_clients"]["test"]["server"][f"site-{s}"])


def test_predictions_for_somebody_who_is_none_of_the_clients(trained):
    _, run = trained
    federation = small_federation()
    if run.recipe.algorithm not in ("fedmix", "fedavg"):
        with pytest.raises(RunError, match="Here private parts decide"):
            run.predict(federation.x)
        return
    assert torch.allclose(run.log_prob(federation.x).exp().sum(dim=1), torch.ones(len(federation.x)))
    result = fedmix.evaluate(run.path, federation=federation, model=Net, densities=False, engine="serial")
    rows = result["new_clients"]["unlabelled"]
    index = np.concatenate(federation.parts["test"])
    accuracy = (run.predict(federation.x[index]) == federation.y[index].numpy()).mean()
    kind = "pooled" if run.recipe.algorithm == "fedmix" else "averaged"
    assert accuracy == pytest.approx(rows[kind]["union"]["accuracy"])


def test_experts_are_state_dicts(trained):
    _, run = trained
    if run.recipe.algorithm in ("fedmix", "fedavg"):
        net = Net()
        for expert in run.experts:
            net.load_state_dict(expert)
        assert len(run.experts) == (3 if run.recipe.algorithm == "fedmix" else 1)


def test_load_needs_the_model_again_and_nothing_else(trained):
    out, run = trained
    again = fedmix.load(out, model=Net)
    x = small_federation().x[:5]
    assert torch.equal(again.client(0).log_prob(x), run.client(0).log_prob(x))
    assert again.round == 8
    assert len(again.metrics) == 8
    with pytest.raises(SettingError, match=r"hand it over again: fedmix.load\(RUN, model=...\)"):
        fedmix.load(out)


def test_what_cannot_be_loaded_says_why(tmp_path, trained):
    _, run = trained
    with pytest.raises(RunError, match="must be a run directory"):
        fedmix.load(tmp_path)
    with pytest.raises(DataError, match=r"one of 4 \(site-0, .*Got 'nobody' instead"):
        run.client("nobody")
    with pytest.raises(DataError, match="Got 4 instead"):
        run.client(4)


def with_object(out, net, words, **more):
    given = {"federation": small_federation(), "model": net, "output": "head", "out": out, "engine": "serial"}
    with pytest.warns(UserWarning, match=words):
        return fedmix.train(**given, **SETTINGS | {"rounds": 1} | more)


def test_an_object_as_a_model_starts_experts_differently(tmp_path):
    run = with_object(tmp_path / "r", Net(), "drawn anew")
    assert not torch.equal(run.experts[0]["body.weight"], run.experts[1]["body.weight"])
    assert run.recipe.model.start == "random"


def test_the_weights_of_an_object_are_a_start_where_that_is_said(tmp_path):
    """Experts part by a tenth of each tensor's spread; without experts the start is the object's own weights."""
    net = Net()
    lazy = {"training": {"client_lr": 1e-9}, "server": {"optimizer": "average"}}
    run = with_object(tmp_path / "mix", net, "told apart by a little noise", **lazy, model_start="given")
    for expert in run.experts:
        apart = (expert["body.weight"] - net.body.weight.detach()).std() / net.body.weight.detach().std()
        assert 0.05 < float(apart) < 0.2
    plain = fedmix.train(
        federation=small_federation(),
        model=net,
        output="head",
        out=tmp_path / "avg",
        engine="serial",
        algorithm="fedavg",
        model_start="given",
        **SETTINGS | {"rounds": 1} | lazy,
    )
    assert torch.allclose(plain.experts[0]["body.weight"], net.body.weight.detach(), atol=1e-6)
    assert plain.recipe.model.start == "given"


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.out = nn.Linear(2, 3)

    def forward(self, x):
        return self.out(self.scale * x)


def test_an_object_that_cannot_be_drawn_again_is_refused(tmp_path):
    with pytest.raises(SettingError, match=r"no reset_parameters\(\).*Give the model's class"):
        fedmix.train(federation=small_federation(), model=Odd(), output="out", out=tmp_path / "r")
    run = fedmix.train(
        federation=small_federation(), model=Odd, output="out", out=tmp_path / "r", engine="serial", rounds=1
    )
    assert "scale" in run.experts[0]


def test_a_model_without_its_output_layer_is_refused(tmp_path):
    with pytest.raises(SettingError, match="output must name the output layer"):
        fedmix.train(federation=small_federation(), model=Net, out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


MINE = """
import numpy as np
from torch import nn

def net(width):
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))

def sites(count):
    rng = np.random.default_rng(0)
    draw = lambda k: rng.integers(0, k, 20)
    return {s: {"x": rng.normal(size=(20, 2)), "y": draw(2), "c": draw(3)} for s in range(count)}
"""


def test_own_models_and_data_by_name(tmp_path, mine):
    mine(MINE)
    settings = {
        "model": {"name": "mine:net", "output": "2", "args": {"width": 5}},
        "data": {"source": "mine:sites", "side": "column", "args": {"count": 3}},
    }
    run = fedmix.train(out=tmp_path / "run", rounds=2, engine="serial", **settings)
    assert run.clients == ["0", "1", "2"]
    assert np.array(run.summary["q_zc"]).shape == (3, 4)
    assert fedmix.load(tmp_path / "run").client(0).predict(np.zeros((1, 2))).shape == (1,)
    with pytest.raises(FedmixError, match=r"model.name must name something that can be imported. 'mine:nett' cannot"):
        fedmix.train(out=tmp_path / "x", rounds=1, **settings | {"model": {"name": "mine:nett"}})


TINY = {"data": {"clients": 4, "share": 0.3}, "rounds": 2, "training": {"epochs": 1}, "evaluation": {"every": 1}}


def test_compare_in_python_is_the_command_line_s(tmp_path):
    """The same numbers, in the result and in comparison.json, whoever asks."""
    found = fedmix.compare("digits-skew", ["fedmix", "fedavg"], seeds=[0, 1], out=tmp_path / "python", **TINY)
    assert [(row["algorithm"], row["seeds"]) for row in found["rows"]] == [("fedmix", [0, 1]), ("fedavg", [0, 1])]
    assert json.loads((tmp_path / "python" / "comparison.json").read_text()) == found
    flags = ["data.clients=4", "data.share=0.3", "training.epochs=1", "evaluation.every=1"]
    settings = [part for flag in flags for part in ("--set", flag)]
    command = ["compare", "digits-skew", "--algorithms", "fedmix,fedavg", "--seeds", "0,1", "--rounds", "2", *settings]
    done = command_line(*command, "--out", str(tmp_path / "cli"), "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == found
    judged = {(row["part"], row["kind"]): row["difference"] for row in found["differences"]}
    assert judged["test", "fine_tuned"]["clients"] == judged["validation", "server"]["clients"] == 8


def test_sweep_in_python_chooses_on_validation_data(tmp_path):
    found = fedmix.sweep("digits-skew", {"training.client_lr": [1e-6, 0.1]}, by="server", out=tmp_path / "s", **TINY)
    assert [row["settings"] for row in found["rows"]] == [{"training.client_lr": 1e-6}, {"training.client_lr": 0.1}]
    accuracies = [row["validation"]["server"]["mean"] for row in found["rows"]]
    assert found["best"] == accuracies.index(max(accuracies))
    assert found["by"] == "server"
    with pytest.raises(SettingError, match="by must be one of as-sent, no-identity, server"):
        fedmix.sweep("digits-skew", {"seed": [0, 1]}, by="fine_tuned", out=tmp_path / "none", **TINY)


def test_an_unknown_engine_is_refused_before_anything_is_written(tmp_path):
    for call in (
        lambda: fedmix.train("digits-skew", out=tmp_path / "r", engine="quantum"),
        lambda: fedmix.compare("digits-skew", out=tmp_path / "r", engine="quantum"),
        lambda: fedmix.sweep("digits-skew", {"seed": [0, 1]}, out=tmp_path / "r", engine="quantum"),
    ):
        with pytest.raises(SettingError, match=r"^engine must be one of flower, local, serial"):
            call()
    assert not (tmp_path / "r").exists()
    fedmix.train("digits-skew", out=tmp_path / "r", engine="serial", **TINY)
    for look in (fedmix.evaluate, fedmix.audit):
        with pytest.raises(SettingError, match="--engine must be one of local, serial"):
            look(tmp_path / "r", engine="flower")


def test_the_experts_of_a_run_are_drawn_once(tmp_path, monkeypatch):
    """Server, clients, checkpoints and the trial of groups ask for the same K models, and for no others."""
    built = []

    def counted(build):
        built.append(build)
        return fresh(build)

    fresh = model_module._fresh
    monkeypatch.setattr(model_module, "_fresh", counted)
    recipe = make_recipe({}, changes=flat({**TINY, "fedmix": {"experts": 3}, "data": {"clients": 4}}))
    train_recipe(recipe, tmp_path / "r", Where("local", 2), HandedOver())
    assert len(built) == 1 + 3  # one to look at, and the experts


@pytest.mark.parametrize(
    ("side", "more", "wanted"),
    [
        (
            "label",
            {},
            {"shared": "all-but-output", "full_steps": True, "gamma": 0.9, "experts": 4, "evidence": "batch"},
        ),
        ("client", {}, {"shared": "all-but-output", "experts": "auto", "evidence": "arriving"}),
        ("client", {"server": {"aggregation": "linear"}}, {"shared": "all-but-output", "experts": 4}),
        (
            "client",
            {"fedmix": {"experts": 2}},
            {"shared": "none", "experts": 2, "evidence": "batch", "full_steps": False},
        ),
    ],
)
def test_without_any_setting_of_fedmix_its_recommended_form_is_trained(tmp_path, side, more, wanted):
    run = fedmix.train(federation=small_federation(side=side), out=tmp_path / "r", rounds=2, engine="serial", **more)
    settings = run.recipe.fedmix
    assert {name: getattr(settings, name) for name in wanted} == wanted
    again = fedmix.train(
        federation=small_federation(side=side), out=tmp_path / "r", rounds=3, engine="serial", resume=True, **more
    )
    assert len(again.metrics) == 3


def test_errors_in_python_name_arguments_and_not_options(tmp_path):
    fedmix.train("digits-skew", out=tmp_path / "r", engine="serial", **TINY)
    with pytest.raises(
        RunError, match="Use resume=True to go on with it, overwrite=True to replace it, or another out"
    ):
        fedmix.train("digits-skew", out=tmp_path / "r", engine="serial", **TINY)
