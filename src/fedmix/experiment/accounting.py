"""What the noise of a run guarantees: (epsilon, delta), from a maintained accountant (dp-accounting)."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from fedmix.errors import SettingError
from fedmix.experiment.recipe import Recipe


def guarantee(recipe: Recipe, cohorts: Iterable[Iterable[int]]) -> dict[str, Any]:
    """(epsilon, delta) of the client that took part most often, against whoever sees its answers.

    Client-level and local: two clients with any data at all are to be told apart. A round's answer is one Gaussian
    mechanism for the weights, one for q(z|s), one for phi. N_s, losses and scores are not covered.
    """
    noise = recipe.privacy.noise
    if not noise:
        return {"epsilon": None, "delta": None, "rounds_of_a_client": None}
    accounting = accountant_or_complain()
    counts = Counter(s for cohort in cohorts for s in cohort)
    most = max(counts.values(), default=0)
    # m Gaussian mechanisms of the same noise are one of noise / sqrt(m): exactly, not a bound
    times = noisy_parts(recipe) * most
    epsilon = accounting.get_epsilon_gaussian(noise / times**0.5, recipe.privacy.delta) if times else 0.0
    return {"epsilon": float(epsilon), "delta": recipe.privacy.delta, "rounds_of_a_client": most}


def accountant_or_complain() -> Any:
    try:
        from dp_accounting import gaussian_mechanism
    except ModuleNotFoundError as error:
        raise SettingError(
            "privacy.noise is accounted for by dp-accounting; install it with: pip install 'fedmix[privacy]'."
        ) from error
    return gaussian_mechanism


def noisy_parts(recipe: Recipe) -> int:
    """How many noisy things one answer holds."""
    if recipe.algorithm == "independent":
        return 0
    if recipe.algorithm != "fedmix":
        return 1
    shared = recipe.fedmix.phi == "global" and recipe.fedmix.objective == "bound"
    return 2 + shared + (shared and recipe.fedmix.prior == "reported")
