"""The Python API: training with one's own data, models and methods, comparing runs, and what comes after training.

    run = fedmix.train("digits-skew", out="runs/first", rounds=20)
    run.client(0).predict(x)

The command line calls this module too.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedmix import schema
from fedmix.after.audit import audit_run
from fedmix.after.inference import evaluate_run
from fedmix.after.options import Options, Stages, nobody
from fedmix.after.restore import restore
from fedmix.after.trained import TrainedRun, load
from fedmix.catalogue import CATALOGUE
from fedmix.core.score import Measure
from fedmix.data.federation import Federation
from fedmix.errors import FedmixError, SettingError
from fedmix.methods.page import Page
from fedmix.methods.registry import shipped_page
from fedmix.report.comparison import Comparison, Sweep, compared, swept
from fedmix.running.directory import RunDirectory
from fedmix.running.files import write_json
from fedmix.running.grids import Point, Read, Train, comparison_points, sweep_points, train_points
from fedmix.running.loggers import check_tools, logging_to
from fedmix.running.pilot import settled
from fedmix.running.run import Progress, Sampler, Watch, refuse_what_cannot_run, run
from fedmix.running.where import Where
from fedmix.schema import AuditFile, EvaluationFile, Summary
from fedmix.settings.build import EQUAL_START, Experiment, Given, build, start_of
from fedmix.settings.reading import make_recipe, read_recipe
from fedmix.settings.recipe import OWN, Recipe
from fedmix.settings.tables import flat


@dataclass(frozen=True)
class Listeners:
    """Functions that are called while a run is trained.

    watch: after each round. warn: with what may be wrong. hint: with what to type next.
    """

    watch: Watch | None = None
    warn: Callable[[str], None] = warnings.warn
    hint: Callable[[str], None] = lambda words: None


@dataclass(frozen=True)
class HandedOver:
    """What was handed over in Python, which a recipe cannot name: data, a model, a method, metrics, a sampler."""

    federation: Federation | None = None
    model: Given = None
    page: Page | None = None
    metrics: Mapping[str, Measure] = field(default_factory=dict)
    sampler: Sampler | None = None


# -- training ----------------------------------------------------------------------------------------------------------


def train(
    recipe: str | None = None,
    *,
    federation: Federation | None = None,
    model: Callable[[], nn.Module] | nn.Module | dict[str, Any] | None = None,
    output: str | None = None,
    model_start: str | None = None,
    batchnorm: str | None = None,
    algorithm: str | Page | None = None,
    scale: str | None = None,
    data_dir: str | None = None,
    out: str | Path,
    engine: str = "local",
    workers: int | None = None,
    device: str = "cpu",
    resume: bool = False,
    overwrite: bool = False,
    watch: Watch | Sequence[Watch] | None = None,
    log: str | Sequence[str] | None = None,
    metrics: Mapping[str, Measure] | None = None,
    sampler: Sampler | None = None,
    **settings: Any,
) -> TrainedRun:
    """Train, and give back the trained run.

    recipe: a shipped recipe or a file to start from; without it, the defaults. scale: "small" takes its smaller settings.
    federation: your own data (`Federation.from_clients`). model: an nn.Module class, a function that builds a module, or a
    module; a dict is the recipe's [model]. output: the name of the model's output layer. model_start: "given" keeps the
    weights of a module as a pretrained start, "random" draws new ones (the default, unless some of them are frozen).
    batchnorm: "private" keeps batch normalisation with each client (FedBN).
    algorithm: a method by name, `package.module:name` of your own method, or its page (fedmix.methods.Page).
    settings: as in a recipe, sections as dicts: rounds=20, fedmix={"experts": 4}, training={"client_lr": 0.1}. Without a recipe
    and without any of FedMix's settings, the form of FedMix is the recommended one (docs/sharing.md); with one, the paper's.
    watch: a function, or several, called after each round with its number, metrics and bytes; one that raises
    fedmix.Stop("why") ends the run there, with a summary. log: "tensorboard", "mlflow", "wandb" or several of them.
    metrics: {"auc": function(y, p) -> number} of true classes [N] and probabilities [N, classes], beside accuracy, balanced
    accuracy, log-likelihood, calibration, F1 and AUC, which are always there.
    sampler: function(round, points of each client, how many, rng) -> clients of a round; setting sampling="by-size" is shipped.

    Settings that many look for: rounds, seed, clients_per_round, training={"client_lr", "batch_size", "epochs", "optimizer",
    "class_weights"}, server={"server_lr", "optimizer"}, evaluation={"every", "patience", "best_by"}. `fedmix settings` explains
    them all.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise SettingError("metrics must be a dict of functions by name, {'mine': function(y, p) -> number}.")
    if isinstance(model, dict):
        settings["model"], model = model, None
    if batchnorm is not None:
        settings["model.batchnorm"] = batchnorm
    if model_start is not None:
        settings["model.start"] = model_start
    page = algorithm if isinstance(algorithm, Page) else None
    if algorithm is not None:
        settings["algorithm"] = OWN if page else algorithm
    given = HandedOver(federation, model, page, metrics or {}, sampler)
    with words_of_python():
        effective = effective_recipe(recipe, settings, given, output, scale)
        where = Where(engine, workers, device)
        listeners = Listeners(_one_watch(watch))
        train_recipe(effective, Path(out), where, given, data_dir, resume, overwrite, log, listeners)
    return load(out, model, page)


