"""Readers of a user's own files: arrays (npz), images in class folders and tables (CSV), with or without clients' names.

A recipe names a reader as data.source = "npz", "images" or "csv" and gives its arguments in [data.args]:

    [data]
    source = "csv"
    split = "by-client"
    args = { file = "patients.csv", label = "diagnosis", client = "hospital" }
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
from fedmix.data.sources import Source, numbers_if_any, whole_numbers
from fedmix.errors import DataError, DataMissing

Array = npt.NDArray[Any]
Cells = Mapping[str, Sequence[str]]  # the text of a CSV: column -> its cells, row by row
Rule = Mapping[str, Any]  # how a column becomes numbers: {column, mean, std} or {column, words}

IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
EMPTY = ("", "nan", "na", "null", "none")
CATEGORIES = 50  # a column with more different words than that is taken for a mistake
CHANNELS = 4  # an image has at most red, green, blue and alpha
LABEL_LIMIT = 100_000  # whole numbers from here on name classes (a postcode does); they do not count them


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

    return _source(cached("npz", [path], decode, names))


def table(
    data_dir: str | None,
    file: str,
    label: str,
    client: str = "",
    side: str | list[str] = "",
    features: list[str] = [],  # noqa: B006 (never changed)
    standardise: bool = True,
    columns: list[dict[str, Any]] = [],  # noqa: B006
) -> Source:
    """Read a CSV with a header and one row for each point.

    label, client, side: columns; all the others are features, unless `features` names them. A list of columns as side is a
    vector of numbers, with data.side = "vector"; these columns are features, too. Words become a column of 0 and 1 for each.
    standardise: numbers are shifted and scaled to mean 0 and standard deviation 1 over all rows.
    columns: how features become numbers, where that is known already; as in federation.json, or agreed on by sites:
    {column = "age", mean = 50, std = 10}, {column = "sex", words = ["f", "m"]}.
    """
    path = _located(file, data_dir)
    known_rules = [_checked_rule(rule) for rule in columns]

    def decode() -> Arrays:
        cells, lines = _read_csv(path)
        of_side = [] if isinstance(side, list) else [side]
        not_features = [name for name in (label, client, *of_side) if name]
        feature_names = _feature_names(cells, not_features, features, known_rules)
        _check_columns(path, cells, lines, not_features, feature_names)
        rules = known_rules or [_rule_for(path, name, cells[name], standardise) for name in feature_names]
        x = _inputs_from_cells(path, rules, cells)
        y = np.array(cells[label])
        c = _number_columns(path, cells, side, lines) if isinstance(side, list) else _column_if_named(cells, side)
        arrays = _decoded(path, x, y, _column_if_named(cells, client), c)
        return arrays | {"features": np.array(json.dumps(rules))}

    return _source(cached("csv", [path], decode, label, client, side, list(features), standardise, known_rules))


def rows(path: Path, columns: Sequence[Mapping[str, Any]]) -> Tensor:
    """Turn the rows of another CSV into numbers [N, features] in the way in which those for training were made."""
    cells, lines = _read_csv(path)
    for rule in columns:
        name = rule["column"]
        _require_column(path, cells, name)
        _refuse_gaps(path, name, cells[name], lines)
    return torch.from_numpy(_inputs_from_cells(path, columns, cells))


def column(path: Path, name: str) -> Array | None:
    """Return a column of a CSV as text, or None if it has no column of that name."""
    cells, _ = _read_csv(path)
    return np.array(cells[name]) if name in cells else None


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

    return _source(cached("images", paths, decode, str(root.resolve()), size, grey))


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


# -- tables ------------------------------------------------------------------------------------------------------------


def _read_csv(path: Path) -> tuple[dict[str, list[str]], list[int]]:
    """Read the cells of each column by its name, and the line of the file that each row ends on."""
    header, numbered_rows = _header_and_rows(path)
    if len(set(header)) != len(header):
        raise DataError(f"{path} must have a name of its own for each column. Its header is {', '.join(header)}.")
    for line, row in numbered_rows:
        if len(row) != len(header):
            raise DataError(f"{path}, line {line} must have {len(header)} values. It has {len(row)}.")
    if not numbered_rows:
        raise DataError(f"{path} must have rows below its header. It has none.")
    lines, rows = zip(*numbered_rows, strict=True)
    columns = map(list, zip(*rows, strict=True))
    return dict(zip(header, columns, strict=True)), list(lines)


def _header_and_rows(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Read the names in the header, and the rows that are not empty, each with the line of the file that it ends on."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        try:
            not_empty = [(reader.line_num, [value.strip() for value in row]) for row in reader if row]
            (_, header), *numbered_rows = not_empty
        except (ValueError, csv.Error) as error:
            raise DataError(f"{path} must be a CSV file in UTF-8 with a header. It is not ({error}).") from error
    return header, numbered_rows


def _feature_names(
    cells: Cells, not_features: Sequence[str], features: Sequence[str], known_rules: Sequence[Rule]
) -> list[str]:
    """Name the columns to learn from: those with a rule, else those that the user names, else all but the others."""
    if known_rules:
        return [rule["column"] for rule in known_rules]
    return list(features) or [name for name in cells if name not in not_features]


def _check_columns(
    path: Path, cells: Cells, lines: Sequence[int], not_features: Sequence[str], feature_names: Sequence[str]
) -> None:
    """Refuse a table that lacks a column or a value, or whose features are its label, client or side information."""
    needed = [*not_features, *feature_names]
    for name in needed:
        _require_column(path, cells, name)
    in_both = set(feature_names) & set(not_features)
    if in_both:
        raise DataError(f"data.args.features must not name {min(in_both)!r}: it is the label, client or side.")
    for name in needed:
        _refuse_gaps(path, name, cells[name], lines)
    if not feature_names:
        raise DataError(f"{path} must have columns beside {', '.join(not_features)} to learn from. It has none.")


def _require_column(path: Path, cells: Cells, name: str) -> None:
    if name not in cells:
        raise DataError(f"{path} must have a column {name!r}. It has {', '.join(cells)}.")


def _refuse_gaps(path: Path, name: str, column: Sequence[str], lines: Sequence[int]) -> None:
    for line, value in zip(lines, column, strict=True):
        if value.lower() in EMPTY:
            raise DataError(
                f"{path}, line {line}: {name!r} must have a value. It is empty; fill it in or leave the row out."
            )


def _number_columns(path: Path, cells: Cells, names: list[str], lines: list[int]) -> Array:
    """Several columns of numbers as one array [N, D]."""
    if not names:
        raise DataError("data.args.side must name a column, or a list of one or more. Got an empty list.")
    columns = []
    for name in names:
        _require_column(path, cells, name)
        _refuse_gaps(path, name, cells[name], lines)
        try:
            columns.append(np.array(cells[name]).astype(np.float64))
        except ValueError as error:
            raise DataError(f"{path}: column {name!r} must be numbers to be part of a vector: {error}.") from error
    return np.stack(columns, axis=1)


def _column_if_named(cells: Cells, name: str) -> Array | None:
    return np.array(cells[name]) if name else None


def _checked_rule(rule: Any) -> dict[str, Any]:
    keys = set(rule) if isinstance(rule, Mapping) else set()
    if keys != {"column", "words"} and keys != {"column", "mean", "std"}:
        raise DataError(
            f"data.args.columns must be {{column, mean, std}} for numbers, {{column, words}} for words. Got {rule!r}."
        )
    return dict(rule)


def _rule_for(path: Path, name: str, column: Sequence[str], standardise: bool) -> dict[str, Any]:
    """Say how a column becomes numbers: by the mean and deviation of its numbers, or by the words that it holds."""
    try:
        values = np.array(column, dtype=np.float64)
    except ValueError:
        return _rule_for_words(path, name, column)
    if not np.isfinite(values).all():
        raise DataError(f"{path}: {name!r} must be finite. It holds infinity.")
    if not standardise:
        return {"column": name, "mean": 0.0, "std": 1.0}
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(values.mean())
        # A column that never changes has no deviation to divide by.
        std = float(values.std()) or 1.0
    if not np.isfinite([mean, std]).all():
        raise DataError(f"{path}: {name!r} must be numbers of ordinary size. They are too large.")
    return {"column": name, "mean": mean, "std": std}


def _rule_for_words(path: Path, name: str, column: Sequence[str]) -> dict[str, Any]:
    words = np.unique(np.array(column))
    if len(words) > CATEGORIES:
        raise DataError(
            f"{path}: {name!r} must be numbers, or words of at most {CATEGORIES} kinds. It has {len(words)} kinds, "
            f"{words[0]!r} among them; leave it out with data.args.features."
        ) from None
    return {"column": name, "words": words.tolist()}


def _inputs_from_cells(path: Path, rules: Sequence[Rule], cells: Cells) -> Array:
    """Turn the columns that have a rule into numbers, side by side: [N, features]."""
    blocks = [_numbers_from_cells(path, rule, cells[rule["column"]]) for rule in rules]
    return np.concatenate(blocks, axis=1)


def _numbers_from_cells(path: Path, rule: Rule, column: Sequence[str]) -> Array:
    """Turn a column into numbers [N, 1], or its words into 0 and 1 for each of the W known ones [N, W]."""
    name = rule["column"]
    if "words" in rule:
        return _one_hot(path, name, rule["words"], column)
    try:
        values = np.array(column, dtype=np.float64)
    except ValueError as error:
        raise DataError(f"{path}: {name!r} must be numbers. {str(error).capitalize()}.") from None
    with np.errstate(over="ignore", invalid="ignore"):
        scaled: Array = ((values - rule["mean"]) / rule["std"])[:, None].astype(np.float32)
    if not np.isfinite(scaled).all():
        raise DataError(f"{path}: {name!r} must be numbers of ordinary size. They are too large.")
    return scaled


def _one_hot(path: Path, name: str, words: Sequence[str], column: Sequence[str]) -> Array:
    position = {word: i for i, word in enumerate(words)}
    unknown = next((word for word in column if word not in position), None)
    if unknown is not None:
        raise DataError(f"{path}: {name!r} must be one of {', '.join(position)}. It has {unknown!r}.")
    return np.eye(len(position), dtype=np.float32)[[position[word] for word in column]]


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


def _decoded(path: Path, x: Array, y: Array, client: Array | None, c: Array | None) -> Arrays:
    """Prepare what the cache keeps: numbers in place of names, channels before rows and columns, moments of images."""
    labels, numbered_y = _numbered(y)
    arrays: Arrays = {"y": numbered_y, "labels": labels} | _inputs(path, x)
    if client is not None:
        names, arrays["owner"] = np.unique(client, return_inverse=True)
        arrays["owners"] = names.astype(str)
    if c is not None and c.ndim == 2:
        arrays["vector"] = _vectors(path, c)
    elif c is not None:
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
    """Prepare x: images stay bytes and get the moments to normalise them with, everything else becomes float32."""
    if x.dtype.kind not in "biuf" or not x.size:
        raise DataError(f"{path}: inputs must be numbers. Got {x.dtype} of shape {list(x.shape)}.")
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        pictures = _channels_first(x)
        return moments(pictures) | {"x": np.ascontiguousarray(pictures)}
    numbers = x.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise DataError(f"{path}: inputs must be finite. They hold NaN or infinity.")
    return {"x": np.ascontiguousarray(numbers)}


def _channels_first(x: Array) -> Array:
    """Bring images [N, H, W], [N, H, W, C] or [N, C, H, W] into the form [N, C, H, W]."""
    if x.ndim == 3:
        return x[:, None]
    channels_are_last = x.shape[1] > CHANNELS and x.shape[3] <= CHANNELS
    return np.moveaxis(x, 3, 1) if channels_are_last else x


def _numbered(y: Array) -> tuple[Array, Array]:
    """Return the classes by name, and the number of each point's class. Whole numbers from 0 stay as they are."""
    if y.dtype.kind == "U" and all(map(_is_whole_number, y)):
        y = y.astype(np.int64)
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise DataError("labels must be there for every point. Some are NaN or infinite.")
    if _count_from_zero(y):
        return np.arange(int(y.max()) + 1).astype(str), y.astype(np.int64)
    names, index = np.unique(y, return_inverse=True)
    return names.astype(str), index


