"""Scores and clusters against independent references."""

import random

import numpy as np
import pytest
import torch
from conftest import small_federation
from sklearn.metrics import adjusted_rand_score

from fedmix.running.evaluate import Scores, adjusted_rand_index, clusters, on_union, scores_of, worst_decile


def test_adjusted_rand_index_is_scikit_learns():
    rng = random.Random(0)
    for _ in range(200):
        n = rng.randint(2, 30)
        a, b = ([rng.randrange(rng.randint(1, 5)) for _ in range(n)] for _ in range(2))
        assert adjusted_rand_index(a, b) == pytest.approx(adjusted_rand_score(a, b), abs=1e-12)


def test_clusters_do_not_mind_the_names_of_experts():
    q = [[0.1, 0.9], [0.2, 0.8], [0.7, 0.3], [0.6, 0.4]]
    assert clusters(q, [0, 0, 1, 1])["adjusted_rand_index"] == 1.0
    assert clusters(q, [0, 1, 0, 1])["adjusted_rand_index"] < 0.1


def test_worst_decile_is_the_mean_of_the_worst_tenth_rounded_up():
    assert worst_decile([0.1 * i for i in range(10)]) == 0
    assert worst_decile([0.5, 0.1, 0.9] * 4) == pytest.approx(0.1)  # 12 clients: the worst 2
    assert worst_decile([0.4]) == 0.4


def test_scores_without_clients_are_null():
    assert Scores({}).summary() == {"mean": None, "std": None, "worst_decile": None}
    some = scores_of(
        {2: {"points": 4, "accuracy": 1.0, "nll": 0.1}, 0: {"points": 2, "accuracy": 0.5, "nll": 0.9}, 1: {"points": 0}}
    )
    assert list(some.of) == [0, 2]
    assert some.summary() == {"mean": 0.75, "std": 0.25, "worst_decile": 0.5}
    assert some.summary("nll")["worst_decile"] == 0.9  # the larger, the worse


def test_the_union_is_scored_whole_and_client_by_client():
    federation = small_federation()
    part = "test"

    def predict(x):
        return torch.log_softmax(x @ torch.tensor([[1.0, 0.2, -1.0], [0.3, 1.0, -1.0]]), dim=1)

    whole, each = on_union(federation, [0, 2, 3], part, predict)
    points = np.concatenate([federation.parts[part][s] for s in (0, 2, 3)])
    assert whole["points"] == len(points)
    right = [int(predict(federation.x[i : i + 1]).argmax() == federation.y[i]) for i in points]
    assert whole["accuracy"] == pytest.approx(np.mean(right))
    assert sum(n["points"] * n["accuracy"] for n in each.of.values()) == pytest.approx(sum(right))
