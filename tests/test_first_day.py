"""The first day with own data: defaults that learn, settings that can be looked up, four hospitals that are embedded."""

import json

import numpy as np
import pytest
from conftest import fedmix as command_line
from conftest import small_federation
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression

import fedmix
from fedmix.data.user_files import heart_disease
from fedmix.errors import DataError
from fedmix.running.run import not_moving
from fedmix.settings.explain import find, sections, settings_of


def hospitals(seed):
    """scikit-learn's breast-cancer table over six hospitals."""
    data = load_breast_cancer(as_frame=True)
    table = data.frame.rename(columns={"target": "tumour"})
    table["tumour"] = np.array(["malignant", "benign"])[table["tumour"]]
    table["hospital"] = [f"hospital-{i}" for i in np.random.default_rng(seed).integers(0, 6, len(table))]
    return fedmix.Federation.from_table(table, label="tumour", client="hospital", seed=seed)


def pooled_regression(federation):
    """The accuracy of a logistic regression on everybody's training rows, a mean over clients as fedmix's."""
    train = np.concatenate(federation.parts["train"])
    model = LogisticRegression(max_iter=5000).fit(federation.x[train], federation.y[train])
    return np.mean([model.score(federation.x[rows], federation.y[rows]) for rows in federation.parts["test"]])


def test_defaults_are_within_two_points_of_a_pooled_logistic_regression(tmp_path):
    ours, theirs = [], []
    for seed in range(5):
        federation = hospitals(seed)
        run = fedmix.train(federation=federation, out=tmp_path / str(seed), seed=seed, engine="serial")
        ours.append(run.summary["accuracy"]["test"]["server"]["mean"])
        theirs.append(pooled_regression(federation))
    assert np.mean(ours) > np.mean(theirs) - 0.02


def test_settings_that_are_given_are_not_replaced_by_defaults_for_own_data(tmp_path):
    settings = {"server": {"optimizer": "average"}, "training": {"batch_size": 8}, "rounds": 1, "engine": "serial"}
    recipe = fedmix.train(federation=small_federation(), out=tmp_path / "run", **settings).recipe
    assert (recipe.server.server_lr, recipe.training.batch_size) == (0.001, 8)
    recipe = fedmix.train(federation=small_federation(), out=tmp_path / "b", rounds=1, engine="serial").recipe
    assert (recipe.server.server_lr, recipe.training.batch_size) == (0.01, 16)


def test_a_run_that_does_not_move_says_so_and_what_to_try(tmp_path):
    slow = {"server": {"server_lr": 1e-6}, "rounds": 12, "engine": "serial", "evaluation": {"every": 12}}
    run = fedmix.train(federation=small_federation(), out=tmp_path / "run", algorithm="fedavg", **slow)
    (line,) = [line for line in run.metrics if line.get("warnings")]
    assert line["round"] == 10
    assert any("not moving" in words and "server.server_lr (now 1e-06)" in words for words in run.summary["warnings"])
    fast = slow | {"server": {"server_lr": 0.05}}
    run = fedmix.train(federation=small_federation(), out=tmp_path / "fast", algorithm="fedavg", **fast)
    assert not run.summary["warnings"]
    assert not not_moving([1.0, 0.9, 0.8])
    assert not_moving([1.0, 1.1, 1.2])
    assert not not_moving([1.0])


def test_every_setting_is_explained():
    unexplained = [setting.name for section in sections() for setting in settings_of(section) if not setting.meaning]
    assert unexplained == []


def test_settings_can_be_looked_up_on_the_command_line():
    everything = command_line("settings")
    assert "training.client_lr = 0.05" in everything.stdout
    one = json.loads(command_line("settings", "fedmix.eta", "--json").stdout)
    assert [(row["name"], row["default"]) for row in one] == [("fedmix.eta", "0.0")]
    assert [setting.name for setting in find("patience")] == ["evaluation.patience"]
    assert {setting.name.partition(".")[0] for setting in find("[server]")} == {"server"}
    wrong = command_line("settings", "client_rl")
    assert (wrong.returncode, "did you mean 'training.client_lr'" in wrong.stderr) == (2, True)


def test_completion_and_help_say_what_there_is():
    assert {"train", "load", "compare", "sweep", "Federation", "Stop"} <= set(dir(fedmix))
    assert all(word in fedmix.train.__doc__ for word in ("metrics", "sampler", "client_lr", "fedmix settings"))


def test_four_hospitals_are_embedded(tmp_path):
    done = command_line("train", "heart-disease", "--rounds", "6", "--out", str(tmp_path / "run"), "--quiet")
    assert done.returncode == 0, done.stderr
    assert "Long Beach" in done.stdout  # clients by their names
    about = json.loads((tmp_path / "run" / "federation.json").read_text())
    assert sorted(about["clients"]) == ["Budapest", "Cleveland", "Long Beach", "Switzerland"]
    assert sum(map(sum, about["points"].values())) == 920
    assert {rule["column"] for rule in about["features"] if "missing" in rule} >= {"chol", "ca", "thal", "slope"}
    run = fedmix.load(tmp_path / "run")
    patient = {"age": 63, "sex": 1, "cp": 4, "trestbps": 140, "chol": 260, "fbs": 0, "restecg": 1, "thalach": 112,
               "exang": 1, "oldpeak": 3, "slope": 2, "ca": None, "thal": None}  # fmt: skip
    assert run.client("Cleveland").predict([patient])[0] in ("no", "yes")
    with pytest.raises(DataError, match="must be 'disease' or 'num'"):
        heart_disease(None, "age")
