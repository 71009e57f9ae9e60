"""A federation: arrays, and which of their points each client holds for training, validation and test.

For example, of two clients whose arrays are at hand:

    federation = Federation.from_clients({"north": {"x": x_north, "y": y_north}, "south": {"x": x_south, "y": y_south}})
    federation.examples(0, "train")  # what the first client, north, trains on
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmix.core.inputs import Input
from fedmix.core.types import Examples
from fedmix.data import clients as own
from fedmix.data import partition
from fedmix.data.arrays import refuse_side_that_measures
from fedmix.data.augment import crop_and_flip
from fedmix.data.clients import PARTS as PARTS
from fedmix.data.labels import Label, numbered, refuse_one_kind
from fedmix.data.partition import Indices
from fedmix.data.tables import Roles, read_csv
from fedmix.errors import DataError, one_of
from fedmix.rng import Stream, stream

SideMoments = tuple[Sequence[float], Sequence[float]]
# What may be said of a table beside its label: how its columns become numbers.
TABLE_OPTIONS = {"features", "leave_out", "words", "missing", "missing_values", "standardise"}
FROM_CLIENTS = ("side", "validation", "test", "classes", "min_size", "small", "seed", "label", "side_column")


@dataclass(frozen=True, repr=False)
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
    labels: Sequence[Label] = ()  # what the user calls the classes
    features: Sequence[Mapping[str, Any]] = ()  # how the columns of a table became numbers
    note: str = ""  # what a user should know of the files that it was made from
    left_out: int = 0  # owners of data who have too few points to take part
    held_out: "Federation | None" = None  # clients that never take part in training; the same arrays, other points
    # How many points of each part the clients hold, where the points themselves are not here.
    elsewhere: Mapping[str, Sequence[int]] | None = None
    kinds: Sequence[str] = ()  # what the user calls the values of c, where it is a column of categories
    side_moments: tuple[Sequence[float], Sequence[float]] = ((), ())  # what a vector c was standardised with
    roles: Mapping[str, Any] = field(default_factory=dict)  # which column of a table is the label, the client, the side
    # Several inputs, or sequences of different lengths, as rows of x; empty: x is what the model is given.
    input_parts: tuple[Input, ...] = ()

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
        if self.input_parts:
            return self.x[index]
        return normalised(self.x[index], self.mean, self.std)

    def unit(self, x: Tensor) -> Tensor:
        """Bring a model's inputs back to numbers in [0, 1]: for images, what they were before they were normalised."""
        if self.mean:
            shift, scale = _by_channel(self.mean, x), _by_channel(self.std, x)
            return (x * scale + shift).clamp(0, 1)
        if self.input_parts or not ((x >= 0) & (x <= 1)).all():
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
        clients: Mapping[Any, Any] | Sequence[Any],
        *,
        side: str = "label",
        validation: float = 0.1,
        test: float = 0.2,
        classes: int | None = None,
        min_size: int = 0,
        small: str = "keep",
        seed: int = 0,
        label: str = "",
        side_column: str | list[str] = "",
        **table_options: Any,
    ) -> "Federation":
        """Make a federation of data that is at hand: {client: data, ...}, or a list of clients' data.

        A client's data is {"x": [N, ...], "y": [N]}, a pair (x, y), a pandas DataFrame (label="..." names its label), a torch
        Dataset of pairs or a Hugging Face Dataset; or {"train": data, "validation": data, "test": data} in place of a random
        split. Labels are words, truth values or whole numbers, and predictions give them back.

        x: an array or tensor; images of bytes are normalised; whole numbers stay whole numbers, for nn.Embedding. A list of
        sequences of different lengths is filled up with zeros, and a model whose forward names `mask` or `lengths` is given
        them. A dict of several inputs goes to the model by name.
        side: what q(z|c) is conditioned on: "label", "client", "column" (a category of each point, "c" beside x and y, or
        side_column of a DataFrame) or "vector" (several numbers of each point).
        min_size, small: clients with fewer points than min_size are kept ("keep"), left out ("leave-out") or merged into one
        ("merge"). A kept client with too few points to divide trains on all of them.
        table_options: for DataFrames, as for a CSV: features, leave_out, words, missing, missing_values, standardise.
        """
        _check_shares(validation, test)
        roles = _roles(label, side_column, table_options)
        gaps = table_options.get("missing_values", ())
        data = own.read_clients(clients, own.Wanted(side in ("column", "vector"), roles, gaps))
        own.refuse_options_without_tables(data, table_options)
        known = own.sort_out(data, min_size, small)
        blocks = list(own.blocks_of(known.clients))
        parts = _parts_of_clients(known.clients, validation, test, seed)
        names = [client.name for client in known.clients]
        owner = np.repeat(np.arange(len(names)), [client.size for client in known.clients])
        labels = numbered(own.joined([block.y for block in blocks], "labels"), "labels", classes)
        refuse_one_kind(labels.names)
        y = torch.from_numpy(labels.index)
        c, categories, kinds = _side_information(side, y, owner, blocks, len(labels.names))
        side_moments: SideMoments = ((), ())
        if c.is_floating_point():
            c, side_moments = standardised(c, parts["train"])
        inputs = own.prepare_inputs([block.x for block in blocks], np.concatenate(parts["train"]), table_options, roles)
        return Federation(
            inputs.x,
            y,
            c,
            parts,
            names,
            len(labels.names),
            categories,
            side,
            mean=inputs.mean,
            std=inputs.std,
            labels=labels.names,
            features=inputs.features,
            note="; ".join([*known.notes, *_notes_on_parts(parts, names)]),
            left_out=known.left_out,
            kinds=kinds,
            side_moments=side_moments,
            roles={"label": label, "side": side_column} if label else {},
            input_parts=inputs.parts,
        )

    @staticmethod
    def from_table(table: Any, *, label: str, client: str, **options: Any) -> "Federation":
        """Make a federation of one table, whose column `client` says who each row belongs to.

        table: a pandas DataFrame, or the path of a CSV file, whose separator and decimal sign are found out. options: as in
        `from_clients`.
        """
        if isinstance(table, (str, os.PathLike)):
            table = read_csv(Path(table), options.pop("separator", ""), options.pop("decimal", ""))
            decimal = {"decimal": "," if table.comma else "."}
        else:
            table, decimal = own.as_table(table), {}
        client = str(client)
        leave_out = [*_named(options.pop("leave_out", [])), client]
        rows = own.by_column(table, client)
        federation = Federation.from_clients(rows, label=label, leave_out=leave_out, **options)
        return replace(federation, roles={**federation.roles, "client": client, **decimal})

    def __repr__(self) -> str:
        points = sum(self.size(s, part) for s in range(len(self)) for part in PARTS)
        shape = ", ".join(part.name or "x" for part in self.input_parts) or "x".join(map(str, self.x.shape[1:]))
        few = ", ".join(self.names[:3]) + (", ..." if len(self) > 3 else "")
        return f"Federation({len(self)} clients ({few}), {points:,} points of {shape}, {self.classes} classes)"


