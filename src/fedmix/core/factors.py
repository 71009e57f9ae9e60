"""Experts that differ from a shared weight by a few numbers: low-rank sums, or factors of rows and columns.

With a rank r an expert's weight is W_k = W + U_k V_k. W is shared, U_k is called `up` and V_k `down`. Rank 0 stands for factors
of rank 1 (Dusenberry et al., 2020): row i of W is multiplied with out_k[i], and column j with in_k[j].

Layers are linear ones or convolutions. The products are never made while a model trains: a layer's output is that of the shared
weight, which is computed once for all experts, and what an expert's factors add to it.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedmix.core.tree import Params
from fedmix.errors import ModelError
from fedmix.rng import Stream

UP, DOWN, OUT, IN = "up", "down", "out", "in"
NOISE = 0.1  # how far experts' weights start apart, as a share of the shared weight's standard deviation
CONVOLUTIONS = {1: nn.functional.conv1d, 2: nn.functional.conv2d, 3: nn.functional.conv3d}


@dataclass(frozen=True)
class Factors:
    """Which layers have factors, and of which rank; rank 0: factors of rows and columns."""

    layers: tuple[str, ...]
    rank: int

    @property
    def kinds(self) -> tuple[str, str]:
        return (UP, DOWN) if self.rank else (OUT, IN)

    @property
    def names(self) -> list[str]:
        """What the factors are called among a model's parameters. No parameter of a module has such a name."""
        return [_name(layer, kind) for layer in self.layers for kind in self.kinds]

    def check(self, layers: Mapping[str, nn.Module]) -> None:
        """Refuse layers that cannot have factors."""
        for name in self.layers:
            layer = layers[name]
            if not isinstance(layer, nn.Linear | _ConvNd):
                raise ModelError(f"layer {name!r} must be linear or a convolution to have factors of its weight.")
            if isinstance(layer, _ConvNd) and (layer.groups > 1 or layer.transposed or layer.padding_mode != "zeros"):
                raise ModelError(
                    f"layer {name!r}: a convolution with groups, transposed, or padded with anything but zeros has no factors."
                )

    def draw(self, weights: Mapping[str, Tensor], rng: Stream) -> Params:
        """An expert's factors, so small that experts start near the shared weight and not at the same place."""
        drawn: Params = {}
        with rng.torch():
            for layer in self.layers:
                drawn |= self._draw_layer(layer, weights[f"{layer}.weight"])
        return drawn

    def _draw_layer(self, layer: str, weight: Tensor) -> Params:
        rows, columns = weight.shape[0], weight[0].numel()
        if not self.rank:
            channels = weight.shape[1]
            return {
                _name(layer, OUT): 1 + NOISE * torch.randn(rows),
                _name(layer, IN): 1 + NOISE * torch.randn(channels),
            }
        down = torch.randn(self.rank, columns) / math.sqrt(columns)
        spread = math.sqrt(self.rank / columns)  # of a row of `up` times `down`, for a unit of `up`
        up = torch.randn(rows, self.rank) * NOISE * float(weight.std(correction=0)) / spread
        return {_name(layer, UP): up, _name(layer, DOWN): down}

    @contextmanager
    def applied(self, layers: Mapping[str, nn.Module], params: Mapping[str, Tensor]) -> Iterator[None]:
        """For the length of a block the layers give what they would with the weights of these factors."""
        with ExitStack() as hooks:
            for name in self.layers:
                first, second = (params[_name(name, kind)] for kind in self.kinds)
                for handle in _hooked(layers[name], first, second, bool(self.rank)):
                    hooks.callback(handle.remove)
            yield

    def composed(self, params: Mapping[str, Tensor]) -> Params:
        """The parameters of an ordinary module: the factors multiplied into the weights."""
        plain = {name: value for name, value in params.items() if name not in self.names}
        for layer in self.layers:
            weight = f"{layer}.weight"
            first, second = (params[_name(layer, kind)] for kind in self.kinds)
            if self.rank:
                plain[weight] = plain[weight] + (first @ second).view_as(plain[weight])
            else:
                plain[weight] = plain[weight] * _along(first, plain[weight], 0) * _along(second, plain[weight], 1)
        return plain


def _name(layer: str, kind: str) -> str:
    return f"{layer}.weight.{kind}"


def _hooked(layer: nn.Module, first: Tensor, second: Tensor, low_rank: bool) -> list[torch.utils.hooks.RemovableHandle]:
    channels = 1 if isinstance(layer, _ConvNd) else -1  # the dimension that holds them

    def add(_: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out + _low_rank(layer, given[0], first, second).to(out.dtype)

    def scale_in(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (given[0] * _along(second, given[0], channels), *given[1:])

    def scale_out(_: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        bias = layer.bias
        if not isinstance(bias, Tensor):
            return out * _along(first, out, channels)
        shift = _along(bias, out, channels)
        return (out - shift) * _along(first, out, channels) + shift

    if low_rank:
        return [layer.register_forward_hook(add)]
    return [layer.register_forward_pre_hook(scale_in), layer.register_forward_hook(scale_out)]


def _low_rank(layer: nn.Module, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """What U V adds to a layer's output for x."""
    if not isinstance(layer, _ConvNd):
        return (x @ down.T.to(x.dtype)) @ up.T.to(x.dtype)
    kernel = down.view(len(down), layer.in_channels, *layer.kernel_size)
    convolve = CONVOLUTIONS[len(layer.kernel_size)]
    narrow = convolve(x, kernel.to(x.dtype), None, layer.stride, layer.padding, layer.dilation)
    points = [1] * len(layer.kernel_size)
    wide: Tensor = convolve(narrow, up.view(*up.shape, *points).to(narrow.dtype))
    return wide


def _along(values: Tensor, like: Tensor, dimension: int) -> Tensor:
    """A vector in the form in which it multiplies `like` along one dimension."""
    shape = [1] * like.dim()
    shape[dimension] = -1
    return values.view(shape)
