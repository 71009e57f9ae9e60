"""Names -> objects: the only place that knows all sources, splits, models and methods by name."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmix.algorithms.fedavg import Locality, everything_local, fedavg, named_layers, nothing_local, output_bias
from fedmix.algorithms.fedmix import fedmix
from fedmix.core.model import Model
from fedmix.core.types import Algorithm
from fedmix.data import partition, shift
from fedmix.data.federation import PARTS, Federation
from fedmix.data.sources import SOURCES, Source
from fedmix.errors import DataError, SettingError, one_of
from fedmix.experiment.recipe import OWN, DataSettings, ModelSettings, Recipe
from fedmix.models.lenet5 import LeNet5
from fedmix.models.mlp import mlp
from fedmix.models.resnet20 import ResNet20
from fedmix.rng import Stream, stream

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
    built = build_model(recipe.model, example, federation.classes, model)
    algorithm = build_algorithm(recipe, built, len(federation), federation.categories, example)
    return Experiment(recipe, federation, built, algorithm)


def build_algorithm(recipe: Recipe, model: Model, clients: int, categories: int, example: Tensor) -> Algorithm:
    name, client, server = recipe.algorithm, recipe.training, recipe.server
    if name == "fedmix":
        return fedmix(model, clients, categories, recipe.rounds, recipe.fedmix, client, server)
    rules: dict[str, Callable[[], Locality]] = {
        "fedavg": nothing_local,
        "biased-fedavg": lambda: output_bias(model),
        "local-global": lambda: named_layers(model, recipe.local_global, example),
        "independent": lambda: everything_local(model),
    }
    return fedavg(name, rules[name](), model, recipe.rounds, client, server)


def build_model(
    settings: ModelSettings, example: Tensor, classes: int, given: Callable[[], nn.Module] | nn.Module | None = None
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
    return Model(factory, settings.output, example, classes)


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


def named_object(name: str, setting: str) -> Any:
    """The object that `package.module:name` stands for."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(f"{setting} must name something that can be imported. {name!r} cannot: {error}.") from error


def build_federation(settings: DataSettings, seed: int, data_dir: str | None = None) -> Federation:
    """Source -> split -> shift -> parts. The split depends on the seed alone, not on method, engine or workers."""
    if settings.source == OWN:
        raise SettingError(
            "this run's data was handed over in Python; go on there: fedmix.train(federation=..., out=RUN, resume=True)."
        )
    if ":" in settings.source:
        made = named_object(settings.source, "data.source")(**settings.args)
        if isinstance(made, Federation):
            return made
        return Federation.from_clients(
            made, side=settings.side, validation=settings.validation, test=settings.test, seed=seed
        )
    if settings.source not in SOURCES:
        raise SettingError(one_of("data.source", settings.source, [*SOURCES, "package.module:name"]))
    source = SOURCES[settings.source](data_dir)
    rng = stream(seed, "data")
    parts = _parts(settings, source, rng)
    own = [np.sort(np.concatenate([part[s] for part in parts])) for s in range(settings.clients)]
    x, y, groups, angle = source.x, source.y, None, None
    if settings.shift == "permute-labels":
        y, groups = shift.permute_labels(y, own, source.classes, settings.permutations, rng.child("shift"))
    elif settings.shift == "rotate":
        x, angle = shift.rotate(x, own, settings.rotation_concentration, rng.child("shift"))
    c, categories = _side(settings.side, y, source.classes, own, groups, angle)
    return Federation(
        x=x,
        y=y,
        c=c,
        parts=dict(zip(PARTS, parts, strict=True)),
        names=[str(s) for s in range(settings.clients)],
        classes=source.classes,
        categories=categories,
        side=settings.side,
        groups=groups,
        mean=source.mean,
        std=source.std,
    )


def _parts(settings: DataSettings, source: Source, rng: Stream) -> list[list[partition.Indices]]:
    """Train, validation and test points of every client, all three with its own distribution.

    Without a test set of the publisher's, a client's points are divided; with one, the training set is split, and each
    client's validation and test points are drawn like its training labels.
    """
    labels = source.y.numpy()
    if source.train == len(labels):
        own = _split(settings, labels, rng.child("split"))
        each = [
            partition.three_parts(index, settings.validation, settings.test, rng.child("parts", s), s)
            for s, index in enumerate(own)
        ]
        return [[three[i] for three in each] for i in range(3)]
    order = rng.child("validation").permutation(source.train)
    held_out = round(settings.validation * source.train)
    pool = np.sort(order[held_out:])
    train = [pool[index] for index in _split(settings, labels[pool], rng.child("split"))]
    validation = partition.like_training(labels, np.sort(order[:held_out]), train, rng.child("validation", "deal"))
    test = partition.like_training(labels, np.arange(source.train, len(labels)), train, rng.child("test"))
    return [train, validation, test]


def _split(settings: DataSettings, labels: Any, rng: Stream) -> list[partition.Indices]:
    match settings.split:
        case "iid":
            return partition.iid(labels, settings.clients, rng)
        case "hsu":
            return partition.hsu(labels, settings.clients, settings.concentration, rng)
        case "dirichlet":
            return partition.dirichlet(labels, settings.clients, settings.concentration, settings.min_size, rng)
        case _:
            return partition.shards(labels, settings.clients, settings.shards_per_client, rng)


def _side(
    side: str, y: Tensor, classes: int, own: list[partition.Indices], groups: list[int] | None, angle: Tensor | None
) -> tuple[Tensor, int]:
    """The column c of side information, and how many values it has."""
    if side == "label":
        return y, classes
    if side == "rotation" and angle is not None:
        return angle, shift.ANGLES
    of_client = list(range(len(own))) if side == "client" else groups if side == "group" else None
    if of_client is None:
        raise DataError(
            f"data.side = {side!r} is not there in this data; use 'label' or 'client', or add the shift that makes it."
        )
    c = torch.zeros_like(y)
    for s, index in enumerate(own):
        c[torch.from_numpy(index)] = of_client[s]
    return c, max(of_client) + 1
