"""One run from start to end: rounds, evaluations, checkpoints, summary. Stopped and resumed, it gives the same numbers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedmix import schema
from fedmix.catalogue import CATALOGUE
from fedmix.core.server import State
from fedmix.engines.store import DiskStore, MemoryStore, Store
from fedmix.errors import RunError
from fedmix.running.accounting import accountant_or_complain
from fedmix.running.carried import Carried, evaluation_rounds, fine_tuned_rounds
from fedmix.running.checkpoint import Checkpoint, Checkpoints
from fedmix.running.directory import RunDirectory
from fedmix.running.loop import Engine, Round, rounds
from fedmix.running.metrics import evaluated, line_of
from fedmix.running.releases import FIRST, Releases
from fedmix.running.signals import deferred_signals
from fedmix.running.start import starting_state
from fedmix.running.summary import summarise
from fedmix.running.where import Stage, Where
from fedmix.schema import MetricsLine, Summary
from fedmix.settings.build import Experiment, code_of


@dataclass(frozen=True)
class Progress:
    """What is known after each round. sent: how many bytes were sent in all rounds up to this one."""

    done: int
    total: int
    metrics: MetricsLine
    sent: int


Watch = Callable[[Progress], None]


def sent_in(lines: Sequence[MetricsLine]) -> int:
    """How many bytes were sent in rounds, down and up, from their lines of metrics."""
    return sum(line["bytes_down"] + line["bytes_up"] for line in lines)


class Stopped(Exception):
    """Somebody asked to stop (Ctrl-C, SIGTERM); the checkpoint of the last whole round is written."""

    def __init__(self, t: int, path: Path) -> None:
        super().__init__(f"stopped after round {t}. Go on with: fedmix train {path} --resume")


def refuse_what_cannot_run(experiment: Experiment, where: Where) -> None:
    """Refuse what cannot be trained, before anything on disk is touched."""
    where.refuse(experiment)
    # A warm start from another model is refused here.
    starting_state(experiment)
    if experiment.recipe.privacy.noise:
        accountant_or_complain()


def run(
    experiment: Experiment,
    directory: RunDirectory,
    where: Where = Where(),  # noqa: B008 (frozen)
    watch: Watch | None = None,
    data_dir: str | None = None,
) -> Summary:
    """Train, from the last checkpoint if there is one, and write the summary, which is also returned.

    data_dir: where clients that are other processes look for the data first.
    """
    training = _Training.begin(experiment, directory, where.kind.states_elsewhere, watch)
    if training is None:
        return _summary_of_ended_run(directory)
    folder = directory.path / schema.CLIENTS
    stage = Stage(experiment, training.store, folder, data_dir)
    return training.finish_with(lambda train: where.run(stage, lambda engine: train(engine, where.device)))


def run_over(experiment: Experiment, directory: RunDirectory, engine: Engine) -> Summary:
    """The same with clients that are somewhere else, behind an engine that is connected already."""
    training = _Training.begin(experiment, directory, engine.states_elsewhere, None)
    if training is None:
        return _summary_of_ended_run(directory)
    return training.finish_with(lambda train: train(engine, "cpu"))


def _summary_of_ended_run(directory: RunDirectory) -> Summary:
    summary = directory.summary()
    assert summary is not None
    return summary


class _Training:
    """A run on its way: the server's state and what is carried along change from round to round."""

    def __init__(
        self,
        experiment: Experiment,
        directory: RunDirectory,
        checkpoints: Checkpoints,
        checkpoint: Checkpoint | None,
        watch: Watch | None,
    ) -> None:
        self.experiment = experiment
        self.recipe = experiment.recipe
        self.directory = directory
        self.checkpoints = checkpoints
        self.private_states = checkpoint.clients if checkpoint else {}
        self.state: State = checkpoint.state if checkpoint else starting_state(experiment)
        self.carried = checkpoint.carried if checkpoint else Carried()
        self.releases = self._releases(checkpoint is None)
        self.watch: Watch = watch or (lambda progress: None)
        self.evaluations = evaluation_rounds(self.recipe)
        self.carried.keep_only(self.evaluations)
        self.fine_tunings = fine_tuned_rounds(self.recipe, len(experiment.federation))

    @staticmethod
    def begin(
        experiment: Experiment, directory: RunDirectory, states_elsewhere: bool, watch: Watch | None
    ) -> "_Training | None":
        """From the last checkpoint, or from the start; None: the run has ended already."""
        checkpoints = Checkpoints(directory.path / schema.CHECKPOINTS, experiment.recipe.checkpoint.keep)
        checkpoint = checkpoints.load_last(experiment.algorithm.state_from)
        summary = directory.summary()
        if checkpoint and _has_ended(checkpoint, summary, experiment.recipe.rounds):
            return None
        if checkpoint:
            _refuse_states_elsewhere(checkpoint, states_elsewhere, directory.path)
        _describe(experiment, directory)
        directory.go_on()
        directory.cut_metrics(checkpoint.round if checkpoint else 0)
        return _Training(experiment, directory, checkpoints, checkpoint, watch)

    def _releases(self, is_new: bool) -> Releases | None:
        """Where it is noted who is asked for noisy answers; None: there is no noise."""
        if not self.recipe.privacy.noise:
            return None
        if is_new:
            self.carried.releases = FIRST
        return Releases(self.directory.path, self.carried.releases or FIRST)

    def store(self) -> Store:
        """The clients' private states as the last checkpoint has them."""
        on_disk = self.recipe.checkpoint.clients == "disk"
        store: Store = DiskStore(self.directory.path / schema.CLIENTS) if on_disk else MemoryStore()
        for client, private in self.private_states.items():
            store.put(client, private)
        # What the checkpoint has is not new to the next one.
        store.take_changed()
        return store

    def finish_with(self, with_engine: Callable[[Callable[[Engine, str], Summary]], Summary]) -> Summary:
        """Train with the engine that `with_engine` hands over. Signals that come meanwhile wait for the end of a round."""
        with deferred_signals() as asked_to_stop:
            summary = with_engine(lambda engine, device: self._train(engine, device, asked_to_stop))
        self.directory.finish(summary)
        return summary

    def _train(self, engine: Engine, device: str, asked_to_stop: Callable[[], bool]) -> Summary:
        """The rounds that are left, each with its metrics, evaluation and checkpoint; then the summary."""
        recipe = self.recipe
        engine.remember(self.carried.engine or {})
        self.directory.describe_environment(engine.name, engine.workers, device, recipe.seed)
        sent = sent_in(self.directory.metrics())
        for step in self._rounds(engine):
            line = self._after_round(engine, step)
            sent += sent_in([line])
            # This is asked once: a signal between here and the end of the step waits for the next step.
            stop = asked_to_stop() and step.t < recipe.rounds
            if stop or self._checkpoint_is_due(engine, step.t):
                self.checkpoints.save(self.state, engine.store, self.carried)
            self.watch(Progress(step.t, recipe.rounds, line, sent))
            if stop:
                raise Stopped(step.t, self.directory.path)
        lines = self.directory.metrics()
        return summarise(self.experiment, engine, self.state, self.carried, lines, self.directory.path)

    def _rounds(self, engine: Engine) -> Iterator[Round]:
        recipe = self.recipe
        return rounds(
            self.experiment.algorithm,
            engine,
            self.state,
            recipe.seed,
            len(self.experiment.federation),
            recipe.clients_per_round,
            recipe.rounds,
            recipe.server,
            self._about_to_ask,
        )

    def _about_to_ask(self, t: int, clients: Sequence[int]) -> None:
        if self.releases:
            self.releases.note(t, clients)

    def _after_round(self, engine: Engine, step: Round) -> MetricsLine:
        """Take the round in, evaluate where it is time to, and write its line."""
        carried = self.carried
        self.state = step.state
        if self.releases and carried.releases is not None:
            carried.releases = self.releases.last
        for reply in step.replies:
            carried.note_reply(reply.client, reply.message.numbers)
        carried.seconds += step.seconds
        if engine.states_elsewhere:
            carried.engine = engine.memory()
        line = line_of(step)
        if step.t in self.evaluations:
            with_fine_tuning = step.t in self.fine_tunings
            line.update(evaluated(self.experiment, engine, step, carried, with_fine_tuning))  # type: ignore[typeddict-item]
        return self.directory.append_metrics(line)

    def _checkpoint_is_due(self, engine: Engine, t: int) -> bool:
        """Whether the state after round t must be saved.

        Clients that keep their states themselves have those of two rounds: the server may not fall further behind.
        """
        return t == self.recipe.rounds or engine.states_elsewhere or t % self.recipe.checkpoint.every == 0


