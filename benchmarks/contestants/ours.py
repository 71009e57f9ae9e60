"""fedmix on the shared setting: python ours.py SETTING ENGINE METHOD [key=value ...]"""

import sys

import numpy as np
import torch
from plain import loss_of
from turns import Turns

from fedmix.data.federation import PARTS, Federation
from fedmix.engines.store import MemoryStore
from fedmix.running.loop import rounds
from fedmix.running.where import Stage, Where
from fedmix.settings.build import build
from fedmix.settings.reading import make_recipe, parse_changes


def federation(setting: str) -> Federation:
    data = np.load(setting)
    clients, points = data["y"].shape
    own = np.arange(clients * points).reshape(clients, points)
    nothing = [np.zeros(0, np.int64)] * clients
    y = torch.from_numpy(data["y"].reshape(-1))
    return Federation(
        x=torch.from_numpy(data["x"].reshape(-1, *data["x"].shape[2:])),
        y=y,
        c=y,
        parts=dict(zip(PARTS, (list(own), nothing, nothing), strict=True)),
        names=[str(s) for s in range(clients)],
        classes=10,
        categories=10,
    )


def main(setting: str, engine: str, method: str, changes: list[str]) -> None:
    settings = {"data.source": "own", "model.name": "lenet5", "training.client_lr": 0.05}
    settings |= {
        "training.batch_size": 64,
        "training.last_batch": "smaller",
    }  # the mini-batches that all contestants take
    if method == "fedavg":
        settings |= {"server.optimizer": "sgd", "server.server_lr": 1.0}
    recipe = make_recipe({"name": "bench", "rounds": 10_000}, method, settings | parse_changes(changes))
    if engine == "serial":
        torch.set_num_threads(1)
    experiment = build(recipe, federation(setting))
    algorithm, data = experiment.algorithm, dict(np.load(setting))
    with Where(engine).open(Stage(experiment, MemoryStore)) as started:
        turns = Turns()
        for step in rounds(algorithm, started, algorithm.init(0), 0, len(experiment.federation), 0, recipe.rounds):
            turns.stop()
            turns.done(loss=loss_of(algorithm.experts(step.state)[0], data))


if __name__ == "__main__":
    main(*sys.argv[1:4], sys.argv[4:])