def _check_shares(validation: float, test: float) -> None:
    if not (0 <= validation < 1 and 0 <= test < 1 and validation + test < 1):
        raise DataError(
            f"validation and test must be shares from 0 to 1 that leave something to train on. Got {validation} and {test}."
        )


def _named(names: Any) -> tuple[str, ...]:
    """Names of columns; a single one may be given as it is."""
    return (names,) if isinstance(names, str) else tuple(map(str, names))


def _roles(label: str, side_column: str | list[str], options: dict[str, Any]) -> Roles | None:
    """Which columns of a table are what; the options of tables that are left say how columns become numbers."""
    unknown = sorted(set(options) - TABLE_OPTIONS)
    if unknown:
        raise DataError(one_of("an argument of from_clients", unknown[0], [*TABLE_OPTIONS, *FROM_CLIENTS]))
    features, leave_out = options.pop("features", ()), options.pop("leave_out", ())
    for name in ("words", "missing_values"):
        if name in options:
            options[name] = _named(options[name])
    if label == "":
        return None
    side = [str(name) for name in side_column] if isinstance(side_column, list) else str(side_column)
    return Roles(str(label), "", side, _named(features), _named(leave_out))


def _parts_of_clients(
    clients: Sequence[own.ClientData], validation: float, test: float, seed: int
) -> dict[str, list[Indices]]:
    """Which points each client trains, validates and tests on; points are numbered client by client."""
    parts: dict[str, list[Indices]] = {part: [] for part in PARTS}
    start = 0
    for s, client in enumerate(clients):
        rng = stream(seed, "federation", "parts", s)
        divided = _client_parts(client, start, validation, test, rng)
        for part in PARTS:
            parts[part].append(divided[part])
        start += client.size
    return parts


