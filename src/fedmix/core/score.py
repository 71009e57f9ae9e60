"""How good predictions are, as plain numbers: accuracy, balanced accuracy, log-likelihood, calibration, F1, area under ROC."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmix.errors import DataError

# (numbers of the true classes [N], probabilities [N, classes]) -> a number
Measure = Callable[[npt.NDArray[Any], npt.NDArray[Any]], float]
MEASURES = ("accuracy", "balanced_accuracy", "nll", "ece")  # always there
MORE_MEASURES = ("f1", "auc")  # auc is there where two classes or more occur
LOWER_IS_BETTER = ("nll", "ece")
BINS = 15  # of confidence, as in Guo et al. (2017)


def score(log_p: Tensor, y: Tensor, more: Mapping[str, Measure] = {}) -> dict[str, float]:
    """log p(y|x) [N, classes] against the true labels [N]: `points`, and if there are any, each of MEASURES, and what else
    can be said of these points.

    balanced_accuracy: the share of a class that is predicted right, averaged over the classes that occur. nll: a mean over
    points. ece: expected calibration error. f1: averaged over classes that occur or are predicted. auc: of the second of two
    classes; of several, each against the others, averaged over those that occur. more: measures of the user's own; one that is
    not finite is left out.
    """
    if not len(y):
        return {"points": 0.0}
    confidence, predicted = log_p.to(torch.float64).exp().max(dim=1)
    right = (predicted == y).to(torch.float64)
    return {
        "points": float(len(y)),
        "accuracy": float(right.sum()) / len(y),
        "balanced_accuracy": _balanced(right, y),
        "nll": float(-log_p.gather(1, y.unsqueeze(1)).to(torch.float64).mean()),
        "ece": _calibration_error(confidence, right),
        "f1": _f1(predicted, y),
        **_auc(log_p, y),
        **_of_user(log_p, y, more),
    }


def confusion(predicted: Tensor, y: Tensor, classes: int) -> Tensor:
    """How many points of each true class (row) were predicted as each class (column): [classes, classes]."""
    return torch.bincount(y * classes + predicted, minlength=classes * classes).view(classes, classes)


def _f1(predicted: Tensor, y: Tensor) -> float:
    classes = int(max(predicted.max(), y.max())) + 1
    counts = confusion(predicted, y, classes).to(torch.float64)
    right, either = counts.diagonal(), counts.sum(dim=0) + counts.sum(dim=1)
    occurs = either > 0
    return float((2 * right[occurs] / either[occurs]).mean())


def _auc(log_p: Tensor, y: Tensor) -> dict[str, float]:
    """The chance that a point of a class has a higher probability of it than a point of another class; ties count half."""
    classes = log_p.shape[1]
    occurring = [1] if classes == 2 else torch.unique(y).tolist()
    areas = [_area(log_p[:, k], y == k) for k in occurring if 0 < int((y == k).sum()) < len(y)]
    return {"auc": sum(areas) / len(areas)} if areas else {}


def _area(values: Tensor, positive: Tensor) -> float:
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).to(torch.float64)
    ranks = (last - (counts - 1) / 2)[inverse]  # equal values share the mean of their ranks
    n = float(positive.sum())
    return (float(ranks[positive].sum()) - n * (n + 1) / 2) / (n * (len(values) - n))


def _of_user(log_p: Tensor, y: Tensor, measures: Mapping[str, Measure]) -> dict[str, float]:
    if not measures:
        return {}
    truth, probabilities = y.cpu().numpy(), log_p.to(torch.float64).exp().cpu().numpy()
    values: dict[str, float] = {}
    for name, measure in measures.items():
        value = measure(truth, probabilities)
        if not isinstance(value, (int, float, np.integer, np.floating)):
            raise DataError(f"measure {name!r} must give a number. Got {type(value).__name__}.")
        if math.isfinite(value):
            values[name] = float(value)
    return values


def _balanced(right: Tensor, y: Tensor) -> float:
    points = torch.bincount(y)
    right_points = torch.bincount(y, weights=right)
    occurs = points > 0
    return float((right_points[occurs] / points[occurs]).mean())


def _calibration_error(confidence: Tensor, right: Tensor) -> float:
    """sum over bins of the bin's share times |its accuracy - its mean confidence|; bin b is (b/BINS, (b+1)/BINS]."""
    bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    gap = torch.bincount(bins, weights=right - confidence, minlength=BINS)
    return float(gap.abs().sum()) / len(right)
