"""New rows and labels, in the form that a run was trained on: from a run directory alone, without its data."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmix.core.inputs import Input
from fedmix.core.types import Examples
from fedmix.data import clients as own
from fedmix.data.arrays import as_array, channels_first, pack, plain_inputs
from fedmix.data.federation import Federation, client_number, normalised
from fedmix.data.formats import npz_arrays
from fedmix.data.labels import given_back, is_missing, text_of
from fedmix.data.tables import Cells, Roles, as_columns, encode_rows, read_csv
from fedmix.errors import DataError

Array = npt.NDArray[Any]


class Encoding:
    """How rows become a model's inputs and labels become numbers; `about` is what federation.json says."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        self.classes: list[Any] = about["labels"] or list(range(about["classes"]))
        self.names: list[str] = about["clients"]
        self._about = about
        self._features = about.get("features") or []
        self._parts = tuple(map(Input.from_table, about.get("input_parts", [])))

    @property
    def of_table(self) -> bool:
        """Whether the run was trained on columns of a table."""
        return bool(self._features)

    @property
    def label_column(self) -> str:
        """Which column of the table is the label; "": it is not known."""
        return str((self._about.get("roles") or {}).get("label", ""))

    # -- inputs --------------------------------------------------------------------------------------------------------

    def inputs(self, rows: Any) -> Tensor:
        """Rows as the model takes them: [N, ...].

        A table, if the run was trained on one: a DataFrame, a dict of columns, a list of dicts or the path of a CSV file.
        Several inputs as a dict, sequences as a list. Otherwise arrays; images of bytes are normalised as in training.
        """
        if isinstance(rows, (str, os.PathLike)):
            return self._from_file(Path(rows))
        if self._features and _is_table(rows):
            return torch.from_numpy(encode_rows(_cells(rows), self._features))
        if self._parts:
            given = rows if isinstance(rows, Mapping) else {"": rows}
            return pack(given, self._parts)[0]
        return self._from_array(as_array(rows, "inputs"))

    def _from_array(self, values: Array) -> Tensor:
        shape: list[int] = self._about["input"]
        if values.dtype.kind in "iu" and self._about["mean"]:
            values = plain_inputs(values, "inputs")  # bytes, in whatever type they come
        bytes_of_images = values.dtype == np.uint8 and bool(self._about["mean"])
        if bytes_of_images and values.ndim in (3, 4) and list(values.shape[1:]) != shape:
            values = channels_first(values)
        if list(values.shape[1:]) != shape:
            hint = "; for a single input give x[None]" if list(values.shape) == shape else ""
            raise DataError(f"inputs must be [N, {', '.join(map(str, shape))}]. Got {list(values.shape)}{hint}.")
        with np.errstate(over="ignore"):
            if not np.isfinite(values.astype(np.float32)).all():
                raise DataError("inputs must be finite. They hold NaN, infinity, or numbers too large for float32.")
        x = torch.from_numpy(np.ascontiguousarray(values))
        if bytes_of_images:
            return normalised(x, self._about["mean"], self._about["std"])
        return x.to(torch.int64) if self._about.get("input_kind") == "integer" else x.float()

    def _from_file(self, path: Path) -> Tensor:
        if not path.is_file():
            raise DataError(f"inputs must be rows, or the path of a file. {path} is not there.")
        if path.suffix == ".npz":
            arrays = npz_arrays(path, ["x"])
            if "x" not in arrays:
                raise DataError(f"{path} must hold an array 'x'. It has none.")
            return self.inputs(arrays["x"])
        if not self._features:
            raise DataError("a CSV needs a run that was trained on a table. This one was not; give arrays.")
        return self.inputs(self.read_csv(path))

    def read_csv(self, path: Path) -> Cells:
        """A CSV with the separator and decimal sign of training, where these were given or found out there."""
        roles = self._about.get("roles") or {}
        return read_csv(path, roles.get("separator", ""), roles.get("decimal", ""))

    # -- labels --------------------------------------------------------------------------------------------------------

    def given_back(self, index: Tensor) -> Array:
        """Labels as they were given, from numbers of classes."""
        return given_back(self.classes, index.numpy())

    def labels(self, values: Any) -> Tensor:
        """Labels as numbers of classes [N]; a label that training did not know is refused."""
        position = {text_of(label): i for i, label in enumerate(self.classes)}
        listed = values.tolist() if hasattr(values, "tolist") else list(values)
        if any(map(is_missing, listed)):
            raise DataError(f"labels must be there for every row. {sum(map(is_missing, listed))} are missing.")
        texts = [text_of(value) for value in listed]
        strange = next((text for text in texts if text not in position), None)
        if strange is not None:
            raise DataError(f"labels must be of {', '.join(list(position)[:20])}. Got {strange!r} as well.")
        return torch.tensor([position[text] for text in texts], dtype=torch.int64)

    # -- points with labels --------------------------------------------------------------------------------------------

    def examples(self, data: Any, client: int | None, label: str = "") -> Examples:
        """Labelled points of a client, as they are trained on. client None: one that never took part.

        data: in any form that Federation.from_clients takes for one client, or a Federation that has the client.
        """
        if isinstance(data, Federation):
            return self._examples_of_federation(data, client)
        if isinstance(data, Mapping) and not {"x", "y"} <= set(data) and "test" in data and "train" not in data:
            raise DataError("the client's training points are needed. Got others: " + ", ".join(map(str, data)) + ".")
        roles = self._about.get("roles") or {}
        column = label or roles.get("label", "")
        side = self._about["side"]
        side_column = roles.get("side", "") if side in ("column", "vector") else ""
        wanted = own.Wanted(side in ("column", "vector"), Roles(column, "", side_column) if column else None)
        if isinstance(data, (str, os.PathLike)):
            data = self.read_csv(Path(data))
        read = own.read_clients({"the client": _as_table(data, bool(self._features))}, wanted)[0]
        if not read.size:
            raise DataError("the client must have labelled points. It has none.")
        blocks = list(read.blocks.values())[:1]
        y = self.labels(np.concatenate([_array(block.y) for block in blocks]))
        return Examples(self.inputs(blocks[0].x), y, self._side(side, y, blocks[0].c, client))

    def _examples_of_federation(self, federation: Federation, client: int | None) -> Examples:
        if client is not None and federation.digest() != self._about["digest"]:
            raise DataError(
                "a Federation must be the run's own. This one has other data; give the client's points, (x, y)."
            )
        if client is None:
            raise DataError("new_client must be given the new client's own data, not a federation.")
        return federation.examples(client_number(federation.names, self.names[client]), "train")

    def _side(self, side: str, y: Tensor, c: Any, client: int | None) -> Tensor:
        """Side information of each point as numbers."""
        if side == "label":
            return y
        if side == "client":
            return torch.full_like(y, client or 0)
        if side == "column":
            return self._kinds(c)
        if side == "vector":
            mean, spread = self._about.get("side_moments") or ([], [])
            vectors = torch.from_numpy(np.asarray(c, dtype=np.float64))
            return ((vectors - torch.tensor(mean)) / torch.tensor(spread)).float()
        raise DataError(f"points of a run with data.side = {side!r} come from its recipe; give a Federation of it.")

    def _kinds(self, c: Any) -> Tensor:
        position = {kind: i for i, kind in enumerate(self._about.get("kinds") or [])}
        texts = [text_of(value) for value in _array(c).tolist()]
        strange = next((text for text in texts if text not in position), None)
        if strange is not None:
            raise DataError(f"side information must be of {', '.join(list(position)[:20])}. Got {strange!r} as well.")
        return torch.tensor([position[text] for text in texts], dtype=torch.int64)


def _array(values: Any) -> Array:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _is_table(rows: Any) -> bool:
    if isinstance(rows, (Cells, Mapping)) or hasattr(rows, "iloc"):
        return True
    return isinstance(rows, Sequence) and bool(rows) and isinstance(rows[0], Mapping)


def _cells(rows: Any) -> Cells:
    return rows if isinstance(rows, Cells) else as_columns(rows, "the new rows")


def _as_table(data: Any, of_table: bool) -> Any:
    """A client's data; a dict of columns or a list of dicts is a table where the run has one."""
    plain = isinstance(data, Mapping) and {"x", "y"} <= set(data)
    return _cells(data) if of_table and _is_table(data) and not plain and not hasattr(data, "iloc") else data
