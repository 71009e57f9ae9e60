"""A user's own data as files: arrays (npz), images in class folders, tables (CSV), each with a client's name if it has one.

Named in a recipe as data.source = "npz", "images" or "csv", with what the functions below take in [data.args].
"""

import csv
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmix.data.files import Arrays, cached, folders, moments
from fedmix.data.formats import npz_arrays
from fedmix.data.sources import Source
from fedmix.errors import DataError, DataMissing

Array = npt.NDArray[Any]
IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
EMPTY = ("", "nan", "na", "null", "none")
CATEGORIES = 50  # a column of words with more different ones than that is taken for a mistake


def npz(data_dir: str | None, file: str, x: str = "x", y: str = "y", client: str = "client", c: str = "c") -> Source:
    """Arrays of an .npz: inputs x [N, ...], labels y [N]; optional: whose each point is [N], side information c [N].

    x, y, client, c: the arrays' names in the file. Bytes of three or four dimensions are images.
    """
    path = _found(file, data_dir)

    def decode() -> Arrays:
        found = npz_arrays(path, names.values())
        given = {key: found[name] for key, name in names.items() if name in found}
        for key in ("x", "y"):
            if key not in given:
                raise DataError(
                    f"{path} must hold an array {names[key]!r}. It has none; data.args.{key} names another one."
                )
        for key, values in given.items():
            if not values.ndim or len(values) != len(given["y"]) or (key != "x" and values.ndim != 1):
                raise DataError(f"{path}: {names[key]!r} must have a value for each of the {len(given['y'])} labels.")
        return _decoded(path, given["x"], given["y"], given.get("client"), given.get("c"))

    names = {"x": x, "y": y, "client": client, "c": c}
    return _source(cached("npz", [path], decode, names))


def table(
    data_dir: str | None,
    file: str,
    label: str,
    client: str = "",
    side: str = "",
    features: list[str] = [],  # noqa: B006 (never changed)
    standardise: bool = True,
    columns: list[dict[str, Any]] = [],  # noqa: B006
) -> Source:
    """A CSV with a header: one row for each point.

    label, client, side: columns; all the others are features, unless `features` names them. Words become a column of 0
    and 1 for each. standardise: numbers are shifted and scaled to mean 0 and standard deviation 1 over all rows.
    columns: how features become numbers, where that is known already; as in federation.json, or agreed on by sites:
    {column = "age", mean = 50, std = 10}, {column = "sex", words = ["f", "m"]}.
    """
    path = _found(file, data_dir)

    def decode() -> Arrays:
        found, rows = _read_csv(path)
        apart = [name for name in (label, client, side) if name]
        used = [about["column"] for about in known] or list(features) or [name for name in found if name not in apart]
        for name in [*apart, *used]:
            if name not in found:
                raise DataError(f"{path} must have a column {name!r}. It has {', '.join(found)}.")
        if set(used) & set(apart):
            raise DataError(
                f"data.args.features must not name {min(set(used) & set(apart))!r}: it is the label, client or side."
            )
        for name in [*apart, *used]:
            _no_gaps(path, name, found[name], rows)
        if not used:
            raise DataError(f"{path} must have columns beside {', '.join(apart)} to learn from. It has none.")
        how = known or [_how(path, name, found[name], standardise) for name in used]
        arrays = _decoded(
            path,
            np.concatenate([_numbers(path, about, found[about["column"]]) for about in how], axis=1),
            np.array(found[label]),
            np.array(found[client]) if client else None,
            np.array(found[side]) if side else None,
        )
        return arrays | {"features": np.array(json.dumps(how))}

    known = [_checked_column(about) for about in columns]
    return _source(cached("csv", [path], decode, label, client, side, list(features), standardise, known))


def rows(path: Path, columns: Sequence[Mapping[str, Any]]) -> Tensor:
    """New rows of a CSV as numbers [N, features], made as they were for training."""
    found, lines = _read_csv(path)
    for about in columns:
        if about["column"] not in found:
            raise DataError(f"{path} must have a column {about['column']!r}. It has {', '.join(found)}.")
        _no_gaps(path, about["column"], found[about["column"]], lines)
    made = [_numbers(path, about, found[about["column"]]) for about in columns]
    return torch.from_numpy(np.concatenate(made, axis=1))


def column(path: Path, name: str) -> Array | None:
    """A column of a CSV as text, if there is one of that name."""
    found, _ = _read_csv(path)
    return np.array(found[name]) if name in found else None


