"""Training from Python: own data, own model, any setting of a recipe."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedmix.data.federation import Federation
from fedmix.errors import SettingError
from fedmix.experiment.audit import audit_run
from fedmix.experiment.build import build
from fedmix.experiment.inference import Options, Where, evaluate_run
from fedmix.experiment.loggers import check_tools, logging_to
from fedmix.experiment.recipe import OWN, Recipe, make_recipe, read_recipe
from fedmix.experiment.record import RunDirectory
from fedmix.experiment.restore import restore
from fedmix.experiment.run import HERE, Progress, check, run
from fedmix.experiment.trained import TrainedRun, load


def train(
    recipe: str | None = None,
    *,
    federation: Federation | None = None,
    model: Callable[[], nn.Module] | nn.Module | dict[str, Any] | None = None,
    output: str | None = None,
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
    object whose layers have reset_parameters); output: the name of its output layer. A dict is the recipe's [model].
    settings: as in a recipe, sections as dicts: rounds=20, fedmix={"experts": 4}, training={"client_lr": 0.1}.
    watch: called after each round. log: "tensorboard", "mlflow", "wandb" or several of them.
    """
    if isinstance(model, dict):
        settings["model"], model = model, None
    effective = effective_recipe(recipe, settings, federation is not None, model is not None, output)
    tools = check_tools(log)
    experiment = build(effective, federation, model, data_dir)
    check(experiment, engine, workers, device)
    directory = RunDirectory.open(Path(out), effective, resume, overwrite)
    try:
        with logging_to(tools, directory.path, effective, warnings.warn, watch) as told:
            run(experiment, directory, engine, workers, told, device, data_dir)
    finally:
        directory.close()
    return load(out, model)


def evaluate(
    run: str | Path,
    *,
    federation: Federation | None = None,
    model: Callable[[], nn.Module] | nn.Module | None = None,
    data_dir: str | None = None,
    clients: int = 0,
    densities: bool | None = None,
    points: int = 2000,
    engine: str = "local",
    workers: int | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Every kind of inference of a trained run, as plain numbers: what `fedmix evaluate RUN --json` prints.

    federation, model: again, where they were handed over in Python. clients: so many, drawn at random (0: all).
    densities: a generative model on each client, for p(s|x) of at most `points` inputs; None: where that is quick.
    """
    options = Options(clients, engine, workers, device, densities, points)
    found = restore(run, federation, model, data_dir)
    check(found.experiment, engine, workers, device, HERE)
    return evaluate_run(found, options)


def audit(
    run: str | Path,
    *,
    federation: Federation | None = None,
    model: Callable[[], nn.Module] | nn.Module | None = None,
    data_dir: str | None = None,
    clients: int = 0,
    engine: str = "local",
    workers: int | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """What the server could have learnt of the clients' labels, as plain numbers: what `fedmix audit RUN --json` prints."""
    found = restore(run, federation, model, data_dir)
    check(found.experiment, engine, workers, device, HERE)
    return audit_run(found, Where(clients, engine, workers, device))


def effective_recipe(
    recipe: str | None, settings: dict[str, Any], own_data: bool, own_model: bool, output: str | None
) -> Recipe:
    changes: dict[str, Any] = {}
    for key, value in settings.items():
        changes |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    if own_data:
        changes["data.source"] = OWN
    if own_model:
        if output is None:
            raise SettingError("output must name the output layer of the model, as in output='fc2'.")
        changes |= {"model.name": OWN, "model.output": output}
    return read_recipe(recipe, changes=changes) if recipe else make_recipe({"name": "own"}, changes=changes)
