"""Readers of a user's own files: arrays (npz), images in class folders and tables (CSV), with or without clients' names.

A recipe names a reader as data.source = "npz", "images" or "csv" and gives its arguments in [data.args]:

    [data]
    source = "csv"
    split = "by-client"
    args = { file = "patients.csv", label = "diagnosis", client = "hospital" }
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedmix.data import tables
from fedmix.data.arrays import plain_inputs, refuse_side_that_measures
from fedmix.data.files import Arrays, cached, folders
from fedmix.data.formats import npz_arrays
from fedmix.data.labels import numbered, words_as_numbers
from fedmix.data.sources import Source, numbers_if_any, whole_numbers
from fedmix.errors import DataError, DataMissing

Array = npt.NDArray[Any]

IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


def npz(data_dir: str | None, file: str, x: str = "x", y: str = "y", client: str = "client", c: str = "c") -> Source:
    """Read an .npz with inputs x [N, ...] and labels y [N]; it may name each point's client [N] and side information c [N].

    x, y, client, c: the arrays' names in the file. Bytes of three or four dimensions are images.
    """
    path = _located(file, data_dir)
    names = {"x": x, "y": y, "client": client, "c": c}

    def decode() -> Arrays:
        given = _named_arrays(path, names)
        for key, values in given.items():
            if not _has_a_value_for_each(key, values, given["y"]):
                raise DataError(f"{path}: {names[key]!r} must have a value for each of the {len(given['y'])} labels.")
        return _decoded(path, given["x"], given["y"], given.get("client"), given.get("c"))

    return _source(cached("npz-labels", [path], decode, names))


def table(
    data_dir: str | None,
    file: str,
    label: str,
    client: str = "",
    side: str | list[str] = "",
    features: list[str] = [],  # noqa: B006 (never changed)
    leave_out: list[str] = [],  # noqa: B006
    words: list[str] = [],  # noqa: B006
    missing: str = "refuse",
    missing_values: list[str] = [],  # noqa: B006
    separator: str = "",
    decimal: str = "",
    standardise: bool = True,
    columns: list[dict[str, Any]] = [],  # noqa: B006
) -> Source:
    """Read a CSV with a header and one row for each point.

    label, client, side: columns; all the others are features, unless `features` names them or `leave_out` leaves them out. A
    list of columns as side is a vector of numbers, with data.side = "vector"; these columns are features, too. Words become a
    column of 0 and 1 for each; `words` names columns of words that look like numbers.
    missing: "refuse" gaps, or "impute" them: the median or the most frequent word of training rows, and a column of 0 and 1
    that tells where. missing_values: cells that mean a gap beside the empty ones, NA, NaN, null and ?.
    separator, decimal: found out, unless they are given. standardise: numbers are shifted and scaled to mean 0 and standard
    deviation 1 over training rows.
    columns: how features become numbers, where that is known already; as in federation.json, or agreed on by sites:
    {column = "age", mean = 50, std = 10}, {column = "sex", words = ["f", "m"]}; missing = 54 fills gaps.
    """
    path = _located(file, data_dir)
    rules = [tables.checked_rule(rule) for rule in columns]
    roles = tables.Roles(label, client, side, tuple(features), tuple(leave_out))
    options: dict[str, Any] = {
        "missing": missing,
        "missing_values": missing_values,
        "words": words,
        "standardise": standardise,
        "rules": rules,
    }

    def decode() -> Arrays:
        return _table_arrays(path, tables.read_csv(path, separator, decimal), roles, options)

    arrays = cached("csv-table", [path], decode, vars(roles), options, separator, decimal)
    reading = {"decimal": str(arrays["decimal"]), "separator": separator}
    return replace(_source(arrays), roles=_as_dict(roles) | reading)


def _as_dict(roles: tables.Roles) -> dict[str, Any]:
    return {"label": roles.label, "client": roles.client, "side": roles.side}


def heart_disease(data_dir: str | None, label: str = "disease") -> Source:
    """Load the embedded table of 920 patients of four hospitals (HEART-DISEASE.md), gaps imputed.

    label: "disease" (no, yes) or "num", the degree of the disease from 0 to 4.
    """
    if label not in ("disease", "num"):
        raise DataError(f"data.args.label must be 'disease' or 'num'. Got {label!r} instead.")
    with as_file(files("fedmix.data") / "heart-disease.csv") as path:
        cells = tables.read_csv(path)
    left_out = ("num",) if label == "disease" else ("disease",)
    roles = tables.Roles(label, "hospital", leave_out=left_out)
    options: dict[str, Any] = {
        "missing": "impute",
        "missing_values": [],
        "words": ["cp", "restecg", "slope", "thal"],  # codes of kinds
        "standardise": True,
        "rules": [],
    }
    return replace(_source(_table_arrays(Path("heart-disease"), cells, roles, options)), roles=_as_dict(roles))


def _table_arrays(path: Path, cells: tables.Cells, roles: tables.Roles, options: Mapping[str, Any]) -> Arrays:
    names = tables.feature_names(cells, roles, options["rules"])
    taken = tables.take_apart(cells, names, **options)
    gaps = options["missing_values"]
    y = tables.kinds_of(cells, roles.label, gaps)
    client = tables.column_of(cells, roles.client, gaps) if roles.client else None
    comma = {"decimal": np.array("," if cells.comma else ".")}
    return taken.arrays() | comma | _decoded(path, None, y, client, _side_column(cells, roles, gaps), roles.label)


def _side_column(cells: tables.Cells, roles: tables.Roles, gaps: Sequence[str]) -> Array | None:
    if isinstance(roles.side, list):
        return tables.number_columns(cells, roles.side)
    return tables.kinds_of(cells, roles.side, gaps) if roles.side else None


def arrays(name: str, given: Mapping[str, Any]) -> Source:
    """Take what a function returned: the same arrays as in an .npz, x and y, and client and c where there are any."""
    missing = [key for key in ("x", "y") if key not in given]
    unknown = set(given) - {"x", "y", "client", "c"}
    if missing or unknown:
        raise DataError(f"{name} must give arrays x, y and, if it has them, client and c. It gave {', '.join(given)}.")
    values = {key: np.asarray(value) for key, value in given.items()}
    _check_lengths(name, values)
    return _source(_decoded(Path(name), values["x"], values["y"], values.get("client"), values.get("c")))


def images(data_dir: str | None, folder: str, size: int = 0, grey: bool = False) -> Source:
    """Read images that lie as FOLDER/CLASS/image or as FOLDER/CLIENT/CLASS/image.

    size: all are scaled to size x size (0: they must have one size); grey: one channel instead of three.
    """
    if not 0 <= size <= 4096:
        raise DataError(f"data.args.size must be from 0 (as they are) to 4096 pixels. Got {size} instead.")
    root = _located(folder, data_dir)
    paths = sorted(path for path in root.rglob("*") if path.suffix.lower() in IMAGES)
    depths = {len(path.relative_to(root).parts) for path in paths}
    if depths not in ({2}, {3}):
        raise DataError(
            f"{root} must hold CLASS/image or CLIENT/CLASS/image files throughout. It holds another layout."
        )
    has_clients = depths == {3}

    def decode() -> Arrays:
        x = _pixels(paths, size, grey)
        y = np.array([path.parent.name for path in paths])
        client = np.array([path.parent.parent.name for path in paths]) if has_clients else None
        return _decoded(root, x, y, client, None)

    return _source(cached("images-labels", paths, decode, str(root.resolve()), size, grey))


def _located(name: str, data_dir: str | None) -> Path:
    """Return a path as it is given, or below the first of the data folders that has it."""
    places = [Path(), *folders(data_dir)]
    for place in places:
        path = place / os.path.expanduser(name)
        if path.exists():
            return path
    raise DataMissing(
        f"{name} was not found here, nor in {', '.join(map(str, places[1:]))}. Name it by its whole path."
    )


# -- arrays ------------------------------------------------------------------------------------------------------------


def _named_arrays(path: Path, names: Mapping[str, str]) -> dict[str, Array]:
    """Read the arrays x, y and, where the file has them, client and c. names: what each is called in the file."""
    stored = npz_arrays(path, names.values())
    given = {key: stored[name] for key, name in names.items() if name in stored}
    for key in ("x", "y"):
        if key not in given:
            raise DataError(
                f"{path} must hold an array {names[key]!r}. It has none; data.args.{key} names another one."
            )
    return given


def _check_lengths(name: str, values: Mapping[str, Array]) -> None:
    for key, array in values.items():
        if not _has_a_value_for_each(key, array, values["y"]):
            raise DataError(f"{name}: {key!r} must have a value for each of the labels.")


def _has_a_value_for_each(key: str, values: Array, labels: Array) -> bool:
    """Say whether an array has one entry for each label. Only entries of x and c may be more than a single value."""
    if not values.ndim or len(values) != len(labels):
        return False
    return key == "x" or values.ndim == 1 or (key == "c" and values.ndim == 2)


# -- images ------------------------------------------------------------------------------------------------------------


def _pixels(paths: Sequence[Path], size: int, grey: bool) -> Array:
    """Read images of one size as bytes: [N, H, W, 3], or [N, H, W] where they are grey."""
    pixels: list[Array] = []
    for path in paths:
        pixels.append(_pixels_of(path, size, grey))
        if pixels[-1].shape != pixels[0].shape:
            raise DataError(
                f"images must have one size. {paths[0].name} has {pixels[0].shape[:2]}, {path} has {pixels[-1].shape[:2]}; "
                "set data.args.size."
            )
    return np.stack(pixels)


def _pixels_of(path: Path, size: int, grey: bool) -> Array:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise DataError("reading images needs Pillow; install it with: pip install 'fedmix[images]'.") from error
    try:
        with Image.open(path) as image:
            # Pillow would clip values of 16 or 32 bits to 8 bits without a warning.
            if image.mode.startswith(("I", "F")):
                raise DataError(f"{path} must have 8 bits a channel. It has more ({image.mode}); convert it.")
            converted = image.convert("L" if grey else "RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(f"{path} must be an image. It cannot be read ({error}).") from error
    if size:
        converted = converted.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(converted)


# -- what all readers share --------------------------------------------------------------------------------------------


def _decoded(
    path: Path, x: Array | None, y: Array, client: Array | None, c: Array | None, label: str = "labels"
) -> Arrays:
    """Prepare what the cache keeps: numbers in place of names, channels before rows and columns."""
    labels = numbered(words_as_numbers(y), f"{path}: {label}")
    arrays: Arrays = {"y": labels.index, "labels": np.array(json.dumps(labels.names))}
    if x is not None:
        arrays |= _inputs(path, x)
    if client is not None:
        names, arrays["owner"] = np.unique(client, return_inverse=True)
        arrays["owners"] = names.astype(str)
    if c is not None and c.ndim == 2:
        arrays["vector"] = _vectors(path, c)
    elif c is not None:
        refuse_side_that_measures(c, str(path))
        kinds, arrays["column"] = np.unique(c, return_inverse=True)
        arrays["kinds"] = kinds.astype(str)
    return arrays


def _vectors(path: Path, c: Array) -> Array:
    """Side information that is several numbers of each point [N, D]."""
    if c.dtype.kind not in "biuf" or not np.isfinite(c.astype(np.float64)).all():
        raise DataError(
            f"{path}: side information c [N, D] must be finite numbers. Got {c.dtype} of shape {list(c.shape)}."
        )
    return np.ascontiguousarray(c.astype(np.float64))


def _inputs(path: Path, x: Array) -> Arrays:
    """Prepare x: images stay bytes, whole numbers stay whole numbers, everything else becomes float32."""
    if x.dtype.kind not in "biuf" or not x.size:
        raise DataError(f"{path}: inputs must be numbers. Got {x.dtype} of shape {list(x.shape)}.")
    return {"x": plain_inputs(x, str(path))}


def _source(arrays: Arrays) -> Source:
    def listed(key: str) -> list[Any]:
        return arrays[key].tolist() if key in arrays else []

    labels = json.loads(str(arrays["labels"]))
    as_table = "table" in arrays
    return Source(
        x=torch.zeros(len(arrays["y"]), 0) if as_table else torch.from_numpy(arrays["x"]),
        y=whole_numbers(arrays["y"]),
        classes=len(labels),
        train=len(arrays["y"]),
        table=tables.Table.from_arrays(arrays) if as_table else None,
        owner=numbers_if_any(arrays, "owner"),
        owners=listed("owners"),
        column=numbers_if_any(arrays, "column"),
        vector=torch.from_numpy(arrays["vector"]) if "vector" in arrays else None,
        kinds=listed("kinds"),
        labels=labels,
    )


READERS: dict[str, Callable[..., Source]] = {
    "npz": npz,
    "images": images,
    "csv": table,
    "heart-disease": heart_disease,
}
