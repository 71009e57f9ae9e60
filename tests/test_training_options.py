"""Training as people do it: metrics, optimisers, class weights, samplers, callbacks, early stopping, batch normalisation."""

import json

import numpy as np
import pytest
import torch
from conftest import fedmix as command_line
from conftest import small_federation
from torch import nn

import fedmix
from fedmix.core.optim import adam
from fedmix.data.federation import Federation
from fedmix.errors import ClientError, FedmixError, ModelError, SettingError

QUICK = {
    "engine": "serial",
    "rounds": 4,
    "evaluation": {"every": 1},
    "training": {"batch_size": 8, "client_lr": 0.2},
    "server": {"server_lr": 0.05},
}


def train(out, federation=None, **changes):
    settings = {**QUICK, **changes}
    return fedmix.train(federation=federation or small_federation(), out=out, **settings)


# -- metrics -----------------------------------------------------------------------------------------------------------


def right_and_sure(y, p):
    return float((p[np.arange(len(y)), y] > 0.5).mean())


def test_own_metrics_are_in_metrics_and_summary_on_every_engine(tmp_path):
    for engine in ("serial", "local"):
        run = train(tmp_path / engine, metrics={"sure": right_and_sure}, engine=engine)
    assert {"sure", "f1", "auc"} <= set(run.metrics[-1]["scores"])
    assert 0 < run.summary["scores"]["test"]["server"]["sure"]["mean"] <= 1
    assert run.metrics[-1]["scores"] == fedmix.load(tmp_path / "serial").metrics[-1]["scores"]


def test_a_recipe_names_metrics_and_samplers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_measures.py").write_text(
        "def half(y, p):\n    return 0.5\n\n\ndef first_two(t, sizes, count, rng):\n    return [t % 2, 2]\n"
    )
    args = ("--set", 'evaluation.metrics=["own_measures:half"]', "--set", "sampling=own_measures:first_two")
    out = str(tmp_path / "run")
    done = command_line("train", "digits-skew", "--rounds", "2", "--out", out, "--quiet", *args)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["clients"] for line in lines] == [[1, 2], [0, 2]]
    assert lines[-1]["scores"]["half"] == 0.5


def test_a_metric_that_gives_no_number_is_refused_by_name(tmp_path):
    with pytest.raises(ClientError, match=r"measure 'odd' must give a number. Got str"):
        train(tmp_path / "run", metrics={"odd": lambda y, p: "high"})


# -- who takes part ----------------------------------------------------------------------------------------------------


def test_a_sampler_chooses_the_clients_of_a_round(tmp_path):
    run = train(tmp_path / "run", sampler=lambda t, sizes, count, rng: rng.choice(len(sizes), count, replace=False),
                clients_per_round=2)  # fmt: skip
    assert all(len(line["clients"]) == 2 for line in run.metrics)
    with pytest.raises(SettingError, match=r"numbers of clients, 0 to 3. In round 1 it gave"):
        train(tmp_path / "other", sampler=lambda t, sizes, count, rng: [9])


def test_large_clients_take_part_more_often_by_size(tmp_path):
    rng = np.random.default_rng(0)
    sizes = {"large": 80, "a": 10, "b": 10, "c": 10}
    clients = {name: (rng.normal(size=(n, 2)), rng.integers(0, 2, n)) for name, n in sizes.items()}
    run = train(
        tmp_path / "run", Federation.from_clients(clients), rounds=40, clients_per_round=1, sampling="by-size",
        evaluation={"every": 40},
    )  # fmt: skip
    taken = [line["clients"][0] for line in run.metrics]
    assert taken.count(0) > 20
    assert len(set(taken)) > 1


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_a_clients_adam_is_torchs(name):
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    start = torch.randn(4, 3, dtype=torch.float64)
    theirs = start.clone().requires_grad_()
    optimizer = kind([theirs], lr=0.1, weight_decay=0.05)
    ours = {"w": start.clone(), "still": torch.ones(2, dtype=torch.float64)}
    rule = adam(0.1, weight_decay=0.05, decoupled=name == "adamw")
    state = rule.init(ours)
    for step in range(5):
        target = torch.full_like(start, step)
        optimizer.zero_grad()
        ((theirs - target) ** 2).sum().backward()
        optimizer.step()
        ours, state = rule.update(ours, {"w": 2 * (ours["w"] - target)}, state, 1.0)
    assert torch.allclose(ours["w"], theirs.detach(), atol=1e-12)
    assert torch.equal(ours["still"], torch.ones(2, dtype=torch.float64))


