"""Files -> arrays. `digits` is embedded: no download, no network."""

from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Source:
    """Labelled data before anybody owns it: x [N, ...] float32, y [N]."""

    x: Tensor
    y: Tensor
    classes: int


def digits() -> Source:
    """1,797 handwritten digits, 8 x 8, from scikit-learn (DIGITS.md): x [1797, 1, 8, 8] in [0, 1]."""
    with (files("fedmix.data") / "digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        x = torch.from_numpy(arrays["x"].astype(np.float32) / 16).unsqueeze(1)
        return Source(x, torch.from_numpy(arrays["y"].astype(np.int64)), 10)


SOURCES = {"digits": digits}
