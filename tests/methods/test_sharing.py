"""FedMix whose experts share layers, differ by factors, or are left out of a client's round by chance."""

import json

import pytest
import torch
from conftest import fedmix as command_line
from conftest import small_experiment
from conftest import train_serially as train_all_rounds
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedmix.core.mixture import ClientModule
from fedmix.core.tree import flatten, nbytes
from fedmix.core.types import Message, Reply
from fedmix.errors import ModelError, SettingError
from fedmix.methods.fedmix_settings import FedmixSettings
from fedmix.methods.fedmix_sharing import decide
from fedmix.rng import stream
from fedmix.settings.reading import read_recipe
from fedmix.testing import check_method

OUTPUT = {"fedmix.shared": "all-but-output"}
FACTORS = {"fedmix.factor_layers": ["fc1"], "fedmix.rank": 2}
ROWS = {"fedmix.factor_layers": ["fc1"], "fedmix.rank": 0}
CHOICES = {
    "output": OUTPUT,
    "names": {"fedmix.shared": ["fc1.weight", "out.bias"]},
    "pattern": {"fedmix.shared": ["fc*"]},
    "layer": {"fedmix.shared": ["fc1"]},
    "factors": FACTORS,
    "rows and columns": ROWS,
    "factors and output": {**FACTORS, **OUTPUT},
}


def train_serially(experiment):
    """The state after the last round, and the clients' private states."""
    steps, privates = train_all_rounds(experiment)
    return steps[-1].state, privates


def weights_of(state):
    return {name: value for name, value in flatten(state).items() if name.startswith(("shared", "experts."))}


@pytest.mark.parametrize("choice", CHOICES)
def test_one_expert_is_fedavg_whatever_it_shares(choice):
    one, _ = train_serially(small_experiment(**CHOICES[choice], **{"fedmix.experts": 1}))
    plain, _ = train_serially(small_experiment("fedavg"))
    weights = {**one.shared, **one.experts[0]}
    assert weights.keys() == plain.shared.keys()
    for name, value in plain.shared.items():
        assert torch.allclose(weights[name], value, atol=1e-6)


def test_with_everything_shared_it_is_fedavg():
    everything, _ = train_serially(small_experiment(**{"fedmix.shared": ["*"]}))
    plain, _ = train_serially(small_experiment("fedavg"))
    for name, value in plain.shared.items():
        assert torch.equal(everything.shared[name], value)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_law_holds_whatever_is_shared(choice):
    settings = {key.removeprefix("fedmix."): value for key, value in CHOICES[choice].items()}
    assert len(check_method("fedmix", experts=3, **settings)) == 10


@pytest.mark.parametrize("more", [{"full_steps": True}, {"evidence": "arriving"}])
def test_every_law_holds_with_what_else_there_is(more):
    assert len(check_method("fedmix", shared="all-but-output", **more)) == 10


def test_with_pruning_what_is_shared_always_comes_back_and_some_experts_do_not():
    experiment = small_experiment(**OUTPUT, **{"fedmix.eta": 1.0, "fedmix.gamma": 0.1, "rounds": 4})
    steps, _ = train_all_rounds(experiment)
    layout = experiment.algorithm.layout
    returned = [layout.unpack(reply.message.tensors) for step in steps for reply in step.replies]
    assert all(list(reply.shared) == layout.shared for reply in returned)
    assert all(reply.experts for reply in returned)
    assert any(len(reply.experts) < 3 for reply in returned)


def test_the_gradient_of_what_is_shared_is_that_of_the_bound():
    """One step on all points, against a loop in float64 over points and experts."""
    changes = {"training.batch_size": 100, "training.client_lr": 0.1, "fedmix.gamma": 0.5, "training.epochs": 1}
    experiment = small_experiment(**OUTPUT, **changes)
    algorithm, data = experiment.algorithm, experiment.federation.examples(1, "train")
    message = algorithm.broadcast(algorithm.init(0), 1)
    private = algorithm.new_client(0)
    reply, _ = algorithm.client_update(message, private, data, stream(0), None)
    parts = algorithm.client.parts(message, private)
    leaf = {name: value.double().requires_grad_() for name, value in parts.shared.items()}
    heads = [{n: v.double().requires_grad_() for n, v in parts.experts[k].items()} for k in range(3)]
    losses = []
    phi = reply.tensors["phi"].double()  # as it was after the only mini-batch, which the loss used
    for x, y, c in zip(data.x.double(), data.y.tolist(), data.c.tolist(), strict=True):
        h = torch.relu(leaf["fc1.weight"] @ x + leaf["fc1.bias"])
        for k, head in enumerate(heads):
            log_p = torch.log_softmax(head["out.weight"] @ h + head["out.bias"], dim=0)
            losses.append(-phi[c, k] * (log_p[y] - torch.log(torch.tensor(3.0))) / len(data))
    total = torch.stack(losses).sum()
    total.backward()
    for name, value in leaf.items():
        assert torch.allclose(reply.tensors[name].double(), value.detach() - 0.1 * value.grad, atol=1e-6)
    for k, head in enumerate(heads):
        for name, value in head.items():
            got = reply.tensors[f"expert.{k}.{name}"].double()
            assert torch.allclose(got, value.detach() - 0.1 * value.grad, atol=1e-6)