def _is_whole_number(word: str) -> bool:
    """Say whether a word is a number as Python would write it: '1' is, '01' is another name."""
    return len(word) < 7 and word.isdecimal() and str(int(word)) == word


def _count_from_zero(y: Array) -> bool:
    if not np.issubdtype(y.dtype, np.integer) or not y.size:
        return False
    return bool(y.min() >= 0 and y.max() < LABEL_LIMIT)


def _source(arrays: Arrays) -> Source:
    def listed(key: str) -> list[Any]:
        return arrays[key].tolist() if key in arrays else []

    return Source(
        x=torch.from_numpy(arrays["x"]),
        y=whole_numbers(arrays["y"]),
        classes=len(arrays["labels"]),
        train=len(arrays["y"]),
        mean=tuple(listed("mean")),
        std=tuple(listed("std")),
        owner=numbers_if_any(arrays, "owner"),
        owners=listed("owners"),
        column=numbers_if_any(arrays, "column"),
        vector=torch.from_numpy(arrays["vector"]) if "vector" in arrays else None,
        kinds=listed("kinds"),
        labels=listed("labels"),
        features=json.loads(str(arrays["features"])) if "features" in arrays else (),
    )


READERS: dict[str, Callable[..., Source]] = {"npz": npz, "images": images, "csv": table}
