"""Clients' data as people have it in memory, before it becomes a federation.

A client's data is {"x": ..., "y": ...}, a pair (x, y), a DataFrame, a torch Dataset or a Hugging Face Dataset; or a dict of
"train", "validation" and "test" with any of these. x is an array, a tensor, a list of sequences, or a dict of several inputs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmix.core.inputs import Input
from fedmix.data import labels, tables
from fedmix.data.arrays import as_array, is_ragged, pack, plain_inputs
from fedmix.data.files import moments
from fedmix.errors import DataError, one_of

Array = npt.NDArray[Any]
PARTS = ("train", "validation", "test")
UNDIVIDED = "undivided"  # in place of a part: the points of a client that does not say which are for what
SMALL = ("keep", "leave-out", "merge")
MERGED = "small clients"  # the name of the client that small ones become


@dataclass(frozen=True)
class Block:
    """Some points of a client: inputs as they were given, labels [N] and, where it was asked for, side information [N]."""

    x: Any
    y: Any
    c: Any = None

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class ClientData:
    """A client's points: by part if it divides them itself, else all of them as UNDIVIDED."""

    name: str
    blocks: dict[str, Block]

    @property
    def size(self) -> int:
        return sum(map(len, self.blocks.values()))

    @property
    def to_train(self) -> int:
        """How many points can be trained on."""
        return self.size if UNDIVIDED in self.blocks else len(self.blocks.get("train", ()))


@dataclass(frozen=True)
class Wanted:
    """What to look for in clients' data.

    side: whether points have side information c of their own. roles: which column of a table is what.
    """

    side: bool
    roles: tables.Roles | None
    gaps: Sequence[str] = ()  # cells of tables that mean a gap, beside the usual ones


@dataclass(frozen=True)
class Sorted:
    """Clients that take part, and what a user should know about those that do not, or not by themselves."""

    clients: list[ClientData]
    left_out: int = 0
    notes: list[str] = field(default_factory=list)


# -- reading what was given --------------------------------------------------------------------------------------------


def read_clients(clients: Any, wanted: Wanted) -> list[ClientData]:
    """The data of all clients by name, each point still as it was given."""
    if isinstance(clients, Mapping) and {"x", "y"} <= set(map(str, clients)):
        raise DataError(
            "from_clients must be given the data of several clients, {name: data}. Got arrays x and y of one; give "
            "{'name': {'x': x, 'y': y}}."
        )
    if _is_frame(clients):
        raise DataError(
            "from_clients must be given a table for each client, {name: table}. Got one table; "
            "Federation.from_table(table, label=..., client=...) divides it by a column."
        )
    listed = _listed(clients)
    if not listed:
        raise DataError("a federation must have at least one client. Got none.")
    names = [name for name, _ in listed]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"clients must have names of their own. {twice[0]!r} is there twice.")
    return [ClientData(name, _blocks(name, data, wanted)) for name, data in listed]


def _listed(clients: Any) -> list[tuple[str, Any]]:
    if isinstance(clients, Mapping):
        return [(str(name), data) for name, data in clients.items()]
    if isinstance(clients, Sequence) and not isinstance(clients, str):
        return [(str(s), data) for s, data in enumerate(clients)]
    raise DataError(
        f"clients must be a dict {{name: data}} or a list of clients' data. Got {type(clients).__name__} instead."
    )


def _blocks(name: str, data: Any, wanted: Wanted) -> dict[str, Block]:
    if isinstance(data, Mapping) and not _is_frame(data) and any(part in data for part in PARTS):
        strange = sorted(str(key) for key in data if key not in PARTS)
        if strange:
            raise DataError(f"client {name} must give {', '.join(PARTS)}. {strange[0]!r} is none of them.")
        return {part: _block(name, data[part], wanted) for part in PARTS if part in data}
    return {UNDIVIDED: _block(name, data, wanted)}


def _block(name: str, data: Any, wanted: Wanted) -> Block:
    block = _as_block(name, data, wanted)
    if wanted.side and block.c is None:
        raise DataError(f"client {name} must give side information c of each point beside x and y. c is missing.")
    lengths = {"x": _length(block.x, name), "y": _length(block.y, name)}
    if wanted.side:
        lengths["c"] = _length(block.c, name)
    if len(set(lengths.values())) != 1:
        raise DataError(f"client {name} must give arrays of one length. Got {lengths}.")
    if len(block):
        labels.check(block.y, f"client {name}: labels")
        _refuse_not_finite(name, block.x)
    return block


