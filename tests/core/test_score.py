"""Scores against scikit-learn's and a loop over bins."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score, log_loss

from fedmix.core.score import BINS, MEASURES, score


@pytest.mark.parametrize("classes", [2, 5])
def test_scores_are_scikit_learns_and_the_definition_of_calibration_error(classes):
    g = torch.Generator().manual_seed(classes)
    log_p = torch.log_softmax(3 * torch.randn(200, classes, generator=g), dim=1)
    y = torch.randint(classes, (200,), generator=g)
    y[y == 1] = 0  # a class that nobody has
    got = score(log_p, y)
    p, found = log_p.exp().double().numpy(), log_p.argmax(dim=1).numpy()
    assert got["points"] == 200
    assert got["accuracy"] == pytest.approx(accuracy_score(y, found))
    there = sorted(set(y.tolist()))
    recall = [np.mean(found[y.numpy() == k] == k) for k in there]
    assert got["balanced_accuracy"] == pytest.approx(np.mean(recall))
    if set(found) <= set(there):
        assert got["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(y, found))
    p /= p.sum(axis=1, keepdims=True)
    assert got["nll"] == pytest.approx(log_loss(y, p, labels=range(classes)), rel=1e-5)
    error = 0.0
    confidence = p.max(axis=1)
    for b in range(BINS):
        inside = (confidence > b / BINS) & (confidence <= (b + 1) / BINS)
        if inside.any():
            right = (found[inside] == y.numpy()[inside]).mean()
            error += inside.mean() * abs(right - confidence[inside].mean())
    assert got["ece"] == pytest.approx(error, abs=1e-6)


def test_certain_and_right_is_perfect_and_nothing_is_no_score():
    y = torch.tensor([0, 2, 1])
    log_p = torch.log(torch.nn.functional.one_hot(y, 3).double().clamp(min=1e-30))
    assert score(log_p, y) == {"points": 3.0} | dict(zip(MEASURES, (1.0, 1.0, 0.0, 0.0), strict=True))
    assert score(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)) == {"points": 0.0}
