"""Laws that every method obeys."""

import pytest
import torch
from conftest import METHODS, small_experiment, small_federation, train_serially

from fedmix.core.tree import flatten, unflatten
from fedmix.core.types import Message, Reply
from fedmix.rng import stream

pytestmark = pytest.mark.parametrize("method", METHODS)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_same_seed_same_numbers_and_another_seed_others(method):
    one, _ = train_serially(small_experiment(method))
    again, _ = train_serially(small_experiment(method))
    other, _ = train_serially(small_experiment(method, seed=1))
    assert equal(flatten(one[-1].state), flatten(again[-1].state))
    assert one[-1].loss == again[-1].loss
    assert one[-1].loss != other[-1].loss


def test_a_round_learns(method):
    steps, _ = train_serially(small_experiment(method, rounds=12))
    assert steps[-1].loss < 0.8 * steps[0].loss


def test_functions_do_not_change_what_they_are_given(method):
    experiment = small_experiment(method)
    algorithm = experiment.algorithm
    state, private = algorithm.init(0), algorithm.new_client(0)
    message = algorithm.broadcast(state, 0)
    before = [{n: t.clone() for n, t in flat.items()} for flat in (flatten(state), private, message.tensors)]
    data = experiment.federation.examples(0, "train")
    reply, _ = algorithm.client_update(message, private, data, stream(0, "x"), None)
    algorithm.server_update(state, [Reply(0, reply)])
    algorithm.predict(message, private, data.x)
    for flat, copy in zip((flatten(state), private, message.tensors), before, strict=True):
        assert equal(dict(flat), copy)
        assert not any(value.requires_grad for value in flat.values())


def test_a_client_is_its_own_address_not_its_place_in_line(method):
    """The same client, data and round give the same reply, whatever ran before."""
    experiment = small_experiment(method)
    algorithm = experiment.algorithm
    message, private = algorithm.broadcast(algorithm.init(0), 1), algorithm.new_client(0)
    data = experiment.federation.examples(1, "train")
    first, _ = algorithm.client_update(message, private, data, stream(0, "round", 1, "client", 1), None)
    torch.rand(100)
    second, _ = algorithm.client_update(message, private, data, stream(0, "round", 1, "client", 1), None)
    assert equal(dict(first.tensors), dict(second.tensors))


def test_permuting_replies_leaves_the_server_where_it_was(method):
    experiment = small_experiment(method)
    algorithm = experiment.algorithm
    state = algorithm.init(0)
    replies = []
    for s in range(4):
        message = algorithm.broadcast(state, s)
        data = experiment.federation.examples(s, "train")
        replies.append(Reply(s, algorithm.client_update(message, algorithm.new_client(0), data, stream(0, s), None)[0]))
    one = flatten(algorithm.server_update(state, replies)[0])
    other = flatten(algorithm.server_update(state, replies[::-1])[0])
    # after one Adam step a parameter moves by the rate in the sign of its gradient: compare where that is not near zero
    for name, value in one.items():
        assert torch.allclose(value.double(), other[name].double(), atol=1e-5), name


def test_predictions_are_log_probabilities(method):
    experiment = small_experiment(method)
    steps, privates = train_serially(experiment)
    algorithm, x = experiment.algorithm, experiment.federation.x[:7]
    with torch.no_grad():
        own = algorithm.predict(algorithm.broadcast(steps[-1].state, 2), privates[2], x)
        p_s = torch.tensor([0.1, 0.2, 0.3, 0.4])
        nobody = algorithm.predict_anonymous(
            algorithm.broadcast(steps[-1].state, None), list(privates.values()), p_s.log(), x
        )
    for log_p in (own, nobody):
        assert log_p.shape == (7, 3)
        assert torch.allclose(log_p.exp().sum(dim=1), torch.ones(7), atol=1e-5)


def test_without_client_identity_one_client_is_that_client(method):
    """Averaging over a single client's private parts must give that client's prediction."""
    experiment = small_experiment(method)
    steps, privates = train_serially(experiment)
    algorithm, x = experiment.algorithm, experiment.federation.x[:7]
    message = algorithm.broadcast(steps[-1].state, None)
    with torch.no_grad():
        own = algorithm.predict(message, privates[1], x)
        nobody = algorithm.predict_anonymous(message, [privates[1]], torch.zeros(1), x)
    assert torch.allclose(own, nobody, atol=1e-5)


def test_private_state_never_crosses_the_wire(method):
    experiment = small_experiment(method)
    steps, privates = train_serially(experiment)
    private_names = set(privates[0])
    for reply in steps[-1].replies:
        assert not private_names & set(reply.message.tensors)
    assert not private_names & set(experiment.algorithm.broadcast(steps[-1].state, 0).tensors)
    assert experiment.algorithm.uses_private == bool(private_names)


