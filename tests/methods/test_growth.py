"""FedMix with evidence from experts as they arrive, and with as many experts as clients need."""

import json

import pytest
import torch
from conftest import fedmix as command_line
from conftest import small_experiment, small_federation, train_serially

import fedmix
from fedmix.core.tree import flatten
from fedmix.core.types import Message
from fedmix.engines.local import LocalEngine
from fedmix.engines.store import MemoryStore
from fedmix.errors import SettingError
from fedmix.methods import fedmix_growth
from fedmix.running.directory import RunDirectory
from fedmix.running.loop import rounds
from fedmix.running.run import run
from fedmix.running.where import Where
from fedmix.schema import read_metrics
from fedmix.settings.build import build
from fedmix.settings.reading import read_recipe

ARRIVING = {"fedmix.evidence": "arriving"}
AUTO = {"fedmix.evidence": "arriving", "fedmix.experts": "auto"}
BAD_START = 2  # a seed
HIDDEN = {"rounds": 6, "data.clients": 12, "data.permutations": 3, **AUTO}


def hidden_groups(seed=0, **changes):
    return build(read_recipe("digits-permutation", "fedmix", {**HIDDEN, "seed": seed, **changes}))


@pytest.mark.parametrize("side", ["label", "client"])
def test_phi_of_a_round_is_drawn_before_anything_is_trained(side):
    """Against a loop in float64 over all points of a client, under the experts as they arrive."""
    own_evidence = {"fedmix.evidence_points": 0, "fedmix.evidence_pool": 0.0}
    experiment = small_experiment(**ARRIVING, **{"data.side": side, **own_evidence})
    algorithm, data = experiment.algorithm, experiment.federation.examples(2, "train")
    message = algorithm.broadcast(algorithm.init(0), 2)
    reply, _ = algorithm.client_update(message, algorithm.new_client(0), data, fedmix_stream(), None)
    parts = algorithm.client.parts(message, algorithm.new_client(0))
    model = experiment.model
    log_lik = []
    for k in range(3):
        logits, _ = model.apply(parts.whole(k), data.x, training=False)
        log_p = torch.log_softmax(logits.double(), dim=1)
        log_lik.append([float(log_p[i, y]) for i, y in enumerate(data.y.tolist())])
    rows = {}
    for value in sorted(set(data.c.tolist())):
        index = [i for i, c in enumerate(data.c.tolist()) if c == value]
        means = torch.tensor([sum(log_lik[k][i] for i in index) / len(index) for k in range(3)], dtype=torch.float64)
        rows[value] = means - means.mean()
    spread = torch.stack(list(rows.values())).square().mean().sqrt()
    for value, r in rows.items():
        wanted = torch.softmax(r / (0.15 * spread), dim=0)
        assert reply.tensors["phi"][value].tolist() == pytest.approx(wanted.tolist(), abs=1e-4)
    others = [value for value in range(experiment.federation.categories) if value not in rows]
    assert torch.equal(reply.tensors["phi"][others], message.tensors["phi"][others])
    assert float(reply.tensors["evidence"]) == pytest.approx(float(spread**2), rel=1e-4)


def test_clients_pool_their_evidence_where_c_is_not_the_client():
    """Round 2 of a run: a client's phi against a loop over its own evidence and everybody's of round 1."""
    experiment = small_experiment(**ARRIVING, **{"data.side": "label", "fedmix.evidence_points": 0})
    state = train_serially(experiment, last=1)[0][-1].state
    algorithm, data = experiment.algorithm, experiment.federation.examples(2, "train")
    message = algorithm.broadcast(state, 2)
    reply, _ = algorithm.client_update(message, algorithm.new_client(0), data, fedmix_stream(), None)
    parts = algorithm.client.parts(message, algorithm.new_client(0))
    log_lik = torch.stack([_log_lik(experiment.model, parts.whole(k), data) for k in range(3)], dim=1)
    use = message.tensors["phi"].double().mean(dim=0)
    for value in sorted(set(data.c.tolist())):
        points = (data.c == value).nonzero().flatten()
        own = log_lik[points].mean(dim=0)
        own = own - own.mean()
        joint = (len(points) * own + 64 * message.tensors["r"][value].double()) / (len(points) + 64)
        wanted = torch.softmax(joint / (0.15 * message.tensors["spread"].double()) - use.log(), dim=0)
        assert reply.tensors["phi"][value].tolist() == pytest.approx(wanted.tolist(), abs=1e-4)
        assert reply.tensors["r"][value].tolist() == pytest.approx(own.tolist(), abs=1e-4)
    others = [value for value in range(experiment.federation.categories) if value not in data.c.tolist()]
    assert torch.equal(reply.tensors["r"][others], message.tensors["r"][others])


def _log_lik(model, weights, data):
    logits, _ = model.apply(weights, data.x, training=False)
    return torch.log_softmax(logits.double(), dim=1).gather(1, data.y[:, None]).squeeze(1)


def fedmix_stream():
    from fedmix.rng import stream

    return stream(0, "test")


