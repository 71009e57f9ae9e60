"""Nested containers of tensors as one flat dict of named tensors, and back: what checkpoints and the wire are made of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Params = dict[str, Tensor]


def flatten(tree: Any, prefix: str = "") -> Params:
    """Any nesting of dicts, tuples, dataclasses, tensors and whole numbers as {'experts.0.fc.weight': ...}."""
    if isinstance(tree, Tensor):
        return {prefix: tree}
    if isinstance(tree, int):
        return {prefix: torch.tensor(tree, dtype=torch.int64)}
    flat: Params = {}
    for key, value in _children(tree).items():
        flat |= flatten(value, _path(prefix, key))
    return flat


def _path(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def unflatten(template: T, flat: Mapping[str, Tensor], prefix: str = "") -> T:
    """The tree of `template`'s form with `flat`'s tensors. Raises KeyError or ValueError where they do not fit."""
    node: Any = template
    if isinstance(node, Tensor):
        return _fitting(node, flat[prefix], prefix)  # type: ignore[return-value]
    if isinstance(node, int):
        return int(flat[prefix])  # type: ignore[return-value]
    children: dict[str, Any] = {}
    for key, value in _children(node).items():
        children[key] = unflatten(value, flat, _path(prefix, key))
    if isinstance(node, dict):
        return children  # type: ignore[return-value]
    if isinstance(node, tuple):
        return tuple(children.values())  # type: ignore[return-value]
    result: T = replace(node, **children)
    return result


def _fitting(template: Tensor, value: Tensor, name: str) -> Tensor:
    """The value, if it has the template's shape and type."""
    if value.shape != template.shape or value.dtype != template.dtype:
        raise ValueError(
            f"{name} must be {list(template.shape)} {template.dtype}. Got {list(value.shape)} {value.dtype}."
        )
    return value


def _children(node: Any) -> dict[str, Any]:
    if isinstance(node, dict):
        return node
    if isinstance(node, tuple):
        return {str(i): value for i, value in enumerate(node)}
    if is_dataclass(node):
        return {f.name: getattr(node, f.name) for f in fields(node)}
    raise TypeError(f"a tree holds dicts, tuples, dataclasses and tensors, not {type(node).__name__}")


def tensors_of(tree: Any, prefix: str = "") -> Params:
    """The tensors in a nesting of dicts, tuples and tensors, by the path to each: the order of a dict does not matter."""
    if isinstance(tree, Tensor):
        return {prefix: tree}
    tensors: Params = {}
    for key, value in _branches(tree).items():
        tensors |= tensors_of(value, f"{prefix}/{key}")
    return tensors


def only_tensors(tree: Any) -> bool:
    """Whether a nesting of dicts and tuples holds nothing but tensors."""
    if isinstance(tree, Tensor):
        return True
    return isinstance(tree, (dict, tuple, list)) and all(map(only_tensors, _branches(tree).values()))


def like_tree(template: T, tensors: Mapping[str, Tensor], prefix: str = "") -> T:
    """A tree of the same form with other tensors, as `tensors_of` names them."""
    return _mapped(template, lambda path, _: tensors[path], prefix)


def stack_trees(trees: Sequence[T]) -> T:
    """Trees of one form as one: each tensor gets a new first dimension; what is no tensor must be the same in all."""
    first = trees[0]
    if isinstance(first, Tensor):
        return torch.stack(trees)  # type: ignore[return-value, arg-type]
    branches = [_branches(tree) for tree in trees]
    keys = branches[0].keys()
    if not keys:
        _refuse_different_leaves(trees)
        return first
    if any(tree.keys() != keys for tree in branches):
        raise ValueError("what clients have beside weights must have the same names for all of them.")
    stacked = {}
    for key in keys:
        values = [tree[key] for tree in branches]
        stacked[key] = stack_trees(values)
    return _like(first, stacked)


def _refuse_different_leaves(leaves: Sequence[Any]) -> None:
    if any(leaf != leaves[0] for leaf in leaves):
        raise ValueError(f"numbers that stay the same in training must be the same for all clients. Got {leaves[:3]}.")


def _branches(tree: Any) -> dict[str, Any]:
    """What a dict, tuple or list holds; anything else is a leaf and holds nothing."""
    if isinstance(tree, dict):
        return {str(key): value for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return {str(i): value for i, value in enumerate(tree)}
    return {}


def _like(template: T, branches: Mapping[str, Any]) -> T:
    """A container of the template's kind."""
    node: Any = template
    if isinstance(node, dict):
        return {key: branches[str(key)] for key in node}  # type: ignore[return-value]
    values = list(branches.values())
    if hasattr(node, "_fields"):  # a named tuple
        return type(node)(*values)  # type: ignore[no-any-return]
    return type(node)(values)  # type: ignore[no-any-return]


def _mapped(tree: T, change: Callable[[str, Tensor], Tensor], prefix: str) -> T:
    """A tree of the same form, with change(path, tensor) in place of each tensor."""
    if isinstance(tree, Tensor):
        return change(prefix, tree)  # type: ignore[return-value]
    branches = _branches(tree)
    if not branches:
        return tree
    changed = {key: _mapped(value, change, f"{prefix}/{key}") for key, value in branches.items()}
    return _like(tree, changed)


def subtree(flat: Mapping[str, Tensor], prefix: str) -> Params:
    """The tensors whose names start with `prefix.`, with that cut off."""
    cut = len(prefix) + 1
    return {name[cut:]: value for name, value in flat.items() if name.startswith(prefix + ".")}


def placed(flat: Mapping[str, Tensor], device: torch.device) -> Params:
    """The tensors on a device; those that are there already are not copied."""
    return {name: value.to(device) for name, value in flat.items()}


def nbytes(flat: Mapping[str, Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in flat.values())


def all_finite(value: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity."""
    # A finite sum is the fast way to know it; but the sum of finite numbers may overflow.
    return bool(torch.isfinite(value.sum())) or bool(torch.isfinite(value).all())
