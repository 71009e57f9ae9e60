"""Nested containers of tensors as one flat dict of named tensors, and back: what checkpoints and the wire are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Params = dict[str, Tensor]


def flatten(tree: Any, prefix: str = "") -> Params:
    """{'experts.0.fc.weight': ...} of any nesting of dicts, tuples, dataclasses, tensors and whole numbers."""
    if isinstance(tree, Tensor):
        return {prefix: tree}
    if isinstance(tree, int):
        return {prefix: torch.tensor(tree, dtype=torch.int64)}
    flat: Params = {}
    for key, value in _children(tree).items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else key)
    return flat


def unflatten(template: T, flat: Mapping[str, Tensor], prefix: str = "") -> T:
    """The tree of `template`'s form with `flat`'s tensors. Raises KeyError or ValueError where they do not fit."""
    node: Any = template
    if isinstance(node, Tensor):
        value = flat[prefix]
        if value.shape != node.shape or value.dtype != node.dtype:
            raise ValueError(
                f"{prefix} must be {list(node.shape)} {node.dtype}. Got {list(value.shape)} {value.dtype}."
            )
        return value  # type: ignore[return-value]
    if isinstance(node, int):
        return int(flat[prefix])  # type: ignore[return-value]
    children: dict[str, Any] = {
        key: unflatten(value, flat, f"{prefix}.{key}" if prefix else key) for key, value in _children(node).items()
    }
    if isinstance(node, dict):
        return children  # type: ignore[return-value]
    if isinstance(node, tuple):
        return tuple(children.values())  # type: ignore[return-value]
    result: T = replace(node, **children)
    return result


def _children(node: Any) -> dict[str, Any]:
    if isinstance(node, dict):
        return node
    if isinstance(node, tuple):
        return {str(i): value for i, value in enumerate(node)}
    if is_dataclass(node):
        return {f.name: getattr(node, f.name) for f in fields(node)}
    raise TypeError(f"a tree holds dicts, tuples, dataclasses and tensors, not {type(node).__name__}")


def subtree(flat: Mapping[str, Tensor], prefix: str) -> Params:
    """The tensors whose names start with `prefix.`, with that cut off."""
    cut = len(prefix) + 1
    return {name[cut:]: value for name, value in flat.items() if name.startswith(prefix + ".")}


def stack(flats: Sequence[Mapping[str, Tensor]]) -> Params:
    """Flat dicts of the same names as one, each tensor with a new first dimension."""
    return {name: torch.stack([flat[name] for flat in flats]) for name in flats[0]}


def placed(flat: Mapping[str, Tensor], device: torch.device) -> Params:
    """The tensors on a device; those that are there already are not copied."""
    return {name: value.to(device) for name, value in flat.items()}


def nbytes(flat: Mapping[str, Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in flat.values())