def test_adam_is_taken_by_methods_without_experts_and_refused_by_the_others(tmp_path):
    training = {"optimizer": "adam", "client_lr": 0.01, "batch_size": 8}
    run = train(tmp_path / "run", algorithm="fedavg", training=training, rounds=8)
    assert run.summary["accuracy"]["test"]["server"]["mean"] > 0.6
    with pytest.raises(SettingError, match=r"must be 'sgd' with FedMix.*have no scale"):
        train(tmp_path / "other", training=training)
    with pytest.raises(SettingError, match=r"training.optimizer must be one of adam, adamw, sgd"):
        train(tmp_path / "other", training={"optimizer": "lion"})


def plain_loop(x, y, net, weights, lr=0.2, steps=1):
    """Torch's own loss with class weights, all points in one mini-batch."""
    loss_of = nn.CrossEntropyLoss(weight=weights)
    for _ in range(steps):
        net.zero_grad()
        loss_of(net(x), y).backward()
        with torch.no_grad():
            for value in net.parameters():
                value -= lr * value.grad


@pytest.mark.parametrize("weights", [[0.2, 1.0, 3.0], "balanced"])
@pytest.mark.parametrize("engine", ["serial", "local"])
def test_class_weights_are_torchs(weights, engine, tmp_path):
    federation = small_federation()
    net = nn.Sequential()
    net.add_module("out", nn.Linear(2, 3))
    settings = {"batch_size": 10_000, "client_lr": 0.2, "class_weights": weights, "last_batch": "smaller"}
    run = fedmix.train(
        federation=federation, model=net, model_start="given", output="out", algorithm="fedavg", out=tmp_path / "run",
        engine=engine, rounds=1, training=settings, server={"optimizer": "average"},
    )  # fmt: skip
    sizes, models = [], []
    for s in range(len(federation)):
        data = federation.examples(s, "train")
        counts = torch.bincount(data.y, minlength=3).float()
        own = torch.tensor(weights) if weights != "balanced" else len(data.y) / (3 * counts)
        local = nn.Linear(2, 3)
        local.load_state_dict(net.out.state_dict())
        plain_loop(data.x, data.y, local, own)
        sizes.append(len(data.y))
        models.append(local.weight.detach())
    shares = torch.tensor(sizes) / sum(sizes)
    expected = sum(share * w for share, w in zip(shares, models, strict=True))
    assert torch.allclose(run.experts[0]["out.weight"], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("weights", "wrong"), [([1.0], "must have 3 numbers. Got 1"), ([-1.0, 1.0, 1.0], "0 or more"), ("equals", "equal")]
)
def test_class_weights_that_do_not_fit_are_refused(weights, wrong, tmp_path):
    with pytest.raises(FedmixError, match=wrong):
        train(tmp_path / "run", training={"class_weights": weights})


# -- ending ------------------------------------------------------------------------------------------------------------


def test_a_callback_ends_a_run_with_its_summary(tmp_path):
    seen = []

    def stop_at_three(progress):
        seen.append(progress.done)
        if progress.done == 3:
            raise fedmix.Stop("good enough")

    run = train(tmp_path / "run", watch=[stop_at_three, lambda progress: seen.append(-progress.done)], rounds=9,
                evaluation={"every": 2})  # fmt: skip
    assert seen == [1, -1, 2, -2, 3]
    assert (run.round, run.summary["rounds"]) == (3, 3)
    assert run.summary["stopped"] == {"why": "good enough", "of": 9}
    assert run.summary["accuracy"]["test"]["fine_tuned"]["mean"] > 0
    again = train(tmp_path / "run", rounds=9, evaluation={"every": 2}, resume=True)
    assert again.round == 3  # it has ended; more rounds go on
    longer = train(tmp_path / "run", rounds=10, evaluation={"every": 2}, resume=True)
    assert (longer.round, "stopped" in longer.summary) == (10, False)


def test_patience_ends_a_run_and_the_best_round_can_be_loaded(tmp_path):
    settings = {"rounds": 40, "evaluation": {"every": 1, "patience": 3}, "checkpoint": {"every": 50, "keep": 1}}
    run = train(tmp_path / "run", **settings)
    best = run.summary["best"]
    assert run.summary["stopped"]["why"].endswith(f"since round {best['round']:.0f}")
    assert run.round == best["round"] + 3
    measured = [line["accuracy"]["validation"]["server"]["mean"] for line in run.metrics]
    assert best["value"] == pytest.approx(max(measured))
    assert int(np.argmax(measured)) + 1 == best["round"]
    at_best = fedmix.load(tmp_path / "run", round="best")
    assert at_best.round == best["round"]
    federation = small_federation()
    accuracies = []
    for s in range(4):
        data = federation.examples(s, "validation")
        accuracies.append((at_best.client(s).predict(data.x) == data.y.numpy()).mean())
    assert np.mean(accuracies) == pytest.approx(best["value"], abs=1e-5)
    with pytest.raises(FedmixError, match="'last', 'best' or one of the checkpoints"):
        fedmix.load(tmp_path / "run", round=999)


