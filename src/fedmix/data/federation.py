"""A federation: arrays, and which of their points each client holds for training, validation and test.

For example, of two clients whose arrays are at hand:

    federation = Federation.from_clients({"north": {"x": x_north, "y": y_north}, "south": {"x": x_south, "y": y_south}})
    federation.examples(0, "train")  # what the first client, north, trains on
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmix.core.types import Examples
from fedmix.data import partition
from fedmix.data.augment import crop_and_flip
from fedmix.data.partition import Indices
from fedmix.errors import DataError
from fedmix.rng import Stream, stream

PARTS = ("train", "validation", "test")
UNDIVIDED = "undivided"  # in place of a part: the points of a client that does not say which are for what
Block = dict[str, Any]  # arrays x, y and perhaps c, with a row for each point


@dataclass(frozen=True)
class Federation:
    """Inputs x [N, ...], labels y [N] and side information c [N]; `parts[part][s]` are the points of client s."""

    x: Tensor
    y: Tensor
    c: Tensor  # categories [N], or vectors [N, D]
    parts: Mapping[str, Sequence[Indices]]
    names: Sequence[str]
    classes: int
    categories: int
    side: str = "label"  # what c is
    groups: Sequence[int] | None = None  # the true group of each client, where it is known
    mean: tuple[float, ...] = ()  # images of bytes become (x / 255 - mean) / std, channel by channel
    std: tuple[float, ...] = ()
    augment: bool = False  # training images are padded, cropped and mirrored at random
    labels: Sequence[str] = ()  # what the user calls the classes
    features: Sequence[Mapping[str, Any]] = ()  # how the columns of a table became numbers
    note: str = ""  # what a user should know of the files that it was made from
    left_out: int = 0  # owners of data who have too few points to take part
    held_out: "Federation | None" = None  # clients that never take part in training; the same arrays, other points
    # How many points of each part the clients hold, where the points themselves are not here.
    elsewhere: Mapping[str, Sequence[int]] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def examples(self, client: int, part: str) -> Examples:
        """Return the points of a client's part as a model takes them, with a way to draw new views of training images."""
        index = torch.from_numpy(self.parts[part][client]).to(self.x.device)
        augmented = self.augment and part == "train"
        views = partial(crop_and_flip, self.mean, self.std) if augmented else None
        return Examples(self.inputs(index), self.y[index], self.c[index], views)

    def inputs(self, index: Tensor) -> Tensor:
        """Return what a model is given for these points: numbers as they are, images of bytes normalised."""
        return normalised(self.x[index], self.mean, self.std)

    def unit(self, x: Tensor) -> Tensor:
        """Bring a model's inputs back to numbers in [0, 1]: for images, what they were before they were normalised."""
        if self.mean:
            shift, scale = _by_channel(self.mean, x), _by_channel(self.std, x)
            return (x * scale + shift).clamp(0, 1)
        if not ((x >= 0) & (x <= 1)).all():
            raise DataError("a density model of the inputs needs images, or numbers in [0, 1]. These are neither.")
        return x

    def digest(self) -> str:
        """Return a fingerprint of who holds what: inputs, labels, side information, parts."""
        state = hashlib.blake2b(digest_size=16)
        if self.elsewhere:
            state.update(repr((self.names, self.elsewhere)).encode())
        for tensor in (self.y, self.c, *torch.split(self.x, 4096)):
            state.update(np.ascontiguousarray(tensor.numpy()).tobytes())
        federations = [self, self.held_out] if self.held_out else [self]
        for federation in federations:
            for points in federation._points():
                state.update(points.astype(np.int64).tobytes() + b"|")
        return state.hexdigest()

    def _points(self) -> Iterator[Indices]:
        """Go through the points of every client, part by part."""
        for part in PARTS:
            yield from self.parts[part]

    def to(self, device: torch.device) -> "Federation":
        """Return the same data, placed on a device once."""
        return replace(self, x=self.x.to(device), y=self.y.to(device), c=self.c.to(device))

    def size(self, client: int, part: str = "train") -> int:
        """Count the points of a client's part, wherever they are."""
        return self.elsewhere[part][client] if self.elsewhere else len(self.parts[part][client])

    def label_counts(self) -> list[list[int]]:
        """Count each client's training points of each label."""
        y = self.y.cpu().numpy()
        return [np.bincount(y[points], minlength=self.classes).tolist() for points in self.parts["train"]]

    @staticmethod
    def described(
        names: Sequence[str], sizes: Mapping[str, Sequence[int]], shape: Sequence[int], classes: int, **more: Any
    ) -> "Federation":
        """Describe clients whose points are somewhere else: only their names and how many points they hold are known."""
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
        """Make a federation of arrays that are at hand: {client: {"x": [N, ...], "y": [N]}, ...}.

        Optional for each client: "c" [N], side information of any kind (numbers or words), used with side="column",
        or several numbers of each point [N, D], used with side="vector"; or "train", "validation" and "test", each with
        its own x, y (and c), in place of a random split.
        side: what q(z|c) is conditioned on: "label", "client", "column" or "vector".
        """
        if not clients:
            raise DataError("a federation must have at least one client. Got none.")
        names = [str(name) for name in clients]
        blocks: list[Block] = []
        parts: dict[str, list[Indices]] = {part: [] for part in PARTS}
        sizes: list[int] = []
        start = 0
        for s, (name, arrays) in enumerate(zip(names, clients.values(), strict=True)):
            client_blocks = _client_blocks(name, arrays, side)
            rng = stream(seed, "federation", "parts", s)
            client_parts = _client_parts(name, client_blocks, start, validation, test, rng)
            for part in PARTS:
                parts[part].append(client_parts[part])
            blocks += client_blocks.values()
            sizes.append(sum(map(len, client_parts.values())))
            start += sizes[-1]
        y = torch.from_numpy(_stacked(blocks, "y").astype(np.int64))
        classes = _number_of_classes(y, classes)
        owner = np.repeat(np.arange(len(names)), sizes)
        c, categories = _side_information(side, y, owner, blocks, classes)
        if c.is_floating_point():
            c = standardised(c, parts["train"])
        x = _stacked_inputs(blocks)
        return Federation(x, y, c, parts, names, classes, categories, side)