def _has_ended(checkpoint: Checkpoint, summary: Summary | None, rounds: int) -> bool:
    """Whether nothing is left to train: a run that is to have more rounds than before has not ended."""
    return summary is not None and checkpoint.round == rounds == summary["rounds"]


def _refuse_states_elsewhere(checkpoint: Checkpoint, states_elsewhere: bool, path: Path) -> None:
    """A run cannot change to an engine that keeps private states in another place."""
    were_elsewhere = checkpoint.carried.engine is not None
    if states_elsewhere != were_elsewhere:
        words = "with --engine flower" if were_elsewhere else "without --engine flower"
        raise RunError(f"{path} must go on {words}: its clients' private states are where it was trained.")


def _describe(experiment: Experiment, directory: RunDirectory) -> None:
    """Write down what a run is, before its first round; refuse what does not fit a run that is resumed."""
    recipe = experiment.recipe
    code = "" if recipe.algorithm in CATALOGUE else code_of(experiment.page)
    directory.describe_federation(experiment.federation)
    if experiment.algorithm.layout.experts:
        experiment.model.stacks(experiment.algorithm.layout.expert)  # found out now, so that it is written down
    directory.describe_run(
        experiment.page.title, recipe.algorithm, experiment.model.structure, code, experiment.model.found_out
    )
    directory.describe_recipe(recipe)