def _refuse_not_finite(name: str, x: Any) -> None:
    of_numbers = isinstance(x, Tensor) or hasattr(x, "iloc") or (isinstance(x, list) and not is_ragged(x))
    values = as_array(x, f"client {name}: x") if of_numbers else x
    if isinstance(values, np.ndarray) and values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError(f"client {name}: x must be finite. It holds NaN or infinity.")


def _length(values: Any, name: str) -> int:
    if isinstance(values, tables.Cells):
        return len(values.lines)
    if isinstance(values, Mapping):
        lengths = {key: _length(value, name) for key, value in values.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"client {name} must give inputs of one length. Got {lengths}.")
        return next(iter(lengths.values()))
    try:
        return len(values)
    except TypeError:
        raise DataError(f"client {name} must give a value for each point. Got a single value, {values!r}.") from None


def _as_block(name: str, data: Any, wanted: Wanted) -> Block:
    """One of the forms that data may have."""
    if isinstance(data, Block):
        return data
    if _is_frame(data):
        return _from_frame(name, data, wanted)
    if isinstance(data, Mapping):
        return _from_mapping(name, data)
    if _is_hugging_face(data):
        return _from_hugging_face(name, data, wanted)
    if isinstance(data, (tuple, list)) and len(data) in (2, 3):
        return Block(*data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (str, np.ndarray, Tensor)):
        return _from_dataset(name, data)
    raise DataError(
        f"client {name} must give {{'x': ..., 'y': ...}}, a pair (x, y), a DataFrame or a Dataset. Got "
        f"{type(data).__name__}."
    )


def _from_mapping(name: str, data: Mapping[Any, Any]) -> Block:
    missing = [key for key in ("x", "y") if key not in data]
    if missing:
        raise DataError(f"client {name} must give arrays x, y. {', '.join(missing)} is missing.")
    return Block(data["x"], data["y"], data.get("c"))


def _is_frame(data: Any) -> bool:
    """Whether this is a pandas DataFrame, or something that looks like one."""
    return isinstance(data, tables.Cells) or (hasattr(data, "columns") and hasattr(data, "iloc"))


def _from_frame(name: str, data: Any, wanted: Wanted) -> Block:
    if wanted.roles is None:
        raise DataError(f"client {name} has a table: label='...' must say which of its columns is the label.")
    roles = wanted.roles
    cells = data if isinstance(data, tables.Cells) else tables.as_columns(data, f"client {name}")
    cells.require(roles.label)

    def column(of: str) -> Any:
        tables.column_of(cells, of, wanted.gaps)  # refuses gaps
        if isinstance(data, tables.Cells):
            return tables.kinds_of(cells, of, wanted.gaps)
        return np.asarray(data.iloc[:, list(cells.columns).index(of)].tolist())

    side: Any = None
    if isinstance(roles.side, list):
        side = tables.number_columns(cells, roles.side)
    elif roles.side:
        side = column(roles.side)
    return Block(cells, column(roles.label), side)


def _is_hugging_face(data: Any) -> bool:
    return hasattr(data, "column_names") and hasattr(data, "features")


def _from_hugging_face(name: str, data: Any, wanted: Wanted) -> Block:
    """A Hugging Face Dataset: its label column, and all the others as inputs."""
    label = wanted.roles.label if wanted.roles else "label"
    names = list(data.column_names)
    if label not in names:
        raise DataError(
            f"client {name} must have a column {label!r}. It has {', '.join(names)}; label='...' names another."
        )
    chosen = wanted.roles.features if wanted.roles else ()
    left_out = wanted.roles.leave_out if wanted.roles else ()
    for column in (*chosen, *left_out):
        if column not in names:
            raise DataError(f"client {name} must have a column {column!r}. It has {', '.join(names)}.")
    inputs = list(chosen) or [column for column in names if column != label and column not in left_out]
    values = {column: data[column][:] for column in inputs}
    x = next(iter(values.values())) if len(values) == 1 else values
    feature = data.features[label]
    classes = getattr(feature, "names", None)
    given = list(data[label][:])
    unlabelled = sum(labels.is_missing(value) or (bool(classes) and value < 0) for value in given)
    if unlabelled:
        raise DataError(f"client {name}: labels must be there for every point. {unlabelled} are missing, or -1.")
    y = np.asarray(given)
    return Block(x, np.array(classes)[y] if classes else y)