def normalised(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return numbers as float32, and images of bytes as (x / 255 - mean) / std, channel by channel."""
    if x.is_floating_point():
        return x.float()
    if not mean:
        raise DataError(
            f"x must be numbers with a decimal point. Got {x.dtype} without a mean and std to normalise it with."
        )
    shift, scale = _by_channel(mean, x), _by_channel(std, x)
    return (x.float() / 255 - shift) / scale


def _by_channel(values: Sequence[float], x: Tensor) -> Tensor:
    """Give a value for each channel the form [C, 1, 1], so that it meets images [N, C, H, W] channel by channel."""
    return torch.tensor(values, device=x.device).view(-1, 1, 1)


def client_number(names: Sequence[str], client: int | str) -> int:
    """Return the number of a client that is given by its number or name."""
    if isinstance(client, int) and 0 <= client < len(names):
        return client
    if str(client) in names:
        return list(names).index(str(client))
    raise DataError(f"a client must be one of {len(names)} ({', '.join(names[:5])}, ...). Got {client!r} instead.")


def _client_blocks(name: str, arrays: Mapping[str, Any], side: str) -> dict[str, Block]:
    """Check a client's arrays: those of each part if it divides its points itself, else all of them as UNDIVIDED."""
    given = {part: arrays[part] for part in PARTS if part in arrays} or {UNDIVIDED: arrays}
    return {part: _checked(name, block, side) for part, block in given.items()}


def _client_parts(
    name: str, blocks: Mapping[str, Block], start: int, validation: float, test: float, rng: Stream
) -> dict[str, Indices]:
    """Number a client's points from `start` and say which of them are in each part."""
    if UNDIVIDED in blocks:
        points = np.arange(start, start + len(blocks[UNDIVIDED]["y"]))
        divided = partition.three_parts(points, validation, test, rng, name)
        return dict(zip(PARTS, divided, strict=True))
    parts = {part: np.arange(0) for part in PARTS}
    for part, block in blocks.items():
        end = start + len(block["y"])
        parts[part] = np.arange(start, end)
        start = end
    if not len(parts["train"]):
        raise DataError(f"client {name} must have points for training. Got none.")
    return parts


def _checked(name: str, block: Mapping[str, Any], side: str) -> Block:
    """Return a client's x, y and, where side information is a column, c as arrays, or say what is wrong with them."""
    wanted = ("x", "y", "c") if side in ("column", "vector") else ("x", "y")
    missing = [key for key in wanted if key not in block]
    if missing:
        raise DataError(f"client {name} must give arrays {', '.join(wanted)}. {', '.join(missing)} is missing.")
    arrays = _as_arrays(name, block, wanted)
    _check_lengths(name, arrays)
    _check_values(name, arrays["x"], arrays["y"])
    return arrays


def _as_arrays(name: str, block: Mapping[str, Any], wanted: Sequence[str]) -> Block:
    try:
        arrays = {key: np.asarray(block[key]) for key in wanted}
        arrays["x"] = arrays["x"].astype(np.float32)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"client {name} must give arrays of numbers, one row a point. Got something else: {error}."
        ) from error
    return arrays


