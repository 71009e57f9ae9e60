"""Scores against scikit-learn's and a loop over bins."""

import numpy as np
import pytest
import torch
from sklearn import metrics
from sklearn.metrics import accuracy_score, balanced_accuracy_score, log_loss

from fedmix.core.score import BINS, MEASURES, MORE_MEASURES, confusion, score


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
    assert score(log_p, y) == {"points": 3.0} | dict(
        zip((*MEASURES, *MORE_MEASURES), (1.0, 1.0, 0.0, 0.0, 1.0, 1.0), strict=True)
    )
    assert score(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)) == {"points": 0.0}


@pytest.mark.parametrize("classes", [2, 4])
def test_f1_auc_and_the_confusion_matrix_are_scikit_learns(classes):
    rng = np.random.default_rng(classes)
    logits = torch.tensor(rng.normal(size=(60, classes))).round(decimals=1)  # with ties
    log_p, y = torch.log_softmax(logits, dim=1), torch.tensor(rng.integers(0, classes, 60))
    found, p = score(log_p, y), log_p.exp().numpy()
    predicted = log_p.argmax(dim=1)
    assert found["f1"] == pytest.approx(metrics.f1_score(y, predicted, average="macro"))
    expected = metrics.roc_auc_score(y, p[:, 1]) if classes == 2 else metrics.roc_auc_score(y, p, multi_class="ovr")
    assert found["auc"] == pytest.approx(expected)
    assert confusion(predicted, y, classes).tolist() == metrics.confusion_matrix(y, predicted).tolist()


def test_measures_of_ones_own_are_there_and_those_without_a_value_are_not():
    log_p, y = torch.log_softmax(torch.randn(5, 3), dim=1), torch.tensor([0, 0, 0, 0, 0])
    found = score(log_p, y, {"mine": lambda y, p: p[:, 0].mean(), "none": lambda y, p: float("nan")})
    assert found["mine"] == pytest.approx(log_p.exp()[:, 0].double().mean().item())
    assert "none" not in found
    assert "auc" not in found  # one class alone has none
