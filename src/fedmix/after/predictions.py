"""Predictions for the rows of a file, with a run on this machine."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmix.after.trained import Predictor, TrainedRun
from fedmix.data.formats import npz_arrays
from fedmix.data.labels import text_of
from fedmix.errors import DataError


def predicted_from_file(
    run: TrainedRun, predictor: Predictor, file: Path, client: str, x: str, y: str
) -> dict[str, Any]:
    """Labels and probabilities for each row of a file, and the accuracy where it has labels."""
    rows, truth = _read(run, file, x, y)
    log_p = predictor.log_prob(rows)
    labels = [text_of(label) for label in predictor.classes]
    result = {
        "client": client,
        "run": str(run.path),
        "round": run.round,
        "labels": labels,
        "predictions": [labels[i] for i in log_p.argmax(dim=1).tolist()],
        "probabilities": [[round(p, 6) for p in row] for row in log_p.exp().tolist()],
    }
    if truth is not None:
        right = log_p.argmax(dim=1) == run.numbers_of(truth)
        result["accuracy"] = float(right.double().mean())
    return result


def _read(run: TrainedRun, file: Path, x: str, y: str) -> tuple[Any, npt.NDArray[Any] | None]:
    if not file.is_file():
        raise DataError(f"--input must be a file. {file} is not there.")
    if file.suffix == ".npz":
        arrays = npz_arrays(file, [x, y])
        if x not in arrays:
            raise DataError(f"{file} must hold an array {x!r}. It has none.")
        return arrays[x], arrays.get(y)
    cells = run.read_csv(file)
    label = run.label_column or y
    truth = np.array(cells.columns[label]) if label in cells.columns else None
    if truth is not None and "" in truth:
        truth = None  # what is to be predicted is not known yet
    return cells, truth
