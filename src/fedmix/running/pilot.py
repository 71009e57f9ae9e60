"""A short run of FedAvg before round 1, for settings that depend on how far clients disagree (`fedmix.shared = "auto"`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedmix import schema
from fedmix.catalogue import CATALOGUE
from fedmix.engines.store import MemoryStore
from fedmix.methods.page import Page, Settle
from fedmix.methods.registry import shipped_page
from fedmix.running.loop import Round, rounds
from fedmix.running.where import Stage, Where
from fedmix.settings.build import Given, build, find_page
from fedmix.settings.reading import read_recipe
from fedmix.settings.recipe import Recipe

ROUNDS = 5
FEDAVG = "fedavg"


def settled(
    recipe: Recipe,
    where: Where,
    given: tuple[Any, Given, Page | None],
    data_dir: str | None,
    out: Path,
    resume: bool,
    say: Callable[[str], None],
) -> Recipe:
    """The recipe with everything decided that its method leaves to a short run; a run that is resumed keeps what it had.

    say: told before the short run, and what it decided.
    """
    settle = _settle_of(recipe, given[2])
    if settle is None:
        return recipe
    if resume and (out / schema.RECIPE).is_file():
        before = read_recipe(str(out))
        if before.algorithm == recipe.algorithm:
            return recipe.with_method_settings(settle.keep(recipe.method_settings, before.method_settings))
    say(f"{min(ROUNDS, recipe.rounds)} rounds of FedAvg decide what is left open in the recipe")
    settings = _decided(recipe, settle, where, given, data_dir)
    say(settle.words(settings))
    return recipe.with_method_settings(settings)


def _settle_of(recipe: Recipe, page: Page | None) -> Settle | None:
    """What decides the open settings of a recipe's method; None: nothing is open. Only shipped methods leave something open."""
    if recipe.algorithm not in CATALOGUE:
        return None
    settle = find_page(recipe.algorithm, page).settle
    return settle if settle is not None and settle.wanted(recipe.method_settings) else None


def _decided(
    recipe: Recipe, settle: Settle, where: Where, given: tuple[Any, Given, Page | None], data_dir: str | None
) -> Any:
    federation, model, _ = given
    plain = replace(recipe, algorithm=FEDAVG)
    experiment = build(plain, federation, model, data_dir, shipped_page(FEDAVG))
    here = where if where.kind.start is not None else Where(workers=where.workers)
    with here.open(Stage(experiment, MemoryStore)) as engine:
        start = experiment.algorithm.init(recipe.seed)
        clients, cohort = len(experiment.federation), recipe.clients_per_round
        last = min(ROUNDS, recipe.rounds)  # beyond, a schedule would have no rate
        steps = list(rounds(experiment.algorithm, engine, start, recipe.seed, clients, cohort, last))
    return settle.decide(recipe.method_settings, experiment.model, _mean_divergence(steps))


def _mean_divergence(steps: Sequence[Round]) -> Mapping[str, float]:
    """The divergence of each parameter, averaged over rounds."""
    layers = [step.diagnosis.detail["divergence_layers"][0] for step in steps]
    return {name: sum(of_round[name] for of_round in layers) / len(layers) for name in layers[0]}