@contextmanager
def words_of_python() -> Iterator[None]:
    """Errors name arguments as Python has them where they name options of the command line: resume=True, not --resume."""
    try:
        yield
    except FedmixError as error:
        message = re.sub(r"--(resume|overwrite)\b", r"\1=True", str(error))
        message = re.sub(r"--([a-z]+)\b", r"\1", message)
        if message == str(error):
            raise
        raise type(error)(message) from error


def _one_watch(watch: Watch | Sequence[Watch] | None) -> Watch | None:
    """Several callbacks as one, called in turn."""
    if watch is None or callable(watch):
        return watch
    callbacks = list(watch)

    def call_all(progress: Progress) -> None:
        for callback in callbacks:
            callback(progress)

    return call_all


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
    """Train one recipe into one directory, and give back its summary. Everything that trains calls this."""
    tools = check_tools(log)
    RunDirectory.refuse_taken(out, resume, overwrite)
    recipe = settled(recipe, where, (given.federation, given.model, given.page), data_dir, out, resume, listeners.hint)
    experiment = build(recipe, given.federation, given.model, data_dir, given.page, given.metrics)
    for words in _words_on_start(experiment, given.model):
        listeners.warn(words)
    refuse_what_cannot_run(experiment, where)
    directory = RunDirectory.open(out, recipe, resume, overwrite)
    try:
        with logging_to(tools, out, recipe, listeners.warn, listeners.watch, listeners.hint) as watch:
            return run(experiment, directory, where, watch, data_dir, given.sampler)
    finally:
        directory.close()


def _words_on_start(experiment: Experiment, model: Given) -> list[str]:
    """What the user should know about the data, and the weights that a run starts from."""
    words = [experiment.federation.note] if experiment.federation.note else []
    if isinstance(model, nn.Module) and experiment.recipe.model.start != "given":
        words.append("the weights of the model are drawn anew; model_start='given' keeps those that it has")
    elif experiment.algorithm.starts_equal():
        words.append(EQUAL_START)
    return words


def effective_recipe(
    recipe: str | None,
    settings: Mapping[str, Any],
    given: HandedOver,
    output: str | None = None,
    scale: str | None = None,
) -> Recipe:
    """The recipe with its changes; data and a model that were handed over are described in it as far as a recipe can."""
    changes = {key: _plain(value) for key, value in flat(settings).items()}
    if given.federation is not None:
        changes |= _described_data(given.federation)
    if given.model is not None:
        if output is None:
            raise SettingError("output must name the output layer of the model, as in output='fc2'.")
        changes |= {"model.name": OWN, "model.output": output}
    if recipe:
        effective = read_recipe(recipe, changes=changes, scale=scale)
    else:
        changes = _defaults_for_own_data(changes) | changes
        effective = make_recipe({"name": "own"}, changes=changes, scale=scale)
        advice = _recommended(effective, changes)
        if advice:
            effective = make_recipe({"name": "own"}, changes=changes | advice, scale=scale)
    if isinstance(given.model, nn.Module):
        start = start_of(given.model, effective.model)
        effective = replace(effective, model=replace(effective.model, start=start))
    return effective


# Without a recipe, unless they are given: the paper's server rate of 0.001 and mini-batches of 64 hardly move in 20 rounds on
# tables and small images. Chosen on validation data (docs/decisions.md).
OWN_DATA_DEFAULTS = {"server.server_lr": 0.01, "training.batch_size": 16}


