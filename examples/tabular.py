"""Tabular data with side information of its own: machines of three makers, spread over eight plants.

A sensor reads the same quantity differently depending on who made it (one is upside down, one has an offset). Each row says
its maker; q(z|c) is conditioned on that column, so experts specialise on makers and every plant's gate learns which of them
its readings need. At prediction time the maker is not given.
"""

import sys

import numpy as np
from torch import nn

import fedmix

MAKERS = {"axo": lambda x: x, "borel": lambda x: -x, "corv": lambda x: x[:, ::-1] + 1.0}


def plants(count: int = 8, rows: int = 150) -> dict[str, dict[str, np.ndarray]]:
    """{plant: x [rows, 6], y (ok or faulty), c (the maker's name)}; each plant bought mostly from one maker."""
    rng = np.random.default_rng(0)
    tables = {}
    for p in range(count):
        truth = rng.normal(size=(rows, 6))
        y = (truth[:, 0] + truth[:, 1] * truth[:, 2] > 0).astype(np.int64)
        favourite = list(MAKERS)[p % 3]
        maker = np.where(rng.random(rows) < 0.8, favourite, rng.choice(list(MAKERS), size=rows))
        x = np.stack([MAKERS[m](truth[i : i + 1])[0] for i, m in enumerate(maker)])
        tables[f"plant-{p}"] = {"x": x, "y": y, "c": maker}
    return tables


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def main(out: str) -> None:
    federation = fedmix.Federation.from_clients(plants(), side="column")
    settings = {
        "rounds": 40,
        "training": {"batch_size": 16, "client_lr": 0.1, "epochs": 2},
        "server": {"server_lr": 0.01},
        "fedmix": {"experts": 3, "gamma": 0.9},
    }
    for method in ("fedmix", "fedavg"):
        run = fedmix.train(
            federation=federation,
            model=net,
            output="4",
            out=f"{out}/{method}",
            overwrite=True,
            algorithm=method,
            **settings,
        )
        accuracy = run.summary["accuracy"]["test"]
        print(f"{method}: fine-tuned {accuracy['fine_tuned']['mean']:.3f}, server {accuracy['server']['mean']:.3f}")
    experts = fedmix.load(f"{out}/fedmix", model=net)
    readings = plants()["plant-0"]["x"][:5]
    print("experts that plant-0 uses for five readings:")
    print(experts.client("plant-0").expert_weights(readings).numpy().round(2))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/tabular")
