"""The Python API: training with own data and own models, comparing, and what comes after. The command line calls this too."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fedmix import schema
from fedmix.after.audit import audit_run
from fedmix.after.inference import evaluate_run
from fedmix.after.options import Options, Stages, nobody
from fedmix.after.restore import restore
from fedmix.after.trained import TrainedRun, load
from fedmix.data.federation import Federation
from fedmix.errors import SettingError
from fedmix.methods.page import Page
from fedmix.report.comparison import Comparison, Sweep, compared, swept
from fedmix.running.directory import RunDirectory
from fedmix.running.files import write_json
from fedmix.running.grids import Point, Train, comparison_points, sweep_points, train_points
from fedmix.running.loggers import check_tools, logging_to
from fedmix.running.run import Watch, refuse_what_cannot_run, run
from fedmix.running.where import Where
from fedmix.schema import AuditFile, EvaluationFile, Summary
from fedmix.settings.build import EQUAL_START, Experiment, Given, build, start_of
from fedmix.settings.reading import make_recipe, read_recipe
from fedmix.settings.recipe import OWN, Recipe
from fedmix.settings.tables import flat


@dataclass(frozen=True)
class Listeners:
    """Who is told what while a run is trained. watch: after each round. warn: what may be wrong. hint: what to type next."""

    watch: Watch | None = None
    warn: Callable[[str], None] = warnings.warn
    hint: Callable[[str], None] = lambda words: None


@dataclass(frozen=True)
class HandedOver:
    """What a recipe cannot name: data, a model, a method that were handed over in Python."""

    federation: Federation | None = None
    model: Given = None
    page: Page | None = None


# -- training ----------------------------------------------------------------------------------------------------------


def train(
    recipe: str | None = None,
    *,
    federation: Federation | None = None,
    model: Callable[[], nn.Module] | nn.Module | dict[str, Any] | None = None,
    output: str | None = None,
    model_start: str | None = None,
    algorithm: str | Page | None = None,
    scale: str | None = None,
    data_dir: str | None = None,
    out: str | Path,
    engine: str = "local",
    workers: int | None = None,
    device: str = "cpu",
    resume: bool = False,
    overwrite: bool = False,
    watch: Watch | None = None,
    log: str | Sequence[str] | None = None,
    **settings: Any,
) -> TrainedRun:
    """Train, and give back the trained run.

    recipe: a shipped recipe or a file to start from; without one, the defaults. scale: "small" takes its smaller settings.
    federation: own data (`Federation.from_clients`); model: an nn.Module class or a function that builds one (or an
    object); output: the name of its output layer. A dict is the recipe's [model]. model_start: of an object, "given" keeps its
    weights as a pretrained start, "random" draws new ones (the default, unless some of them are frozen).
    algorithm: a method by name, `package.module:name` of one of your own, or its page (fedmix.methods.Page).
    settings: as in a recipe, sections as dicts: rounds=20, fedmix={"experts": 4}, training={"client_lr": 0.1}.
    watch: called after each round. log: "tensorboard", "mlflow", "wandb" or several of them.
    """
    if isinstance(model, dict):
        settings["model"], model = model, None
    if model_start is not None:
        settings["model.start"] = model_start
    page = algorithm if isinstance(algorithm, Page) else None
    if algorithm is not None:
        settings["algorithm"] = OWN if page else algorithm
    given = HandedOver(federation, model, page)
    effective = effective_recipe(recipe, settings, given, output, scale)
    where = Where(engine, workers, device)
    train_recipe(effective, Path(out), where, given, data_dir, resume, overwrite, log, Listeners(watch))
    return load(out, model, page)


def train_recipe(
    recipe: Recipe,
    out: Path,
    where: Where,
    given: HandedOver,
    data_dir: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    log: str | Sequence[str] | None = None,
    listeners: Listeners = Listeners(),
) -> Summary:
    """Train one recipe into one directory; its summary. Everything that trains calls this."""
    tools = check_tools(log)
    experiment = build(recipe, given.federation, given.model, data_dir, given.page)
    for words in _words_on_start(experiment, given.model):
        listeners.warn(words)
    refuse_what_cannot_run(experiment, where)
    directory = RunDirectory.open(out, recipe, resume, overwrite)
    try:
        with logging_to(tools, out, recipe, listeners.warn, listeners.watch, listeners.hint) as watch:
            return run(experiment, directory, where, watch, data_dir)
    finally:
        directory.close()


def _words_on_start(experiment: Experiment, model: Given) -> list[str]:
    """What is to be said of the weights that a run starts from."""
    if isinstance(model, nn.Module) and experiment.recipe.model.start != "given":
        return ["the weights of the model are drawn anew; model_start='given' keeps those that it has"]
    return [EQUAL_START] if experiment.algorithm.starts_equal() else []


def effective_recipe(
    recipe: str | None,
    settings: Mapping[str, Any],
    given: HandedOver,
    output: str | None = None,
    scale: str | None = None,
) -> Recipe:
    """The recipe of what was handed over: own data and an own model are described as they are."""
    changes = flat(settings)
    if given.federation is not None:
        changes |= _described_data(given.federation)
    if given.model is not None:
        if output is None:
            raise SettingError("output must name the output layer of the model, as in output='fc2'.")
        changes |= {"model.name": OWN, "model.output": output}
    if recipe:
        made = read_recipe(recipe, changes=changes, scale=scale)
    else:
        made = make_recipe({"name": "own"}, changes=changes, scale=scale)
    if isinstance(given.model, nn.Module):
        made = replace(made, model=replace(made.model, start=start_of(given.model, made.model)))
    return made


def _described_data(federation: Federation) -> dict[str, Any]:
    """What a recipe can truly say of data that was handed over."""
    held_out = 0 if federation.held_out is None else len(federation.held_out)
    return {
        "data.source": OWN,
        "data.clients": len(federation),
        "data.holdout_clients": held_out,
        "data.split": "by-client",
        "data.side": federation.side,
    }


# -- several runs ------------------------------------------------------------------------------------------------------


def compare(
    recipe: str,
    algorithms: Sequence[str] = ("fedmix", "fedavg", "biased-fedavg", "local-global"),
    *,
    seeds: Sequence[int] = (),
    out: str | Path,
    scale: str | None = None,
    data_dir: str | None = None,
    engine: str = "local",
    workers: int | None = None,
    device: str = "cpu",
    resume: bool = False,
    overwrite: bool = False,
    **settings: Any,
) -> Comparison:
    """Train several methods on the same data and seeds: a row for each, and their differences paired over clients and seeds.

    settings: as in `train`. The result is also written to OUT/comparison.json.
    """
    points = comparison_points(recipe, algorithms, seeds, flat(settings), scale)
    train_one = _trainer(Where(engine, workers, device), data_dir, resume, overwrite)
    return compare_points(points, Path(out), train_one)


def _trainer(where: Where, data_dir: str | None, resume: bool, overwrite: bool) -> Train:
    def train_one(recipe: Recipe, folder: Path) -> Summary:
        return train_recipe(recipe, folder, where, HandedOver(), data_dir, resume, overwrite)

    return train_one


def compare_points(points: Sequence[Point], out: Path, train_one: Train) -> Comparison:
    """Train every point, and compare their methods. A client's error ends it."""
    runs = [train_one(point.recipe, out / point.name) for point in points]
    comparison = compared(runs)
    write_json(out / schema.COMPARISON, comparison)
    return comparison


