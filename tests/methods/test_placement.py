"""Where tensors live, and what follows: bytes, aggregation, frozen backbones, warm starts, refusals of another model."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from conftest import METHODS, small_experiment, small_federation, small_recipe, train_serially
from torch import nn

import fedmix
from fedmix import schema
from fedmix.core.placement import digest_of, lay_out
from fedmix.core.tree import flatten
from fedmix.core.types import Message
from fedmix.engines.client import Task, perform, perform_group
from fedmix.errors import ClientError, ModelError, RunError
from fedmix.methods import Page
from fedmix.methods.fedmix import fedmix as mixture
from fedmix.rng import stream
from fedmix.running.directory import RunDirectory
from fedmix.running.run import run
from fedmix.running.where import Where
from fedmix.settings.build import build

BACKBONE = 300


class Pretrained(nn.Module):
    """A wide frozen body with weights of its own, and a small head that is trained."""

    def __init__(self, seed=7):
        super().__init__()
        self.body, self.out = nn.Linear(2, BACKBONE), nn.Linear(BACKBONE, 3)
        generator = torch.Generator().manual_seed(seed)
        for value in self.body.parameters():
            value.data = torch.randn(value.shape, generator=generator)
            value.requires_grad = False

    def forward(self, x):
        return self.out(torch.relu(self.body(x)))


def head_bytes(experts):
    return 4 * experts * (3 * BACKBONE + 3)


@pytest.mark.parametrize("method", METHODS)
def test_frozen_weights_cross_no_wire_are_not_trained_and_get_no_noise(method):
    experiment = small_experiment(method, model=Pretrained, **{"fedmix.experts": 4})
    algorithm = experiment.algorithm
    assert algorithm.layout.frozen == ["body.weight", "body.bias"]
    state = algorithm.init(0)
    body = Pretrained().body.weight.detach()
    for message in (algorithm.broadcast(state, 0), algorithm.broadcast(state, None)):
        assert not [name for name in message.tensors if "body" in name]
    steps, privates = train_serially(experiment)
    assert all(torch.equal(w["body.weight"], body) for w in algorithm.experts(steps[-1].state))
    assert not [name for private in privates.values() for name in private if "body" in name]
    if method == "fedmix":
        beside = 4 * (2 * 3 * 4 + 4)  # phi down and up, q(z|s) up
        sent = 4 * (2 * head_bytes(4) + beside)
        assert steps[0].bytes_down + steps[0].bytes_up == sent
    if method == "fedavg":
        assert steps[0].bytes_up == steps[0].bytes_down == 4 * head_bytes(1)


def test_frozen_weights_are_the_servers_or_the_client_says_so():
    """A model whose builder gives other pretrained weights elsewhere must not be trained on quietly."""
    server = small_experiment("fedmix", model=Pretrained)
    elsewhere = small_experiment("fedmix", model=lambda: Pretrained(seed=8))
    message = server.algorithm.broadcast(server.algorithm.init(0), 0)
    assert message.numbers["frozen"] == server.algorithm.client.own_digest
    task, private = Task("train", 1, 0, message), server.algorithm.new_client(0, 0)
    with pytest.raises(ClientError, match="frozen weights must be the server's"):
        perform(elsewhere.algorithm, elsewhere.federation, 0, task, private)


def test_a_warm_start_sends_other_frozen_weights_once():
    other = small_experiment("fedavg", model=lambda: Pretrained(seed=8))
    trained, _ = train_serially(other)
    models = other.algorithm.experts(trained[-1].state)
    experiment = small_experiment("fedmix", model=Pretrained)
    algorithm = experiment.algorithm
    state = algorithm.warm_start(algorithm.init(0), models, stream(0))
    steps, privates = train_serially(experiment, state)
    frozen = 4 * (2 * BACKBONE + BACKBONE)
    assert steps[0].bytes_down - steps[1].bytes_down == 4 * frozen  # to four clients, in the first round alone
    assert all(torch.equal(private[".frozen.body.weight"], models[0]["body.weight"]) for private in privates.values())
    back = algorithm.state_from(flatten(steps[-1].state))
    assert flatten(back).keys() == flatten(steps[-1].state).keys()
    x = experiment.federation.x[:5]
    whole = algorithm.predict(algorithm.broadcast(steps[-1].state, None), privates[0], x)
    assert torch.isfinite(whole).all()
    tasks = [Task("train", 4, s, algorithm.broadcast(steps[-1].state, s)) for s in range(4)]
    known = [privates[s] for s in range(4)]
    together = perform_group(algorithm, experiment.federation, 0, tasks, known)
    for (reply, _), task, private in zip(together, tasks, known, strict=True):
        alone, _ = perform(algorithm, experiment.federation, 0, task, private)
        assert all(torch.allclose(reply.tensors[n], value, atol=1e-5) for n, value in alone.tensors.items())


def trained(experiment, out):
    directory = RunDirectory.open(out, experiment.recipe, resume=False, overwrite=False)
    try:
        return run(experiment, directory, Where("serial"))
    finally:
        directory.close()


@pytest.mark.parametrize("start", ["alike", "apart"])
def test_a_warm_start_takes_private_layers_along(tmp_path, start):
    """Liang's pre-training: Local/Global goes on where FedAvg was, its private layers too."""
    before = trained(small_experiment("fedavg", rounds=25), tmp_path / "avg")
    changes = {
        "rounds": 1,
        "warm_start": str(tmp_path / "avg"),
        "local_global.start": start,
        "training.client_lr": 1e-6,
    }
    after = trained(small_experiment("local-global", **changes), tmp_path / "lg")
    cold = trained(small_experiment("local-global", rounds=1, **{"training.client_lr": 1e-6}), tmp_path / "cold")
    reached = before["accuracy"]["test"]["server"]["mean"]
    assert reached > 0.8
    assert after["accuracy"]["test"]["server"]["mean"] == pytest.approx(reached, abs=0.02)
    assert cold["accuracy"]["test"]["server"]["mean"] < reached - 0.2
    assert after["bytes_down"] > cold["bytes_down"]  # the layers were sent, once, and counted


