"""A federation: arrays, and which of their points each client holds for training, validation and test."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmix.core.types import Examples
from fedmix.data import partition
from fedmix.data.augment import crop_and_flip
from fedmix.data.partition import Indices
from fedmix.errors import DataError
from fedmix.rng import stream

PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Federation:
    """x [N, ...], labels y [N], side information c [N]; `parts[part][s]` are the points of client s."""

    x: Tensor
    y: Tensor
    c: Tensor
    parts: Mapping[str, Sequence[Indices]]
    names: Sequence[str]
    classes: int
    categories: int
    side: str = "label"  # what c is
    groups: Sequence[int] | None = None  # the true group of each client, where it is known
    mean: tuple[float, ...] = ()  # of images of bytes: (x / 255 - mean) / std, channel by channel
    std: tuple[float, ...] = ()
    augment: bool = False  # training images are padded, cropped and mirrored at random
    labels: Sequence[str] = ()  # what the user calls the classes
    features: Sequence[Mapping[str, Any]] = ()  # how the columns of a table became numbers
    left_out: int = 0  # owners of data who have too few points to take part
    held_out: "Federation | None" = None  # clients that never take part in training: the same arrays, other points
    elsewhere: Mapping[str, Sequence[int]] | None = None  # how many points of each part clients hold that are not here

    def __len__(self) -> int:
        return len(self.names)

    def examples(self, client: int, part: str) -> Examples:
        index = torch.from_numpy(self.parts[part][client]).to(self.x.device)
        views = partial(crop_and_flip, self.mean, self.std) if self.augment and part == "train" else None
        return Examples(self.inputs(index), self.y[index], self.c[index], views)

    def inputs(self, index: Tensor) -> Tensor:
        """What a model is given for these points: numbers as they are, images of bytes normalised."""
        return normalised(self.x[index], self.mean, self.std)

    def unit(self, x: Tensor) -> Tensor:
        """A model's inputs brought back to numbers in [0, 1]: bytes of images before they were normalised."""
        if self.mean:
            shift, scale = (torch.tensor(values, device=x.device).view(-1, 1, 1) for values in (self.mean, self.std))
            return (x * scale + shift).clamp(0, 1)
        if not ((x >= 0) & (x <= 1)).all():
            raise DataError("a density model of the inputs needs images, or numbers in [0, 1]. These are neither.")
        return x

    def digest(self) -> str:
        """A fingerprint of who holds what: inputs, labels, side information, parts."""
        state = hashlib.blake2b(digest_size=16)
        state.update(repr((self.names, self.elsewhere)).encode() if self.elsewhere else b"")
        for tensor in (self.y, self.c, *torch.split(self.x, 4096)):
            state.update(np.ascontiguousarray(tensor.numpy()).tobytes())
        for federation in (self, *([self.held_out] if self.held_out else [])):
            for part in PARTS:
                for own in federation.parts[part]:
                    state.update(own.astype(np.int64).tobytes() + b"|")
        return state.hexdigest()

    def to(self, device: torch.device) -> "Federation":
        """The same data, placed on a device once."""
        return replace(self, x=self.x.to(device), y=self.y.to(device), c=self.c.to(device))

    def size(self, client: int, part: str = "train") -> int:
        return self.elsewhere[part][client] if self.elsewhere else len(self.parts[part][client])

    def label_counts(self) -> list[list[int]]:
        """How many training points of each label each client has."""
        y = self.y.cpu().numpy()
        return [np.bincount(y[own], minlength=self.classes).tolist() for own in self.parts["train"]]

    @staticmethod
    def described(
        names: Sequence[str], sizes: Mapping[str, Sequence[int]], shape: Sequence[int], classes: int, **more: Any
    ) -> "Federation":
        """Clients whose points are somewhere else: known are their names and how many points they hold."""
        nothing = torch.zeros(2, dtype=torch.int64)
        parts = {part: [np.arange(0)] * len(names) for part in PARTS}
        return Federation(
            torch.zeros(2, *shape), nothing, nothing, parts, names, classes, elsewhere=dict(sizes), **more
        )

    @staticmethod
    def from_clients(
        clients: Mapping[Any, Mapping[str, Any]],
        *,
        side: str = "label",
        validation: float = 0.1,
        test: float = 0.2,
        classes: int | None = None,
        seed: int = 0,
    ) -> "Federation":
        """A federation of one's own arrays: {client: {"x": [N, ...], "y": [N]}, ...}.

        Optional for each client: "c" [N], side information of any kind (numbers or words), used with side="column";
        or "train", "validation" and "test", each with its own x, y (and c), in place of a random split.
        side: what q(z|c) is conditioned on: "label", "client" or "column".
        """
        if not clients:
            raise DataError("a federation must have at least one client. Got none.")
        names = [str(name) for name in clients]
        pieces: dict[str, list[Any]] = {"x": [], "y": [], "c": []}
        parts: dict[str, list[Indices]] = {part: [] for part in PARTS}
        start = 0
        for s, (name, arrays) in enumerate(zip(names, clients.values(), strict=True)):
            given = {part: arrays[part] for part in PARTS if part in arrays}
            blocks = [_checked(name, block, side) for block in (given.values() or [arrays])]
            for block in blocks:
                for key, values in block.items():
                    pieces[key].append(values)
            sizes = [len(block["y"]) for block in blocks]
            if given:
                ends = np.cumsum([start, *sizes])
                spans = {part: np.arange(a, b) for part, a, b in zip(given, ends[:-1], ends[1:], strict=True)}
                own = [spans.get(part, np.arange(0)) for part in PARTS]
            else:
                rng = stream(seed, "federation", "parts", s)
                own = list(partition.three_parts(np.arange(start, start + sizes[0]), validation, test, rng, name))
            for part, index in zip(PARTS, own, strict=True):
                parts[part].append(index)
            if not len(parts["train"][-1]):
                raise DataError(f"client {name} must have points for training. Got none.")
            start += sum(sizes)
        y = torch.from_numpy(np.concatenate(pieces["y"]).astype(np.int64))
        found = int(y.max()) + 1
        if int(y.min()) < 0 or found > (classes or found):
            raise DataError(
                f"labels must be whole numbers from 0 to {(classes or found) - 1}. Got {int(y.min())} to {found - 1}."
            )
        owner = np.concatenate([np.full(sum(len(parts[p][s]) for p in PARTS), s) for s in range(len(names))])
        c, categories = _side_column(side, y, owner, pieces["c"], classes or found)
        try:
            x = torch.from_numpy(np.concatenate(pieces["x"]))
        except ValueError as error:
            raise DataError(f"x must have the same shape on every client: {error}.") from error
        return Federation(x, y, c, parts, names, classes or found, categories, side)


