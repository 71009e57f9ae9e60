"""Inputs as people have them in memory: arrays, tensors, lists of sequences, dicts of several inputs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmix.core.inputs import Input
from fedmix.data.files import moments
from fedmix.data.labels import refuse_measurements
from fedmix.errors import DataError

Array = npt.NDArray[Any]
CHANNELS = 4  # an image has at most red, green, blue and alpha
SMALLEST_IMAGE = 4  # whole numbers [N, H, W] are an image from so many pixels on
EXACT = 2**53  # float64 holds whole numbers up to this one


def as_array(values: Any, what: str) -> Array:
    """An array of numbers from whatever holds them."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        if values.layout != torch.strided:
            raise DataError(f"{what} must be a dense tensor. Got {values.layout}; x.to_dense() makes one.")
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    if hasattr(values, "iloc"):  # pandas, which has types that NumPy knows not
        values = values.to_numpy().tolist()
    if hasattr(values, "todense"):
        raise DataError(f"{what} must be dense. Got {type(values).__name__}; x.toarray() makes an array.")
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise DataError(f"{what} must have no masked values. Fill them, as in x.filled(0).")
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(f"{what} must be an array of numbers, one row a point. Got something else: {error}.") from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"{what} must be numbers, one row a point. Got {array.dtype} of shape {list(array.shape)}.")
    return array


def is_ragged(values: Any) -> bool:
    """Whether these are sequences of different lengths."""
    if not isinstance(values, (list, tuple)) or not values:
        return isinstance(values, np.ndarray) and values.dtype == object
    if not all(hasattr(value, "__len__") and not isinstance(value, (str, Mapping)) for value in values):
        return False
    return len({len(value) for value in values}) > 1


def plain_inputs(x: Array, what: str) -> Array:
    """Prepare inputs: images stay bytes, whole numbers stay whole numbers, everything else becomes float32."""
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return np.ascontiguousarray(channels_first(x))
    if x.dtype.kind in "iu" and x.ndim in (3, 4) and min(x.shape[1:3]) >= SMALLEST_IMAGE:
        return _bytes_of(x, what)
    if x.dtype.kind in "iu":
        return np.ascontiguousarray(x.astype(np.int64))
    with np.errstate(over="ignore"):
        numbers = x.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise DataError(f"{what}: inputs must be finite. They hold NaN, infinity, or numbers too large for float32.")
    return np.ascontiguousarray(numbers)


def _bytes_of(x: Array, what: str) -> Array:
    """Images in whole numbers of another type than bytes."""
    if x.size and (x.min() < 0 or x.max() > 255):
        raise DataError(
            f"{what}: images in whole numbers must be from 0 to 255. Got {x.min()} to {x.max()}; divide them by their largest "
            "value, so that they are floats from 0 to 1."
        )
    return np.ascontiguousarray(channels_first(x.astype(np.uint8)))


def channels_first(x: Array) -> Array:
    """Bring images [N, H, W], [N, H, W, C] or [N, C, H, W] into the form [N, C, H, W]."""
    if x.ndim == 3:
        return x[:, None]
    channels_are_last = x.shape[1] > CHANNELS and x.shape[3] <= CHANNELS
    return np.moveaxis(x, 3, 1) if channels_are_last else x


def refuse_side_that_measures(c: Array, what: str) -> None:
    """Refuse side information that is a measurement: its values are no categories."""
    if c.dtype.kind == "f" and (c != np.round(c)).any():
        raise DataError(
            f"{what}: side information must be categories. Got {float(c[c != np.round(c)][0]):g}, a measurement; put it into "
            "classes first, or give it as a vector (data.side = 'vector')."
        )
    if c.dtype.kind in "iuf":
        refuse_measurements(c, f"{what}: side information")


# -- several inputs ----------------------------------------------------------------------------------------------------