def test_full_steps_are_those_of_experts_and_not_of_what_they_share():
    """With equal shares every expert steps as far as one model would; what is shared steps as it does without."""
    changes = {"training.batch_size": 100, "fedmix.gamma": 1.0, "fedmix.gate_through_features": False}
    moved = {}
    for full in (False, True):
        experiment = small_experiment(**OUTPUT, **changes, **{"fedmix.full_steps": full})
        algorithm = experiment.algorithm
        message = algorithm.broadcast(algorithm.init(0), 0)
        data = experiment.federation.examples(0, "train")
        reply, _ = algorithm.client_update(message, algorithm.new_client(0), data, stream(0), None)
        moved[full] = {name: reply.tensors[name] - message.tensors[name] for name in message.tensors if name != "phi"}
    for name, value in moved[False].items():
        times = 3.0 if name.startswith("expert.") else 1.0
        assert torch.allclose(moved[True][name], times * value, atol=1e-6)


def test_what_is_shared_is_computed_once():
    """FLOP of a mini-batch: with four output layers little more than FedAvg's, with four experts four times as many."""
    flop = {}
    for name, algorithm, changes in (
        ("fedavg", "fedavg", {}),
        ("shared", "fedmix", OUTPUT),
        ("whole", "fedmix", {}),
    ):
        sizes = (
            {"model.hidden": [256, 16], "fedmix.experts": 4} if algorithm == "fedmix" else {"model.hidden": [256, 16]}
        )
        experiment = small_experiment(algorithm, **sizes, **changes)
        method = experiment.algorithm
        message = method.broadcast(method.init(0), 0)
        with FlopCounterMode(display=False) as counter:
            method.client_update(
                message, method.new_client(0), experiment.federation.examples(0, "train"), stream(0), 1
            )
        flop[name] = counter.get_total_flops()
    assert flop["shared"] < 1.15 * flop["fedavg"]
    assert flop["whole"] > 3.9 * flop["fedavg"]


def test_bytes_are_what_the_placement_says():
    experiment = small_experiment(**OUTPUT)
    algorithm = experiment.algorithm
    message = algorithm.broadcast(algorithm.init(0), 0)
    beside = algorithm.layout.unpack(message.tensors).beside
    hidden, output = 8 * 2 + 8, 3 * 8 + 3
    assert message.nbytes - nbytes(beside) == 4 * (hidden + 3 * output)
    algorithm = small_experiment(**FACTORS, **OUTPUT).algorithm
    message = algorithm.broadcast(algorithm.init(0), 0)
    factors = 8 * 2 + 2 * 2
    assert message.nbytes - nbytes(beside) == 4 * (hidden + 3 * (output + factors))


def test_factors_are_averaged_one_by_one():
    """Each factor of an expert is the mean of those that clients return, weighted by N_s q(z=k|s)."""
    experiment = small_experiment(**FACTORS, **{"server.optimizer": "average", "fedmix.gamma": 1.0})
    algorithm = experiment.algorithm
    state = algorithm.init(0)
    replies, weights = [], []
    for s in range(4):
        data = experiment.federation.examples(s, "train")
        message = algorithm.broadcast(state, s)
        reply, _ = algorithm.client_update(message, algorithm.new_client(0), data, stream(0, s), None)
        replies.append(Reply(s, reply))
        weights.append(len(data))
    after, _ = algorithm.server_update(state, replies)
    for k in range(3):
        for name in ("fc1.weight.up", "fc1.weight.down"):
            copies = [
                n * reply.message.tensors[f"expert.{k}.{name}"] for n, reply in zip(weights, replies, strict=True)
            ]
            assert torch.allclose(after.experts[k][name], sum(copies) / sum(weights), atol=1e-6)


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(4 * 16, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.fc(self.drop(self.conv(x).relu()).flatten(1)).relu())