def _from_dataset(name: str, data: Any) -> Block:
    """A torch Dataset of pairs (x, y)."""
    pairs = []
    for i in range(len(data)):
        try:
            item = data[i]
        except NotImplementedError:
            raise DataError(
                f"client {name}: a Dataset must give its items by number. This one cannot; make a list."
            ) from None
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise DataError(f"client {name}: a Dataset must give pairs (x, y). Item {i} is {type(item).__name__}.")
        pairs.append(item)
    if not pairs:
        return Block([], [])
    x, y = zip(*pairs, strict=True)
    if any(getattr(value, "ndim", 0) for value in y):
        raise DataError(
            f"client {name}: y must be one label of each point. Got an array; a one-hot label is y.argmax()."
        )
    labels_of_points = [value.item() if hasattr(value, "item") else value for value in y]
    if isinstance(x[0], Mapping):
        return Block({key: [row[key] for row in x] for key in x[0]}, labels_of_points)
    if isinstance(x[0], (tuple, list)):
        raise DataError(f"client {name}: several inputs must be a dict by name. Got a {type(x[0]).__name__}.")
    rows = [row.detach().cpu().numpy() if isinstance(row, Tensor) else np.asarray(row) for row in x]
    same_shape = len({row.shape for row in rows}) == 1
    if not same_shape and rows[0].dtype == np.uint8 and rows[0].ndim >= 2:
        raise DataError(f"client {name}: images must have one size. Got {rows[0].shape} and others; scale them first.")
    return Block(np.stack(rows) if same_shape else rows, labels_of_points)


def as_table(data: Any) -> Any:
    """A table: a DataFrame as it is, a dict of columns or a list of dicts as cells."""
    return data if _is_frame(data) else tables.as_columns(data)


def refuse_options_without_tables(clients: Sequence[ClientData], options: Mapping[str, Any]) -> None:
    """Refuse what is said about columns where no client has any."""
    has_table = any(isinstance(block.x, tables.Cells) for block in blocks_of(clients))
    if options and not has_table:
        raise DataError(
            f"{min(options)} is about columns of a table. No client has one; leave it out, or give DataFrames."
        )


# -- small clients -----------------------------------------------------------------------------------------------------


def sort_out(clients: Sequence[ClientData], min_size: int, small: str) -> Sorted:
    """Clients without points are left out; those with fewer than min_size are kept, left out or merged, as asked."""
    if small not in SMALL:
        raise DataError(one_of("small", small, SMALL))
    empty = [client for client in clients if not client.to_train]
    rest = [client for client in clients if client.to_train]
    few = [client for client in rest if client.size < min_size]
    notes = []
    if empty:
        notes.append(f"{_named(empty)} without points to train on: left out")
    if not few or small == "keep":
        return _somebody(Sorted(rest, len(empty), notes), min_size)
    enough = [client for client in rest if client.size >= min_size]
    if small == "leave-out":
        notes.append(f"{_named(few)} with fewer than {min_size} points: left out")
        return _somebody(Sorted(enough, len(empty) + len(few), notes), min_size)
    notes.append(f"{_named(few)} with fewer than {min_size} points: merged into one, {MERGED!r}")
    return Sorted([*enough, _merged(few)], len(empty), notes)


def _named(clients: Sequence[ClientData]) -> str:
    names = ", ".join(client.name for client in clients[:3]) + (", ..." if len(clients) > 3 else "")
    return f"{len(clients)} client{'s' if len(clients) > 1 else ''} ({names})"


def _somebody(sorted_out: Sorted, min_size: int) -> Sorted:
    if not sorted_out.clients:
        raise DataError(f"a client must have {max(min_size, 1)} or more points to train on. No client has.")
    return sorted_out


def _merged(clients: Sequence[ClientData]) -> ClientData:
    kinds = {frozenset(client.blocks) for client in clients}
    if len(kinds) > 1:
        raise DataError("clients that are merged must all be divided into the same parts, or none. They differ.")
    parts = {part: _joined_blocks([client.blocks[part] for client in clients]) for part in clients[0].blocks}
    return ClientData(MERGED, parts)


def _joined_blocks(blocks: Sequence[Block]) -> Block:
    c = None if blocks[0].c is None else joined([block.c for block in blocks], "c")
    return Block(_joined_inputs([block.x for block in blocks]), joined([block.y for block in blocks], "y"), c)


def _joined_inputs(inputs: Sequence[Any]) -> Any:
    if isinstance(inputs[0], tables.Cells):
        return tables.joined(inputs)
    if isinstance(inputs[0], Mapping):
        return {name: _joined_inputs([x[name] for x in inputs]) for name in inputs[0]}
    rows = [row for x in inputs for row in x]
    return rows if is_ragged(rows) else joined(inputs, "x")


def joined(arrays: Sequence[Any], what: str) -> Array:
    """Arrays of several clients below each other."""
    arrays = [_from_pandas(values) for values in arrays]
    plain = [values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values) for values in arrays]
    kinds = {"text" if values.dtype.kind in "US" else "numbers" for values in plain if values.size}
    if len(kinds) > 1:
        raise DataError(f"{what} must be of one kind on every client. Got words and numbers.")
    try:
        return np.concatenate(plain)
    except ValueError as error:
        raise DataError(f"{what} must have the same shape on every client: {error}.") from error


