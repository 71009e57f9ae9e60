"""Everything that a client computes is on its device, and nothing in the batch loop waits for it.

No GPU is needed: on torch's `meta` device a tensor of another device in an operation is an error, and so is reading a
number. Where there is a GPU, a run on it is compared with the CPU.
"""

import pytest
import torch
from conftest import METHODS, small_experiment, train_serially

from fedmix.core import training
from fedmix.core.tree import flatten, placed
from fedmix.core.types import Examples
from fedmix.data.augment import crop_and_flip
from fedmix.data.federation import Federation, normalised
from fedmix.engines.serial import SerialEngine
from fedmix.engines.store import MemoryStore
from fedmix.errors import SettingError
from fedmix.rng import stream
from fedmix.running.loop import rounds
from fedmix.running.where import Stage, Where

META = torch.device("meta")


def on_meta(experiment, augment=False):
    data = experiment.federation.examples(0, "train")
    views = (lambda x, rng: crop_and_flip((0.5,), (0.5,), x, rng)) if augment else None
    there = Examples(data.x.to(META), data.y.to(META), data.c.to(META), views)
    algorithm = experiment.algorithm
    return algorithm.broadcast(algorithm.init(0), 0).to(META), placed(algorithm.new_client(0), META), there


@pytest.fixture
def no_reading(monkeypatch):
    """What is read of the device after the loop cannot be read here."""
    monkeypatch.setattr(training, "values_of", lambda losses: [0.0])
    monkeypatch.setattr(training, "refuse_what_is_not_finite", lambda losses, params: None)


def images(clients=2):
    generator = torch.Generator().manual_seed(0)
    made = {
        f"s{s}": {"x": torch.rand(30, 1, 16, 16, generator=generator).numpy(), "y": torch.arange(30).numpy() % 3}
        for s in range(clients)
    }
    return Federation.from_clients(made)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("changes", [{}, {"fedmix.gate_through_features": False, "fedmix.phi": "private"}])
def test_a_client_trains_on_its_device_alone(method, changes, no_reading):
    experiment = small_experiment(method, **changes, **{"training.momentum": 0.5})
    reply, after = experiment.algorithm.client_update(*on_meta(experiment), stream(0), None)
    assert {value.device for value in (*reply.tensors.values(), *after.values())} <= {META}


@pytest.mark.parametrize("method", METHODS)
def test_convolutions_dropout_and_augmentation_too(method, no_reading):
    changes = {"model.name": "lenet5", "model.channels": [4, 4], "model.hidden": [8], "model.dropout": [0.3, 0.1]}
    experiment = small_experiment(method, federation=images(), **changes)
    reply, _ = experiment.algorithm.client_update(*on_meta(experiment, augment=True), stream(0), None)
    assert {value.device for value in reply.tensors.values()} <= {META}


@pytest.mark.parametrize("method", METHODS)
def test_predictions_are_made_on_the_device(method):
    experiment = small_experiment(method)
    message, private, data = on_meta(experiment)
    assert experiment.algorithm.predict(message, private, data.x).device == META


def test_bytes_are_normalised_on_the_device():
    x = torch.zeros(2, 1, 4, 4, dtype=torch.uint8, device=META)
    assert normalised(x, (0.5,), (0.5,)).device == META
    assert small_experiment().federation.to(META).examples(0, "train").x.device == META


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(SettingError, match="--device must be one of cpu, cuda, cuda:N, mps"):
        Where(device="gpu")
    if not torch.cuda.is_available():
        for device in ("cuda", "cuda:1", "mps"):
            with pytest.raises(SettingError, match="torch cannot use"):
                Where(device=device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", ["serial", "local"])
def test_a_gpu_gives_the_same_numbers(method, engine):
    experiment = small_experiment(method)
    steps, _ = train_serially(experiment)
    with Where(engine, device="cuda").open(Stage(experiment, MemoryStore)) as started:
        algorithm = experiment.algorithm
        there = list(rounds(algorithm, started, algorithm.init(0), 0, len(experiment.federation), 0, 3))
    assert isinstance(started, SerialEngine) == (engine == "serial")
    wanted = flatten(steps[-1].state)
    for name, value in flatten(there[-1].state).items():
        assert torch.allclose(value.float(), wanted[name].float(), atol=1e-4), name