def test_convolutions_are_shared_by_a_pattern_and_dropout_is_no_obstacle():
    from fedmix.data.federation import Federation

    rng = torch.Generator().manual_seed(0)
    sites = {f"s{s}": {"x": torch.randn(20, 1, 6, 6, generator=rng).numpy(), "y": [0, 1, 2, 1] * 5} for s in range(2)}
    federation = Federation.from_clients(sites)
    experiment = small_experiment(federation=federation, model=Convolutional, **{"fedmix.shared": ["conv"]})
    layout = experiment.algorithm.layout
    assert layout.shared == ["conv.weight", "conv.bias"]
    assert experiment.model.stacks(layout.expert)
    first, _ = train_serially(experiment)
    again, _ = train_serially(experiment)
    for name, value in flatten(first).items():
        assert torch.equal(value, flatten(again)[name])
    # whole convolutions of experts' own are quicker one after the other
    assert not experiment.model.stacks(["conv.weight", "out.weight"])


# -- left out by chance --------------------------------------------------------------------------------------------------

DROPOUT = {"fedmix.expert_dropout": 0.6}


def with_known_use(experiment):
    """A state in which clients use experts differently."""
    state = experiment.algorithm.init(0)
    state.extras["q_zs"] = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [0.5, 0.4, 0.1]])
    state.extras["phi"] = torch.tensor([[0.6, 0.3, 0.1]]).repeat(3, 1)
    return state


def test_experts_are_left_out_the_more_the_less_they_are_used():
    experiment = small_experiment(**DROPOUT)
    algorithm, state = experiment.algorithm, with_known_use(experiment)
    sent = torch.zeros(4, 3)
    for t in range(400):
        in_round = type(state)(**{**state.__dict__, "round": t})
        for s in range(4):
            held = list(algorithm.layout.unpack(algorithm.broadcast(in_round, s, training=True).tensors).experts)
            sent[s, held] += 1
    q = state.extras["q_zs"]
    wanted = 1 - 0.6 * (1 - q / q.max(dim=1, keepdim=True).values)
    assert torch.allclose(sent / 400, wanted, atol=0.09)
    assert bool((sent.max(dim=1).values == 400).all())
    everything = algorithm.layout.unpack(algorithm.broadcast(state, 0).tensors).experts
    assert list(everything) == [0, 1, 2]  # an evaluation leaves nothing out


def test_what_comes_back_has_the_same_mean_as_with_all_experts():
    """Over every way in which experts may be left out, weighed by its chance, against all of them."""
    experiment = small_experiment(**DROPOUT)
    server, state = experiment.algorithm.server, with_known_use(experiment)
    q, n = state.extras["q_zs"], torch.tensor([24.0, 28.0, 32.0, 36.0])
    chances = server._chances(state, [0, 1, 2, 3])
    all_there = torch.ones(4, 3, dtype=torch.bool)
    updates = torch.randn(4, generator=torch.Generator().manual_seed(0)).double()
    k = 1
    mean = 0.0
    for pattern in range(16):
        returned = all_there.clone()
        returned[:, k] = torch.tensor([bool(pattern >> s & 1) for s in range(4)])
        chance = torch.where(returned[:, k], chances[:, k], 1 - chances[:, k]).prod()
        mean += float(chance * (server._expert_weights(q, n, returned, chances)[:, k] @ updates))
    whole = server._expert_weights(q, n, all_there, None)[:, k] @ updates
    assert mean == pytest.approx(float(whole), rel=1e-6)


def test_fewer_bytes_cross_the_wire_and_a_run_repeats():
    state, _ = train_serially(small_experiment(**DROPOUT, **{"rounds": 6, "fedmix.gamma": 0.1}))
    again, _ = train_serially(small_experiment(**DROPOUT, **{"rounds": 6, "fedmix.gamma": 0.1}))
    for name, value in weights_of(state).items():
        assert torch.equal(value, weights_of(again)[name])
    experiment = small_experiment(**DROPOUT)
    algorithm, known = experiment.algorithm, with_known_use(experiment)
    sizes = [algorithm.broadcast(known, s, training=True).nbytes for s in range(4)]
    assert min(sizes) < algorithm.broadcast(known, None).nbytes