def arrays(name: str, given: Mapping[str, Any]) -> Source:
    """Data of a function: the same arrays as in an .npz, x and y, and client and c where there are any."""
    missing = [key for key in ("x", "y") if key not in given]
    if missing or set(given) - {"x", "y", "client", "c"}:
        raise DataError(f"{name} must give arrays x, y and, if it has them, client and c. It gave {', '.join(given)}.")
    values = {key: np.asarray(value) for key, value in given.items()}
    for key, value in values.items():
        if not value.ndim or len(value) != len(values["y"]) or (key != "x" and value.ndim != 1):
            raise DataError(f"{name}: {key!r} must have a value for each of the labels.")
    return _source(_decoded(Path(name), values["x"], values["y"], values.get("client"), values.get("c")))


def images(data_dir: str | None, folder: str, size: int = 0, grey: bool = False) -> Source:
    """Images in folders: FOLDER/CLASS/image, or FOLDER/CLIENT/CLASS/image.

    size: all are scaled to size x size (0: they must have one size); grey: one channel instead of three.
    """
    if not 0 <= size <= 4096:
        raise DataError(f"data.args.size must be from 0 (as they are) to 4096 pixels. Got {size} instead.")
    root = _found(folder, data_dir)
    paths = sorted(path for path in root.rglob("*") if path.suffix.lower() in IMAGES)
    depths = {len(path.relative_to(root).parts) for path in paths}
    if depths not in ({2}, {3}):
        raise DataError(
            f"{root} must hold CLASS/image or CLIENT/CLASS/image files throughout. It holds another layout."
        )

    def decode() -> Arrays:
        x = _pixels(paths, size, grey)
        y = np.array([path.parent.name for path in paths])
        client = np.array([path.parent.parent.name for path in paths]) if depths == {3} else None
        return _decoded(root, x, y, client, None)

    return _source(cached("images", paths, decode, str(root.resolve()), size, grey))


def _found(name: str, data_dir: str | None) -> Path:
    """A path as it is given, or below one of the data folders."""
    places = [Path(), *folders(data_dir)]
    for place in places:
        if (place / os.path.expanduser(name)).exists():
            return place / os.path.expanduser(name)
    raise DataMissing(
        f"{name} was not found here, nor in {', '.join(map(str, places[1:]))}. Name it by its whole path."
    )


