"""A run directory and its data, brought back together: what comes after training starts here."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedmix.core.server import State
from fedmix.data.federation import Federation
from fedmix.engines.store import MemoryStore
from fedmix.errors import RunError
from fedmix.experiment.build import Experiment, build
from fedmix.experiment.checkpoint import Checkpoints, private_states
from fedmix.experiment.recipe import OWN
from fedmix.experiment.record import read_run, run_recipe
from fedmix.experiment.trained import refuse_another_model
from fedmix.methods.page import Page


@dataclass(frozen=True)
class Restored:
    """A run at its last checkpoint."""

    path: Path
    experiment: Experiment
    state: State
    store: MemoryStore  # the clients' private states, as they were then
    carried: dict[str, Any]

    @property
    def about(self) -> dict[str, Any]:
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
    """The run with its data, which must be what it was trained on; what was handed over in Python is handed over again."""
    path = Path(run)
    recipe, about = run_recipe(path), read_run(path)
    if recipe.data.source == OWN and federation is None:
        raise RunError(
            f"the data of {path} was handed over in Python; hand it over again: federation=..., as in "
            f"fedmix.evaluate({str(path)!r}, federation=...)."
        )
    experiment = build(recipe, federation, model, data_dir, algorithm)
    refuse_another_model(path, about, experiment.model)
    try:
        known = json.loads((path / "federation.json").read_text())["digest"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path / 'federation.json'} must describe the run's data. It is damaged ({error}).") from error
    if experiment.federation.digest() != known:
        raise RunError(
            f"{path} must be looked at with its own data. What is found now differs from its federation.json."
        )
    found = Checkpoints(path / "checkpoints", recipe.checkpoint.keep).load_last(experiment.algorithm.state_from)
    if found is None:
        raise RunError(f"{path} must have a checkpoint. It has none yet; train it first, or go on with --resume.")
    store = MemoryStore()
    for client, private in private_states(path, found).items():
        store.put(client, private)
    return Restored(path, experiment, found.state, store, found.carried)
