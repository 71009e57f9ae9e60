"""Labels as people have them: words, truth values, whole numbers, whole floats. Inside they are numbers from 0.

numbered(np.array(["ill", "well", "ill"]))  # labels ["ill", "well"], index [0, 1, 0]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmix.errors import DataError

Array = npt.NDArray[Any]
Label = str | bool | int | float

LABEL_LIMIT = 100_000  # whole numbers from here on name classes (a postcode does); they do not count them
MOST_KINDS = 20  # more different numbers than that, with few points of each, are measurements and no classes
POINTS_OF_A_KIND = 5


@dataclass(frozen=True)
class Labels:
    """The classes by what the user calls them, in order, and the number of each point's class."""

    names: list[Label]
    index: npt.NDArray[np.int64]


def numbered(values: Any, what: str = "labels", classes: int | None = None) -> Labels:
    """Number the classes of labels [N].

    Whole numbers that count from 0 stay as they are; so do all whole numbers where the number of classes is given. Anything
    else is numbered in the order of its values.
    """
    array = _plain(values, what)
    if array.dtype.kind == "f":
        array = _whole(array, what)
    if array.dtype.kind in "iu":
        refuse_measurements(array, what)
    if array.dtype.kind in "iu" and _counts_from_zero(array, classes):
        count = classes or int(array.max()) + 1
        return Labels(list(range(count)), array.astype(np.int64))
    names, index = np.unique(array, return_inverse=True)
    if classes and len(names) > classes:
        raise DataError(f"{what} must be of {classes} kinds. Got {len(names)}, {names[0]} and {names[-1]} among them.")
    return Labels(names.tolist(), index.reshape(-1).astype(np.int64))


def refuse_one_kind(names: Sequence[Label]) -> None:
    """Refuse data with one class: there is nothing to tell apart."""
    if len(names) < 2:
        raise DataError(f"labels must be of two kinds or more. All are {names[0]!r}.")


def check(values: Any, what: str) -> None:
    """Refuse labels of some points that cannot be classes."""
    array = _plain(values, what)
    if array.dtype.kind == "f":
        _refuse_fractions(array, what)


def given_back(names: Sequence[Label], index: Array) -> Array:
    """Labels as they were given, from numbers of classes: [N] -> [N]."""
    labels: Array = np.array(names)[np.asarray(index)]
    return labels


def is_missing(value: Any) -> bool:
    """Whether this stands for nothing: None, NaN, or what pandas has in its place."""
    if value is None or str(value) in ("<NA>", "NaT"):  # pandas' NA cannot be compared
        return True
    return isinstance(value, (float, np.floating)) and bool(value != value)


def text_of(label: Label) -> str:
    """A label in words: 1.0, as some programs save whole numbers, is the label 1."""
    if isinstance(label, float) and label == int(label):
        return str(int(label))
    return str(label)


def words_as_numbers(cells: Array) -> Array:
    """Cells of a file, as numbers where every cell is one as Python would write it: '1' is, '01' is another name."""
    if cells.dtype.kind == "U" and len(cells) and all(map(_is_whole_number, cells)):
        return cells.astype(np.int64)
    return cells


def refuse_measurements(array: Array, what: str) -> None:
    """Refuse whole numbers that are so many that they measure something."""
    kinds = len(np.unique(array))
    if kinds > MOST_KINDS and len(array) < POINTS_OF_A_KIND * kinds:
        raise DataError(
            f"{what} must be classes. Got {kinds} different numbers in {len(array)} points, which looks like a measurement; "
            "fedmix trains classifiers: put the numbers into classes first. If they are names, write them as words."
        )


def _plain(values: Any, what: str) -> Array:
    """An array [N] of words, truth values or numbers."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    if hasattr(values, "array") and hasattr(values, "index"):  # a pandas Series, whose own types NumPy knows not
        values = values.tolist()
    if isinstance(values, (list, tuple)) and any(map(is_missing, values)):
        raise DataError(f"{what} must be there for every point. {sum(map(is_missing, values))} are missing.")
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(
            f"{what} must be a list of words or whole numbers, one a point. Got lists among them."
        ) from error
    if array.dtype == object:
        array = _of_objects(array, what)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "biufUS":
        raise DataError(
            f"{what} must be a list of words or whole numbers, one a point. Got {array.dtype} {array.shape}."
        )
    return array.astype(str) if array.dtype.kind == "S" else array


def _of_objects(array: Array, what: str) -> Array:
    """What pandas gives for words: objects, all of one kind."""
    missing = sum(map(is_missing, array.ravel()))
    if missing:
        raise DataError(f"{what} must be there for every point. {missing} are missing.")
    kinds = {type(value).__name__ for value in array.ravel()}
    if len(kinds) > 1:
        raise DataError(f"{what} must be of one kind. Got {' and '.join(sorted(kinds))}.")
    plain = np.array(array.tolist())
    if plain.dtype == object:
        raise DataError(f"{what} must be words or whole numbers. Got {kinds.pop()}.")
    return plain


def _whole(array: Array, what: str) -> Array:
    """Whole numbers that are written as floats, as some programs save them."""
    _refuse_fractions(array, what)
    refuse_measurements(array, what)
    return array.astype(np.int64) if _counts_from_zero(array, None) else array


def _refuse_fractions(array: Array, what: str) -> None:
    if not np.isfinite(array).all():
        raise DataError(f"{what} must be there for every point. Some are NaN or infinite.")
    if (array != np.round(array)).any():
        strange = float(array[array != np.round(array)][0])
        raise DataError(
            f"{what} must be classes. Got {strange:g}, a measurement; fedmix trains classifiers: put the numbers into classes "
            "first, as in y = (y > 100)."
        )


def _is_whole_number(word: str) -> bool:
    return len(word) < 7 and word.isdecimal() and str(int(word)) == word


def _counts_from_zero(array: Array, classes: int | None) -> bool:
    if not array.size or array.min() < 0 or array.max() >= LABEL_LIMIT:
        return False
    if classes:
        return bool(array.max() < classes)
    # Labels 0 and 90,000 are names of two classes; labels 0 to 9 without a 7 are ten.
    return bool(array.min() == 0 and array.max() < 2 * len(np.unique(array)) + MOST_KINDS)
