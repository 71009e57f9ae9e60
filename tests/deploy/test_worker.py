"""A site's worker without its processes: what it reads, what it answers, what it keeps to itself, predictions afterwards."""

import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("flwr")

from fedmix.deploy import wire
from fedmix.deploy.folder import agreed_recipe, init
from fedmix.deploy.predict import predict_site
from fedmix.deploy.worker import Worker, discreet, run_folder
from fedmix.engines.client import Task
from fedmix.engines.flower import Order, pack_orders, unpack_outcomes
from fedmix.errors import ClientError, DataError
from fedmix.experiment.recipe import dump_recipe
from fedmix.experiment.trained import revive

RUN = "0123456789abcdef" * 2


def data(folder, n=60, label=None):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 30)).astype("float32")
    y = (x[:, 0] > 0).astype(int)
    np.savez(folder / "data.npz", x=x, y=y if label is None else np.array([label, *y[1:].astype(str)]))
    return x, y


@pytest.fixture
def site(tmp_path):
    init(tmp_path / "f", ["a", "b"], "localhost:8000")
    data(tmp_path / "f" / "sites" / "a")
    return tmp_path / "f" / "sites" / "a"


def ask(worker, **more):
    recipe = agreed_recipe(worker.folder)
    return json.loads(worker.answer("query", wire.table({"recipe": dump_recipe(recipe)}))["table"]["json"])


def orders(worker, kind="train", t=1, state=0, **changes):
    recipe = agreed_recipe(worker.folder)
    known = {"clients": ["a", "client 1"], "input": [30], "classes": 2, "categories": 2, "mean": [], "std": []}
    known |= {"labels": ["0", "1"], "features": [], "side": "label"}
    _, algorithm = revive(recipe, known)
    message = algorithm.broadcast(algorithm.init(recipe.seed), 0)
    about = {"run": RUN, "recipe": dump_recipe(recipe), "federation": known, "digest": ask(worker)["digest"]}
    return pack_orders(about | changes, [Order(Task(kind, t, 0, message, part="test"), state)])


def test_a_new_run_is_asked_about_the_data_as_it_is_now(site):
    worker = Worker(site)
    first = ask(worker)
    assert first["clients"] == ["a"]
    data(site, n=100)
    second = ask(worker)
    assert second["points"]["train"] == [70] != first["points"]["train"]
    assert second["digest"] != first["digest"]


def test_orders_are_answered_and_what_was_sent_is_kept(site):
    worker = Worker(site)
    (outcome,) = unpack_outcomes(worker.answer("train", orders(worker)))
    assert outcome.error == ""
    assert outcome.message.numbers["n"] == 42
    own = run_folder(site, RUN)
    assert sorted(path.name for path in (own / "clients" / "0").iterdir()) == [
        "000001.safetensors",
        "received.safetensors",
    ]
    assert all(path.stat().st_mode & 0o077 == 0 for path in (own / "clients").rglob("*.safetensors"))
    assert own.stat().st_mode & 0o077 == 0
    assert (site / "cache").stat().st_mode & 0o077 == 0


def test_a_run_with_other_data_than_it_began_with_is_refused(site):
    worker = Worker(site)
    with pytest.raises(ClientError, match="is not what it was when this run began"):
        worker.answer("train", orders(worker, digest="another"))
    with pytest.raises(ClientError, match="32 hexadecimal digits"):
        worker.answer("train", orders(worker, run="../../etc"))


def test_what_an_error_quotes_of_the_data_stays_at_the_site(site):
    data(site, label="Jane Doe, HIV+")
    with pytest.raises(DataError, match="Jane Doe") as raised:
        ask(Worker(site))
    assert "Jane" not in discreet(raised.value)
    assert "deploy check" in discreet(raised.value)
    assert discreet(ValueError("Jane Doe")) == "it failed (ValueError); its log says why"


def test_predictions_with_what_is_at_the_site(site, tmp_path):
    with pytest.raises(Exception, match="must have taken part in a run"):
        predict_site(site, tmp_path / "x.npz")
    worker = Worker(site)
    worker.answer("train", orders(worker))
    worker.answer("train", orders(worker, kind="evaluate", state=1))
    x, y = data(site)
    found = predict_site(site, site / "data.npz")
    assert found["round"] == 1  # the weights after round 1, as they came with its evaluation
    assert found["accuracy"] == pytest.approx(np.mean(np.array(found["predictions"]) == y.astype(str)))
    for given, words in (
        ({"x": x[:, :5]}, "shape"),
        ({"x": np.where(x > 2, np.nan, x)}, "must be finite"),
        ({"x": x, "y": y[:, None]}, "one value for each"),
        ({"x": x, "y": np.array(["sick"] * len(x))}, "labels must be of 0, 1"),
        ({"z": x}, "must hold an array 'x'"),
    ):
        np.savez(tmp_path / "new.npz", **given)
        with pytest.raises(DataError, match=words):
            predict_site(site, tmp_path / "new.npz")
    np.savez(tmp_path / "new.npz", x=x, y=y.astype("float64"))
    assert predict_site(site, tmp_path / "new.npz")["accuracy"] == found["accuracy"]
    done = subprocess.run(
        [sys.executable, "-m", "fedmix", "predict", "--site", str(site), "--input", str(site / "data.npz")],
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[0] == "label,p(0),p(1)"
    assert len(done.stdout.splitlines()) == 61


def test_a_file_beside_the_reader_does_not_shadow_the_sites_own(site, tmp_path, monkeypatch):
    other = tmp_path / "elsewhere"
    other.mkdir()
    data(other, n=10)
    monkeypatch.chdir(other)
    assert sum(ask(Worker(site))["points"][part][0] for part in ("train", "validation", "test")) == 60