def test_bytes_are_those_of_the_payload(method):
    experiment = small_experiment(method)
    steps, _ = train_serially(experiment)
    up = sum(t.numel() * 4 for reply in steps[0].replies for t in reply.message.tensors.values())
    assert steps[0].bytes_up == up
    if method == "independent":
        assert (steps[0].bytes_down, steps[0].bytes_up) == (0, 0)
    if method == "fedavg":
        assert steps[0].bytes_down == steps[0].bytes_up == 4 * 4 * experiment.model.parameters


def test_state_survives_flattening(method):
    experiment = small_experiment(method)
    steps, _ = train_serially(experiment)
    state = steps[-1].state
    back = unflatten(experiment.algorithm.init(5), flatten(state))
    assert equal(flatten(back), flatten(state))
    assert back.round == 3


def test_a_reply_predicts_like_the_broadcast_it_is_a_change_of(method):
    """What a client sends back is the weights that `predict` takes: local accuracy is measured with it."""
    experiment = small_experiment(method)
    algorithm = experiment.algorithm
    message, private = algorithm.broadcast(algorithm.init(0), 0), algorithm.new_client(0)
    data = experiment.federation.examples(0, "train")
    reply, after = algorithm.client_update(message, private, data, stream(0, "x"), 1)
    with torch.no_grad():
        log_p = algorithm.predict(Message(reply.tensors), after, data.x)
        start = algorithm.predict(message, private, data.x)
    picked = [p.gather(1, data.y.unsqueeze(1)).mean() for p in (start, log_p)]
    assert picked[1] > picked[0]


def test_warm_start_takes_the_other_runs_experts(method):
    experiment = small_experiment(method)
    steps, _ = train_serially(experiment)
    experts = experiment.algorithm.experts(steps[-1].state)
    state = experiment.algorithm.warm_start(experiment.algorithm.init(9), experts, stream(9))
    assert equal(flatten(experiment.algorithm.experts(state)), flatten(experts))
    assert state.round == 0


def test_clients_of_one_point_and_of_one_class_are_fine(method):
    federation = small_federation()
    parts = {part: [own[:1] for own in federation.parts[part]] for part in federation.parts}
    from dataclasses import replace

    experiment = small_experiment(method, federation=replace(federation, parts=parts))
    steps, _ = train_serially(experiment)
    assert all(bool(torch.isfinite(t).all()) for t in flatten(steps[-1].state).values())


def test_the_server_needs_only_sums(method):
    """server.aggregation = "linear": the same rounds from sums over clients (eq:fedmixPavg)."""
    # plain averaging: Adam's first steps are signs, which rounding can turn where a gradient is all but zero
    changes = {"server.optimizer": "average", "rounds": 3}
    if method == "fedmix":
        changes["fedmix.prior"] = "reported"
    one, _ = train_serially(small_experiment(method, **changes))
    other, _ = train_serially(small_experiment(method, **changes, **{"server.aggregation": "linear"}))
    left, right = flatten(one[-1].state), flatten(other[-1].state)
    for name, value in left.items():
        if name != "extras.q_zs":  # known to the clients alone
            assert torch.allclose(value.double(), right[name].double(), atol=1e-5), name
    assert other[-1].diagnosis.divergence is None


def test_adapting_changes_private_parts_alone(method):
    experiment = small_experiment(method)
    steps, _ = train_serially(experiment)
    algorithm, data = experiment.algorithm, experiment.federation.examples(0, "train")
    message, new = algorithm.newcomer(steps[-1].state, True), algorithm.new_client(0)
    after, private = algorithm.adapt(message, new, data, stream(0), 20)
    assert set(after.tensors) == set(message.tensors)
    for name, value in message.tensors.items():
        assert name == "phi" or torch.equal(after.tensors[name], value), name
    assert algorithm.uses_private == any(not torch.equal(private[name], new[name]) for name in new)
    if algorithm.uses_private:
        assert private_loss(algorithm, after, private, data) < private_loss(algorithm, message, new, data)


def private_loss(algorithm, message, private, data):
    with torch.no_grad():
        return float(torch.nn.functional.nll_loss(algorithm.predict(message, private, data.x), data.y))


def test_noise_changes_what_is_sent_and_not_its_form(method):
    quiet, loud = (
        small_experiment(method, **{"privacy.clip": 1.0, "privacy.noise": noise, "rounds": 1}) for noise in (0.0, 0.1)
    )
    (one,), _ = train_serially(quiet)
    (other,), _ = train_serially(loud)
    for a, b in zip(one.replies, other.replies, strict=True):
        assert {n: v.shape for n, v in a.message.tensors.items()} == {n: v.shape for n, v in b.message.tensors.items()}
        for name, value in a.message.tensors.items():
            assert not torch.equal(value, b.message.tensors[name]), name
        if method == "fedmix":
            for name in ("phi", "q_zs"):
                rows = b.message.tensors[name]
                assert torch.allclose(rows.sum(dim=-1), torch.ones(rows.shape[:-1]), atol=1e-5)
