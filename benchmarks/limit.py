"""Why a round cannot be quicker: how close each operation of LeNet-5's step comes to the matrix-product rate, one thread.

The library's convolution kernels themselves stay below it; what a whole step loses beyond them is pooling, ReLU and the rest.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from fedmix.core.model import Model
from fedmix.models.lenet5 import LeNet5
from fedmix.rng import stream

B, REPEAT = 64, 30


def images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).contiguous(memory_format=torch.channels_last)


def operations() -> dict[str, tuple[float, Callable[[], Any]]]:
    """Name -> floating-point operations, and a function that does them."""
    x, h, z = images(B, 3, 32, 32), images(B, 32, 14, 14), torch.randn(B, 1600)
    w1, w2, w3 = images(32, 3, 5, 5), images(64, 32, 5, 5), torch.randn(512, 1600)
    g1, g2, g3 = images(B, 32, 28, 28), images(B, 64, 10, 10), torch.randn(B, 512)
    b1, b2 = torch.randn(32), torch.randn(64)
    first, second, third = 2.0 * 75 * 32 * 784 * B, 2.0 * 800 * 64 * 100 * B, 2.0 * 1600 * 512 * B

    def backward(g: torch.Tensor, inputs: torch.Tensor, w: torch.Tensor, mask: list[bool]) -> Any:
        ones, zeros = [1, 1], [0, 0]
        return torch.ops.aten.convolution_backward(g, inputs, w, [w.shape[0]], ones, zeros, ones, False, zeros, 1, mask)

    return {
        "first convolution, forward": (first, lambda: F.conv2d(x, w1, b1)),
        "first convolution, backward (weights)": (first, lambda: backward(g1, x, w1, [False, True, True])),
        "second convolution, forward": (second, lambda: F.conv2d(h, w2, b2)),
        "second convolution, backward (weights, input)": (2 * second, lambda: backward(g2, h, w2, [True, True, True])),
        "hidden layer, forward and backward": (3 * third, lambda: (F.linear(z, w3), g3.T @ z, g3 @ w3)),
    }


def whole_step() -> Callable[[], Any]:
    model = Model(lambda: LeNet5((3, 32, 32), 10), "out", torch.zeros(2, 3, 32, 32), 10)
    params = model.init(stream(0))
    x, y = torch.randn(B, 3, 32, 32), torch.randint(10, (B,))

    def step() -> Any:
        leaves = {name: w.detach().requires_grad_() for name, w in params.items()}
        logits, _ = model.apply(leaves, x, training=True)
        return torch.autograd.grad(F.cross_entropy(logits, y), list(leaves.values()))

    return step


def main() -> None:
    torch.set_num_threads(1)
    a = torch.randn(1024, 1024)
    table = operations()
    entered = {"matrix product": (2.0 * 1024**3, lambda: a @ a), **table}
    work = sum(flop for flop, _ in table.values())
    entered["a whole step (forward, backward)"] = (work, whole_step())
    seconds: dict[str, list[float]] = {name: [] for name in entered}
    for _ in range(REPEAT):  # in turns: all of them meet the same noise
        for name, (_, act) in entered.items():
            began = time.perf_counter()
            act()
            seconds[name].append(time.perf_counter() - began)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    peak = entered["matrix product"][0] / middle["matrix product"]
    print("| operation | ms | share of the matrix-product rate |\n|---|---|---|")
    for name, (flop, _) in entered.items():
        print(f"| {name} | {1000 * middle[name]:.2f} | {100 * flop / middle[name] / peak:.0f} % |")
    kernels = sum(middle[name] for name in table)
    print(
        f"| all kernels of a step, nothing between them | {1000 * kernels:.2f} | {100 * work / kernels / peak:.0f} % |"
    )


if __name__ == "__main__":
    main()
