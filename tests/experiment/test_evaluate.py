"""Scores and clusters against independent references."""

import random

import pytest
from sklearn.metrics import adjusted_rand_score

from fedmix.experiment.evaluate import Scores, adjusted_rand_index, clusters, worst_decile


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
    assert Scores([], []).summary() == {"mean": None, "std": None, "worst_decile": None}
    assert Scores([0, 2], [0.5, 1.0]).summary() == {"mean": 0.75, "std": 0.25, "worst_decile": 0.5}