def pack(
    inputs: Mapping[str, Any], like: Sequence[Input] = (), what: str = "x", train: Array | None = None
) -> tuple[Tensor, tuple[Input, ...]]:
    """Several inputs as rows of one tensor [N, D], and what they are. like: what they were in training, if they are new.

    train: the rows whose images say what images are normalised with.
    """
    known = {part.name: part for part in like}
    if like and set(known) != set(inputs):
        raise DataError(f"{what} must have the inputs {', '.join(known)}. Got {', '.join(inputs)}.")
    columns: list[Array] = []
    parts: list[Input] = []
    for name in known or inputs:
        part, rows = _packed(name, inputs[name], known.get(name), f"{what}[{name!r}]" if name else what, train)
        columns.append(rows)
        parts.append(part)
    lengths = {part.name: len(rows) for part, rows in zip(parts, columns, strict=True)}
    if len(set(lengths.values())) != 1:
        raise DataError(f"{what} must have inputs of one length. Got {lengths}.")
    return torch.from_numpy(np.concatenate(columns, axis=1)), tuple(parts)


def _packed(name: str, values: Any, like: Input | None, what: str, train: Array | None) -> tuple[Input, Array]:
    if is_ragged(values) or (like is not None and like.sequence):
        return _packed_sequences(name, values, like, what)
    array = plain_inputs(as_array(values, what), what)
    mean, std = _moments_of(array, like, train)
    if array.dtype == np.uint8:
        by_channel = (1, -1, 1, 1)
        array = (array / 255 - np.reshape(mean, by_channel)) / np.reshape(std, by_channel)
    kind = _kind_of(as_array(values, what), array)
    part = Input(name, tuple(array.shape[1:]), kind, mean, std)
    _refuse_another_input(part, like, what)
    return part, _rows(array, what)


def _moments_of(array: Array, like: Input | None, train: Array | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if array.dtype != np.uint8:
        return (), ()
    if like is not None:
        return like.mean, like.std
    found = moments(array if train is None else array[train])
    return tuple(found["mean"].tolist()), tuple(found["std"].tolist())


def _kind_of(given: Array, array: Array) -> str:
    if given.dtype.kind == "b":
        return "truth"
    return "integer" if array.dtype.kind in "iu" else "float"


def _refuse_another_input(part: Input, like: Input | None, what: str) -> None:
    if like is not None and part.shape != like.shape:
        raise DataError(f"{what} must have the shape {list(like.shape)}, as in training. Got {list(part.shape)}.")


def _packed_sequences(name: str, values: Any, like: Input | None, what: str) -> tuple[Input, Array]:
    """Sequences filled up with zeros to the length of the longest, and how long each one is."""
    rows = [as_array(value, f"{what}, sequence {i}") for i, value in enumerate(values)]
    shapes = {row.shape[1:] for row in rows}
    if len(shapes) != 1 or any(row.ndim == 0 for row in rows):
        raise DataError(f"{what} must be sequences whose elements have one shape. Got {sorted(map(list, shapes))}.")
    longest = max(map(len, rows))
    if like is not None and longest > like.shape[0]:
        raise DataError(f"{what} must have at most {like.shape[0]} elements a sequence, as in training. Got {longest}.")
    size = like.shape[0] if like is not None else longest
    whole = all(row.dtype.kind in "iub" for row in rows)
    filled = np.zeros((len(rows), size, *shapes.pop()), np.int64 if whole else np.float32)
    for i, row in enumerate(rows):
        filled[i, : len(row)] = row
    part = Input(name, tuple(filled.shape[1:]), "integer" if whole else "float", sequence=True)
    counts = np.array([len(row) for row in rows], dtype=np.float64)
    return part, np.concatenate([_rows(plain_inputs(filled, what), what), counts[:, None]], axis=1)


def _rows(array: Array, what: str) -> Array:
    if array.dtype.kind in "iu" and array.size and np.abs(array).max() > EXACT:
        raise DataError(f"{what} must be whole numbers up to 2 ** 53. Got larger ones.")
    return array.reshape(len(array), -1).astype(np.float64)