def test_a_start_that_was_sent_is_taken_once():
    """A newcomer's adapted layers count, and a client whose answer was refused is not set back."""
    plain = small_experiment("fedavg", rounds=10)
    models = plain.algorithm.experts(train_serially(plain)[0][-1].state)
    experiment = small_experiment("local-global")
    algorithm, data = experiment.algorithm, experiment.federation.examples(0, "train")
    state = algorithm.warm_start(algorithm.init(0), models, stream(0))
    message, new = algorithm.newcomer(state, True), algorithm.new_client(0, 0)
    after, private = algorithm.adapt(message, new, data, stream(0), 30)
    with torch.no_grad():
        before, adapted = algorithm.predict(message, new, data.x), algorithm.predict(after, private, data.x)
    wanted = models[0]["fc1.weight"]
    assert torch.equal(algorithm.client.parts(message, new).private["fc1.weight"], wanted)
    assert not torch.allclose(before, adapted, atol=1e-3)
    _, trained_once = algorithm.client_update(message, new, data, stream(0), None)
    again = algorithm.client.parts(message, trained_once).private["fc1.weight"]
    assert torch.equal(again, trained_once["fc1.weight"])
    assert not torch.equal(again, wanted)


def test_frozen_weights_of_an_older_run_are_taken_or_refused():
    experiment = small_experiment("fedmix", model=Pretrained)
    algorithm = experiment.algorithm
    flat = {name.removeprefix("extras."): value for name, value in flatten(algorithm.init(0)).items()}
    other = Pretrained(seed=9).state_dict()
    for k in range(3):
        flat |= {f"experts.{k}.body.{kind}": other[f"body.{kind}"] for kind in ("weight", "bias")}
    state = algorithm.state_from(flat)
    assert torch.equal(algorithm.experts(state)[1]["body.weight"], other["body.weight"])
    with pytest.raises(ValueError, match="differs between experts"):
        algorithm.state_from(flat | {"experts.1.body.weight": other["body.weight"] + 1})


def test_frozen_weights_of_half_precision_have_a_digest_and_a_missing_weight_is_no_weight():
    assert digest_of({"a": torch.ones(3, dtype=torch.bfloat16)}) != digest_of({"a": torch.ones(3, dtype=torch.float16)})
    model = small_experiment("fedavg").model
    part = {name: value for name, value in model.init(stream(0)).items() if name != "out.bias"}
    with pytest.raises(ModelError, match=r"a model needs all of its parameters\. Missing: out\.bias"):
        model.apply(part, torch.zeros(2, 2), training=False)


