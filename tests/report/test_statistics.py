"""Means over seeds and paired differences, against NumPy written out."""

import numpy as np
import pytest

from fedmix.report.comparison import compared, swept
from fedmix.report.statistics import over_seeds, paired_difference


def test_a_deviation_over_seeds_is_the_sample_deviation():
    values = [0.5, 0.7, 0.9, 0.4]
    assert over_seeds(values) == pytest.approx({"mean": np.mean(values), "std": np.std(values, ddof=1)})
    assert over_seeds([0.5]) == {"mean": 0.5, "std": None}
    assert over_seeds([None, 0.5, None]) == {"mean": 0.5, "std": None}
    assert over_seeds([None]) == {"mean": None, "std": None}


def of_clients(values):
    return {f"client {s}": float(value) for s, value in enumerate(values)}


def test_a_paired_difference_is_the_mean_over_clients_and_its_interval_that_of_a_bootstrap():
    rng = np.random.default_rng(0)
    first, second = rng.uniform(0.5, 0.9, size=(3, 40)), rng.uniform(0.45, 0.9, size=(3, 40))
    found = paired_difference([(of_clients(a), of_clients(b)) for a, b in zip(first, second, strict=True)])
    differences = first - second
    assert found["mean"] == pytest.approx(differences.mean())
    assert (found["clients"], found["seeds"]) == (120, 3)
    drawn = np.empty(4000)
    for r in range(len(drawn)):
        seeds = rng.integers(0, 3, size=3)
        drawn[r] = np.mean([rng.choice(differences[seed], size=40).mean() for seed in seeds])
    low, high = np.percentile(drawn, [2.5, 97.5])
    width = high - low
    assert found["low"] == pytest.approx(low, abs=0.1 * width)
    assert found["high"] == pytest.approx(high, abs=0.1 * width)


def test_clients_are_paired_by_name_and_seeds_count_alike():
    first, second = {"a": 0.9, "b": 0.5, "only here": 0.0}, {"b": 0.4, "a": 0.7, "only there": 1.0}
    assert paired_difference([(first, second)])["mean"] == pytest.approx((0.2 + 0.1) / 2)
    many, few = of_clients([0.6] * 9), of_clients([0.5] * 9)
    both = paired_difference([(many, few), ({"a": 0.5}, {"a": 0.8})])
    assert both["mean"] == pytest.approx((0.1 - 0.3) / 2)  # a seed with more clients does not count more
    assert paired_difference([({"a": 1.0}, {"b": 1.0})]) is None
    assert paired_difference([]) is None


@pytest.mark.parametrize(
    ("shift", "spread", "verdict"), [(0.05, 0.01, "ahead"), (-0.05, 0.01, "behind"), (0.001, 0.1, "level")]
)
def test_level_is_said_where_the_interval_crosses_zero(shift, spread, verdict):
    noise = np.random.default_rng(1).normal(scale=spread, size=50)
    found = paired_difference([(of_clients(0.5 + shift + noise), of_clients(np.full(50, 0.5)))])
    assert found["verdict"] == verdict
    assert (found["low"] <= 0 <= found["high"]) == (verdict == "level")


def test_one_client_is_no_evidence():
    assert paired_difference([({"a": 1.0}, {"a": 0.0})])["verdict"] == "level"


def made_summary(algorithm, seed, tuned, server):
    over_clients = {"mean": tuned, "std": 0.0, "worst_decile": tuned}
    validation = {"mean": server, "std": 0.0, "worst_decile": server}
    return {
        "algorithm": algorithm,
        "recipe": "r",
        "scale": "full",
        "rounds": 3,
        "seed": seed,
        "bytes_down": 1,
        "bytes_up": 1,
        "warnings": [],
        "accuracy": {
            "test": {"fine_tuned": over_clients, "server": over_clients, "no_identity": None},
            "validation": {"as_sent": over_clients, "server": validation, "no_identity": None},
        },
        "of_clients": {
            "test": {"fine_tuned": dict.fromkeys("abc", tuned), "server": {}},
            "validation": {"as_sent": {}, "server": dict.fromkeys("abc", server), "no_identity": {}},
        },
    }


def test_methods_are_compared_over_the_seeds_that_both_have():
    mixed = [made_summary("fedmix", seed, 0.8 + seed / 100, 0.7) for seed in range(3)]
    plain = [made_summary("fedavg", seed, 0.7, 0.7) for seed in (1, 2)]
    found = compared([*mixed, *plain])
    assert [row["algorithm"] for row in found["rows"]] == ["fedmix", "fedavg"]
    assert found["rows"][0]["test"]["fine_tuned"] == pytest.approx({"mean": 0.81, "std": 0.01})
    by_kind = {(row["part"], row["kind"]): row["difference"] for row in found["differences"]}
    assert by_kind["test", "fine_tuned"]["mean"] == pytest.approx(0.115)
    assert by_kind["test", "fine_tuned"]["seeds"] == 2
    assert by_kind["test", "fine_tuned"]["verdict"] == "ahead"
    assert by_kind["validation", "server"]["verdict"] == "level"
    assert by_kind["validation", "no_identity"] is None


def test_a_sweep_chooses_on_validation_data_and_not_on_test_data():
    runs = [
        ({"eta": 0.0}, made_summary("fedmix", 0, tuned=0.9, server=0.5)),
        ({"eta": 0.5}, made_summary("fedmix", 0, tuned=0.6, server=0.8)),
    ]
    assert swept(runs, "server")["best"] == 1
    assert swept(runs, "as-sent")["best"] == 0  # made up: as sent is as fine-tuned there
    assert swept(runs, "no identity")["best"] is None