def sweep(
    recipe: str,
    grid: Mapping[str, Sequence[Any]],
    *,
    seeds: Sequence[int] = (),
    by: str = "as_sent",
    out: str | Path,
    algorithm: str | None = None,
    scale: str | None = None,
    data_dir: str | None = None,
    engine: str = "local",
    workers: int | None = None,
    device: str = "cpu",
    resume: bool = False,
    overwrite: bool = False,
    **settings: Any,
) -> Sweep:
    """Train a grid of settings, {"fedmix.eta": [0, 0.5]}, and choose the best on validation data.

    by: the kind of accuracy to choose by: "as_sent", "server" or "no_identity". The result is also written to OUT/sweep.json.
    """
    points = sweep_points(recipe, grid, seeds, flat(settings), algorithm, scale)
    train_one = _trainer(Where(engine, workers, device), data_dir, resume, overwrite)
    return sweep_over(points, Path(out), train_one, by)


def sweep_over(
    points: Sequence[Point],
    out: Path,
    train_one: Train,
    by: str,
    about_to: Callable[[Point, int], None] = lambda point, i: None,
) -> Sweep:
    """Train every point; those that fail are named in the result, and the others are compared."""
    trained = train_points(points, out, train_one, about_to)
    result = swept([(point.settings, summary) for point, summary in trained.runs], by, trained.failed)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / schema.SWEEP, result)
    return result


# -- after training ----------------------------------------------------------------------------------------------------


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
    watch: Stages = nobody,
) -> EvaluationFile:
    """Every kind of inference of a trained run, as plain numbers: what `fedmix evaluate RUN --json` prints.

    federation, model, algorithm: again, where they were handed over in Python. clients: this many, drawn at random (0: all).
    densities: a generative model on each client, for p(s|x) of at most `points` inputs; None: where that is quick.
    """
    options = Options(Where(engine, workers, device).after_training(), clients, densities, points)
    restored = restore(run, federation, model, data_dir, algorithm)
    return evaluate_run(restored, options, watch)


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
    watch: Stages = nobody,
) -> AuditFile:
    """What the server could have learnt of the clients' labels, as plain numbers: what `fedmix audit RUN --json` prints."""
    options = Options(Where(engine, workers, device).after_training(), clients)
    restored = restore(run, federation, model, data_dir, algorithm)
    return audit_run(restored, options, watch)