def _defaults_for_own_data(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that learn where no recipe says anything. A rate of the server's belongs to its default optimiser alone."""
    other_optimizer = "server.optimizer" in changes
    return {
        key: value for key, value in OWN_DATA_DEFAULTS.items() if not (other_optimizer and key.startswith("server."))
    }


def _plain(value: Any) -> Any:
    """A setting without NumPy: numbers and lists as a recipe has them."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _recommended(recipe: Recipe, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the method that are recommended to somebody who gives none of them; nothing once one of them is given."""
    if recipe.algorithm not in CATALOGUE:
        return {}
    section = CATALOGUE[recipe.algorithm].section
    if not section or any(key.startswith(f"{section}.") for key in changes):
        return {}
    advice = shipped_page(recipe.algorithm).recommended(recipe.data.side, recipe.server, recipe.privacy)
    return {f"{section}.{key}": value for key, value in advice.items()}


def _described_data(federation: Federation) -> dict[str, Any]:
    """What a recipe can truly say about data that was handed over."""
    held_out = 0 if federation.held_out is None else len(federation.held_out)
    return {
        "data.source": OWN,
        "data.clients": len(federation),
        "data.holdout_clients": held_out,
        "data.split": "by-client",
        "data.side": federation.side,
    }


# -- several runs ------------------------------------------------------------------------------------------------------


@words_of_python()
def compare(
    recipe: str | None = None,
    algorithms: Sequence[str] = ("fedmix", "fedavg", "biased-fedavg", "local-global"),
    *,
    federation: Federation | None = None,
    model: Callable[[], nn.Module] | nn.Module | None = None,
    output: str | None = None,
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

    recipe, federation, model, output, settings: as in `train`. The result is also written to OUT/comparison.json.
    """
    given = HandedOver(federation, model)
    points = comparison_points(_reader(recipe, given, output, scale), algorithms, seeds, flat(settings))
    train_one = _trainer(Where(engine, workers, device), data_dir, resume, overwrite, given)
    return compare_points(points, Path(out), train_one)


def _reader(recipe: str | None, given: HandedOver, output: str | None, scale: str | None) -> Read:
    """A function that reads the recipe with a method and changes, for data and a model that were handed over."""

    def read(method: str | None, changes: Mapping[str, Any]) -> Recipe:
        chosen = {} if method is None else {"algorithm": method}
        if recipe is not None and given == HandedOver():
            return read_recipe(recipe, method, {key: _plain(value) for key, value in changes.items()}, scale)
        return effective_recipe(recipe, {**changes, **chosen}, given, output, scale)

    return read


def _trainer(
    where: Where, data_dir: str | None, resume: bool, overwrite: bool, given: HandedOver = HandedOver()
) -> Train:
    """A function that trains one recipe into one folder."""

    def train_one(recipe: Recipe, folder: Path) -> Summary:
        return train_recipe(recipe, folder, where, given, data_dir, resume, overwrite)

    return train_one


def compare_points(points: Sequence[Point], out: Path, train_one: Train) -> Comparison:
    """Train every point, and compare their methods. A client's error ends it."""
    runs = [train_one(point.recipe, out / point.name) for point in points]
    comparison = compared(runs)
    write_json(out / schema.COMPARISON, comparison)
    return comparison


@words_of_python()
def sweep(
    recipe: str | None,
    grid: Mapping[str, Sequence[Any]],
    *,
    federation: Federation | None = None,
    model: Callable[[], nn.Module] | nn.Module | None = None,
    output: str | None = None,
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

    recipe: None where the data is handed over; federation, model, output, settings: as in `train`.
    by: the kind of accuracy to choose by: "as_sent", "server" or "no_identity". The result is also written to OUT/sweep.json.
    """
    given = HandedOver(federation, model)
    points = sweep_points(_reader(recipe, given, output, scale), grid, seeds, flat(settings), algorithm)
    train_one = _trainer(Where(engine, workers, device), data_dir, resume, overwrite, given)
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
    """Every kind of inference with a trained run, as plain numbers: what `fedmix evaluate RUN --json` prints.

    federation, model, algorithm: what was handed over in Python must be given again. clients: how many are looked at, drawn
    at random; 0: all. densities: whether a generative model is trained on each client, for p(s|x) of at most `points`
    inputs; None: where that is quick.
    """
    options = Options(Where(engine, workers, device).after_training(), clients, densities, points)
    restored = restore(run, federation, model, data_dir, algorithm)
    return evaluate_run(restored, options, watch)


def predict_with(
    run: str | Path,
    input: str | Path,
    client: str | None = None,
    round: int | str = "last",
    x: str = "x",
    y: str = "y",
) -> dict[str, Any]:
    """Predictions for the rows of a file, .npz or .csv, as plain numbers: what `fedmix predict RUN --json` prints.

    client None: for somebody who is none of the clients. x, y: what an .npz calls its inputs and labels; where the file has
    labels there is an accuracy too.
    """
    trained = load(run, round=round)
    predictor = trained.client(client) if client is not None else trained
    about = {"client": client or "", "run": str(trained.path), "round": trained.round}
    return {**about, **predictor.predict_file(Path(input), x, y)}


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
    """What the server could have learnt about the clients' labels, as plain numbers: what `fedmix audit RUN --json` prints."""
    options = Options(Where(engine, workers, device).after_training(), clients)
    restored = restore(run, federation, model, data_dir, algorithm)
    return audit_run(restored, options, watch)