def _notes_on_parts(parts: Mapping[str, Sequence[Indices]], names: Sequence[str]) -> list[str]:
    """Which clients have too few points to be measured on."""
    untested = [name for name, points in zip(names, parts["test"], strict=True) if not len(points)]
    if not untested or len(untested) == len(names):
        return []
    few = ", ".join(untested[:3]) + (", ..." if len(untested) > 3 else "")
    return [f"{len(untested)} clients ({few}) have no test points: they train, and no accuracy is measured on them"]


def normalised(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return numbers as float32, whole numbers as int64, and images of bytes as (x / 255 - mean) / std, channel by channel."""
    if x.is_floating_point():
        return x.float()
    if not mean:
        return x.to(torch.int64)
    shift, scale = _by_channel(mean, x), _by_channel(std, x)
    return (x.float() / 255 - shift) / scale


def _by_channel(values: Sequence[float], x: Tensor) -> Tensor:
    """Give a value for each channel the form [C, 1, 1], so that it meets images [N, C, H, W] channel by channel."""
    return torch.tensor(values, device=x.device).view(-1, 1, 1)


def client_number(names: Sequence[str], client: int | str) -> int:
    """Return the number of a client that is given by its name or, where no client is called so, by its number."""
    if str(client) in names:
        return list(names).index(str(client))
    if isinstance(client, (int, np.integer)) and 0 <= client < len(names):
        return int(client)
    raise DataError(f"a client must be one of {len(names)} ({', '.join(names[:5])}, ...). Got {client!r} instead.")


def _client_parts(
    client: own.ClientData, start: int, validation: float, test: float, rng: Stream
) -> dict[str, Indices]:
    """Number a client's points from `start` and say which of them are in each part."""
    if own.UNDIVIDED in client.blocks:
        points = np.arange(start, start + client.size)
        if not partition.can_be_divided(len(points), validation, test):
            nothing = np.arange(0)
            return {"train": points, "validation": nothing, "test": nothing}
        divided = partition.three_parts(points, validation, test, rng, client.name)
        return dict(zip(PARTS, divided, strict=True))
    parts = {part: np.arange(0) for part in PARTS}
    for part, block in client.blocks.items():
        end = start + len(block)
        parts[part] = np.arange(start, end)
        start = end
    return parts


def _side_information(
    side: str, y: Tensor, owner: Indices, blocks: Sequence[own.Block], classes: int
) -> tuple[Tensor, int, list[str]]:
    """Return what q(z|c) is conditioned on as numbers c [N], how many different ones there are, and what they are called."""
    if side == "label":
        return y, classes, []
    if side == "client":
        return torch.from_numpy(owner), int(owner.max()) + 1, []
    if side == "column":
        column = own.joined([block.c for block in blocks], "c")
        if column.ndim != 1:
            raise DataError(f"c must be one category of each point with side='column'. Got shape {list(column.shape)}.")
        refuse_side_that_measures(column, "c")
        values, index = np.unique(column, return_inverse=True)
        return torch.from_numpy(index.astype(np.int64)), len(values), [str(value) for value in values.tolist()]
    if side == "vector":
        return *_vectors(blocks), []
    raise DataError(f"side must be 'label', 'client', 'column' or 'vector'. Got {side!r} instead.")


def _vectors(blocks: Sequence[own.Block]) -> tuple[Tensor, int]:
    """Return side information that is several numbers of each point, and how many."""
    c = own.joined([block.c for block in blocks], "c")
    if c.ndim != 2 or c.dtype.kind not in "biuf" or not np.isfinite(c.astype(np.float64)).all():
        raise DataError(f"c must be finite numbers [N, D] with side='vector'. Got {c.dtype} of shape {list(c.shape)}.")
    return torch.from_numpy(c.astype(np.float64)), c.shape[1]


def standardised(vectors: Tensor, train: Sequence[Indices]) -> tuple[Tensor, SideMoments]:
    """Shift and scale each number to mean 0 and standard deviation 1 over all training points: [N, D] -> [N, D].

    Gives the means and deviations too. float64 until then: in float32 large numbers that differ a little, such as times,
    would all be the same.
    """
    known = vectors[torch.from_numpy(np.concatenate(train))]
    spread = known.std(dim=0, correction=0)
    if bool((spread == 0).any()):
        constant = (spread == 0).nonzero().flatten().tolist()
        raise DataError(
            f"c must differ between points to tell them apart. Number {constant[0]} is the same for all of them."
        )
    mean = known.mean(dim=0)
    return ((vectors - mean) / spread).float(), (mean.tolist(), spread.tolist())
