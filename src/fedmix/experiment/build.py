"""Names -> objects: models and methods by name; data in `federate`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fedmix.algorithms.fedavg import Locality, everything_local, fedavg, named_layers, nothing_local, output_bias
from fedmix.algorithms.fedmix import fedmix
from fedmix.core.model import Model
from fedmix.core.types import Algorithm
from fedmix.data.federation import Federation
from fedmix.errors import SettingError, one_of
from fedmix.experiment.federate import build_federation
from fedmix.experiment.recipe import OWN, ModelSettings, Recipe, named_object
from fedmix.models.lenet5 import LeNet5
from fedmix.models.mlp import mlp
from fedmix.models.resnet20 import ResNet20

MODELS: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "lenet5": LeNet5, "resnet20": ResNet20}


@dataclass(frozen=True)
class Experiment:
    """A recipe brought to life."""

    recipe: Recipe
    federation: Federation
    model: Model
    algorithm: Algorithm


def build(
    recipe: Recipe,
    federation: Federation | None = None,
    model: Callable[[], nn.Module] | nn.Module | None = None,
    data_dir: str | None = None,
) -> Experiment:
    """The objects of a recipe; a federation or model that was handed over takes the place of the named one.

    data_dir: where data files are looked for first.
    """
    federation = federation or build_federation(recipe.data, recipe.seed, data_dir)
    example = federation.inputs(torch.arange(2))
    built = build_model(recipe.model, example, federation.classes, model, recipe.training.precision)
    algorithm = build_algorithm(recipe, built, len(federation), federation.categories, example)
    return Experiment(recipe, federation, built, algorithm)


def build_algorithm(recipe: Recipe, model: Model, clients: int, categories: int, example: Tensor) -> Algorithm:
    name, how = recipe.algorithm, (recipe.training, recipe.server, recipe.privacy)
    if name == "fedmix":
        return fedmix(model, clients, categories, recipe.rounds, recipe.fedmix, *how)
    rules: dict[str, Callable[[], Locality]] = {
        "fedavg": nothing_local,
        "biased-fedavg": lambda: output_bias(model),
        "local-global": lambda: named_layers(model, recipe.local_global, example),
        "independent": lambda: everything_local(model),
    }
    return fedavg(name, rules[name](), model, recipe.rounds, *how)


def build_model(
    settings: ModelSettings,
    example: Tensor,
    classes: int,
    given: Callable[[], nn.Module] | nn.Module | None = None,
    precision: str = "float32",
) -> Model:
    if given is not None:
        factory = partial(_fresh_copy, given) if isinstance(given, nn.Module) else given
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
