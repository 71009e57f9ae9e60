"""How good predictions are: accuracy, balanced accuracy, negative log-likelihood and calibration, as plain numbers."""

import torch
from torch import Tensor

MEASURES = ("accuracy", "balanced_accuracy", "nll", "ece")
LOWER_IS_BETTER = ("nll", "ece")
BINS = 15  # of confidence, as in Guo et al. (2017)


def score(log_p: Tensor, y: Tensor) -> dict[str, float]:
    """log p(y|x) [N, classes] against the true labels [N]: `points`, and if there are any, each of MEASURES.

    balanced_accuracy: the share of a class that is predicted right, averaged over the classes that occur. nll: a mean over
    points. ece: expected calibration error.
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
    }


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
