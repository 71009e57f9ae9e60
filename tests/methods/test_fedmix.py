"""FedMix against Algorithm 1 written out naively, and against the methods it contains."""

import copy

import pytest
import torch
from conftest import small_experiment, small_federation, train_serially
from torch import nn

from fedmix.core.tree import flatten, subtree
from fedmix.core.types import Message
from fedmix.engines.store import MemoryStore
from fedmix.errors import SettingError
from fedmix.rng import stream

CATEGORIES = 3


def naive_client(experiment, message, private, data, rng, eta, gate_through=True):
    """Algorithm 2's client, line by line in float64 with ordinary modules, loops over points and torch's own SGD."""
    settings, training = experiment.recipe.fedmix, experiment.recipe.training
    K = settings.experts
    held = sorted({int(n.split(".")[1]) for n in message.tensors if n.startswith("expert.")})
    experts = {}
    for k in held:
        experts[k] = copy.deepcopy(experiment.model.module).double()
        experts[k].load_state_dict({n: w.double() for n, w in subtree(message.tensors, f"expert.{k}").items()})
    theta = {n: private[f"gate.{n}"].double().clone().requires_grad_() for n in ("pi", "A", "b")}
    phi = message.tensors["phi"].double().tolist()
    optimizer = torch.optim.SGD(
        [p for e in experts.values() for p in e.parameters()] + list(theta.values()), lr=training.client_lr
    )

    losses = []

    def q_zs():
        return [sum(phi[int(c)][k] for c in data.c) / len(data) for k in range(K)]

    def kept():
        q = q_zs()
        largest = max(held, key=lambda k: q[k])
        return [k for k in held if q[k] >= eta / K or k == largest]

    for index in training.passes().batches(len(data), rng.child("batches")):
        x, y, c = data.x[index].double(), data.y[index], data.c[index]
        keep = kept()
        hidden = {k: torch.relu(experts[k].fc1(x)) for k in keep}
        pi = torch.softmax(torch.stack([theta["pi"][k] for k in keep]), dim=0)
        h = sum(pi[j] * (hidden[k] if gate_through else hidden[k].detach()) for j, k in enumerate(keep))
        p_gate = torch.softmax(h @ theta["A"] + theta["b"], dim=1)
        often = torch.ones(CATEGORIES).double()
        if training.label_counts:
            often = torch.tensor([1.0 + CATEGORIES * int((data.y == v).sum()) for v in range(CATEGORIES)]).double()
        p_lik = {k: torch.softmax(experts[k].out(hidden[k]), dim=1) * often for k in keep}
        p_lik = {k: p / p.sum(dim=1, keepdim=True) for k, p in p_lik.items()}
        for category in sorted(set(c.tolist())):
            points = [i for i in range(len(index)) if int(c[i]) == category]
            power = []
            for k in keep:
                total = sum(float(torch.log(p_lik[k][i, y[i]] * p_gate[i, k]).detach()) for i in points)
                power.append(torch.exp(torch.tensor(total / (settings.beta * len(points)), dtype=torch.float64)).item())
            mass = sum(phi[category][k] for k in keep)
            for j, k in enumerate(keep):
                new = power[j] / sum(power) * mass
                phi[category][k] = settings.gamma * phi[category][k] + (1 - settings.gamma) * new
        likelihood, gate, shares = 0.0, 0.0, dict.fromkeys(keep, 0.0)
        for i in range(len(index)):
            row = phi[int(c[i])]
            mass = sum(row[k] for k in keep)
            shares = {k: share + row[k] / mass / len(index) for k, share in shares.items()}
            likelihood = likelihood + sum(row[k] / mass * torch.log(p_lik[k][i, y[i]]) for k in keep)
            gate = gate + sum(row[k] * torch.log(p_gate[i, k]) for k in range(K))
        losses.append((likelihood + gate).item() / -len(index))
        longer = 1 / max(shares.values()) if settings.full_steps else 1.0
        optimizer.zero_grad()
        (-(longer * likelihood + gate) / len(index)).backward()
        optimizer.step()
    last = losses[-len(losses) // training.epochs :]
    return experts, theta, phi, q_zs(), kept(), sum(last) / len(last)


@pytest.mark.parametrize("eta", [0.0, 0.9], ids=["algorithm-1", "algorithm-2"])
@pytest.mark.parametrize("through", [True, False], ids=["gate-through-features", "detached"])
@pytest.mark.parametrize("changes", [{}, {"fedmix.full_steps": True, "training.label_counts": True}], ids=["", "ours"])
def test_client_equals_the_algorithm_written_out(eta, through, changes):
    changes = changes | {"fedmix.gate_through_features": through}
    experiment = small_experiment(**{"fedmix.eta": eta, "fedmix.gamma": 0.6, "training.epochs": 2}, **changes)
    algorithm = experiment.algorithm
    steps, privates = train_serially(experiment)
    message = algorithm.broadcast(steps[-1].state, 2)
    data = experiment.federation.examples(2, "train")
    rng = stream(0, "round", 9, "client", 2)
    reply, after = algorithm.client_update(message, privates[2], data, rng, None)
    experts, theta, phi, q, keep, loss = naive_client(experiment, message, privates[2], data, rng, eta, through)
    assert reply.numbers["loss"] == pytest.approx(loss, abs=1e-5)
    if eta:
        assert len(keep) < 3  # or this tests nothing
    assert sorted({int(n.split(".")[1]) for n in reply.tensors if n.startswith("expert.")}) == keep
    for k in keep:
        for name, value in experts[k].named_parameters():
            assert torch.allclose(reply.tensors[f"expert.{k}.{name}"].double(), value.detach(), atol=1e-5)
    for name, value in theta.items():
        assert torch.allclose(after[f"gate.{name}"].double(), value.detach(), atol=1e-5)
    assert torch.allclose(reply.tensors["phi"].double(), torch.tensor(phi, dtype=torch.float64), atol=1e-5)
    assert reply.tensors["q_zs"].tolist() == pytest.approx(q, abs=1e-5)


@pytest.mark.parametrize("changes", [{}, {"training.label_counts": True}, {"fedmix.full_steps": True}])
def test_one_expert_is_fedavg(changes):
    mixed, _ = train_serially(small_experiment("fedmix", **{"fedmix.experts": 1, "rounds": 5}, **changes))
    plain, _ = train_serially(small_experiment("fedavg", rounds=5, **changes))
    for name, value in plain[-1].state.shared.items():
        assert torch.allclose(mixed[-1].state.experts[0][name], value, atol=1e-6)
    for a, b in zip(mixed, plain, strict=True):
        assert a.loss == pytest.approx(b.loss, abs=1e-6)
        assert a.diagnosis.divergence == pytest.approx(b.diagnosis.divergence, abs=1e-5)


def test_experts_that_are_all_alike_step_as_far_as_one_model():
    """Full steps, phi held at 1/K: each expert's training on a client is FedAvg's, from the same weights."""
    alike = {"fedmix.full_steps": True, "fedmix.gamma": 1.0, "fedmix.gate_through_features": False}
    mixed, plain = small_experiment("fedmix", **alike), small_experiment("fedavg")
    sent = mixed.algorithm.broadcast(mixed.algorithm.init(0), 2)
    single = plain.algorithm.broadcast(plain.algorithm.init(0), 2)  # starts where expert 0 does
    rng, data = stream(0, "round", 1, "client", 2), mixed.federation.examples(2, "train")
    many, _ = mixed.algorithm.client_update(sent, mixed.algorithm.new_client(0), data, rng, None)
    one, _ = plain.algorithm.client_update(single, plain.algorithm.new_client(0), data, rng, None)
    for name, value in subtree(many.tensors, "expert.0").items():
        assert torch.allclose(value, one.tensors[name], atol=1e-6)
        assert not torch.equal(value, single.tensors[name])


@pytest.mark.parametrize("changes", [{}, {"training.momentum": 0.9}, {"training.schedule": "cosine"}])
def test_one_expert_per_client_is_independent_training(changes):
    """K = S, c = client, phi and gates fixed to the client, plain averaging: S models that never meet."""
    settings = {"data.side": "client", "fedmix.experts": 4, "server.optimizer": "average"}
    settings |= {"fedmix.entropy": 0.0, "fedmix.phi_floor": 0.0, "rounds": 4, "training.epochs": 2} | changes
    mixed = small_experiment("fedmix", **settings)
    alone = small_experiment("independent", **settings)
    from dataclasses import replace

    start = mixed.algorithm.init(0)
    start = replace(start, extras=start.extras | {"phi": torch.eye(4)}, experts=(start.experts[0],) * 4)
    store = MemoryStore()
    for s in range(4):
        gate = mixed.algorithm.new_client(0)
        gate["gate.b"] = torch.full((4,), -1000.0).index_fill(0, torch.tensor([s]), 0.0)
        store.put(s, gate)
    steps, _ = train_serially(mixed, start, store)
    _, models = train_serially(alone)
    for s in range(4):
        for name, value in models[s].items():
            assert torch.allclose(steps[-1].state.experts[s][name], value, atol=1e-6), (s, name)
    assert torch.allclose(steps[-1].state.extras["phi"], torch.eye(4), atol=1e-6)


def test_permuting_experts_permutes_the_result():
    experiment = small_experiment()
    algorithm = experiment.algorithm
    from dataclasses import replace

    start = algorithm.init(0)
    order = [2, 0, 1]
    turned = replace(start, experts=tuple(start.experts[k] for k in order))
    one, _ = train_serially(experiment, start)
    other, _ = train_serially(experiment, turned)
    assert torch.allclose(other[-1].state.extras["phi"], one[-1].state.extras["phi"][:, order], atol=1e-4)
    for k, j in enumerate(order):
        for name, value in one[-1].state.experts[j].items():
            assert torch.allclose(other[-1].state.experts[k][name], value, atol=2e-3)


def test_pruning_sends_fewer_bytes_and_eta_zero_sends_all():
    settings = {"rounds": 6, "fedmix.gamma": 0.3, "fedmix.beta": 0.4}
    whole, _ = train_serially(small_experiment(**settings))
    pruned, _ = train_serially(small_experiment(**settings, **{"fedmix.eta": 0.7}))
    assert {step.bytes_up for step in whole} == {whole[0].bytes_up}
    assert {step.bytes_down for step in whole} == {whole[0].bytes_down}
    assert pruned[0].bytes_down == whole[0].bytes_down  # nothing is known of the clients yet
    assert pruned[1].bytes_down < whole[1].bytes_down
    assert all(a.bytes_up < b.bytes_up for a, b in zip(pruned, whole, strict=True))
    returned = pruned[-1].diagnosis.detail["experts_returned"]
    assert sum(returned) < 12
    assert all(bool(torch.isfinite(t).all()) for t in flatten(pruned[-1].state).values())


def test_a_client_with_one_expert_trains_it_like_fedavg():
    """Pruned to one expert, and the gate kept out of the features: the likelihood under phi'' is FedAvg's loss."""
    experiment = small_experiment(**{"fedmix.gate_through_features": False, "fedmix.eta": 1.0})
    plain = small_experiment("fedavg")
    algorithm = experiment.algorithm
    from fedmix.core.types import Message

    whole = algorithm.broadcast(algorithm.init(0), None)
    alone = {n: t for n, t in whole.tensors.items() if not n.startswith(("expert.1", "expert.2"))}
    data, rng = experiment.federation.examples(0, "train"), stream(0, "x")
    reply, _ = algorithm.client_update(Message(alone, whole.numbers), algorithm.new_client(0), data, rng, None)
    start = plain.algorithm.broadcast(plain.algorithm.init(0), 0)
    wanted, _ = plain.algorithm.client_update(start, {}, data, rng, None)
    for name, value in wanted.tensors.items():
        assert torch.equal(reply.tensors[f"expert.0.{name}"], value)


def test_an_expert_that_was_not_sent_costs_no_computation():
    from torch.utils.flop_counter import FlopCounterMode

    experiment = small_experiment("fedmix", **{"fedmix.eta": 0.5})
    algorithm, data = experiment.algorithm, experiment.federation.examples(0, "train")
    whole = algorithm.broadcast(algorithm.init(0), None)

    def flop(held):
        left_out = [f"expert.{k}." for k in range(3) if k not in held]
        tensors = {n: w for n, w in whole.tensors.items() if not n.startswith(tuple(left_out))}
        with FlopCounterMode(display=False) as counter:
            algorithm.client_update(Message(tensors, whole.numbers), algorithm.new_client(0), data, stream(0), 1)
        return counter.get_total_flops()

    one, two, three = (flop(range(n)) for n in (1, 2, 3))
    assert 1.8 * one < two < 2 * one  # nothing for those left out; the gate is the rest
    assert 2.5 * one < three < 3 * one


def test_an_expert_that_nobody_returned_keeps_weights_and_adam_state():
    experiment = small_experiment()
    algorithm = experiment.algorithm
    from fedmix.core.types import Message, Reply

    steps, privates = train_serially(experiment)
    state = steps[-1].state
    replies = []
    for s in range(4):
        reply, _ = algorithm.client_update(
            algorithm.broadcast(state, s), privates[s], experiment.federation.examples(s, "train"), stream(0, s), None
        )
        left = {n: t for n, t in reply.tensors.items() if not n.startswith("expert.1.")}
        replies.append(Reply(s, Message(left, reply.numbers)))
    after, diagnosis = algorithm.server_update(state, replies)
    assert all(torch.equal(after.experts[1][n], w) for n, w in state.experts[1].items())
    same = flatten(after.experts_opt[1])
    assert all(torch.equal(same[n], t) for n, t in flatten(state.experts_opt[1]).items())
    assert not torch.equal(after.experts[0]["out.bias"], state.experts[0]["out.bias"])
    assert diagnosis.detail["experts_returned"] == [4, 0, 4]


def test_rows_of_phi_that_no_client_of_the_cohort_holds_keep_their_values():
    experiment = small_experiment(**{"data.side": "client", "clients_per_round": 2, "rounds": 1})
    steps, _ = train_serially(experiment)
    chosen = {reply.client for reply in steps[0].replies}
    phi = steps[0].state.extras["phi"]
    for s in range(4):
        assert torch.equal(phi[s], torch.full((3,), 1 / 3)) == (s not in chosen)
        assert (float(steps[0].state.extras["phi_opt"]["step"]["phi"][s]) == 1) == (s in chosen)


def test_private_phi_stays_with_the_client():
    experiment = small_experiment(**{"fedmix.phi": "private", "fedmix.gamma": 0.5})
    steps, privates = train_serially(experiment)
    assert "phi" not in steps[-1].replies[0].message.tensors
    assert "phi" not in experiment.algorithm.broadcast(steps[-1].state, 0).tensors
    assert not torch.equal(privates[0]["phi"], privates[1]["phi"])
    assert torch.allclose(privates[0]["phi"].sum(dim=1), torch.ones(3), atol=1e-5)


def test_exact_marginal_is_the_mean_of_the_gate():
    experiment = small_experiment(**{"fedmix.marginal": "exact", "training.epochs": 3})
    algorithm = experiment.algorithm
    message, private = algorithm.broadcast(algorithm.init(0), 0), algorithm.new_client(0)
    data = experiment.federation.examples(0, "train")
    reply, after = algorithm.client_update(message, private, data, stream(0, "x"), None)
    from fedmix.core.mixture import ClientModule

    with torch.no_grad():
        wanted = ClientModule(algorithm, Message(reply.tensors), after).expert_weights(data.x).mean(dim=0)
    assert torch.allclose(reply.tensors["q_zs"], wanted, atol=1e-6)
    assert not torch.allclose(wanted, torch.full((3,), 1 / 3), atol=1e-3)


def test_direct_objective_trains_without_a_posterior():
    steps, _ = train_serially(small_experiment(rounds=10, **{"fedmix.objective": "direct", "fedmix.marginal": "exact"}))
    assert torch.equal(steps[-1].state.extras["phi"], torch.full((3, 3), 1 / 3))
    assert steps[-1].loss < 0.8 * steps[0].loss


def test_reported_prior_is_sent_only_when_the_recipe_says_so():
    silent, _ = train_serially(small_experiment())
    assert "c_shares" not in silent[0].replies[0].message.tensors
    told, _ = train_serially(small_experiment(**{"fedmix.prior": "reported"}))
    assert "c_shares" in told[0].replies[0].message.tensors
    assert not torch.equal(told[-1].state.extras["phi"], silent[-1].state.extras["phi"])


def test_a_prior_of_ones_own_must_fit():
    steps, _ = train_serially(small_experiment(**{"fedmix.prior": [1.0, 2.0, 3.0]}))
    assert torch.isfinite(steps[-1].state.extras["phi"]).all()
    with pytest.raises(SettingError, match="3 shares"):
        small_experiment(**{"fedmix.prior": [0.5, 0.5]})


def test_warm_start_from_one_model_makes_different_experts():
    plain = small_experiment("fedavg")
    steps, _ = train_serially(plain)
    mixed = small_experiment()
    state = mixed.algorithm.warm_start(mixed.algorithm.init(0), plain.algorithm.experts(steps[-1].state), stream(0))
    weights = [w["fc1.weight"] for w in state.experts]
    assert not torch.equal(weights[0], weights[1])
    source = steps[-1].state.shared["fc1.weight"]
    assert (weights[0] - source).std() < 0.3 * source.std()


class TwoInputs(nn.Module):
    """A user's own module: features with two axes, an output layer of another name."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 6)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.drop(torch.tanh(self.body(x))))


@pytest.mark.parametrize("method", ["fedmix", "fedavg"])
def test_dropout_comes_from_the_clients_stream(method):
    runs = []
    for noise in (3, 300):
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        experiment = small_experiment(
            method, small_federation(), TwoInputs, **{"model.name": "own", "model.output": "head"}
        )
        steps, _ = train_serially(experiment)
        assert torch.equal(torch.get_rng_state(), before)  # nobody's global generator is touched
        runs.append(steps[-1].loss)
    assert runs[0] == runs[1]
