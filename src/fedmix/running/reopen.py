"""A run directory brought back to life at its last checkpoint, without its data."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fedmix.core.algorithm import Algorithm
from fedmix.core.model import Model
from fedmix.core.tree import Params
from fedmix.errors import RunError
from fedmix.methods.page import Page
from fedmix.running.checkpoint import Checkpoint, Checkpoints
from fedmix.running.directory import run_recipe
from fedmix.schema import read_federation, read_run
from fedmix.settings.build import Given, revive
from fedmix.settings.recipe import Recipe


@dataclass(frozen=True)
class Reopened:
    """A run at its last checkpoint. federation: what federation.json says about the data."""

    path: Path
    recipe: Recipe
    federation: Mapping[str, Any]
    model: Model
    algorithm: Algorithm
    checkpoint: Checkpoint

    @property
    def experts(self) -> tuple[Params, ...]:
        """The models that are shared, each as a dict of parameters."""
        return self.algorithm.experts(self.checkpoint.state)


def reopen(path: Path, model: Given = None, page: Page | None = None, round: int | str = "last") -> Reopened:
    """A run directory at its last checkpoint, or at another. model, page: needed again where they were handed over."""
    recipe = run_recipe(path)
    federation = read_federation(path)
    built, algorithm = revive(recipe, federation, model, page, read_run(path).get("found_out"))
    refuse_another_model(path, built)
    return Reopened(path, recipe, federation, built, algorithm, _checkpoint(path, recipe, algorithm, round))


def _checkpoint(path: Path, recipe: Recipe, algorithm: Algorithm, round: int | str) -> Checkpoint:
    """The checkpoint of a round: "last", "best" on validation data, or a number."""
    if round == "last":
        return last_checkpoint(path, recipe, algorithm)
    checkpoints = Checkpoints(path / "checkpoints", recipe.checkpoint.keep)
    best = last_checkpoint(path, recipe, algorithm).carried.best_round
    if round == "best" and best is None:
        raise RunError(
            f"{path} has no best checkpoint: none was evaluated yet, or its clients keep their states themselves."
        )
    wanted = best if round == "best" else round
    if not isinstance(wanted, int) or wanted not in checkpoints.rounds():
        known = ", ".join(map(str, checkpoints.rounds()))
        raise RunError(f"round must be 'last', 'best' or one of the checkpoints {known}. Got {round!r}.")
    return checkpoints.load(wanted, algorithm.state_from)


def last_checkpoint(path: Path, recipe: Recipe, algorithm: Algorithm) -> Checkpoint:
    """The newest checkpoint of a run that must have one."""
    checkpoints = Checkpoints(path / "checkpoints", recipe.checkpoint.keep)
    checkpoint = checkpoints.load_last(algorithm.state_from)
    if checkpoint is None:
        raise RunError(f"{path} must have a checkpoint. It has none yet; train it first, or go on with --resume.")
    return checkpoint


def refuse_another_model(path: Path, model: Model) -> None:
    """Refuse a model that differs in any layer from the one that the run was trained with."""
    before = str(read_run(path).get("model", model.structure)).splitlines()
    now = model.structure.splitlines()
    if before != now:
        lines = [pair for pair in zip_longest(before, now, fillvalue="nothing") if pair[0] != pair[1]]
        was, is_now = lines[0]
        raise RunError(
            f"{path} must be loaded with the model that it was trained with. It had {was.strip()!r} where this "
            f"one has {is_now.strip()!r}."
        )
