"""Models and methods from the names that a recipe gives them. `federate` does the same for data."""

import ast
import copy
import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmix.catalogue import CATALOGUE
from fedmix.core.algorithm import Algorithm
from fedmix.core.inputs import Input
from fedmix.core.method import Setup
from fedmix.core.model import Model
from fedmix.core.score import MEASURES, MORE_MEASURES, Measure
from fedmix.data.federation import Federation
from fedmix.errors import SettingError, one_of
from fedmix.methods.page import Page
from fedmix.methods.registry import shipped_page
from fedmix.models.lenet5 import LeNet5
from fedmix.models.mlp import mlp
from fedmix.models.resnet20 import ResNet20
from fedmix.settings.federate import build_federation
from fedmix.settings.importing import named_object
from fedmix.settings.recipe import OWN, ModelSettings, Recipe
from fedmix.settings.tables import settings_from

MODELS: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "lenet5": LeNet5, "resnet20": ResNet20}
Factory = Callable[[], nn.Module]
# A model that was handed over: what builds one, or the module itself.
Given = Factory | nn.Module | None

EQUAL_START = "the experts start from the same weights, told apart by a little noise on what is trained"


@dataclass(frozen=True)
class Experiment:
    """A recipe brought to life."""

    recipe: Recipe
    federation: Federation
    model: Model
    algorithm: Algorithm
    page: Page


def build(
    recipe: Recipe,
    federation: Federation | None = None,
    model: Given = None,
    data_dir: str | None = None,
    page: Page | None = None,
    measures: Mapping[str, Measure] | None = None,
) -> Experiment:
    """The objects of a recipe; a federation, model or method that was handed over takes the place of the named one.

    data_dir: where data files are looked for first. measures: of the user's own, handed over in Python.
    """
    federation = federation or build_federation(recipe.data, recipe.seed, data_dir)
    example = federation.inputs(torch.arange(2))
    built = build_model(
        recipe.model, example, federation.classes, model, recipe.training.precision, federation.input_parts
    )
    method_page = find_page(recipe.algorithm, page)
    every_measure = {**measures_of(recipe), **(measures or {})}
    taken = [name for name in every_measure if name in (*MEASURES, *MORE_MEASURES, "points", "n", "loss", "bound")]
    if taken:
        raise SettingError(f"metrics must have names of their own. {taken[0]!r} is there already.")
    algorithm = build_algorithm(
        recipe, built, len(federation), federation.categories, example, method_page, every_measure
    )
    return Experiment(recipe, federation, algorithm.setup.model, algorithm, method_page)


def revive(
    recipe: Recipe,
    about: Mapping[str, Any],
    model: Given = None,
    page: Page | None = None,
    known: Mapping[str, Any] | None = None,
) -> tuple[Model, Algorithm]:
    """The model and the method of a run, from its recipe and what federation.json says about its data.

    known: what was found out about the model in training; None: it is tried with zeros, as older runs need it.
    """
    parts = tuple(map(Input.from_table, about.get("input_parts", [])))
    example = torch.zeros(2, *about["input"], dtype=torch.float64 if parts else torch.float32)
    if about.get("input_kind") == "integer":
        example = example.to(torch.int64)
    built = build_model(recipe.model, example, about["classes"], model, recipe.training.precision, parts, known)
    method_page = find_page(recipe.algorithm, page)
    clients, categories = len(about["clients"]), about["categories"]
    algorithm = build_algorithm(recipe, built, clients, categories, example, method_page)
    return algorithm.setup.model, algorithm


def measures_of(recipe: Recipe) -> dict[str, Measure]:
    """The measures that a recipe names as `package.module:name`, by the last part of their names."""
    found: dict[str, Measure] = {}
    for name in recipe.evaluation.metrics:
        measure = named_object(name, "evaluation.metrics")
        if not callable(measure):
            raise SettingError(f"evaluation.metrics must name functions. {name} is {type(measure).__name__}.")
        found[name.partition(":")[2]] = measure
    return found


def find_page(name: str, given: Page | None = None) -> Page:
    """A method's page: a shipped one, the one that was handed over, or one that is imported by its name."""
    if name in CATALOGUE:
        return shipped_page(name)
    if name == OWN:
        if given is None:
            raise SettingError(
                "this run's method was handed over in Python; hand it over again: algorithm=..., as in "
                "fedmix.load(RUN, algorithm=...)."
            )
        return given
    imported = named_object(name, "algorithm")
    if not isinstance(imported, Page):
        raise SettingError(f"algorithm must name a fedmix.methods.Page. {name!r} is a {type(imported).__name__}.")
    return imported


