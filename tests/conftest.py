"""Small federations and experiments that every test can afford."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from published import write_everything

from fedmix.catalogue import CATALOGUE
from fedmix.cli import main
from fedmix.data.federation import Federation
from fedmix.engines.serial import SerialEngine
from fedmix.engines.store import MemoryStore
from fedmix.running.loop import rounds
from fedmix.settings.build import build
from fedmix.settings.reading import make_recipe

# Files whose tests take longest, started first: with two processes neither waits for the other at the end.
LONGEST = (
    "test_recipes.py",
    "test_cli.py",
    "test_deployment.py",
    "test_run.py",
    "test_after_training.py",
    "test_package.py",
)
METHODS = tuple(CATALOGUE)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def fedmix(*args):
    """The command in this process: status, standard output, standard error."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        main(list(args))
    return SimpleNamespace(returncode=ended.value.code, stdout=out.getvalue(), stderr=errors.getvalue())


@pytest.fixture(autouse=True)
def one_thread():
    """As in a worker, and so that tests do not depend on the machine's cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_federation(clients=4, points=24, side="label", seed=0):
    """Clients of different sizes, 3 classes of 2-dimensional blobs, moved a little on each client."""
    rng = np.random.default_rng(seed)
    made = {}
    for s in range(clients):
        y = rng.integers(0, 3, size=points + 4 * s)
        centres = np.array([[0, 2], [2, 0], [-2, -2]])
        x = centres[y] + 0.3 * s + rng.normal(size=(len(y), 2))
        made[f"site-{s}"] = {"x": x, "y": y, "c": np.where(x[:, 0] > 0, "right", "left")}
    return Federation.from_clients(made, side=side, seed=seed)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Writes the user's own mine.py into the current folder; no other test sees what was imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield (tmp_path / "mine.py").write_text
    sys.modules.pop("mine", None)


@pytest.fixture
def small_files(tmp_path, monkeypatch):
    """Small files in the publishers' formats, found through $FEDMIX_DATA, with checksums of their own."""
    folder = tmp_path / "publishers"
    write_everything(folder, monkeypatch)
    monkeypatch.setenv("FEDMIX_DATA", str(folder))
    monkeypatch.setenv("FEDMIX_CACHE", str(tmp_path / "cache"))
    return folder


def small_recipe(algorithm="fedmix", **changes):
    base = {
        "rounds": 3,
        "data.source": "own",
        "model.hidden": [8],
        "training.batch_size": 6,
        "training.client_lr": 0.1,
        "server.server_lr": 0.02,
        "fedmix.experts": 3,
        "evaluation.share_private": True,
        "evaluation.every": 2,
        "checkpoint.every": 1,
    }
    return make_recipe({"name": "small"}, algorithm, base | changes)


def small_experiment(algorithm="fedmix", federation=None, model=None, **changes):
    recipe = small_recipe(algorithm, **changes)
    return build(recipe, federation or small_federation(side=recipe.data.side), model)


def train_serially(experiment, state=None, store=None, last=None):
    """The state after the last round, and the clients' private states."""
    recipe, algorithm = experiment.recipe, experiment.algorithm
    store = store or MemoryStore()
    engine = SerialEngine(algorithm, experiment.federation, recipe.seed, store)
    state = state or algorithm.init(recipe.seed)
    per_round = recipe.clients_per_round
    steps = list(
        rounds(algorithm, engine, state, recipe.seed, len(experiment.federation), per_round, last or recipe.rounds)
    )
    return steps, {s: store.get(s) for s in store.clients()}