def test_a_run_that_ends_early_is_the_same_stopped_and_resumed(tmp_path):
    settings = {"rounds": 40, "evaluation": {"every": 1, "patience": 2}}
    whole = train(tmp_path / "whole", **settings)

    def power_cut(progress):
        if progress.done == 2:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(tmp_path / "cut", watch=power_cut, **settings)
    resumed = train(tmp_path / "cut", resume=True, **settings)
    assert resumed.summary["stopped"] == whole.summary["stopped"]
    assert all(torch.equal(a[n], b[n]) for a, b in zip(whole.experts, resumed.experts, strict=True) for n in a)


def test_the_best_round_is_judged_by_what_is_asked_for(tmp_path):
    run = train(tmp_path / "run", evaluation={"every": 1, "best_by": "sure"}, metrics={"sure": right_and_sure})
    measured = [line["scores"]["sure"] for line in run.metrics]
    assert run.summary["best"]["round"] == int(np.argmax(measured)) + 1
    with pytest.raises(SettingError, match=r"evaluation.best_by must be one of"):
        train(tmp_path / "other", evaluation={"every": 1, "best_by": "speed"})


# -- batch normalisation -----------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.body(x))))


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_private_batch_normalisation_is_fedbn(engine, tmp_path):
    """Against a loop of plain torch modules: everything but the norms is averaged, norms and statistics stay."""
    torch.manual_seed(0)
    federation, net = small_federation(), Norm()
    run = fedmix.train(
        federation=federation, model=net, model_start="given", output="out", algorithm="fedavg", out=tmp_path / "run",
        engine=engine, rounds=3, training={"batch_size": 10_000, "client_lr": 0.2}, server={"optimizer": "average"},
        **{"model.batchnorm": "private"},
    )  # fmt: skip
    locals_ = []
    for _ in range(len(federation)):
        local = Norm()
        local.load_state_dict(net.state_dict())
        locals_.append(local)
    shared = [name for name in net.state_dict() if not name.startswith("norm.")]
    for _ in range(3):
        sizes = []
        for s, local in enumerate(locals_):
            data = federation.examples(s, "train")
            local.train()
            plain_loop(data.x, data.y, local, None)
            sizes.append(len(data.y))
        shares = torch.tensor(sizes) / sum(sizes)
        mean = {n: sum(a * m.state_dict()[n] for a, m in zip(shares, locals_, strict=True)) for n in shared}
        for local in locals_:
            local.load_state_dict(mean, strict=False)
    for s, local in enumerate(locals_):
        x = federation.examples(s, "test").x
        expected = torch.log_softmax(local.eval()(x), dim=1)
        assert torch.allclose(run.client(s).log_prob(x), expected, atol=1e-5)
    sent = run.metrics[0]["bytes_up"]
    assert sent == 4 * 4 * sum(net.state_dict()[name].numel() for name in shared)


def test_batch_normalisation_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(ModelError, match=r"model.batchnorm = 'private', FedBN"):
        train(tmp_path / "run", model=Norm, output="out")
    with pytest.raises(SettingError, match=r"set fedmix.shared = 'all-but-output'"):
        train(tmp_path / "run", model=Norm, output="out", fedmix={"experts": 2}, **{"model.batchnorm": "private"})
    run = train(
        tmp_path / "run", model=Norm, output="out", fedmix={"experts": 2, "shared": "all-but-output"},
        **{"model.batchnorm": "private"},
    )  # fmt: skip
    x = small_federation().x[:5]
    loaded = fedmix.load(tmp_path / "run", Norm)
    assert torch.equal(loaded.client(1).log_prob(x), run.client(1).log_prob(x))
    with torch.no_grad():
        assert torch.allclose(loaded.client(1).module()(x), run.client(1).log_prob(x), atol=1e-6)


@pytest.mark.parametrize(("by", "measure"), [("nll", "nll"), ("-odd", "odd")])
def test_what_should_be_low_is_best_where_it_is_lowest(by, measure, tmp_path):
    odd = {"odd": lambda y, p: float((p.argmax(axis=1) != y).mean())}
    run = train(tmp_path / "run", evaluation={"every": 1, "best_by": by}, metrics=odd)
    measured = [line["scores"][measure] for line in run.metrics]
    assert run.summary["best"]["round"] == int(np.argmin(measured)) + 1


def test_metrics_must_have_names_of_their_own(tmp_path):
    with pytest.raises(SettingError, match="'f1' is there already"):
        train(tmp_path / "run", metrics={"f1": right_and_sure})
    with pytest.raises(SettingError, match="metrics must be a dict"):
        train(tmp_path / "run", metrics=[right_and_sure])