def _check_lengths(name: str, arrays: Block) -> None:
    single = [key for key, values in arrays.items() if values.ndim == 0]
    if single:
        raise DataError(f"client {name} must give arrays {', '.join(arrays)}. {', '.join(single)} is a single value.")
    lengths = {key: len(values) for key, values in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(f"client {name} must give arrays of one length. Got {lengths}.")


def _check_values(name: str, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> None:
    if not np.issubdtype(y.dtype, np.integer) or y.ndim != 1:
        raise DataError(f"client {name}: y must be a list of whole numbers. Got {y.dtype} {y.shape}.")
    if not np.isfinite(x).all():
        raise DataError(f"client {name}: x must be finite. It holds NaN or infinity.")


def _stacked(blocks: Sequence[Block], key: str) -> npt.NDArray[Any]:
    """Put the arrays of all clients below each other."""
    return np.concatenate([block[key] for block in blocks])


def _stacked_inputs(blocks: Sequence[Block]) -> Tensor:
    try:
        return torch.from_numpy(_stacked(blocks, "x"))
    except ValueError as error:
        raise DataError(f"x must have the same shape on every client: {error}.") from error


def _number_of_classes(y: Tensor, classes: int | None) -> int:
    """Return how many classes there are: as many as the user says, else as many as the labels go up to."""
    smallest, largest = int(y.min()), int(y.max())
    count = classes or largest + 1
    if smallest < 0 or largest >= count:
        raise DataError(f"labels must be whole numbers from 0 to {count - 1}. Got {smallest} to {largest}.")
    return count


def _side_information(
    side: str, y: Tensor, owner: Indices, blocks: Sequence[Block], classes: int
) -> tuple[Tensor, int]:
    """Return what q(z|c) is conditioned on as numbers c [N], and how many different ones there are."""
    if side == "label":
        return y, classes
    if side == "client":
        return torch.from_numpy(owner), int(owner.max()) + 1
    if side == "column":
        values, index = np.unique(_stacked(blocks, "c"), return_inverse=True)
        return torch.from_numpy(index.astype(np.int64)), len(values)
    if side == "vector":
        return _vectors(blocks)
    raise DataError(f"side must be 'label', 'client', 'column' or 'vector'. Got {side!r} instead.")


def _vectors(blocks: Sequence[Block]) -> tuple[Tensor, int]:
    """Return side information that is several numbers of each point, and how many."""
    try:
        c = _stacked(blocks, "c")
    except ValueError as error:
        raise DataError(f"c must have the same shape on every client: {error}.") from error
    if c.ndim != 2 or c.dtype.kind not in "biuf" or not np.isfinite(c.astype(np.float64)).all():
        raise DataError(f"c must be finite numbers [N, D] with side='vector'. Got {c.dtype} of shape {list(c.shape)}.")
    return torch.from_numpy(c.astype(np.float64)), c.shape[1]


def standardised(vectors: Tensor, train: Sequence[Indices]) -> Tensor:
    """Shift and scale each number to mean 0 and standard deviation 1 over all training points: [N, D] -> [N, D].

    float64 until then: in float32 large numbers that differ a little, such as times, would all be the same.
    """
    known = vectors[torch.from_numpy(np.concatenate(train))]
    spread = known.std(dim=0, correction=0)
    if bool((spread == 0).any()):
        constant = (spread == 0).nonzero().flatten().tolist()
        raise DataError(
            f"c must differ between points to tell them apart. Number {constant[0]} is the same for all of them."
        )
    return ((vectors - known.mean(dim=0)) / spread).float()
