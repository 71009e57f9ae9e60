"""Where a run's clients live: on this machine, one after the other or side by side, or in Flower's processes.

That decides how long a run takes and nothing else, so it is not part of a recipe.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from fedmix.engines.flower import FlowerEngine, flwr, nodes_of, simulate
from fedmix.engines.local import LocalEngine, cores
from fedmix.engines.serial import SerialEngine
from fedmix.engines.store import Store
from fedmix.errors import SettingError, one_of
from fedmix.running.loop import Engine
from fedmix.settings.build import Experiment
from fedmix.settings.importing import folders_beside
from fedmix.settings.reading import dump_recipe
from fedmix.settings.recipe import OWN

DEVICES = ("cpu", "cuda", "mps")
# What Flower runs in the processes of clients.
CLIENT_APP = "fedmix.apps.client:app"
T = TypeVar("T")


@dataclass(frozen=True)
class Where:
    """Where clients are trained.

    engine: a name in ENGINES. workers: how many processes train clients; None: as many as fit. device: the name that torch
    gives to it.
    """

    engine: str = "local"
    workers: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise SettingError(one_of("--engine", self.engine, ENGINES))
        if self.workers is not None and self.workers < 1:
            raise SettingError(f"--workers must be 1 or more. Got {self.workers} instead.")
        self._check_device()

    def _check_device(self) -> None:
        if self.device == "cpu":
            return
        if self.device not in DEVICES and not self.device.startswith("cuda:"):
            raise SettingError(one_of("--device", self.device, (*DEVICES, "cuda:N")))
        if not _reachable(self.device):
            raise SettingError(f"--device must be one that this machine has. torch cannot use {self.device!r} here.")
        if not self.kind.any_device:
            raise SettingError(f"--device must be cpu with --engine {self.engine}. Got {self.device!r} instead.")

    @property
    def kind(self) -> "EngineKind":
        return ENGINES[self.engine]

    def refuse(self, experiment: Experiment) -> None:
        """Refuse what this engine cannot train, before anything on disk is touched."""
        recipe = experiment.recipe
        self.kind.ready()
        if self.kind.other_processes and OWN in (recipe.data.source, recipe.model.name, recipe.algorithm):
            raise SettingError(
                f"--engine {self.engine} needs data, a model and a method that a recipe can name (package.module:name, "
                "files): its clients are other processes, which cannot have what was handed over in Python."
            )

    def run(self, stage: "Stage", work: Callable[[Engine], T]) -> T:
        """Give the engine to `work`, and give back what that returns. The engine lives as long as that takes."""
        if self.kind.inside is not None:
            return self.kind.inside(self, stage, work)  # type: ignore[no-any-return]
        with self.open(stage) as engine:
            return work(engine)

    def after_training(self) -> "Where":
        """The same, if its engine can do more than train: evaluate and audit hold the clients' private states here."""
        if self.kind.start is None:
            raise SettingError(one_of("--engine", self.engine, [name for name, kind in ENGINES.items() if kind.start]))
        return self

    def open(self, stage: "Stage") -> "closing[Engine]":
        """An engine whose clients are in this process or in its children; a `with` block closes it."""
        assert self.kind.start is not None
        return closing(self.kind.start(self, stage))


@dataclass(frozen=True)
class Stage:
    """What an engine needs to begin.

    store: gives the clients' private states, for engines that hold them in this process. folder: where clients that are other
    processes keep theirs. data_dir: where such clients look for the data first.
    """

    experiment: Experiment
    store: Callable[[], Store]
    folder: Path | None = None
    data_dir: str | None = None


class EngineKind(NamedTuple):
    """What an engine can do. Code asks for a property and never for a name. Either `start` or `inside` is there.

    start: starts an engine whose clients are in this process, or in its children.
    inside: does the work inside of something that starts the server itself.
    states_elsewhere: clients keep their private states themselves, so the server's checkpoint does not hold them.
    other_processes: clients are processes that cannot have objects of this one.
    any_device: clients can be trained on other devices than the CPU.
    ready: raises a SettingError where a package that the engine needs is missing.
    """

    start: Callable[[Where, Stage], Engine] | None
    inside: Callable[[Where, Stage, Callable[[Engine], Any]], Any] | None
    states_elsewhere: bool
    other_processes: bool
    any_device: bool
    ready: Callable[[], Any]


def _serial(where: Where, stage: Stage) -> Engine:
    experiment = stage.experiment
    device = torch.device(where.device)
    return SerialEngine(experiment.algorithm, experiment.federation, experiment.recipe.seed, stage.store(), device)


def _local(where: Where, stage: Stage) -> Engine:
    experiment = stage.experiment
    device = torch.device(where.device)
    # Several processes would wait for each other on any device but the CPU.
    default = cores() if where.device == "cpu" else 1
    workers = default if where.workers is None else where.workers
    return LocalEngine(
        experiment.algorithm, experiment.federation, experiment.recipe.seed, stage.store(), workers, device
    )


def _simulated(where: Where, stage: Stage, work: Callable[[Engine], T]) -> T:
    """Flower's simulation starts the server itself, so the work is done inside of it."""
    assert stage.folder is not None
    recipe = stage.experiment.recipe
    workers = where.workers or cores()
    about = {
        "recipe": dump_recipe(recipe),
        "folder": str(stage.folder.resolve()),
        "data_dir": stage.data_dir,
        "beside": folders_beside(),
    }
    results: list[T] = []

    def serve(grid: Any) -> None:
        deadline = recipe.server.deadline
        nodes = nodes_of(grid, workers)
        results.append(work(FlowerEngine(grid, lambda _: about, None, nodes, deadline, strict=not deadline)))

    simulate(workers, CLIENT_APP, serve)
    return results[0]


def _nothing_needed() -> None:
    pass


ENGINES = {
    "local": EngineKind(
        start=_local,
        inside=None,
        states_elsewhere=LocalEngine.states_elsewhere,
        other_processes=False,
        any_device=True,
        ready=_nothing_needed,
    ),
    "serial": EngineKind(
        start=_serial,
        inside=None,
        states_elsewhere=SerialEngine.states_elsewhere,
        other_processes=False,
        any_device=True,
        ready=_nothing_needed,
    ),
    "flower": EngineKind(
        start=None,
        inside=_simulated,
        states_elsewhere=FlowerEngine.states_elsewhere,
        other_processes=True,
        any_device=False,
        ready=flwr,
    ),
}


def _reachable(device: str) -> bool:
    """Whether torch can use a device. It is not touched: a process that has used one cannot be forked any more."""
    kind, _, number = device.partition(":")
    if kind == "mps":
        return torch.backends.mps.is_available()
    if not number:
        return torch.cuda.device_count() > 0
    return number.isdecimal() and int(number) < torch.cuda.device_count()
