"""Training from Python: own data, own model, any setting of a recipe."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from fedmix.after.audit import audit_run
from fedmix.after.inference import Options, Where, evaluate_run
from fedmix.after.restore import restore
from fedmix.after.trained import TrainedRun, load
from fedmix.data.federation import Federation
from fedmix.errors import SettingError
from fedmix.methods.page import Page
from fedmix.running.directory import RunDirectory
from fedmix.running.loggers import check_tools, logging_to
from fedmix.running.run import HERE, Progress, check, run
from fedmix.settings.build import EQUAL_START, Experiment, Given, build, start_of
from fedmix.settings.recipe import OWN, Recipe, make_recipe, read_recipe


def train(
    recipe: str | None = None,
    *,
    federation: Federation | None = None,
    model: Callable[[], nn.Module] | nn.Module | dict[str, Any] | None = None,
    output: str | None = None,
    model_start: str | None = None,
    algorithm: str | Page | None = None,
    data_dir: str | None = None,
    out: str | Path,
    engine: str = "local",
    workers: int | None = None,
    device: str = "cpu",
    resume: bool = False,
    overwrite: bool = False,
    watch: Callable[[Progress], None] | None = None,
    log: str | Sequence[str] | None = None,
    **settings: Any,
) -> TrainedRun:
    """Train, and give back the trained run.

    recipe: a shipped recipe or a file to start from; without one, the defaults.
    federation: own data (`Federation.from_clients`); model: an nn.Module class or a function that builds one (or an
    object); output: the name of its output layer. A dict is the recipe's [model]. model_start: of an object, "given" keeps its
    weights as a pretrained start, "random" draws new ones (the default, unless some of them are frozen).
    algorithm: a method by name, `package.module:name` of one of your own, or its page (fedmix.methods.Page).
    settings: as in a recipe, sections as dicts: rounds=20, fedmix={"experts": 4}, training={"client_lr": 0.1}.
    watch: called after each round. log: "tensorboard", "mlflow", "wandb" or several of them.
    """
    if isinstance(model, dict):
        settings["model"], model = model, None
    page = algorithm if isinstance(algorithm, Page) else None
    if model_start is not None:
        settings["model.start"] = model_start
    if algorithm is not None:
        settings["algorithm"] = OWN if page else algorithm
    effective = effective_recipe(recipe, settings, federation, model, output)
    tools = check_tools(log)
    experiment = build(effective, federation, model, data_dir, page)
    for words in start_words(experiment, model):
        warnings.warn(words, stacklevel=2)
    check(experiment, engine, workers, device)
    directory = RunDirectory.open(Path(out), effective, resume, overwrite)
    try:
        with logging_to(tools, directory.path, effective, warnings.warn, watch) as told:
            run(experiment, directory, engine, workers, told, device, data_dir)
    finally:
        directory.close()
    return load(out, model, page)


def evaluate(
    run: str | Path,
    *,
    federation: Federation | None = None,
    model: Given = None,
    algorithm: Page | None = None,
    data_dir: str | None = None,
    clients: int = 0,
    densities: bool | None = None,
    points: int = 2000,
    engine: str = "local",
    workers: int | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Every kind of inference of a trained run, as plain numbers: what `fedmix evaluate RUN --json` prints.

    federation, model, algorithm: again, where they were handed over in Python. clients: so many, drawn at random (0: all).
    densities: a generative model on each client, for p(s|x) of at most `points` inputs; None: where that is quick.
    """
    options = Options(clients, engine, workers, device, densities, points)
    found = restore(run, federation, model, data_dir, algorithm)
    check(found.experiment, engine, workers, device, HERE)
    return evaluate_run(found, options)


def audit(
    run: str | Path,
    *,
    federation: Federation | None = None,
    model: Given = None,
    algorithm: Page | None = None,
    data_dir: str | None = None,
    clients: int = 0,
    engine: str = "local",
    workers: int | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """What the server could have learnt of the clients' labels, as plain numbers: what `fedmix audit RUN --json` prints."""
    found = restore(run, federation, model, data_dir, algorithm)
    check(found.experiment, engine, workers, device, HERE)
    return audit_run(found, Where(clients, engine, workers, device))


def start_words(experiment: Experiment, model: Any) -> list[str]:
    """What is to be said of the weights that a run starts from."""
    if isinstance(model, nn.Module) and experiment.recipe.model.start != "given":
        return ["the weights of the model are drawn anew; model_start='given' keeps those that it has"]
    return [EQUAL_START] if experiment.algorithm.starts_equal() else []


def effective_recipe(
    recipe: str | None, settings: dict[str, Any], federation: Federation | None, model: Any, output: str | None
) -> Recipe:
    """The recipe of what was handed over: own data and an own model are described as they are."""
    changes: dict[str, Any] = {}
    for key, value in settings.items():
        changes |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    if federation is not None:
        changes |= described_data(federation)
    if model is not None:
        if output is None:
            raise SettingError("output must name the output layer of the model, as in output='fc2'.")
        changes |= {"model.name": OWN, "model.output": output}
    made = read_recipe(recipe, changes=changes) if recipe else make_recipe({"name": "own"}, changes=changes)
    if isinstance(model, nn.Module):
        made = replace(made, model=replace(made.model, start=start_of(model, made.model)))
    return made


def described_data(federation: Federation) -> dict[str, Any]:
    """What a recipe can truly say of data that was handed over."""
    held_out = 0 if federation.held_out is None else len(federation.held_out)
    return {
        "data.source": OWN,
        "data.clients": len(federation),
        "data.holdout_clients": held_out,
        "data.split": "by-client",
        "data.side": federation.side,
    }
