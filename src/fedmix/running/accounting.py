"""What the noise of a run guarantees: (epsilon, delta), from a maintained accountant (dp-accounting)."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fedmix.errors import SettingError
from fedmix.running.releases import Unknown, cohorts
from fedmix.settings.recipe import Recipe


def guarantee(recipe: Recipe, parts: int, cohorts: Iterable[Iterable[int]]) -> dict[str, Any]:
    """(epsilon, delta) of the client that answered most often, against anybody who sees its answers; or why there is none.

    The guarantee is client-level and local: two clients with any data at all can hardly be told apart. A round's answer is
    one Gaussian mechanism for the weights, one for q(z|s), one for phi. N_s, losses and scores are not covered.

    parts: how many noisy things one answer holds. cohorts: for every time that a round was trained, its clients; a round
    that was trained again counts again.
    """
    noise = recipe.privacy.noise
    if not noise:
        return _none(None)
    if recipe.privacy.reproducible:
        return _none("privacy.reproducible draws the noise from the recipe's seed, so the server can subtract it")
    accounting = accountant_or_complain()
    try:
        counts = Counter(s for cohort in cohorts for s in cohort)
    except Unknown as error:
        return _none(f"{error}, so it is not known how often clients answered")
    most = max(counts.values(), default=0)
    delta = recipe.privacy.delta
    epsilon = _epsilon(accounting, noise, parts * most, delta)
    return {"epsilon": epsilon, "delta": delta, "rounds_of_a_client": most, "why_none": None}


def _epsilon(accounting: Any, noise: float, mechanisms: int, delta: float) -> float:
    if not mechanisms:
        return 0.0
    # m Gaussian mechanisms with the same noise are one with noise / sqrt(m). That is exact, not a bound.
    return float(accounting.get_epsilon_gaussian(noise / mechanisms**0.5, delta))


def guarantee_of_run(recipe: Recipe, parts: int, folder: Path, last_release: str | None) -> dict[str, Any]:
    """What the noise of this run directory guarantees.

    last_release: the last line of releases.jsonl that the last checkpoint knew.
    """

    def asked() -> Iterator[list[int]]:
        if last_release is None:
            raise Unknown("its first rounds were trained by a version that drew noise from the seed")
        yield from cohorts(folder, last_release)

    return guarantee(recipe, parts, asked())


def _none(why: str | None) -> dict[str, Any]:
    return {"epsilon": None, "delta": None, "rounds_of_a_client": None, "why_none": why}


def accountant_or_complain() -> Any:
    """dp-accounting's module for Gaussian mechanisms; an error that says how to install it where it is missing."""
    try:
        from dp_accounting import gaussian_mechanism
    except ModuleNotFoundError as error:
        raise SettingError(
            "privacy.noise is accounted for by dp-accounting; install it with: pip install 'fedmix[privacy]'."
        ) from error
    return gaussian_mechanism