# -- inputs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """Inputs of all points [N, ...] as a federation holds them, and how they were made."""

    x: Tensor
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    parts: tuple[Input, ...] = ()
    features: Sequence[Mapping[str, Any]] = ()


def prepare_inputs(
    blocks: Sequence[Any], train: Array, options: Mapping[str, Any], roles: tables.Roles | None
) -> Inputs:
    """The inputs of all clients' blocks as one tensor. train: the rows that are trained on, whose statistics are used."""
    first = blocks[0]
    kinds = {_form(x) for x in blocks}
    if len(kinds) > 1:
        raise DataError(f"x must be of one form on every client. Got {' and '.join(sorted(kinds))}.")
    if isinstance(first, tables.Cells):
        assert roles is not None
        return _table_inputs(tables.joined(blocks), train, options, roles)
    if isinstance(first, Mapping):
        together = {name: _column_of(blocks, name) for name in first}
        return _several_inputs(together, train)
    rows = [row for x in blocks for row in x] if any(map(is_ragged, blocks)) or _differ_in_length(blocks) else None
    if rows is not None:
        return _several_inputs({"": rows}, train)
    arrays = [as_array(x, "x") for x in blocks]
    if len({array.dtype == np.uint8 for array in arrays if array.size}) > 1:
        raise DataError(
            "x must be of one kind on every client. Some have bytes, which are normalised, others have not."
        )
    return _one_input(joined(arrays, "x"), train)


def _form(x: Any) -> str:
    if isinstance(x, tables.Cells):
        return "a table"
    return "a dict of inputs" if isinstance(x, Mapping) else "an array"


def _differ_in_length(blocks: Sequence[Any]) -> bool:
    """Whether clients have lists of tokens, of one length on each client and of another one on others."""
    lists = [x for x in blocks if isinstance(x, (list, tuple)) and len(x)]
    firsts = [np.asarray(x[0]) for x in lists]
    if not firsts or not all(first.ndim == 1 and first.dtype.kind in "iu" for first in firsts):
        return False
    return len({len(first) for first in firsts}) > 1


def _column_of(blocks: Sequence[Mapping[str, Any]], name: str) -> Any:
    for block in blocks:
        if name not in block:
            raise DataError(f"x must have the same inputs on every client. {name!r} is missing on one.")
    return _joined_inputs([block[name] for block in blocks])


def _several_inputs(together: Mapping[str, Any], train: Array) -> Inputs:
    x, parts = pack({str(name): values for name, values in together.items()}, train=train)
    return Inputs(x, parts=parts)


def _one_input(x: Array, train: Array) -> Inputs:
    prepared = plain_inputs(x, "x")
    if prepared.dtype != np.uint8:
        return Inputs(torch.from_numpy(prepared))
    found = moments(prepared[train])
    return Inputs(torch.from_numpy(prepared), tuple(found["mean"].tolist()), tuple(found["std"].tolist()))


def _table_inputs(cells: tables.Cells, train: Array, options: Mapping[str, Any], roles: tables.Roles) -> Inputs:
    names = tables.feature_names(cells, roles, options.get("rules", ()))
    table = tables.take_apart(cells, names, **options)
    rules = tables.make_rules(table, train)
    return Inputs(torch.from_numpy(tables.encode(table, rules)), features=rules)


def _from_pandas(values: Any) -> Any:
    """A Series or DataFrame of numbers as an array, whatever types of its own pandas keeps it in."""
    if not hasattr(values, "iloc"):
        return values
    return np.array(values.to_numpy().tolist())


def by_column(table: Any, client: str) -> dict[str, Any]:
    """The rows of a table by the value of one column."""
    cells = table if isinstance(table, tables.Cells) else tables.as_columns(table)
    owners = tables.column_of(cells, client)
    rows_of: dict[str, list[int]] = {}
    for i, owner in enumerate(owners.tolist()):
        rows_of.setdefault(owner, []).append(i)
    return {owner: _some_rows(table, rows) for owner, rows in sorted(rows_of.items())}


def _some_rows(table: Any, rows: Sequence[int]) -> Any:
    if not isinstance(table, tables.Cells):
        return table.iloc[list(rows)]
    columns = {name: [values[i] for i in rows] for name, values in table.columns.items()}
    return replace(table, columns=columns, lines=[table.lines[i] for i in rows])


def blocks_of(clients: Iterable[ClientData]) -> Iterator[Block]:
    for client in clients:
        yield from client.blocks.values()