@pytest.mark.parametrize("method", METHODS)
def test_a_clients_module_can_be_saved_and_copied(tmp_path, method):
    given = {"federation": small_federation(), "algorithm": method, "engine": "serial", "rounds": 1}
    module = fedmix.train(out=tmp_path / "run", **given).client(0).module()
    torch.save(module, tmp_path / "module.pt")
    assert (tmp_path / "module.pt").stat().st_size > 1000
    x = small_federation().x[:4]
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(module)(x), module(x))


def test_private_layers_start_apart_where_that_is_said():
    for start, same in (("alike", True), ("apart", False)):
        algorithm = small_experiment("local-global", **{"local_global.start": start}).algorithm
        one, other = (algorithm.new_client(0, s)["fc1.weight"] for s in (0, 1))
        assert torch.equal(one, other) == same
        assert torch.equal(one, algorithm.new_client(0, 0)["fc1.weight"])  # and the same again


def mixed(setup, settings):
    """FedMix with a shared body: everything but the output layer is one for all."""
    return replace(mixture(setup, settings), place=lambda name: "expert" if name.startswith("out") else "shared")


def test_experts_that_share_a_body_are_a_rule_of_placement():
    from fedmix.methods.fedmix_settings import FedmixSettings

    page = Page("shared body", mixed, FedmixSettings)
    experiment = build(small_recipe("own", **{"own.experts": 3}), small_federation(), page=page)
    algorithm = experiment.algorithm
    assert algorithm.one_by_one is None
    steps, privates = train_serially(experiment)
    sent = algorithm.broadcast(steps[-1].state, 0).tensors
    assert sorted(n for n in sent if "fc1" in n) == ["fc1.bias", "fc1.weight"]
    assert sum("out.weight" in name for name in sent) == 3
    tasks = [Task("train", 4, s, algorithm.broadcast(steps[-1].state, s)) for s in range(4)]
    known = [privates[s] for s in range(4)]
    for (reply, _), task, private in zip(
        perform_group(algorithm, experiment.federation, 0, tasks, known), tasks, known, strict=True
    ):
        alone, _ = perform(algorithm, experiment.federation, 0, task, private)
        assert all(torch.allclose(reply.tensors[n], value, atol=1e-5) for n, value in alone.tensors.items())
    # shared tensors are averaged with p(s), experts with p(s|z=k)
    plain = build(small_recipe("own", **{"server.optimizer": "average"}), small_federation(), page=page)
    (step,), _ = train_serially(plain, last=1)
    n = [reply.message.numbers["n"] for reply in step.replies]
    mean = sum(w / sum(n) * r.message.tensors["fc1.weight"] for w, r in zip(n, step.replies, strict=True))
    assert torch.allclose(step.state.shared["fc1.weight"], mean, atol=1e-6)
    q = [w * float(r.message.tensors["q_zs"][1]) for w, r in zip(n, step.replies, strict=True)]
    expert = sum(w / sum(q) * r.message.tensors["expert.1.out.bias"] for w, r in zip(q, step.replies, strict=True))
    assert torch.allclose(step.state.experts[1]["out.bias"], expert, atol=1e-6)


def test_places_that_are_none_and_names_that_say_two_things_are_refused():
    with pytest.raises(ModelError, match=r"place\('a'\) must be one of shared, expert, private, frozen. Got 'here'"):
        lay_out(["a"], [], lambda name: "here", 0, "mine")
    with pytest.raises(ModelError, match="number of experts must be 1 or more"):
        lay_out(["a"], [], lambda name: "expert", 0, "mine")
    layout = lay_out(["expert.0.a", "a"], [], lambda name: "expert" if name == "a" else "shared", 2, "mine")
    with pytest.raises(ModelError, match=r"must not be called 'expert\.0\.a'"):
        layout.refuse_equal_names([])


def test_a_digest_names_values_names_types_and_shapes():
    w = {"a": torch.arange(4.0)}
    known = digest_of(w)
    assert digest_of({"a": torch.arange(4.0)}) == known < 2**48
    for other in ({"b": w["a"]}, {"a": w["a"].double()}, {"a": w["a"].view(2, 2)}, {"a": w["a"] + 1}):
        assert digest_of(other) != known


