"""New views of training images, drawn on the worker from the client's own random stream, mini-batch by mini-batch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedmix.rng import Stream

PAD = 4


def crop_and_flip(mean: Sequence[float], std: Sequence[float], x: Tensor, rng: Stream) -> Tensor:
    """Images [B, C, H, W] as (x / 255 - mean) / std: padded by four black pixels, cut out at random, mirrored or not."""
    size, channels, height, width = x.shape
    shift = rng.numpy.integers(0, 2 * PAD + 1, size=(2, size))
    mirrored = rng.numpy.integers(0, 2, size=size).astype(bool)
    black = (-torch.tensor(mean) / torch.tensor(std) if mean else torch.zeros(channels)).to(x.device)
    padded = black.view(1, -1, 1, 1).repeat(size, 1, height + 2 * PAD, width + 2 * PAD)
    padded[:, :, PAD:-PAD, PAD:-PAD] = x
    across = np.arange(width)
    rows = shift[0][:, None] + np.arange(height)
    columns = shift[1][:, None] + np.where(mirrored[:, None], across[::-1], across)
    image = torch.arange(size, device=x.device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=x.device).view(1, -1, 1, 1)
    down, along = (torch.from_numpy(index).to(x.device) for index in (rows, columns))
    return padded[image, channel, down.view(size, 1, height, 1), along.view(size, 1, 1, width)]
