"""Names -> objects: models and methods by name; data in `federate`."""

import ast
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
from fedmix.core.method import Setup
from fedmix.core.model import Model
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


EQUAL_START = "the experts start from the same weights, told apart by a little noise on what is trained"
Given = Callable[[], nn.Module] | nn.Module | None  # a model that was handed over


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
) -> Experiment:
    """The objects of a recipe; a federation, model or method that was handed over takes the place of the named one.

    data_dir: where data files are looked for first.
    """
    federation = federation or build_federation(recipe.data, recipe.seed, data_dir)
    example = federation.inputs(torch.arange(2))
    built = build_model(recipe.model, example, federation.classes, model, recipe.training.precision)
    found = find_page(recipe.algorithm, page)
    algorithm = build_algorithm(recipe, built, len(federation), federation.categories, example, found)
    return Experiment(recipe, federation, built, algorithm, found)


def revive(
    recipe: Recipe, about: Mapping[str, Any], model: Given = None, page: Page | None = None
) -> tuple[Model, Algorithm]:
    """Model and method of a run, from its recipe and what federation.json says of its data."""
    example = torch.zeros(2, *about["input"])
    built = build_model(recipe.model, example, about["classes"], model, recipe.training.precision)
    found = find_page(recipe.algorithm, page)
    return built, build_algorithm(recipe, built, len(about["clients"]), about["categories"], example, found)


def find_page(name: str, given: Page | None = None) -> Page:
    """A method's page: shipped, handed over, or by the name of something that can be imported."""
    if name in CATALOGUE:
        return shipped_page(name)
    if name == OWN:
        if given is None:
            raise SettingError(
                "this run's method was handed over in Python; hand it over again: algorithm=..., as in "
                "fedmix.load(RUN, algorithm=...)."
            )
        return given
    found = named_object(name, "algorithm")
    if not isinstance(found, Page):
        raise SettingError(f"algorithm must name a fedmix.methods.Page. {name!r} is a {type(found).__name__}.")
    return found


def code_of(page: Page) -> str:
    """A digest of the file that a method of one's own is written in, without comments; "" of what cannot be read."""
    try:
        tree = ast.parse(inspect.getsource(inspect.getmodule(page.build) or page.build))
    except (OSError, TypeError, SyntaxError):
        return ""
    return hashlib.blake2b(ast.dump(tree).encode(), digest_size=8).hexdigest()


def build_algorithm(
    recipe: Recipe, model: Model, clients: int, categories: int, example: Tensor, page: Page
) -> Algorithm:
    settings = recipe.method_settings
    if isinstance(settings, dict):
        settings = settings_from(page.settings, settings, "own")
        page.check(settings, recipe.server, recipe.privacy)
    setup = Setup(model, clients, categories, recipe.rounds, recipe.training, recipe.server, recipe.privacy, example)
    return Algorithm(page.title, setup, page.build(setup, settings), recipe.seed)


def build_model(
    settings: ModelSettings,
    example: Tensor,
    classes: int,
    given: Given = None,
    precision: str = "float32",
) -> Model:
    if isinstance(given, nn.Module):
        factory: Callable[[], nn.Module] = partial(
            _copy_of if start_of(given, settings) == "given" else _fresh_copy, given
        )
    elif given is not None:
        factory = given
    elif settings.name in MODELS:
        factory = _named_model(settings, tuple(example.shape[1:]), classes)
    elif settings.name == OWN:
        raise SettingError(
            "this run's model was handed over in Python; hand it over again: fedmix.load(RUN, model=...), or to go on "
            "fedmix.train(model=..., out=RUN, resume=True)."
        )
    elif ":" in settings.name:
        factory = partial(named_object(settings.name, "model.name"), **settings.args)
    else:
        raise SettingError(one_of("model.name", settings.name, [*MODELS, "package.module:name"]))
    return Model(factory, settings.output, example, classes, precision)


def _named_model(settings: ModelSettings, shape: tuple[int, ...], classes: int) -> Callable[[], nn.Module]:
    """One of our own models for inputs of this shape; what the recipe leaves out is the model's own."""
    given = {name: getattr(settings, name) for name in ("hidden", "channels", "dropout") if getattr(settings, name)}
    if settings.name == "mlp":
        return partial(mlp, int(np.prod(shape)), classes, **given)
    if len(shape) != 3 or min(shape[1:]) < 16:
        raise SettingError(
            f"model.name = {settings.name!r} needs images [channels, height, width] of 16 pixels or more. Got {list(shape)}."
        )
    return partial(MODELS[settings.name], shape, classes, **given)


def start_of(module: nn.Module, settings: ModelSettings) -> str:
    """Whether a module that was handed over brings its weights along. Whoever freezes some has trained them before."""
    frozen = any(not value.requires_grad for value in module.parameters())
    return settings.start or ("given" if frozen else "random")


def _copy_of(module: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(module)


def _fresh_copy(module: nn.Module) -> nn.Module:
    """A copy of a module with new random parameters: experts must start differently."""
    import copy

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
