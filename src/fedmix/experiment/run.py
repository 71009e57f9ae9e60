"""One run from start to end: rounds, evaluations, checkpoints, summary. Stopped and resumed, it gives the same numbers."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedmix.core.score import MEASURES
from fedmix.core.tree import Params
from fedmix.core.types import State
from fedmix.engines.local import LocalEngine, cores
from fedmix.engines.serial import SerialEngine
from fedmix.engines.store import DiskStore, MemoryStore, Store
from fedmix.errors import SettingError, one_of
from fedmix.experiment import evaluate
from fedmix.experiment.accounting import accountant_or_complain, guarantee
from fedmix.experiment.build import Experiment
from fedmix.experiment.checkpoint import Checkpoints
from fedmix.experiment.loop import Engine, Round, rounds
from fedmix.experiment.recipe import OWN, read_recipe
from fedmix.experiment.record import RunDirectory
from fedmix.experiment.trained import load
from fedmix.rng import stream

ENGINES = ("local", "serial")
DEVICES = ("cpu", "cuda", "mps")


@dataclass(frozen=True)
class Progress:
    """What whoever watches a run is told after each round."""

    done: int
    total: int
    metrics: dict[str, Any]


class Stopped(Exception):
    """Asked to stop (Ctrl-C, SIGTERM); the checkpoint of the last whole round is written."""

    def __init__(self, t: int, path: Path) -> None:
        super().__init__(f"stopped after round {t}. Go on with: fedmix train {path} --resume")


def _other_runs_experts(experiment: Experiment) -> tuple[Params, ...]:
    """The experts of the run that the recipe names; a model that was handed over in Python is the same one there."""
    path = experiment.recipe.warm_start
    own = (Path(path) / "recipe.toml").is_file() and read_recipe(path).model.name == OWN
    return load(path, experiment.model.build if own else None).experts


def check(experiment: Experiment, engine: str, workers: int | None, device: str = "cpu") -> None:
    """Refuse what cannot run before anything on disk is touched."""
    if device not in DEVICES and not device.startswith("cuda:"):
        raise SettingError(one_of("--device", device, (*DEVICES, "cuda:N")))
    if device != "cpu" and not _reachable(device):
        raise SettingError(f"--device must be one that this machine has. torch cannot use {device!r} here.")
    if engine not in ENGINES:
        raise SettingError(one_of("--engine", engine, ENGINES))
    if workers is not None and workers < 1:
        raise SettingError(f"--workers must be 1 or more. Got {workers} instead.")
    if experiment.recipe.warm_start:
        starting_state(experiment)
    if experiment.recipe.privacy.noise:
        accountant_or_complain()


def starting_state(experiment: Experiment) -> State:
    """The server's state before round 1: new, or from the experts of another run."""
    recipe, algorithm = experiment.recipe, experiment.algorithm
    state = algorithm.init(recipe.seed)
    if recipe.warm_start:
        state = algorithm.warm_start(state, _other_runs_experts(experiment), stream(recipe.seed, "warm start"))
    return state


def _reachable(device: str) -> bool:
    """Without touching the device: a process that has cannot be forked any more."""
    kind, _, number = device.partition(":")
    if kind == "mps":
        return torch.backends.mps.is_available()
    return number.isdecimal() and int(number) < torch.cuda.device_count() if number else torch.cuda.device_count() > 0


def make_engine(name: str, workers: int | None, experiment: Experiment, store: Store, device: str = "cpu") -> Engine:
    algorithm, federation, seed = experiment.algorithm, experiment.federation, experiment.recipe.seed
    place = torch.device(device)
    if name == "serial":
        return SerialEngine(algorithm, federation, seed, store, place)
    default = cores() if device == "cpu" else 1  # processes on one device wait for each other
    return LocalEngine(algorithm, federation, seed, store, default if workers is None else workers, place)


