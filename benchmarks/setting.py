"""The CIFAR-10 setting that contestants share: the same data, model, start and mini-batches, as one file for all of them.

LeNet-5 (878,538 parameters), 10 clients x 450 images, B = 64, E = 1, SGD with rate 0.05, no dropout; the server takes the
mean. Images are noise of the right shape with labels that can be learnt: speed does not depend on what they show, and no
data has to be at hand.
"""

from pathlib import Path

import numpy as np

CLIENTS, POINTS, BATCH, RATE, ROUNDS = 10, 450, 64, 0.05, 40


def write(path: Path) -> None:
    """x [S, N, 3, 32, 32], y [S, N], order [T, S, N] (each round's mini-batches are runs of 64), start.* (the weights)."""
    from fedmix.models.lenet5 import LeNet5
    from fedmix.rng import stream

    rng = np.random.default_rng(0)
    templates = rng.normal(size=(10, 3, 32, 32))
    y = rng.integers(0, 10, size=(CLIENTS, POINTS))
    x = (0.4 * templates[y] + 0.5 * rng.normal(size=(CLIENTS, POINTS, 3, 32, 32))).astype(np.float32)
    order = np.stack(
        [
            [stream(0, "round", t, "client", s).child("batches").permutation(POINTS) for s in range(CLIENTS)]
            for t in range(1, ROUNDS + 1)
        ]
    )
    with stream(0, "init", "expert", 0).torch():
        start = {f"start.{name}": w.detach().numpy() for name, w in LeNet5((3, 32, 32), 10).named_parameters()}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, x=x, y=y, order=order, **start)
