"""The server's state before round 1: drawn from the seed, or taken from another run."""

from pathlib import Path

from fedmix.core.server import State
from fedmix.core.tree import Params
from fedmix.rng import stream
from fedmix.running.reopen import reopen
from fedmix.settings.build import Experiment
from fedmix.settings.reading import read_recipe
from fedmix.settings.recipe import OWN


def starting_state(experiment: Experiment) -> State:
    """New experts, or those of the run that the recipe's warm_start names."""
    recipe, algorithm = experiment.recipe, experiment.algorithm
    state = algorithm.init(recipe.seed)
    if not recipe.warm_start:
        return state
    return algorithm.warm_start(state, _experts_of_other_run(experiment), stream(recipe.seed, "warm start"))


def _experts_of_other_run(experiment: Experiment) -> tuple[Params, ...]:
    """The experts of the run that warm_start names.

    Where its model or its method was handed over in Python too, it is the same one as here.
    """
    path = Path(experiment.recipe.warm_start)
    other = read_recipe(str(path)) if (path / "recipe.toml").is_file() else None
    model = experiment.model.build if other and other.model.name == OWN else None
    page = experiment.page if other and other.algorithm == OWN else None
    run = reopen(path, model, page)
    if run.model.factors == experiment.model.factors:
        return run.experts
    # other factors, or none: whole weights are what both runs have
    return tuple(map(run.model.plain, run.experts))
