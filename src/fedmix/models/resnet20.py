"""ResNet-20 with group normalisation and parameter-free ('option A') shortcuts, for CIFAR-sized images."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

OUTPUT = "out"
GROUPS = 8


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut that halves the picture by taking every second pixel, and pads channels with zero."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.stride = 2 if after > before else 1
        self.extra = after - before
        self.conv1 = nn.Conv2d(before, after, 3, stride=self.stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, after)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.extra:
            shortcut = nn.functional.pad(shortcut, (0, 0, 0, 0, 0, self.extra))
        x = self.norm1(self.conv1(x)).relu()
        return torch.relu(self.norm2(self.conv2(x)) + shortcut)


class ResNet20(nn.Module):
    """stem, stage1, stage2, stage3 (three blocks each), mean over the picture, out."""

    def __init__(self, shape: tuple[int, int, int], classes: int, channels: Sequence[int] = (16,)) -> None:
        super().__init__()
        width = channels[0]
        self.stem = nn.Sequential(
            nn.Conv2d(shape[0], width, 3, padding=1, bias=False), nn.GroupNorm(GROUPS, width), nn.ReLU()
        )
        self.stage1 = nn.Sequential(*[Block(width, width) for _ in range(3)])
        self.stage2 = nn.Sequential(Block(width, 2 * width), *[Block(2 * width, 2 * width) for _ in range(2)])
        self.stage3 = nn.Sequential(Block(2 * width, 4 * width), *[Block(4 * width, 4 * width) for _ in range(2)])
        self.out = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage3(self.stage2(self.stage1(self.stem(x))))
        logits: Tensor = self.out(x.mean(dim=(2, 3)))
        return logits