def code_of(page: Page) -> str:
    """A digest of the file in which the user's own method is written, without its comments; "" if it cannot be read."""
    try:
        source = inspect.getsource(inspect.getmodule(page.build) or page.build)
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        return ""
    return hashlib.blake2b(ast.dump(tree).encode(), digest_size=8).hexdigest()


def build_algorithm(
    recipe: Recipe,
    model: Model,
    clients: int,
    categories: int,
    example: Tensor,
    page: Page,
    measures: Mapping[str, Measure] | None = None,
) -> Algorithm:
    """The method of a recipe for this model, this many clients and this many values of side information."""
    settings = recipe.method_settings
    if isinstance(settings, dict):
        # The user's own method: its settings are a plain table, and nobody has checked them yet.
        settings = settings_from(page.settings, settings, "own")
        page.check(settings, recipe.server, recipe.privacy)
    setup = Setup(
        page.model(model, settings),
        clients,
        categories,
        recipe.rounds,
        recipe.training,
        recipe.server,
        recipe.privacy,
        example,
        recipe.data.side,
        measures or {},
    )
    return Algorithm(page.title, setup, page.build(setup, settings), recipe.seed)


def build_model(
    settings: ModelSettings,
    example: Tensor,
    classes: int,
    given: Given = None,
    precision: str = "float32",
    inputs: tuple[Input, ...] = (),
    known: Mapping[str, Any] | None = None,
) -> Model:
    """The model that was handed over, or else the one that [model] names."""
    if given is None:
        if inputs and settings.name in MODELS:
            raise SettingError(
                f"model.name = {settings.name!r} takes one input. The data has sequences, or several inputs."
            )
        factory = _factory_by_name(settings, tuple(example.shape[1:]), classes)
    elif isinstance(given, nn.Module):
        factory = _factory_of_copies(given, settings)
    elif callable(given):
        factory = given
    else:
        raise SettingError(
            f"model must be an nn.Module class, a function that builds a module, or a module. Got {given!r}; a shipped model "
            "is named as model={'name': 'mlp'}."
        )
    private_norms = settings.batchnorm == "private"
    return Model(factory, settings.output, example, classes, precision, inputs, known, private_norms)


def _factory_of_copies(module: nn.Module, settings: ModelSettings) -> Factory:
    keeps_weights = start_of(module, settings) == "given"
    return partial(copy.deepcopy if keeps_weights else _fresh_copy, module)


def _factory_by_name(settings: ModelSettings, shape: tuple[int, ...], classes: int) -> Factory:
    if settings.name in MODELS:
        return _shipped_model(settings, shape, classes)
    if settings.name == OWN:
        raise SettingError(
            "this run's model was handed over in Python; hand it over again: fedmix.load(RUN, model=...), or to go on "
            "fedmix.train(model=..., out=RUN, resume=True)."
        )
    if ":" in settings.name:
        return partial(named_object(settings.name, "model.name"), **settings.args)
    raise SettingError(one_of("model.name", settings.name, [*MODELS, "package.module:name"]))


def _shipped_model(settings: ModelSettings, shape: tuple[int, ...], classes: int) -> Factory:
    """One of the shipped models for inputs of this shape; sizes that the recipe leaves out are the model's defaults."""
    sizes = {"hidden": settings.hidden, "channels": settings.channels, "dropout": settings.dropout}
    given: dict[str, Any] = {name: values for name, values in sizes.items() if values}
    if settings.name == "mlp":
        return partial(mlp, int(np.prod(shape)), classes, **given)
    if len(shape) != 3 or min(shape[1:]) < 16:
        raise SettingError(
            f"model.name = {settings.name!r} needs images [channels, height, width] of 16 pixels or more. Got {list(shape)}."
        )
    return partial(MODELS[settings.name], shape, classes, **given)


def start_of(module: nn.Module, settings: ModelSettings) -> str:
    """What a module that was handed over starts from: the weights that it has ("given"), or new ones ("random").

    Unless the settings say it: somebody who freezes some of the weights has trained them before.
    """
    frozen = any(not value.requires_grad for value in module.parameters())
    return settings.start or ("given" if frozen else "random")


def _fresh_copy(module: nn.Module) -> nn.Module:
    """A copy of a module with new random parameters: experts must start differently."""
    fresh = copy.deepcopy(module)
    for name, layer in fresh.named_modules():
        if next(layer.parameters(recurse=False), None) is None:
            continue
        if not hasattr(layer, "reset_parameters"):
            raise SettingError(
                f"layer {name!r} of the model has no reset_parameters(), so no second expert can be drawn from it. "
                "Give the model's class, or a function that builds it, instead of an object."
            )
        layer.reset_parameters()
    return fresh