def run(
    experiment: Experiment,
    directory: RunDirectory,
    engine: str = "local",
    workers: int | None = None,
    watch: Callable[[Progress], None] | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Train, from the last checkpoint if there is one, and write the summary, which is also returned."""
    recipe, algorithm, federation = experiment.recipe, experiment.algorithm, experiment.federation
    state = algorithm.init(recipe.seed)
    checkpoints = Checkpoints(directory.path / "checkpoints", recipe.checkpoint.keep)
    found = checkpoints.load_last(state)
    done = directory.summary()
    if found and done and found.round == recipe.rounds == done["rounds"]:
        return done
    directory.describe_federation(federation)
    directory.describe_recipe(recipe)
    directory.go_on()
    store: Store = DiskStore(directory.path / "clients") if recipe.checkpoint.clients == "disk" else MemoryStore()
    carried: dict[str, Any] = {"proxy": {}, "seconds": 0.0}
    if found:
        state, carried = found.state, found.carried
        for client, private in found.clients.items():
            store.put(client, private)
        store.take_changed()
    else:
        state = starting_state(experiment)
    directory.cut_metrics(state.round)

    with (
        closing(make_engine(engine, workers, experiment, store, device)) as started,
        _deferred_signals() as asked_to_stop,
    ):
        directory.describe_environment(started.name, started.workers, device, recipe.seed)
        per_round = recipe.clients_per_round
        everyone = len(federation)
        for step in rounds(algorithm, started, state, recipe.seed, everyone, per_round, recipe.rounds, recipe.server):
            state = step.state
            # local accuracy while training: each client's own score, on validation data, of the weights it just sent
            carried["proxy"] |= {str(r.client): _score(r.message.numbers) for r in step.replies}
            carried["seconds"] += step.seconds
            line = _metrics(experiment, started, step, carried["proxy"])
            directory.append_metrics(line)
            last = step.t == recipe.rounds
            stop = asked_to_stop()  # asked once: a signal between here and the end of the step waits for the next one
            if last or stop or step.t % recipe.checkpoint.every == 0:
                checkpoints.save(state, store, carried)
            if watch:
                watch(Progress(step.t, recipe.rounds, line))
            if stop and not last:
                raise Stopped(step.t, directory.path)
        summary = summarise(experiment, started, state, directory, carried)
    directory.finish(summary)
    return summary


def _score(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: numbers[name] for name in ("points", *MEASURES) if name in numbers}


def _metrics(experiment: Experiment, engine: Engine, step: Round, proxy: dict[str, Any]) -> dict[str, Any]:
    recipe, algorithm, federation = experiment.recipe, experiment.algorithm, experiment.federation
    line: dict[str, Any] = {
        "round": step.t,
        "loss": step.loss,
        "bytes_down": step.bytes_down,
        "bytes_up": step.bytes_up,
        "seconds": round(step.seconds, 4),
        "divergence": step.diagnosis.divergence,
        "clients": [reply.client for reply in step.replies],
        **step.diagnosis.detail,
        "refused": [{"client": r.client, "field": r.field, "reason": r.reason} for r in step.refused],
        "absent": [{"client": client, "reason": reason} for client, reason in step.absent.items()],
    }
    if step.t % recipe.evaluation.every == 0 or step.t == recipe.rounds:
        began = time.perf_counter()
        everyone = range(len(federation))
        server = evaluate.client_scores(algorithm, engine, step.state, everyone, "validation", step.t)
        shared = recipe.evaluation.share_private
        whole = evaluate.global_score(algorithm, engine.store, step.state, federation, "validation", shared)
        line["accuracy"] = {
            "local": evaluate.scores_of({int(s): numbers for s, numbers in proxy.items()}).summary(),
            "server": server.summary(),
            "global": whole.accuracy,
        }
        line["bytes_evaluation"] = whole.bytes
        line["seconds_evaluation"] = round(time.perf_counter() - began, 4)
        line |= algorithm.describe(step.state)
    return line


def summarise(
    experiment: Experiment, engine: Engine, state: State, directory: RunDirectory, carried: dict[str, Any]
) -> dict[str, Any]:
    """summary.json: what came out, on test data, and what it cost."""
    recipe, algorithm, federation = experiment.recipe, experiment.algorithm, experiment.federation
    lines = directory.metrics()
    everyone = range(len(federation))
    server = evaluate.client_scores(algorithm, engine, state, everyone, "test", recipe.rounds)
    epochs = recipe.evaluation.finetune_epochs
    local = evaluate.client_scores(algorithm, engine, state, everyone, "test", recipe.rounds, finetune=epochs)
    whole = evaluate.global_score(algorithm, engine.store, state, federation, "test", recipe.evaluation.share_private)
    described = algorithm.describe(state)
    summary: dict[str, Any] = {
        "algorithm": recipe.algorithm,
        "recipe": recipe.name,
        "scale": recipe.scale,
        "rounds": recipe.rounds,
        "seed": recipe.seed,
        "clients": len(federation),
        "parameters": experiment.model.parameters,
        "bytes_down": sum(line["bytes_down"] for line in lines),
        "bytes_up": sum(line["bytes_up"] for line in lines),
        "bytes_evaluation": sum(line.get("bytes_evaluation", 0) for line in lines) + whole.bytes,
        "loss": lines[-1]["loss"],
        "accuracy": {"local": local.summary(), "server": server.summary(), "global": whole.accuracy},
        "accuracy_of_clients": {
            name: {federation.names[s]: numbers["accuracy"] for s, numbers in scores.of.items()}
            for name, scores in (("local", local), ("server", server))
        },
        "scores": {"local": local.summaries(), "server": server.summaries(), "global": whole.numbers},
        "seconds": round(carried["seconds"], 2),
        **described,
        "warnings": lines[-1].get("warnings", []),
    }
    if recipe.privacy.noise:
        summary["privacy"] = guarantee(recipe, (line["clients"] for line in lines))
    if whole.why:
        summary["notes"] = {"accuracy.global": whole.why}
    if federation.groups is not None:
        summary["groups"] = list(federation.groups)
        if "q_zs" in described:
            seen = engine.store.clients()  # of the others nothing is known
            found = [described["q_zs"][s] for s in seen]
            summary["clusters"] = evaluate.clusters(found, [federation.groups[s] for s in seen])
    return summary


@contextmanager
def _deferred_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM wait for the end of the round; a second Ctrl-C does not."""
    asked = threading.Event()

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
