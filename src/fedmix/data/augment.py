"""New views of training images, drawn on the worker from the client's own random stream, mini-batch by mini-batch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedmix.rng import Stream

PAD = 4


def crop_and_flip(mean: Sequence[float], std: Sequence[float], x: Tensor, rng: Stream) -> Tensor:
    """Pad images by four black pixels, cut them out at random, mirror half of them: [B, C, H, W] -> [B, C, H, W].

    mean, std: the images are normalised with them already, (value - mean) / std; nothing: they are not.
    """
    size, channels, height, width = x.shape
    shift = rng.numpy.integers(0, 2 * PAD + 1, size=(2, size))
    mirrored = rng.numpy.integers(0, 2, size=size).astype(bool)
    black = _black(mean, std, channels).to(x.device)
    padded = black.view(1, -1, 1, 1).repeat(size, 1, height + 2 * PAD, width + 2 * PAD)
    padded[:, :, PAD:-PAD, PAD:-PAD] = x
    # Which row and column of the padded image each pixel of the new one is taken from: [B, H], [B, W].
    across = np.arange(width)
    rows = shift[0][:, None] + np.arange(height)
    columns = shift[1][:, None] + np.where(mirrored[:, None], across[::-1], across)
    image = torch.arange(size, device=x.device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=x.device).view(1, -1, 1, 1)
    row = torch.from_numpy(rows).to(x.device).view(size, 1, height, 1)
    column = torch.from_numpy(columns).to(x.device).view(size, 1, 1, width)
    return padded[image, channel, row, column]


def _black(mean: Sequence[float], std: Sequence[float], channels: int) -> Tensor:
    """Return what the value 0 becomes in each channel when it is normalised: [C]."""
    if not mean:
        return torch.zeros(channels)
    return -torch.tensor(mean) / torch.tensor(std)
