"""What a model is given beside one tensor: several inputs by name, sequences of different lengths.

Inside the house a point is one row of one tensor. Several inputs lie side by side in that row as float64, which holds
float32 and whole numbers up to 2 ** 53 exactly; the model takes the row apart again before its forward pass.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedmix.errors import ModelError

MASKS = ("mask", "attention_mask")  # names by which a forward pass can ask which places of a sequence are filled
LENGTHS = "lengths"
KINDS = {"float": torch.float32, "integer": torch.int64, "truth": torch.bool}


@dataclass(frozen=True)
class Input:
    """One input of a model. name: "" is the only one, given by its position. shape: of one point.

    kind: "float", "integer" or "truth". mean, std: what an image was normalised with, channel by channel, or nothing.
    sequence: places of it may be empty, and how many are filled is known.
    """

    name: str
    shape: tuple[int, ...]
    kind: str = "float"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    sequence: bool = False

    @property
    def width(self) -> int:
        """How many numbers of a row it takes: its own, and one for its length."""
        count = 1
        for size in self.shape:
            count *= size
        return count + self.sequence

    def table(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> "Input":
        lists = {key: tuple(table[key]) for key in ("shape", "mean", "std")}
        return Input(**{**table, **lists})


def taken_apart(x: Tensor, inputs: Sequence[Input]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rows [B, D] as inputs by name, and the lengths of those that are sequences, by the same names."""
    values: dict[str, Tensor] = {}
    lengths: dict[str, Tensor] = {}
    start = 0
    for part in inputs:
        end = start + part.width
        if part.sequence:
            lengths[part.name] = x[..., end - 1].to(torch.int64)
        numbers = x[..., start : end - part.sequence]
        values[part.name] = numbers.reshape(*x.shape[:-1], *part.shape).to(KINDS[part.kind])
        start = end
    return values, lengths


def arguments(module: nn.Module, x: Tensor, inputs: Sequence[Input]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """What a forward pass is called with: the only input by its position, several by name.

    Where the forward pass names `lengths`, `mask` or `attention_mask`, it is told how long sequences are.
    """
    values, lengths = taken_apart(x, inputs)
    known = _parameters(module)
    more = _about_sequences(values, lengths, known)
    if list(values) == [""]:
        return (values[""],), more
    unknown = [name for name in values if known is not None and name not in known]
    if unknown:
        raise ModelError(
            f"the model's forward must take {', '.join(values)} by name. It does not take {unknown[0]}; it takes "
            f"{', '.join(known or ())}."
        )
    return (), {**values, **more}


def _parameters(module: nn.Module) -> list[str] | None:
    """The names of what a forward pass takes; None: anything."""
    parameters = inspect.signature(module.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return list(parameters)


def _about_sequences(
    values: Mapping[str, Tensor], lengths: Mapping[str, Tensor], known: Sequence[str] | None
) -> dict[str, Tensor]:
    """Lengths and masks that the forward pass asks for by name: `mask` with one sequence, `NAME_mask` with several."""
    asked = known or ()
    told: dict[str, Tensor] = {}
    for name, count in lengths.items():
        prefix = f"{name}_" if len(lengths) > 1 else ""
        if prefix + LENGTHS in asked:
            told[prefix + LENGTHS] = count
        places = torch.arange(values[name].shape[count.dim()], device=count.device)
        for mask in MASKS:
            if prefix + mask in asked and prefix + mask not in values:
                told[prefix + mask] = places < count.unsqueeze(-1)
    return told
