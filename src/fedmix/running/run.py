"""One run from start to end: rounds, evaluations, checkpoints, summary. Stopped and resumed, it gives the same numbers."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedmix.catalogue import CATALOGUE
from fedmix.core.score import MEASURES
from fedmix.core.server import State
from fedmix.engines.client import BOUND
from fedmix.engines.flower import FlowerEngine, flwr, nodes_of, simulate
from fedmix.engines.local import LocalEngine, cores
from fedmix.engines.serial import SerialEngine
from fedmix.engines.store import DiskStore, MemoryStore, Store
from fedmix.errors import RunError, SettingError, one_of
from fedmix.running import evaluate
from fedmix.running.accounting import RELEASES, accountant_or_complain, guarantee_of_run
from fedmix.running.checkpoint import Checkpoint, Checkpoints
from fedmix.running.directory import RunDirectory
from fedmix.running.loop import Engine, Round, rounds
from fedmix.running.releases import FIRST, Releases
from fedmix.running.start import starting_state
from fedmix.settings.build import Experiment, code_of
from fedmix.settings.recipe import OWN, dump_recipe, folders_beside

HERE = ("local", "serial")  # engines whose clients are on this machine
ENGINES = (*HERE, "flower")
CLIENT_APP = "fedmix.apps.client:app"  # what Flower runs where clients are
DEVICES = ("cpu", "cuda", "mps")


@dataclass(frozen=True)
class Progress:
    """What whoever watches a run is told after each round."""

    done: int
    total: int
    metrics: dict[str, Any]
    sent: int  # bytes, in all rounds up to this one


def sent_in(lines: Sequence[Mapping[str, Any]]) -> int:
    """Bytes down and up in rounds, from their lines of metrics."""
    return sum(line["bytes_down"] + line["bytes_up"] for line in lines)


class Stopped(Exception):
    """Asked to stop (Ctrl-C, SIGTERM); the checkpoint of the last whole round is written."""

    def __init__(self, t: int, path: Path) -> None:
        super().__init__(f"stopped after round {t}. Go on with: fedmix train {path} --resume")


def check(
    experiment: Experiment,
    engine: str,
    workers: int | None,
    device: str = "cpu",
    engines: Sequence[str] = ENGINES,
) -> None:
    """Refuse what cannot run before anything on disk is touched. engines: those that can do it."""
    if device not in DEVICES and not device.startswith("cuda:"):
        raise SettingError(one_of("--device", device, (*DEVICES, "cuda:N")))
    if device != "cpu" and not _reachable(device):
        raise SettingError(f"--device must be one that this machine has. torch cannot use {device!r} here.")
    if engine not in engines:
        raise SettingError(one_of("--engine", engine, engines))
    if engine == "flower":
        flwr()
        if device != "cpu":
            raise SettingError(f"--device must be cpu with --engine flower. Got {device!r} instead.")
        recipe = experiment.recipe
        if OWN in (recipe.data.source, recipe.model.name, recipe.algorithm):
            raise SettingError(
                "--engine flower needs data, a model and a method that a recipe can name (package.module:name, files): its "
                "clients are other processes, which cannot have what was handed over in Python."
            )
    if workers is not None and workers < 1:
        raise SettingError(f"--workers must be 1 or more. Got {workers} instead.")
    if engines is not HERE:  # it is to be trained
        starting_state(experiment)
        if experiment.recipe.privacy.noise:
            accountant_or_complain()


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
    data_dir: str | None = None,
) -> dict[str, Any]:
    """Train, from the last checkpoint if there is one, and write the summary, which is also returned.

    data_dir: where clients that are other processes look for the data first.
    """

    def here(going: _Going) -> dict[str, Any]:
        with closing(make_engine(engine, workers, experiment, going.store(), device)) as started:
            return going.to_its_end(started, device)

    def simulated(going: _Going) -> dict[str, Any]:
        nodes = workers or cores()
        folder = str(going.clients_folder.resolve())
        about = {
            "recipe": dump_recipe(experiment.recipe),
            "folder": folder,
            "data_dir": data_dir,
            "beside": folders_beside(),
        }
        ended: list[dict[str, Any]] = []

        def serve(grid: Any) -> None:
            deadline = experiment.recipe.server.deadline
            started = FlowerEngine(grid, lambda _: about, None, nodes_of(grid, nodes), deadline, strict=not deadline)
            ended.append(going.to_its_end(started, device))

        simulate(nodes, CLIENT_APP, serve)
        return ended[0]

    return _run(experiment, directory, simulated if engine == "flower" else here, engine == "flower", watch)


def run_over(experiment: Experiment, directory: RunDirectory, engine: Engine) -> dict[str, Any]:
    """The same with clients that are somewhere else, behind an engine that is connected already."""
    return _run(experiment, directory, lambda going: going.to_its_end(engine, "cpu"), True, None)


def _run(
    experiment: Experiment,
    directory: RunDirectory,
    to_its_end: Callable[["_Going"], dict[str, Any]],
    elsewhere: bool,
    watch: Callable[[Progress], None] | None,
) -> dict[str, Any]:
    """elsewhere: clients keep their private states themselves."""
    recipe = experiment.recipe
    checkpoints = Checkpoints(directory.path / "checkpoints", recipe.checkpoint.keep)
    found = checkpoints.load_last(experiment.algorithm.state_from)
    done = directory.summary()
    if found and done and found.round == recipe.rounds == done["rounds"]:
        return done
    if found and elsewhere != ("engine" in found.carried):
        words = "without --engine flower" if elsewhere else "with --engine flower"
        raise RunError(f"{directory.path} must go on {words}: its clients' private states are where it was trained.")
    directory.describe_federation(experiment.federation)
    code = "" if recipe.algorithm in CATALOGUE else code_of(experiment.page)
    directory.describe_run(experiment.page.title, recipe.algorithm, experiment.model.structure, code)
    directory.describe_recipe(recipe)
    directory.go_on()
    directory.cut_metrics(found.round if found else 0)
    with _deferred_signals() as asked_to_stop:
        summary = to_its_end(_Going(experiment, directory, checkpoints, found, watch, asked_to_stop))
    directory.finish(summary)
    return summary


@dataclass(frozen=True)
class _Going:
    """A run on its way, whatever engine it is on."""

    experiment: Experiment
    directory: RunDirectory
    checkpoints: Checkpoints
    found: Checkpoint | None
    watch: Callable[[Progress], None] | None
    asked_to_stop: Callable[[], bool]

    @property
    def clients_folder(self) -> Path:
        return self.directory.path / "clients"

    def store(self) -> Store:
        """Clients' private states as the last checkpoint has them."""
        on_disk = self.experiment.recipe.checkpoint.clients == "disk"
        store: Store = DiskStore(self.clients_folder) if on_disk else MemoryStore()
        for client, private in (self.found.clients if self.found else {}).items():
            store.put(client, private)
        store.take_changed()
        return store

    def to_its_end(self, engine: Engine, device: str) -> dict[str, Any]:
        """The rounds that are left, each with its metrics, evaluation and checkpoint; then the summary."""
        recipe, algorithm, found = self.experiment.recipe, self.experiment.algorithm, self.found
        state = found.state if found else starting_state(self.experiment)
        carried: dict[str, Any] = found.carried if found else {"proxy": {}, "seconds": 0.0}
        releases = self._releases(carried)
        engine.remember(carried.get("engine", {}))
        self.directory.describe_environment(engine.name, engine.workers, device, recipe.seed)
        elsewhere = (
            engine.name == "flower"
        )  # clients keep the states of two rounds: the server may not fall further behind
        everyone, per_round = len(self.experiment.federation), recipe.clients_per_round
        sent = sent_in(self.directory.metrics())
        for step in rounds(
            algorithm,
            engine,
            state,
            recipe.seed,
            everyone,
            per_round,
            recipe.rounds,
            recipe.server,
            releases.note if releases else lambda t, clients: None,
        ):
            state = step.state
            if releases and RELEASES in carried:
                carried[RELEASES] = releases.last
            # local accuracy while training: each client's own score, on validation data, of the weights it just sent
            carried["proxy"] |= {str(r.client): _score(r.message.numbers) for r in step.replies}
            carried["seconds"] += step.seconds
            if elsewhere:
                carried["engine"] = engine.memory()
            line = self.directory.append_metrics(_metrics(self.experiment, engine, step, carried["proxy"]))
            sent += sent_in([line])
            last = step.t == recipe.rounds
            stop = (
                self.asked_to_stop()
            )  # asked once: a signal between here and the end of the step waits for the next one
            if last or stop or elsewhere or step.t % recipe.checkpoint.every == 0:
                self.checkpoints.save(state, engine.store, carried)
            if self.watch:
                self.watch(Progress(step.t, recipe.rounds, line, sent))
            if stop and not last:
                raise Stopped(step.t, self.directory.path)
        return summarise(self.experiment, engine, state, self.directory, carried)

    def _releases(self, carried: dict[str, Any]) -> Releases | None:
        """Where it is noted who is asked for noisy answers; None: there is no noise."""
        if not self.experiment.recipe.privacy.noise:
            return None
        if self.found is None:
            carried[RELEASES] = FIRST
        return Releases(self.directory.path, carried.get(RELEASES, FIRST))


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
        if (bound := server.mean_over_points(BOUND)) is not None:
            line["bound"] = bound  # of validation points, with the server's weights
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
        "title": experiment.page.title,
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
        "warnings": _troubles(lines) + _unanswered(server, len(federation)),
    }
    if recipe.privacy.noise:
        summary["privacy"] = {
            "noise": recipe.privacy.noise,
            **guarantee_of_run(recipe, algorithm.noisy_parts, directory.path, carried),
        }
    if whole.why:
        summary["notes"] = {"accuracy.global": whole.why}
    if federation.groups is not None:
        summary["groups"] = list(federation.groups)
        if "q_zs" in described:
            seen = engine.store.clients()  # of the others nothing is known
            found = [described["q_zs"][s] for s in seen]
            summary["clusters"] = evaluate.clusters(found, [federation.groups[s] for s in seen])
    return summary


def _troubles(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """What went wrong with experts at any time, each kind as it was said last; and who was left out."""
    last = {trouble.split(":")[0]: trouble for line in lines for trouble in line.get("warnings", [])}
    told = list(last.values())
    for kind in ("absent", "refused"):
        rounds_of = [line for line in lines if line.get(kind)]
        if rounds_of:
            row = rounds_of[-1][kind][-1]
            told.append(
                f"{kind}: clients in {len(rounds_of):,} of {len(lines):,} rounds, last client {row['client']} in round "
                f"{rounds_of[-1]['round']} ({row['reason']})"
            )
    return told


def _unanswered(scores: evaluate.Scores, clients: int) -> list[str]:
    if not scores.unanswered:
        return []
    s, reason = next(iter(scores.unanswered.items()))
    return [
        f"unanswered: accuracy is over {clients - len(scores.unanswered):,} of {clients:,} clients; client {s}: {reason}"
    ]


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
