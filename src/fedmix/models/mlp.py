"""A multi-layer perceptron with ReLU."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

OUTPUT = "out"


def mlp(inputs: int, classes: int, hidden: Sequence[int] = (64,), dropout: Sequence[float] = ()) -> nn.Module:
    """Flatten, then hidden layers fc1, fc2, ... with ReLU, each followed by its dropout, then the output layer `out`."""
    layers: list[tuple[str, nn.Module]] = [("flatten", nn.Flatten())]
    widths = [inputs, *hidden]
    for i, (a, b) in enumerate(pairwise(widths), start=1):
        layers += [(f"fc{i}", nn.Linear(a, b)), (f"relu{i}", nn.ReLU())]
        if dropout:
            layers.append((f"dropout{i}", nn.Dropout(dropout[i - 1])))
    layers.append((OUTPUT, nn.Linear(widths[-1], classes)))
    module = nn.Sequential()
    for name, layer in layers:
        module.add_module(name, layer)
    return module
