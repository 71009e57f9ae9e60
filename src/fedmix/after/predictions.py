"""Predictions for the rows of a file: of a run on this machine, or of a client at its site."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedmix.after.rows import Encoding
from fedmix.data.formats import npz_arrays
from fedmix.data.labels import text_of
from fedmix.errors import DataError


def predicted_from_file(
    encoding: Encoding, log_prob: Callable[[Tensor], Tensor], file: Path, x: str = "x", y: str = "y"
) -> dict[str, Any]:
    """Labels and probabilities for each row of a file, .npz or .csv, and the accuracy where it has labels.

    log_prob: log p(y|x) from inputs as the model takes them. x, y: what an .npz calls inputs and labels.
    """
    rows, truth = _read(encoding, file, x, y)
    log_p = log_prob(encoding.inputs(rows))
    labels = [text_of(label) for label in encoding.classes]
    result: dict[str, Any] = {
        "labels": labels,
        "predictions": [labels[i] for i in log_p.argmax(dim=1).tolist()],
        "probabilities": [[round(p, 6) for p in row] for row in log_p.exp().tolist()],
    }
    if truth is not None:
        if truth.shape != (len(log_p),):
            raise DataError(f"{file}: {y!r} must have one value for each of the {len(log_p)} inputs.")
        right = log_p.argmax(dim=1) == encoding.labels(truth)
        result["accuracy"] = float(right.double().mean())
    return result


def _read(encoding: Encoding, file: Path, x: str, y: str) -> tuple[Any, npt.NDArray[Any] | None]:
    """The rows of a file, and their labels where all of them are there."""
    if not file.is_file():
        raise DataError(f"--input must be a file. {file} is not there.")
    if file.suffix == ".npz":
        arrays = npz_arrays(file, [x, y])
        if x not in arrays:
            raise DataError(f"{file} must hold an array {x!r}. It has none.")
        return arrays[x], arrays.get(y)
    if not encoding.of_table:
        raise DataError("a CSV needs a model that was trained on columns of a table. This one was not.")
    cells = encoding.read_csv(file)
    label = encoding.label_column or y
    if label not in cells.columns or "" in cells.columns[label]:
        return cells, None
    return cells, np.array(cells.columns[label])