# -- what is refused, what is exported -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fedmix.shared": ["fc7"]}, "no parameter is called 'fc7'. There are: fc1.weight"),
        ({"fedmix.factor_layers": ["fc7"]}, "no layer is called 'fc7'. There are: fc1, out"),
        ({"fedmix.rank": -1}, "fedmix.rank must be 1 or more, or 0"),
        ({"fedmix.expert_dropout": 1.0}, "fedmix.expert_dropout must be in"),
        ({"fedmix.expert_dropout": 0.5, "fedmix.eta": 0.5}, "both leave experts out"),
        ({"fedmix.expert_dropout": 0.5, "server.aggregation": "linear"}, "the server does not see who uses which"),
        ({"fedmix.expert_dropout": 0.5, "fedmix.experts": "auto", "fedmix.evidence": "arriving"}, "must be known"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises((SettingError, ModelError), match=message):
        small_experiment(**changes)


def test_the_command_line_says_it_in_one_line(tmp_path):
    done = command_line("train", "digits-permutation", "--set", "fedmix.shared=fc9", "--out", str(tmp_path / "r"))
    assert done.returncode == 2
    assert "no parameter is called 'fc9'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("choice", ["output", "factors", "rows and columns"])
def test_a_module_predicts_what_its_client_does(choice):
    experiment = small_experiment(**CHOICES[choice])
    state, privates = train_serially(experiment)
    algorithm, x = experiment.algorithm, experiment.federation.x[:5]
    message = algorithm.broadcast(state, 0)
    module = ClientModule(algorithm, message, privates[0]).eval()
    assert torch.allclose(module(x), algorithm.predict(message, privates[0], x), atol=1e-6)


# -- which layers --------------------------------------------------------------------------------------------------------


def test_layers_on_which_clients_disagree_most_become_experts_within_the_budget():
    model = small_experiment("fedavg", **{"model.hidden": [8, 8]}).model
    names = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    sizes = {"fc1": 24, "fc2": 72, "out": 27}

    def chosen(budget, disagree):
        divergence = dict.fromkeys(model.names, 0.1) | {f"{disagree}.{part}": 0.4 for part in ("weight", "bias")}
        return decide(FedmixSettings(shared="auto", budget=budget, experts=3), model, divergence).shared

    def cost(*layers):
        return 1 + 2 * sum(sizes[layer] for layer in layers) / sum(sizes.values())

    assert chosen(cost("out"), "fc1") == names
    assert chosen(cost("out", "fc1"), "fc1") == names[2:]
    assert chosen(cost("out", "fc2"), "fc2") == names[:2]
    assert chosen(cost("out", "fc1"), "fc2") == names[2:]  # the one that fits
    assert chosen(3.0, "fc2") == "none"
    with pytest.raises(SettingError, match=r"fedmix.budget must be 1.44 or more with 3 experts"):
        chosen(1.4, "fc1")


def test_what_a_short_run_chose_is_in_the_recipe_and_stays_when_the_run_goes_on(tmp_path):
    out = str(tmp_path / "r")
    settings = ["--set", "fedmix.shared=auto", "--set", "fedmix.budget=2", "--out", out, "--quiet"]
    done = command_line("train", "digits-skew", "--rounds", "2", *settings)
    assert done.returncode == 0, done.stderr
    chosen = read_recipe(out).fedmix.shared
    assert chosen == ["fc1.weight", "fc1.bias"]
    done = command_line("train", "digits-skew", "--rounds", "3", *settings, "--resume")
    assert done.returncode == 0, done.stderr
    assert read_recipe(out).fedmix.shared == chosen
    assert command_line("evaluate", out, "--quiet").returncode == 0


def test_a_short_run_is_refused_where_single_clients_are_not_seen():
    for more in ({"server.aggregation": "linear"}, {"privacy.noise": 1.0, "privacy.clip": 1.0}):
        with pytest.raises(SettingError, match="the short run that decides sees single clients' updates"):
            small_experiment(**{"fedmix.shared": "auto"}, **more)


def test_a_plan_compares_what_may_be_shared():
    done = command_line("plan", "digits-skew", "--shared", "--json", "--set", "model.hidden=[16,8]")
    rows = json.loads(done.stdout)
    assert [row["shared"] for row in rows] == ["FedAvg", "nothing", "fc1", "all but output"]
    weights = [row["bytes"]["weights_per_round"] for row in rows]
    first, second, output = 64 * 16 + 16, 16 * 8 + 8, 8 * 10 + 10
    one = first + second + output
    wanted = [one, 4 * one, first + 4 * (second + output), first + second + 4 * output]
    assert [count / weights[0] for count in weights] == pytest.approx([count / one for count in wanted])
    computed = [row["flop_per_round"] for row in rows]
    assert computed[1] > computed[2] > computed[3] > computed[0]
    table = command_line("plan", "digits-skew", "--shared").stdout
    assert "all but output" in table
    refused = command_line("plan", "digits-skew", "--shared", "--algorithm", "fedavg")
    assert refused.returncode == 2
    assert "fedavg has no such setting" in refused.stderr


# -- what a review found -------------------------------------------------------------------------------------------------


def test_full_steps_are_the_same_whether_layers_are_shared_or_not_where_experts_are_left_out():
    """Left-out experts leave their share to the others: an output layer's gradient is that of experts that share nothing."""
    moved = {}
    for name, changes in (("shared", OUTPUT), ("whole", {})):
        more = {"training.batch_size": 100, "fedmix.full_steps": True, "fedmix.gamma": 1.0}
        experiment = small_experiment(**changes, **more, **{"fedmix.expert_dropout": 0.5})
        algorithm = experiment.algorithm
        start = algorithm.init(0)
        one = algorithm.init(0).experts[0] if name == "whole" else {**start.shared, **start.experts[0]}
        phi = torch.tensor([[0.5, 0.2, 0.3]]).repeat(3, 1)
        weights = {n: one[n] for n in algorithm.layout.expert}
        tensors = {f"expert.{k}.{n}": v for k in (0, 1) for n, v in weights.items()}
        message = Message({**{n: one[n] for n in algorithm.layout.shared}, **tensors, "phi": phi}, {"round": 1})
        data = experiment.federation.examples(0, "train")
        reply, _ = algorithm.client_update(message, algorithm.new_client(0), data, stream(0), None)
        moved[name] = reply.tensors["expert.0.out.weight"] - message.tensors["expert.0.out.weight"]
    assert torch.allclose(moved["shared"], moved["whole"], atol=1e-6)


def test_a_warm_start_does_not_mix_bodies_and_heads(tmp_path):
    whole = small_experiment()
    state, _ = train_serially(whole)
    models = whole.algorithm.experts(state)
    for changes in (OUTPUT, FACTORS):
        algorithm = small_experiment(**changes).algorithm
        with pytest.raises(ModelError, match="models that agree in what experts share"):
            algorithm.warm_start(algorithm.init(0), models, stream(0))
    algorithm = small_experiment(**OUTPUT).algorithm
    shared, _ = train_serially(small_experiment(**OUTPUT))
    again = algorithm.warm_start(algorithm.init(0), algorithm.experts(shared), stream(0))
    assert all(torch.equal(value, shared.shared[name]) for name, value in again.shared.items())


class Tied(nn.Module):
    """A model that uses one layer's weight in another place, too."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.out = nn.Linear(2, 3)

    def forward(self, x):
        return self.out(torch.nn.functional.linear(self.a(x).relu(), self.a.weight))


def test_factors_that_would_not_be_seen_are_refused():
    with pytest.raises(ModelError, match="factors of a would not be seen"):
        small_experiment(model=Tied, **{"fedmix.factor_layers": ["a"], "fedmix.rank": 1})


class WithToken(nn.Module):
    """A model with a parameter of its own at the top."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(2))
        self.out = nn.Linear(2, 3)

    def forward(self, x):
        return self.out(x + self.token)


def test_auto_takes_a_parameter_at_the_top_for_a_layer():
    model = small_experiment("fedavg", model=WithToken).model
    settings = FedmixSettings(shared="auto", budget=3.0, experts=2)
    assert decide(settings, model, dict.fromkeys(model.names, 0.1)).shared == "none"
    settings = FedmixSettings(shared="auto", budget=1.85, experts=2)
    assert decide(settings, model, dict.fromkeys(model.names, 0.1)).shared == ["token"]


def frozen_output():
    model = WithToken()
    model.out.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fedmix.shared": "auto", "fedmix.factor_layers": ["fc1"]}, "the budget is about whole layers"),
        ({"fedmix.experts": "auto", "fedmix.repair": True, "fedmix.evidence": "arriving"}, "begins with one expert"),
        ({"fedmix.repair": True, "fedmix.evidence": "arriving", "fedmix.marginal": "exact"}, "'posterior' with"),
    ],
)
def test_more_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(SettingError, match=message):
        small_experiment(**changes)


def test_an_output_layer_that_is_not_trained_leaves_nothing_to_choose():
    with pytest.raises(SettingError, match="the output layer 'out' is not trained"):
        small_experiment(model=frozen_output, **OUTPUT)