class Relu(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(torch.relu(self.fc(x)))


class Tanh(Relu):
    def forward(self, x):
        return self.out(torch.tanh(self.fc(x)))


Tanh.__qualname__ = Relu.__qualname__


def test_a_model_that_is_not_the_trained_one_is_refused(tmp_path):
    given = {"federation": small_federation(), "output": "out", "engine": "serial", "rounds": 1}
    fedmix.train(model=Relu, out=tmp_path / "own", **given)
    assert fedmix.load(tmp_path / "own", Relu)
    with pytest.raises(RunError, match="the model that it was trained with"):
        fedmix.load(tmp_path / "own", Tanh)
    layers = (nn.ReLU, nn.Tanh)
    one, other = (lambda act=act: nn.Sequential(nn.Linear(2, 4), act(), nn.Linear(4, 3)) for act in layers)
    fedmix.train(model=one, out=tmp_path / "layers", **given | {"output": "2"})
    with pytest.raises(RunError, match=r"It had '\(1\): ReLU\(\)' where this one has '\(1\): Tanh\(\)'"):
        fedmix.load(tmp_path / "layers", other)
    with pytest.raises(RunError, match="the model that it was trained with"):
        fedmix.evaluate(tmp_path / "layers", federation=small_federation(), model=other)


def test_an_exported_module_has_all_of_the_models_parameters():
    model = small_experiment("fedavg").model
    whole = model.init(stream(0))
    missing = {name: value for name, value in whole.items() if name != "out.bias"}
    for wrong, name in ((missing, "out.bias"), ({**whole, "more": torch.zeros(1)}, "more")):
        with pytest.raises(ModelError, match=f"Missing or unexpected: {name}"):
            model.module_with(wrong)


@pytest.mark.parametrize("method", METHODS)
def test_run_directories_of_before_are_read_and_go_on(tmp_path, method):
    """Schema 1: no run.json, FedMix's posterior at the top of the state."""
    experiment = small_experiment(method, rounds=2)
    trained(experiment, tmp_path / "r")
    whole = trained(small_experiment(method, rounds=3), tmp_path / "whole")
    (tmp_path / "r" / "run.json").unlink()
    folder = tmp_path / "r" / "checkpoints" / "round-000002"
    from safetensors.torch import load_file

    from fedmix.running.files import write_json, write_tensors

    flat = {name.removeprefix("extras."): value for name, value in load_file(folder / "server.safetensors").items()}
    manifest = json.loads((folder / "manifest.json").read_text())
    write_json(folder / "manifest.json", manifest | {"server": write_tensors(folder / "server.safetensors", flat)})
    assert fedmix.load(tmp_path / "r").round == 2
    again = small_experiment(method, rounds=3)
    directory = RunDirectory.open(tmp_path / "r", again.recipe, resume=True, overwrite=False)
    summary = run(again, directory, Where("serial"))
    directory.close()
    assert summary["loss"] == whole["loss"]
    assert summary["scores"] == whole["scores"]
    assert json.loads((tmp_path / "r" / "run.json").read_text())["schema"] == schema.VERSION


def test_a_run_of_a_later_version_is_refused_in_one_line(tmp_path):
    trained(small_experiment(rounds=1), tmp_path / "r")
    about = json.loads((tmp_path / "r" / "run.json").read_text())
    (tmp_path / "r" / "run.json").write_text(json.dumps(about | {"schema": 99}))
    with pytest.raises(RunError, match="schema 99, and this fedmix knows up to 3; use a newer fedmix"):
        fedmix.load(tmp_path / "r")
    (tmp_path / "r" / "run.json").write_text("{")
    with pytest.raises(RunError, match=r"run\.json must describe the run. It is damaged"):
        fedmix.load(tmp_path / "r")


def test_own_data_is_described_as_it_is(tmp_path):
    federation = small_federation(clients=5, side="client")
    fedmix.train(federation=federation, out=tmp_path / "r", engine="serial", rounds=1)
    data = fedmix.load(tmp_path / "r").recipe.data
    assert (data.clients, data.side, data.split, data.holdout_clients) == (5, "client", "by-client", 0)


def test_names_on_the_wire_are_parsed_by_the_layout_alone():
    """A reply with an expert that is no number ended everybody's run; it is refused by name."""
    experiment = small_experiment("fedmix")
    algorithm = experiment.algorithm
    sent = algorithm.broadcast(algorithm.init(0), 0)
    reply, _ = algorithm.client_update(
        sent, algorithm.new_client(0, 0), experiment.federation.examples(0, "train"), stream(0), None
    )
    for name in ("expert.x.y", "expert.99.out.bias", "expert.", "shared.out.bias", "gate.A"):
        wrong = Message({**reply.tensors, name: torch.zeros(3)}, reply.numbers)
        assert algorithm.check(sent, wrong) == f"{name}: it was not sent to this client"
