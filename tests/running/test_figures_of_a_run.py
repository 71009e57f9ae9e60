"""The protocol of figures: what a summary says are means over a run's last evaluations."""

import json

import numpy as np
import pytest
from conftest import small_experiment

from fedmix.engines.serial import SerialEngine
from fedmix.engines.store import MemoryStore
from fedmix.errors import SettingError
from fedmix.running.carried import evaluation_rounds, fine_tuned_rounds
from fedmix.running.checkpoint import Checkpoints
from fedmix.running.directory import RunDirectory
from fedmix.running.evaluate import client_scores
from fedmix.running.run import run
from fedmix.running.where import Where
from fedmix.schema import read_metrics

EVERY = {"rounds": 20, "evaluation.every": 1, "training.epochs": 3}


def train(folder, rounds=20, engine="serial", **changes):
    experiment = small_experiment("fedmix", **EVERY | {"rounds": rounds} | changes)
    directory = RunDirectory.open(folder, experiment.recipe, resume=folder.exists(), overwrite=False)
    try:
        return run(experiment, directory, Where(engine, 2))
    finally:
        directory.close()


def test_validation_figures_are_means_over_the_last_evaluations(tmp_path):
    summary = train(tmp_path / "run")
    assert summary["measured"] == {"fine_tuned": [18, 19, 20], "validation": [17, 18, 19, 20]}
    last = [line["accuracy"]["validation"] for line in read_metrics(tmp_path / "run")][-4:]
    found = summary["accuracy"]["validation"]
    for kind in ("as_sent", "server"):
        means = [accuracy[kind]["mean"] for accuracy in last]
        assert found[kind]["mean"] == pytest.approx(np.mean(means), abs=1e-5)
        of_clients = summary["of_clients"]["validation"][kind]
        assert len(of_clients) == 4
        assert np.mean(list(of_clients.values())) == pytest.approx(found[kind]["mean"])
    assert found["no_identity"] == pytest.approx(np.mean([accuracy["no_identity"] for accuracy in last]), abs=1e-5)
    assert len(summary["of_clients"]["validation"]["no_identity"]) == 4


def test_fine_tuned_figures_are_means_over_the_last_three(tmp_path):
    """Against the last three checkpoints, each loaded by itself and fine-tuned."""
    summary = train(tmp_path / "run")
    in_metrics = ["test" in line["accuracy"] for line in read_metrics(tmp_path / "run")]
    assert in_metrics == [False] * 17 + [True] * 3
    experiment = small_experiment("fedmix", **EVERY)
    losses = []
    for t in (18, 19, 20):
        checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=3)
        checkpoint = checkpoints._load(f"round-{t:06d}", experiment.algorithm.state_from)
        store = MemoryStore()
        for client, private in checkpoint.clients.items():
            store.put(client, private)
        engine = SerialEngine(experiment.algorithm, experiment.federation, experiment.recipe.seed, store)
        scores = client_scores(experiment.algorithm, engine, checkpoint.state, range(4), "test", t, finetune=1)
        losses.append(scores.values("nll"))
    assert losses[0] != losses[1] != losses[2]
    found = summary["scores"]["test"]["fine_tuned"]
    assert found["nll"]["mean"] == pytest.approx(np.mean(losses))
    assert found["nll"]["std"] == pytest.approx(np.std(np.mean(losses, axis=0)))  # over clients
    values = list(summary["of_clients"]["test"]["fine_tuned"].values())
    assert (
        found["accuracy"]["mean"] == summary["accuracy"]["test"]["fine_tuned"]["mean"] == pytest.approx(np.mean(values))
    )


def test_a_run_that_was_made_longer_has_the_figures_of_one_that_never_stopped(tmp_path):
    whole = train(tmp_path / "whole", rounds=11, **{"evaluation.every": 2})
    train(tmp_path / "longer", rounds=9, **{"evaluation.every": 2})  # ends with an evaluation that is none of the whole
    longer = train(tmp_path / "longer", rounds=11, **{"evaluation.every": 2})
    assert whole["measured"] == longer["measured"] == {"fine_tuned": [10, 11], "validation": [10, 11]}
    for key in ("accuracy", "of_clients", "scores"):
        assert whole[key] == longer[key]


def test_engines_agree_on_every_figure(tmp_path):
    one, other = (train(tmp_path / engine, rounds=6, engine=engine) for engine in ("serial", "local"))
    for key in ("accuracy", "of_clients", "measured"):
        assert json.dumps(one[key]) == json.dumps(other[key])


def test_clients_are_fine_tuned_once_where_more_would_not_be_affordable():
    cheap = small_experiment("fedavg", **EVERY).recipe
    assert fine_tuned_rounds(cheap, clients=4) == [18, 19, 20]
    assert fine_tuned_rounds(cheap, clients=1000) == [18, 19, 20]  # all of them take part in every round
    few = small_experiment("fedavg", **EVERY, clients_per_round=2).recipe
    assert fine_tuned_rounds(few, clients=6) == [18, 19, 20]  # 12 client epochs more, of 120
    assert fine_tuned_rounds(few, clients=7) == [20]
    asked = small_experiment("fedavg", **EVERY, **{"clients_per_round": 2, "evaluation.finetune_evaluations": 2})
    assert fine_tuned_rounds(asked.recipe, clients=1000) == [19, 20]
    with pytest.raises(SettingError, match=r"finetune_evaluations must be a whole number from 0 to 3"):
        small_experiment("fedavg", **{"evaluation.finetune_evaluations": 4})


def test_the_last_round_is_always_evaluated():
    recipe = small_experiment("fedavg", **{"rounds": 7, "evaluation.every": 3}).recipe
    assert evaluation_rounds(recipe) == [3, 6, 7]