def normalised(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Numbers as float32; images of bytes as (x / 255 - mean) / std, channel by channel."""
    if x.is_floating_point():
        return x.float()
    if not mean:
        raise DataError(
            f"x must be numbers with a decimal point. Got {x.dtype} without a mean and std to normalise it with."
        )
    shift, scale = (torch.tensor(values, device=x.device).view(-1, 1, 1) for values in (mean, std))
    return (x.float() / 255 - shift) / scale


def client_number(names: Sequence[str], client: int | str) -> int:
    """The number of a client given by number or name."""
    if isinstance(client, int) and 0 <= client < len(names):
        return client
    if str(client) in names:
        return list(names).index(str(client))
    raise DataError(f"a client must be one of {len(names)} ({', '.join(names[:5])}, ...). Got {client!r} instead.")


def _checked(name: str, block: Mapping[str, Any], side: str) -> dict[str, Any]:
    wanted = ("x", "y", "c") if side == "column" else ("x", "y")
    missing = [key for key in wanted if key not in block]
    if missing:
        raise DataError(f"client {name} must give arrays {', '.join(wanted)}. {', '.join(missing)} is missing.")
    try:
        arrays = {key: np.asarray(block[key]) for key in wanted}
        arrays["x"] = arrays["x"].astype(np.float32)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"client {name} must give arrays of numbers, one row a point. Got something else: {error}."
        ) from error
    single = [key for key, values in arrays.items() if values.ndim == 0]
    if single:
        raise DataError(f"client {name} must give arrays {', '.join(wanted)}. {', '.join(single)} is a single value.")
    if len({len(values) for values in arrays.values()}) != 1:
        sizes = {key: len(values) for key, values in arrays.items()}
        raise DataError(f"client {name} must give arrays of one length. Got {sizes}.")
    if not np.issubdtype(arrays["y"].dtype, np.integer) or arrays["y"].ndim != 1:
        raise DataError(
            f"client {name}: y must be a list of whole numbers. Got {arrays['y'].dtype} {arrays['y'].shape}."
        )
    if not np.isfinite(arrays["x"]).all():
        raise DataError(f"client {name}: x must be finite. It holds NaN or infinity.")
    return arrays


def _side_column(side: str, y: Tensor, owner: Indices, column: list[Any], classes: int) -> tuple[Tensor, int]:
    if side == "label":
        return y, classes
    if side == "client":
        return torch.from_numpy(owner), int(owner.max()) + 1
    if side == "column":
        values, index = np.unique(np.concatenate(column), return_inverse=True)
        return torch.from_numpy(index.astype(np.int64)), len(values)
    raise DataError(f"side must be 'label', 'client' or 'column'. Got {side!r} instead.")
