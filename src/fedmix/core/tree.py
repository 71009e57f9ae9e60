"""Nested containers of tensors as one flat dict of named tensors, and back: what checkpoints and the wire are made of."""

from collections.abc import Callable, Mapping, Sequence
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


def tensors_of(tree: Any, prefix: str = "") -> Params:
    """The tensors of a nesting of dicts, tuples and tensors, by the way to them, whatever order dicts have."""
    if isinstance(tree, Tensor):
        return {prefix: tree}
    found: Params = {}
    for key, value in _branches(tree).items():
        found |= tensors_of(value, f"{prefix}/{key}")
    return found


def only_tensors(tree: Any) -> bool:
    """Whether a nesting of dicts and tuples holds nothing but tensors."""
    if isinstance(tree, Tensor):
        return True
    return isinstance(tree, (dict, tuple, list)) and all(map(only_tensors, _branches(tree).values()))


def like_tree(template: T, tensors: Mapping[str, Tensor], prefix: str = "") -> T:
    """A tree of the same form with other tensors, as `tensors_of` names them."""
    return _mapped(template, lambda path, _: tensors[path], prefix)


def stack_trees(trees: Sequence[T]) -> T:
    """Trees of one form as one: each tensor with a new first dimension; what is no tensor must be the same in all."""
    first = trees[0]
    if isinstance(first, Tensor):
        return torch.stack(trees)  # type: ignore[return-value, arg-type]
    branches = [_branches(tree) for tree in trees]
    if not branches[0]:
        if any(tree != first for tree in trees):
            raise ValueError(
                f"numbers that stay the same in training must be the same for all clients. Got {trees[:3]}."
            )
        return first
    if any(own.keys() != branches[0].keys() for own in branches):
        raise ValueError("what clients have beside weights must have the same names for all of them.")
    stacked = {key: stack_trees([own[key] for own in branches]) for key in branches[0]}
    return _like(first, stacked)


def _branches(tree: Any) -> dict[str, Any]:
    if isinstance(tree, dict):
        return {str(key): value for key, value in tree.items()}
    return {str(i): value for i, value in enumerate(tree)} if isinstance(tree, (tuple, list)) else {}


def _like(template: T, branches: Mapping[str, Any]) -> T:
    """A container of the template's kind."""
    node: Any = template
    if isinstance(node, dict):
        return {key: branches[str(key)] for key in node}  # type: ignore[return-value]
    values = list(branches.values())
    return type(node)(*values) if hasattr(node, "_fields") else type(node)(values)  # type: ignore[no-any-return]


def _mapped(tree: T, change: Callable[[str, Tensor], Tensor], prefix: str) -> T:
    if isinstance(tree, Tensor):
        return change(prefix, tree)  # type: ignore[return-value]
    branches = _branches(tree)
    if not branches:
        return tree
    return _like(tree, {key: _mapped(value, change, f"{prefix}/{key}") for key, value in branches.items()})


def subtree(flat: Mapping[str, Tensor], prefix: str) -> Params:
    """The tensors whose names start with `prefix.`, with that cut off."""
    cut = len(prefix) + 1
    return {name[cut:]: value for name, value in flat.items() if name.startswith(prefix + ".")}


def placed(flat: Mapping[str, Tensor], device: torch.device) -> Params:
    """The tensors on a device; those that are there already are not copied."""
    return {name: value.to(device) for name, value in flat.items()}


def nbytes(flat: Mapping[str, Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in flat.values())