def _read_csv(path: Path) -> tuple[dict[str, list[str]], list[int]]:
    """Columns by name, and the line of the file that each row ends on."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        try:
            read = [(reader.line_num, [value.strip() for value in row]) for row in reader if row]
            (_, header), *found = read
        except (ValueError, csv.Error) as error:
            raise DataError(f"{path} must be a CSV file in UTF-8 with a header. It is not ({error}).") from error
    lines, rows = [line for line, _ in found], [row for _, row in found]
    if len(set(header)) != len(header):
        raise DataError(f"{path} must have a name of its own for each column. Its header is {', '.join(header)}.")
    for line, row in zip(lines, rows, strict=True):
        if len(row) != len(header):
            raise DataError(f"{path}, line {line} must have {len(header)} values. It has {len(row)}.")
    if not rows:
        raise DataError(f"{path} must have rows below its header. It has none.")
    columns = zip(*rows, strict=True)
    return {name: list(column) for name, column in zip(header, columns, strict=True)}, lines


def _no_gaps(path: Path, name: str, column: Sequence[str], lines: Sequence[int]) -> None:
    for line, value in zip(lines, column, strict=True):
        if value.lower() in EMPTY:
            raise DataError(
                f"{path}, line {line}: {name!r} must have a value. It is empty; fill it in or leave the row out."
            )


def _checked_column(about: Any) -> dict[str, Any]:
    keys = set(about) if isinstance(about, Mapping) else set()
    if keys != {"column", "words"} and keys != {"column", "mean", "std"}:
        raise DataError(
            "data.args.columns must be {column, mean, std} for numbers, {column, words} for words. Got " + f"{about!r}."
        )
    return dict(about)


def _how(path: Path, name: str, column: Sequence[str], standardise: bool) -> dict[str, Any]:
    """How a column becomes numbers: the mean and deviation of numbers, or the words that there are."""
    try:
        values = np.array(column, dtype=np.float64)
    except ValueError:
        words = np.unique(np.array(column))
        if len(words) > CATEGORIES:
            raise DataError(
                f"{path}: {name!r} must be numbers, or words of at most {CATEGORIES} kinds. It has {len(words)} kinds, "
                f"{words[0]!r} among them; leave it out with data.args.features."
            ) from None
        return {"column": name, "words": words.tolist()}
    if not np.isfinite(values).all():
        raise DataError(f"{path}: {name!r} must be finite. It holds infinity.")
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = (float(values.mean()), float(values.std()) or 1.0) if standardise else (0.0, 1.0)
    if not np.isfinite([mean, std]).all():
        raise DataError(f"{path}: {name!r} must be numbers of ordinary size. They are too large.")
    return {"column": name, "mean": mean, "std": std}


def _numbers(path: Path, about: Mapping[str, Any], column: Sequence[str]) -> Array:
    """A column as numbers [N, 1], or words as 0 and 1 for each of them [N, W]."""
    name = about["column"]
    if "words" in about:
        place = {word: i for i, word in enumerate(about["words"])}
        strange = next((word for word in column if word not in place), None)
        if strange is not None:
            raise DataError(f"{path}: {name!r} must be one of {', '.join(place)}. It has {strange!r}.")
        return np.eye(len(place), dtype=np.float32)[[place[word] for word in column]]
    try:
        values = np.array(column, dtype=np.float64)
    except ValueError as error:
        raise DataError(f"{path}: {name!r} must be numbers. {str(error).capitalize()}.") from None
    with np.errstate(over="ignore", invalid="ignore"):
        made: Array = ((values - about["mean"]) / about["std"])[:, None].astype(np.float32)
    if not np.isfinite(made).all():
        raise DataError(f"{path}: {name!r} must be numbers of ordinary size. They are too large.")
    return made


def _pixels(paths: Sequence[Path], size: int, grey: bool) -> Array:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise DataError("reading images needs Pillow; install it with: pip install 'fedmix[images]'.") from error
    pixels: list[Array] = []
    for path in paths:
        try:
            with Image.open(path) as image:
                if image.mode.startswith(("I", "F")):
                    raise DataError(f"{path} must have 8 bits a channel. It has more ({image.mode}); convert it.")
                opened = image.convert("L" if grey else "RGB")
        except (OSError, UnidentifiedImageError) as error:
            raise DataError(f"{path} must be an image. It cannot be read ({error}).") from error
        pixels.append(np.asarray(opened.resize((size, size), Image.Resampling.BILINEAR) if size else opened))
        if pixels[-1].shape != pixels[0].shape:
            raise DataError(
                f"images must have one size. {paths[0].name} has {pixels[0].shape[:2]}, {path} has {pixels[-1].shape[:2]}; "
                "set data.args.size."
            )
    return np.stack(pixels)


def _decoded(path: Path, x: Array, y: Array, client: Array | None, c: Array | None) -> Arrays:
    """What the cache keeps: numbers in place of names, channels before rows and columns, moments of images."""
    labels, y = _numbered(y)
    arrays: Arrays = {"y": y, "labels": labels}
    if x.dtype.kind not in "biuf" or not x.size:
        raise DataError(f"{path}: inputs must be numbers. Got {x.dtype} of shape {list(x.shape)}.")
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        x = x[:, None] if x.ndim == 3 else x if x.shape[1] <= 4 or x.shape[3] > 4 else np.moveaxis(x, 3, 1)
        arrays |= moments(x)
    else:
        x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise DataError(f"{path}: inputs must be finite. They hold NaN or infinity.")
    arrays["x"] = np.ascontiguousarray(x)
    if client is not None:
        names, arrays["owner"] = np.unique(client, return_inverse=True)
        arrays["owners"] = names.astype(str)
    if c is not None:
        kinds, arrays["column"] = np.unique(c, return_inverse=True)
        arrays["kinds"] = kinds.astype(str)
    return arrays


def _numbered(y: Array) -> tuple[Array, Array]:
    """Classes by name, and each point's number. Whole numbers from 0 stay as they are."""
    if y.dtype.kind == "U" and all(len(word) < 7 and word.isdecimal() and str(int(word)) == word for word in y):
        y = y.astype(np.int64)
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise DataError("labels must be there for every point. Some are NaN or infinite.")
    if np.issubdtype(y.dtype, np.integer) and y.size and y.min() >= 0 and y.max() < 100_000:
        return np.arange(int(y.max()) + 1).astype(str), y.astype(np.int64)
    names, index = np.unique(y, return_inverse=True)
    return names.astype(str), index


def _source(arrays: Arrays) -> Source:
    def whole(key: str) -> Tensor | None:
        return torch.from_numpy(np.asarray(arrays[key], dtype=np.int64)) if key in arrays else None

    def listed(key: str) -> list[Any]:
        return arrays[key].tolist() if key in arrays else []

    y = whole("y")
    assert y is not None
    return Source(
        x=torch.from_numpy(arrays["x"]),
        y=y,
        classes=len(arrays["labels"]),
        train=len(y),
        mean=tuple(listed("mean")),
        std=tuple(listed("std")),
        owner=whole("owner"),
        owners=listed("owners"),
        column=whole("column"),
        kinds=listed("kinds"),
        labels=listed("labels"),
        features=json.loads(str(arrays["features"])) if "features" in arrays else (),
    )


READERS: dict[str, Callable[..., Source]] = {"npz": npz, "images": images, "csv": table}
