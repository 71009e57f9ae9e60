"""Means over seeds, and differences of two methods paired over clients and seeds. Plain Python: the report needs no NumPy."""

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

RESAMPLES = 1000
# how often the interval holds the true difference
LEVEL = 0.95
Verdict = Literal["ahead", "behind", "level"]


class OverSeeds(TypedDict):
    """A figure over seeds: its mean and its sample deviation, which one seed alone does not have."""

    mean: float | None
    std: float | None


class Difference(TypedDict):
    """First minus second: the mean over clients and seeds, and its bootstrap interval.

    verdict: what is said of the first method; 'level' where the interval crosses zero, or there is one client alone.
    """

    mean: float
    low: float
    high: float
    clients: int
    seeds: int
    verdict: Verdict


def over_seeds(values: Sequence[float | None]) -> OverSeeds:
    """Mean and sample deviation of the values that are known."""
    known = [value for value in values if value is not None]
    if not known:
        return {"mean": None, "std": None}
    deviation = statistics.stdev(known) if len(known) > 1 else None
    return {"mean": statistics.fmean(known), "std": deviation}


def paired_difference(pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> Difference | None:
    """The difference of two methods; None where they have no client in common.

    pairs: for each seed that both have, each client's accuracy under the first and under the second.

    The interval is a bootstrap in two steps: seeds are drawn with replacement, then the clients of each. With one seed it says
    how much other clients would change, and nothing of other seeds.
    """
    of_all_seeds = [_differences(first, second) for first, second in pairs]
    of_seeds = list(filter(None, of_all_seeds))
    if not of_seeds:
        return None
    # the mean of each seed first, so that a seed with more clients does not count more
    mean = statistics.fmean(map(statistics.fmean, of_seeds))
    low, high = _interval(of_seeds)
    clients = sum(map(len, of_seeds))
    return {
        "mean": mean,
        "low": low,
        "high": high,
        "clients": clients,
        "seeds": len(of_seeds),
        "verdict": _verdict(low, high) if clients > 1 else "level",
    }


def _differences(first: Mapping[str, float], second: Mapping[str, float]) -> list[float]:
    return [value - second[client] for client, value in first.items() if client in second]


def _interval(of_seeds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The bootstrap's interval of the mean difference."""
    # the same runs give the same interval
    rng = random.Random(0)
    means = sorted(_resampled_mean(of_seeds, rng) for _ in range(RESAMPLES))
    outside = round((1 - LEVEL) / 2 * RESAMPLES)
    return means[outside], means[-1 - outside]


def _resampled_mean(of_seeds: Sequence[Sequence[float]], rng: random.Random) -> float:
    drawn = rng.choices(of_seeds, k=len(of_seeds))
    means = [statistics.fmean(rng.choices(differences, k=len(differences))) for differences in drawn]
    return statistics.fmean(means)


def _verdict(low: float, high: float) -> Verdict:
    if low > 0:
        return "ahead"
    return "behind" if high < 0 else "level"
