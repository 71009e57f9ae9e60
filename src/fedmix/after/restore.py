"""A run directory and its data, brought back together: what comes after training starts here."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fedmix.core.server import State
from fedmix.data.federation import Federation
from fedmix.engines.store import MemoryStore
from fedmix.errors import RunError
from fedmix.methods.page import Page
from fedmix.running.carried import Carried
from fedmix.running.checkpoint import private_states
from fedmix.running.directory import run_recipe
from fedmix.running.reopen import last_checkpoint, refuse_another_model
from fedmix.schema import About, read_federation
from fedmix.settings.build import Experiment, build
from fedmix.settings.recipe import OWN


@dataclass(frozen=True)
class Restored:
    """A run at its last checkpoint."""

    path: Path
    experiment: Experiment
    state: State
    # The clients' private states, as they were then.
    store: MemoryStore
    carried: Carried

    @property
    def about(self) -> About:
        """Which run this is, for whatever is written about it."""
        recipe = self.experiment.recipe
        return {
            "recipe": recipe.name,
            "scale": recipe.scale,
            "algorithm": recipe.algorithm,
            "title": self.experiment.page.title,
            "seed": recipe.seed,
            "round": self.state.round,
            "rounds": recipe.rounds,
            "clients": len(self.experiment.federation),
        }


def restore(
    run: str | Path,
    federation: Federation | None = None,
    model: Callable[[], nn.Module] | nn.Module | None = None,
    data_dir: str | None = None,
    algorithm: Page | None = None,
) -> Restored:
    """The run with its data, which must be what it was trained on. What was handed over in Python must be given again."""
    path = Path(run)
    recipe = run_recipe(path)
    if recipe.data.source == OWN and federation is None:
        raise RunError(
            f"the data of {path} was handed over in Python; hand it over again: federation=..., as in "
            f"fedmix.evaluate({str(path)!r}, federation=...)."
        )
    experiment = build(recipe, federation, model, data_dir, algorithm)
    refuse_another_model(path, experiment.model)
    if experiment.federation.digest() != read_federation(path)["digest"]:
        raise RunError(
            f"{path} must be looked at with its own data. What is found now differs from its federation.json."
        )
    checkpoint = last_checkpoint(path, recipe, experiment.algorithm)
    store = MemoryStore()
    for client, private in private_states(path, checkpoint).items():
        store.put(client, private)
    return Restored(path, experiment, checkpoint.state, store, checkpoint.carried)
