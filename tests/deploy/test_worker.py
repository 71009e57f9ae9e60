"""A site's worker without its processes: what it reads, what it answers, what it keeps to itself, predictions afterwards."""

import io
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr")

from fedmix.core.settings import PrivacySettings
from fedmix.deploy import wire
from fedmix.deploy.acceptance import accept, accepted_recipes, agreed_recipe
from fedmix.deploy.folder import init
from fedmix.deploy.predict import predict_site
from fedmix.deploy.supernode import wrong_with_app
from fedmix.deploy.worker import Worker, discreet, run_folder
from fedmix.engines.client import Task
from fedmix.engines.flower import Order, pack_orders, unpack_outcomes
from fedmix.errors import ClientError, DataError, SettingError
from fedmix.settings.build import revive
from fedmix.settings.reading import dump_recipe, read_recipe

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
        ({"x": x[:, :5]}, r"inputs must be \[N, "),
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


def asking(recipe):
    return wire.table({"recipe": recipe if isinstance(recipe, str) else dump_recipe(recipe)})


def test_a_site_takes_part_in_what_its_owner_accepted_and_in_nothing_else(site):
    worker, agreed = Worker(site), agreed_recipe(site)
    other = replace(agreed, rounds=21)
    with pytest.raises(ClientError, match=r"has not accepted this recipe \(another rounds\)") as raised:
        worker.answer("query", asking(other))
    (kept,) = (site / "refused").iterdir()
    assert kept.name in str(raised.value)
    with pytest.raises(ClientError, match="has not accepted"):
        worker.answer("train", orders(worker, recipe=dump_recipe(other)))
    accept(site, read_recipe(str(kept)))
    assert json.loads(worker.answer("query", asking(other))["table"]["json"])["clients"] == ["a"]
    assert [recipe.rounds for recipe in accepted_recipes(site).values()] == [20, 21]
    (outcome,) = unpack_outcomes(worker.answer("train", orders(worker, recipe=dump_recipe(other))))
    assert outcome.error == ""
    next((site / "accepted").iterdir()).unlink()  # the owner has changed their mind
    with pytest.raises(ClientError, match="has not accepted"):
        worker.answer("train", orders(worker, recipe=dump_recipe(other)))


def test_comments_and_order_do_not_matter(site):
    text = dump_recipe(agreed_recipe(site))
    first, *rest = text.split("\n\n")
    assert Worker(site).answer("query", asking("# as agreed\n" + "\n\n".join([first, *reversed(rest)])))


@pytest.mark.parametrize(
    "change",
    [
        'data.source = "canary:touch"',
        'model.name = "canary:touch"',
        'data.source = "os:system"\ndata.args = {command = "touch touched"}',
        'algorithm = "canary:touch"',
    ],
)
def test_no_name_of_a_foreign_recipe_is_imported(site, monkeypatch, change):
    """A module that leaves a trace when it is imported, beside the site and on the path."""
    monkeypatch.chdir(site)
    monkeypatch.syspath_prepend(str(site))
    (site / "canary.py").write_text("open('touched', 'w').close()\ntouch = print\n")
    settings = (site / "site.toml").read_text().replace('source = "npz"', 'source = "recipe"')
    (site / "site.toml").write_text(re.sub(r"(?m)^args = .*$", "args = { part = 0, of = 1 }", settings))
    text = f'name = "federation"\n{change}\n'
    for kind, content in (("query", asking(text)), ("train", pack_orders({"recipe": text}, []))):
        with pytest.raises(ClientError, match=r"has not accepted|cannot be used here"):
            Worker(site).answer(kind, content)
    assert not (site / "touched").exists()


def test_a_method_of_somebodys_own_comes_from_an_installed_package(site, monkeypatch):
    """A file beside the site is not enough, even where the owner accepted the recipe."""
    monkeypatch.chdir(site)
    (site / "loose.py").write_text("open('touched', 'w').close()\n")
    recipe = replace(agreed_recipe(site), algorithm="loose:method")
    accept(site, recipe)
    with pytest.raises(ClientError, match="must come from a package that the site's owner installed"):
        Worker(site).answer("query", asking(recipe))
    assert not (site / "touched").exists()
    installed = replace(agreed_recipe(site), algorithm="fedmix.methods.fedavg:PAGE")
    accept(site, installed)
    worker = Worker(site)
    assert json.loads(worker.answer("query", asking(installed))["table"]["json"])["clients"] == ["a"]


