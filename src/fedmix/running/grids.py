"""Several runs: methods compared over seeds, or a grid of settings."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmix.catalogue import CATALOGUE
from fedmix.errors import ClientError, SettingError
from fedmix.schema import Summary
from fedmix.settings.reading import folder_of_run
from fedmix.settings.recipe import Recipe

Train = Callable[[Recipe, Path], Summary]
# (a method, or None for the recipe's; changes) -> a recipe
Read = Callable[[str | None, Mapping[str, Any]], Recipe]


@dataclass(frozen=True)
class Point:
    """One run of a grid: the settings that vary, its recipe, and the name of its folder."""

    settings: Mapping[str, Any]
    recipe: Recipe
    name: str


@dataclass(frozen=True)
class Trained:
    """The runs of a grid. runs: those that ended. failed: what went wrong with the others, in words."""

    runs: list[tuple[Point, Summary]]
    failed: list[str]


def comparison_points(
    read: Read, methods: Sequence[str], seeds: Sequence[int], changes: Mapping[str, Any]
) -> list[Point]:
    """Every method with every seed; without seeds, with the seed of the recipe."""
    methods, seeds = listed("algorithms", methods, str), listed("seeds", seeds, int)
    if not methods:
        raise SettingError("algorithms must name one method or more. Got none.")
    first = read(methods[0], changes_for(methods[0], changes))
    points = []
    for method in methods:
        for seed in seeds or [first.seed]:
            changed = read(method, {**changes_for(method, changes), "seed": seed})
            points.append(Point({"algorithm": method}, changed, folder_of_run(changed)))
    return points


def listed(name: str, values: Any, kind: type) -> list[Any]:
    """Several values as a list; a single one may be given as it is. The same one twice would count as two."""
    several = [values] if isinstance(values, (str, int)) else [kind(value) for value in values]
    twice = [value for i, value in enumerate(several) if value in several[:i]]
    if twice:
        raise SettingError(f"{name} must name each one once. {twice[0]!r} is there twice.")
    return several


def changes_for(method: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes that a method takes: a shipped one has no use for the settings of the user's own ([own])."""
    if method not in CATALOGUE:
        return dict(changes)
    return {key: value for key, value in changes.items() if not key.startswith("own.")}


def sweep_points(
    read: Read,
    grid: Mapping[str, Sequence[Any]],
    seeds: Sequence[int] = (),
    changes: Mapping[str, Any] | None = None,
    algorithm: str | None = None,
) -> list[Point]:
    """Every combination of the grid's values with every seed. grid: {"fedmix.eta": [0, 0.5]}; one of its keys may be seed."""
    changes, seeds = changes or {}, listed("seeds", seeds, int)
    for key, options in grid.items():
        if isinstance(options, (str, int, float)) or not hasattr(options, "__len__"):
            raise SettingError(f"{key} must have a list of values to compare. Got {options!r}.")
    grid = {key: getattr(options, "tolist", lambda options=options: options)() for key, options in grid.items()}
    values, seeds = _without_seeds(grid, seeds)
    varied = _varied(values)
    if "rounds" in values and "rounds" in changes:
        raise SettingError("rounds must be given once: by --rounds, or by --set rounds=...")
    points = []
    for combination in itertools.product(*values.values()):
        settings = dict(zip(values, combination, strict=True))
        varying = {key: settings[key] for key in varied}
        for seed in _seeds_of(settings, seeds):
            changed = read(algorithm, {**settings, **changes, **seed})
            points.append(Point(varying, changed, _folder(varying, changed.seed)))
    return points


def _varied(values: Mapping[str, Sequence[Any]]) -> list[str]:
    """The settings that have several values; one at least must have them."""
    varied = [key for key, options in values.items() if len(options) > 1]
    if not varied:
        raise SettingError(
            "--set must give a setting several values, as in --set fedmix.eta=0,0.25,0.5. None has them."
        )
    return varied


def _without_seeds(
    grid: Mapping[str, Sequence[Any]], seeds: Sequence[int]
) -> tuple[dict[str, Sequence[Any]], Sequence[int]]:
    """A grid without its seeds, and the seeds: they are averaged over, not compared.

    They are only compared where nothing but the seed varies.
    """
    if "seed" in grid and seeds:
        raise SettingError("seeds must be given once: by --seeds, or by --set seed=...")
    values = dict(grid)
    if len(values) > 1:
        seeds = values.pop("seed", seeds)
    return values, seeds


def _seeds_of(settings: Mapping[str, Any], seeds: Sequence[int]) -> list[dict[str, int]]:
    """What each run of a point changes to have its seed: nothing, where the recipe or the point has a seed."""
    if "seed" in settings or not seeds:
        return [{}]
    return [{"seed": seed} for seed in seeds]


def _folder(varying: Mapping[str, Any], seed: int) -> str:
    """What the folder of a run is called, as in eta=0.5-seed0."""
    words = ",".join(f"{key.split('.')[-1]}={value}" for key, value in varying.items())
    return f"{words}-seed{seed}".replace("/", "_").replace(" ", "")


def train_points(
    points: Sequence[Point], out: Path, train: Train, about_to: Callable[[Point, int], None] = lambda point, i: None
) -> Trained:
    """Train one point after the other. about_to: called with each point and its place before it is trained.

    A client's error belongs to one point alone, as when its rate is too large: the others are trained all the same.
    """
    trained = Trained([], [])
    for place, point in enumerate(points):
        about_to(point, place)
        try:
            trained.runs.append((point, train(point.recipe, out / point.name)))
        except ClientError as error:
            trained.failed.append(f"{point.name}: {error}")
    return trained