def test_arriving_evidence_works_with_sums():
    plain, sums = (
        train_serially(small_experiment(**ARRIVING, **{"server.aggregation": aggregation}))[0][-1].state
        for aggregation in ("clients", "linear")
    )
    for name, value in flatten(plain.experts).items():
        assert torch.allclose(value, flatten(sums.experts)[name], atol=1e-5), name
    assert torch.allclose(plain.extras["spread"], sums.extras["spread"], atol=1e-5)


def test_arriving_evidence_works_with_pruning():
    steps, _ = train_serially(small_experiment(**ARRIVING, **{"fedmix.eta": 0.8, "rounds": 5}))
    assert all(float(row.sum()) == pytest.approx(1, abs=1e-4) for row in steps[-1].state.extras["q_zs"])


def test_one_expert_at_most_is_fedavg():
    mixed = small_experiment("fedmix", **AUTO, **{"fedmix.max_experts": 1})
    plain = small_experiment("fedavg")
    (one,) = train_serially(mixed)[0][-1].state.experts
    shared = train_serially(plain)[0][-1].state.shared
    for name, value in shared.items():
        assert torch.allclose(one[name], value, atol=1e-6), name


@pytest.mark.parametrize("seed", [0, 1])
def test_hidden_groups_and_their_number_are_found(seed):
    experiment = hidden_groups(seed)
    steps, _ = train_serially(experiment)
    last = steps[-1].state.extras
    alive = fedmix_growth.alive(last)
    assert len(alive) == 3
    found = last["q_zs"].argmax(dim=1).tolist()
    groups = experiment.federation.groups
    assert len(set(zip(found, groups, strict=True))) == 3
    events = [event for step in steps for event in step.diagnosis.detail.get("structure", [])]
    assert events[0]["what"] == "split"
    assert sum(events[0]["clients"]) == 12
    assert {len(step.state.experts) for step in steps} == {8}
    assert len(experiment.algorithm.experts(steps[-1].state)) == 3


def test_clients_that_are_all_alike_have_one_expert():
    steps, _ = train_serially(hidden_groups(**{"data.permutations": 1}))
    assert fedmix_growth.alive(steps[-1].state.extras) == [0]
    first, last = steps[0], steps[-1]
    assert last.bytes_down == first.bytes_down  # and its price is one model's


def test_only_experts_that_there_are_cross_the_wire():
    experiment = hidden_groups()
    steps, _ = train_serially(experiment)
    split_at = next(i for i, step in enumerate(steps) if step.diagnosis.detail.get("structure"))
    before, after = steps[split_at].bytes_down, steps[split_at + 1].bytes_down
    assert 2.5 * before < after < 3.1 * before


def test_engines_agree_and_a_run_can_be_resumed(tmp_path):
    experiment = hidden_groups()
    serial, _ = train_serially(experiment)
    engine = LocalEngine(experiment.algorithm, experiment.federation, 0, MemoryStore(), 2)
    try:
        local = list(rounds(experiment.algorithm, engine, experiment.algorithm.init(0), 0, 12, 0, 6))
    finally:
        engine.close()
    for name, value in flatten(serial[-1].state.experts).items():
        assert torch.allclose(value, flatten(local[-1].state.experts)[name], atol=1e-5), name
    for last in (1, 3, 6):
        made = hidden_groups(**{"rounds": last, "checkpoint.every": 1})
        directory = RunDirectory.open(tmp_path / "run", made.recipe, resume=last > 1, overwrite=False)
        summary = run(made, directory, Where("serial"))
        directory.close()
    assert summary["clusters"]["adjusted_rand_index"] == 1.0
    loaded = fedmix.load(tmp_path / "run")
    assert len(loaded.experts) == 3
    for name, value in flatten(serial[-1].state.experts).items():
        assert torch.equal(value, flatten(loaded._state.experts)[name]), name
    lines = read_metrics(tmp_path / "run")
    assert [line["round"] for line in lines if line.get("structure")] == [2]
    assert len(lines[-1]["experts"]) == 3
    shown = command_line("show", str(tmp_path / "run")).stdout
    assert "3 groups of 4, 4, 4 clients, unchanged since round 2" in shown
    assert "round 2: expert 0 is split into 0, 1, 2 with 4, 4, 4 clients" in shown
    x = made.federation.examples(0, "test").x
    client = loaded.client(0)
    assert torch.allclose(client.module()(x), client.log_prob(x), atol=1e-5)
    json.dumps(summary)


def test_everything_after_training_works_with_the_experts_that_there_are(tmp_path):
    changes = {"data.holdout_clients": 3, "data.clients": 9, "rounds": 4, "data.permutations": 3}
    experiment = hidden_groups(**changes)
    directory = RunDirectory.open(tmp_path / "run", experiment.recipe, resume=False, overwrite=False)
    run(experiment, directory, Where("serial"))
    directory.close()
    result = fedmix.evaluate(tmp_path / "run", engine="serial", densities=False)
    assert result["new_clients"]["labelled"][-1]["fine_tuned"]["accuracy"]["mean"] > 0
    assert result["no_identity"]["averaged"]["union"]["accuracy"] > 0
    assert result["new_clients"]["unlabelled"]["distilled"]["union"]["accuracy"] > 0
    assert fedmix.audit(tmp_path / "run", engine="serial")["audited"] == 9