def test_repeatable_noise_is_refused_where_data_has_owners(site):
    noisy = PrivacySettings(clip=1.0, noise=1.0, reproducible=True)
    recipe = replace(agreed_recipe(site), privacy=noisy)
    with pytest.raises(SettingError, match="protects nobody"):
        accept(site, recipe)
    with pytest.raises(ClientError, match="protects nobody"):
        Worker(site).answer("query", asking(recipe))
    with pytest.raises(ClientError, match="reasonable size"):
        Worker(site).answer("query", asking("# " + "x" * 2**19))


@pytest.mark.parametrize(
    "lie",
    [
        {"client": "../../../victim"},
        {"client": "/tmp/victim"},
        {"client": -1},
        {"client": 1.0},
        {"round": "1"},
        {"kind": "spy"},
    ],
)
def test_an_order_names_clients_by_numbers_and_nothing_is_written_for_others(site, lie):
    worker = Worker(site)
    content = orders(worker)
    packed = json.loads(content["table"]["json"])
    packed["table"]["orders"][0]["task"] |= lie
    content["table"]["json"] = json.dumps(packed)
    before = sorted(site.parent.parent.rglob("*"))
    with pytest.raises(ClientError, match="an order must"):
        worker.answer("train", content)
    assert [p for p in sorted(site.parent.parent.rglob("*")) if p not in before and "refused" not in p.parts] == []


def test_a_client_that_is_not_here_is_not_answered_for(site):
    worker = Worker(site)
    content = orders(worker)
    packed = json.loads(content["table"]["json"])
    packed["table"]["orders"][0]["task"]["client"] = 1
    content["table"]["json"] = json.dumps(packed)
    (outcome,) = unpack_outcomes(worker.answer("train", content))
    assert outcome.message is None
    assert not (run_folder(site, RUN) / "clients" / "1").exists()


def test_a_site_gives_no_density_no_rounds_beyond_its_recipe_and_few_noisy_answers(site):
    worker = Worker(site)
    for more, why in (({"kind": "density"}, "no model of its inputs"), ({"t": 21}, "has no round 21")):
        (outcome,) = unpack_outcomes(worker.answer("train", orders(worker, **more)))
        assert why in outcome.error
    noisy = replace(agreed_recipe(site), privacy=PrivacySettings(clip=1.0, noise=1.0))
    accept(site, noisy)
    answers = []
    for _ in range(7):
        again = Worker(site)  # a site that is started anew counts on
        (outcome,) = unpack_outcomes(again.answer("train", orders(again, recipe=dump_recipe(noisy))))
        answers.append(outcome.error)
    assert answers[:5] == [""] * 5
    assert all("has answered 5 times in round 1" in error for error in answers[5:])


def bundle(files):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return made.getvalue()


def test_a_site_takes_no_code_from_the_server(site):
    own = (site.parent.parent / "server" / "app" / "pyproject.toml").read_text()
    assert wrong_with_app(bundle({"pyproject.toml": own, ".info/CONTENT": ""})) is None
    for files, why in (
        ({"pyproject.toml": own, "evil.py": "import os"}, "brings files along"),
        ({"pyproject.toml": own.replace("fedmix.apps.client:app", "os:system")}, "its entry point is 'os:system'"),
        ({"pyproject.toml": own.replace("dependencies = []", 'dependencies = ["evil"]')}, "packages installed"),
        ({"pyproject.toml": "not = [toml"}, "cannot be read"),
        ({"pyproject.toml": own + "#" * 2**21}, "larger than"),
    ):
        assert why in wrong_with_app(bundle(files))
    assert "cannot be read" in wrong_with_app(b"no archive")