def test_a_client_that_was_away_has_the_gate_of_the_expert_that_was_split():
    gate = {"gate.pi": torch.tensor([1.0, 0.0, 0.0]), "gate.b": torch.tensor([3.0, 0.0, 0.0]), "gate.A": torch.eye(3)}
    sent = {"born": torch.tensor([4, 4, 6]), "parent": torch.tensor([0, 0, 1])}
    away = fedmix_growth.migrate({**gate, "known": torch.tensor(3)}, sent)
    assert away["gate.b"].tolist() == [3.0, 3.0, 3.0]  # 1 from 0, then 2 from 1
    assert away["gate.A"][:, 2].tolist() == [1.0, 0.0, 0.0]
    there = fedmix_growth.migrate({**gate, "known": torch.tensor(7)}, sent)
    assert there["gate.b"].tolist() == [3.0, 0.0, 0.0]
    assert fedmix_growth.migrate({**gate, "known": torch.tensor(3)}, {}) == {**gate, "known": torch.tensor(3)}


def test_clients_that_take_part_now_and_then_find_their_groups():
    steps, _ = train_serially(hidden_groups(rounds=30, clients_per_round=4))
    last = steps[-1].state.extras
    found = last["q_zs"].argmax(dim=1).tolist()
    experiment = hidden_groups()
    assert len(set(zip(found, experiment.federation.groups, strict=True))) == len(set(found)) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"fedmix.evidence": "batch"},
            "fedmix.evidence must be 'arriving' with fedmix.experts = 'auto' or fedmix.repair",
        ),
        ({"fedmix.eta": 0.5}, "fedmix.eta must be 0 with fedmix.experts = 'auto' or fedmix.repair"),
        ({"server.aggregation": "linear"}, "server.aggregation must be 'clients' with FedMix: experts are split by"),
        ({"fedmix.experts": "many"}, "fedmix.experts must be 1 or more, or 'auto'. Got 'many'"),
        ({"fedmix.experts": 0}, "fedmix.experts must be 1 or more, or 'auto'. Got 0"),
        ({"fedmix.max_experts": 0}, "fedmix.max_experts must be 1 or more"),
        ({"fedmix.evidence_temperature": 0.0}, "fedmix.evidence_temperature must be more than 0"),
        ({"fedmix.evidence": "later"}, "fedmix.evidence must be one of arriving, batch"),
        ({"privacy.noise": 1.0, "privacy.clip": 1.0}, "privacy.noise must be 0 with FedMix: it sends"),
    ],
)
def test_what_cannot_be_is_refused(changes, words):
    with pytest.raises(SettingError) as refused:
        small_experiment("fedmix", federation=small_federation(), **AUTO | changes)
    assert words in str(refused.value)


def test_the_paper_s_step_is_left_as_it_is():
    """Settings of the new evidence change nothing where it is not used."""
    plain, with_settings = (
        train_serially(small_experiment("fedmix", **changes))[0][-1].state
        for changes in ({}, {"fedmix.evidence_temperature": 3.0, "fedmix.max_experts": 5})
    )
    for name, value in flatten(plain).items():
        assert torch.equal(value, flatten(with_settings)[name])


def test_a_message_of_an_auto_run_names_its_experts():
    algorithm = hidden_groups().algorithm
    message = algorithm.broadcast(algorithm.init(0), 0)
    assert isinstance(message, Message)
    assert {name.split(".")[1] for name in message.tensors if name.startswith("expert.")} == {"0"}


def test_with_a_fixed_number_the_same_moves_repair_a_bad_start():
    """Four experts drawn at random: on this seed two groups stay with one of them, unless experts are merged and split."""
    exact = {}
    for repair in (False, True):
        changes = {
            "fedmix.experts": 4,
            "fedmix.repair": repair,
            "rounds": 20,
            "data.clients": 20,
            "data.permutations": 4,
        }
        experiment = hidden_groups(BAD_START, **changes)
        steps, _ = train_serially(experiment)
        main = steps[-1].state.extras["q_zs"].argmax(dim=1).tolist()
        pairs = set(zip(main, experiment.federation.groups, strict=True))
        exact[repair] = len(set(main)) == len(pairs) == 4
        if repair:
            alive = fedmix_growth.alive(steps[-1].state.extras)
            assert len(alive) == 4
            assert steps[0].state.extras["alive"].sum() == 4
    assert exact == {False: False, True: True}


def test_an_expert_is_not_retired_before_most_clients_have_met_it():
    """Two of twelve clients a round: after two rounds nobody can say that an expert has no clients."""
    changes = {"fedmix.experts": 4, "fedmix.repair": True, "clients_per_round": 2, "rounds": 3}
    steps, _ = train_serially(hidden_groups(0, **changes))
    retired = [
        event for step in steps for event in step.diagnosis.detail.get("structure", []) if event["what"] == "retired"
    ]
    assert retired == []
