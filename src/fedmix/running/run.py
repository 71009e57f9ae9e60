"""One run from start to end: rounds, evaluations, checkpoints, summary. Stopped and resumed, it gives the same numbers."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedmix import schema
from fedmix.catalogue import CATALOGUE
from fedmix.core.score import LOWER_IS_BETTER, MORE_MEASURES
from fedmix.core.server import State
from fedmix.engines.store import DiskStore, MemoryStore, Store
from fedmix.errors import RunError, SettingError, one_of
from fedmix.rng import cohort_by_size, stream
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
from fedmix.schema import VALIDATION_KINDS, MetricsLine, Summary
from fedmix.settings.build import Experiment, code_of
from fedmix.settings.importing import named_object
from fedmix.settings.recipe import Recipe


@dataclass(frozen=True)
class Progress:
    """What is known after each round. sent: how many bytes were sent in all rounds up to this one."""

    done: int
    total: int
    metrics: MetricsLine
    sent: int


FIRST_ROUNDS = 10  # after so many rounds a run should have learnt something
LEAST_FALL = 0.01  # the share by which its loss should have fallen
Watch = Callable[[Progress], None]
# (round, points of each client, how many are wanted, a NumPy generator) -> clients
Sampler = Callable[[int, Sequence[int], int, Any], Sequence[int]]


def sent_in(lines: Sequence[MetricsLine]) -> int:
    """How many bytes were sent in rounds, down and up, from their lines of metrics."""
    return sum(line["bytes_down"] + line["bytes_up"] for line in lines)


class Stop(Exception):
    """Raised by a callback that wants the run to end here, with its summary: raise fedmix.Stop("it is good enough")."""


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
    sampler: Sampler | None = None,
) -> Summary:
    """Train, from the last checkpoint if there is one, and write the summary, which is also returned.

    data_dir: where clients that are other processes look for the data first. sampler: who takes part in a round, where that
    was handed over in Python.
    """
    training = _Training.begin(experiment, directory, where.kind.states_elsewhere, watch, sampler)
    if training is None:
        return _summary_of_ended_run(directory)
    folder = directory.path / schema.CLIENTS
    stage = Stage(experiment, training.store, folder, data_dir)
    return training.finish_with(lambda train: where.run(stage, lambda engine: train(engine, where.device)))


def run_over(experiment: Experiment, directory: RunDirectory, engine: Engine) -> Summary:
    """The same with clients that are somewhere else, behind an engine that is connected already."""
    training = _Training.begin(experiment, directory, engine.states_elsewhere, None, None)
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
        sampler: Sampler | None,
    ) -> None:
        self.experiment = experiment
        self.choose = chooser(experiment, sampler)
        self.recipe = experiment.recipe
        self.directory = directory
        self.checkpoints = checkpoints
        self.private_states = checkpoint.clients if checkpoint else {}
        self.state: State = checkpoint.state if checkpoint else starting_state(experiment)
        self.carried = checkpoint.carried if checkpoint else Carried()
        self.releases = self._releases(checkpoint is None)
        self.watch: Watch = watch or (lambda progress: None)
        self._first_losses = [line["loss"] for line in directory.metrics()][:FIRST_ROUNDS]
        self.evaluations = evaluation_rounds(self.recipe)
        self.carried.keep_only(self.evaluations)
        self.fine_tunings = fine_tuned_rounds(self.recipe, len(experiment.federation))

    @staticmethod
    def begin(
        experiment: Experiment,
        directory: RunDirectory,
        states_elsewhere: bool,
        watch: Watch | None,
        sampler: Sampler | None,
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
        return _Training(experiment, directory, checkpoints, checkpoint, watch, sampler)

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
            why = self._why_to_end(Progress(step.t, recipe.rounds, line, sent))
            if why:
                return self._end_early(engine, step, why)
            if stop:
                raise Stopped(step.t, self.directory.path)
        return self._summarise(self.experiment, engine)

    def _summarise(self, experiment: Experiment, engine: Engine) -> Summary:
        lines = self.directory.metrics()
        summary = summarise(experiment, engine, self.state, self.carried, lines, self.directory.path)
        if self.carried.best:
            best = self.carried.best
            summary["best"] = {
                "round": int(best["round"]),
                "by": self.recipe.evaluation.best_by,
                "value": best["value"],
            }
        return summary

    def _why_to_end(self, progress: Progress) -> str:
        """Why the run ends after this round though it could go on: a callback says so, or nothing gets better; "": it does."""
        try:
            self.watch(progress)
        except Stop as stop:
            return str(stop) or "a callback asked for it"
        patience = self.recipe.evaluation.patience
        since = int(self.carried.best.get("since", 0))
        if patience and since >= patience and progress.done in self.evaluations and progress.done < progress.total:
            best = self.carried.best_round
            return f"no better evaluation on validation data in {since} since round {best}"
        return ""

    def _end_early(self, engine: Engine, step: Round, why: str) -> Summary:
        """End after this round as if it were the last one: evaluated, saved, with a summary that says why."""
        if step.t not in self.evaluations:
            evaluated(self.experiment, engine, step, self.carried, False)
        self.checkpoints.save(self.state, engine.store, self.carried)
        shorter = replace(self.experiment, recipe=replace(self.recipe, rounds=step.t))
        summary = self._summarise(shorter, engine)
        summary["stopped"] = {"why": why, "of": self.recipe.rounds}
        return summary

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
            self.choose,
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
        line = line_of(step, self.experiment.federation.names)
        self._first_losses = [*self._first_losses, line["loss"]][:FIRST_ROUNDS]
        if step.t == min(FIRST_ROUNDS, self.recipe.rounds) and not_moving(self._first_losses):
            line["warnings"] = [*line.get("warnings", []), _what_to_try(self.recipe, self._first_losses)]
        if step.t in self.evaluations:
            with_fine_tuning = step.t in self.fine_tunings
            line.update(evaluated(self.experiment, engine, step, carried, with_fine_tuning))  # type: ignore[typeddict-item]
            by = self.recipe.evaluation.best_by
            carried.note_best(step.t, judged_by(line, by.lstrip("-")), by.startswith("-") or by in LOWER_IS_BETTER)
        return self.directory.append_metrics(line)

    def _checkpoint_is_due(self, engine: Engine, t: int) -> bool:
        """Whether the state after round t must be saved.

        Clients that keep their states themselves have those of two rounds: the server may not fall further behind.
        """
        best = t in self.evaluations and self.carried.best_round == t
        return best or t == self.recipe.rounds or engine.states_elsewhere or t % self.recipe.checkpoint.every == 0


def not_moving(losses: Sequence[float]) -> bool:
    """Whether the loss of the first rounds has hardly fallen: by less than a hundredth from their first third to their last."""
    third = len(losses) // 3
    if third < 1:
        return False
    first, last = sum(losses[:third]) / third, sum(losses[-third:]) / third
    return last > first - LEAST_FALL * abs(first)


def _what_to_try(recipe: Recipe, losses: Sequence[float]) -> str:
    server = f"server.server_lr (now {recipe.server.server_lr:g}) or " if recipe.server.optimizer != "average" else ""
    return (
        f"not moving: the loss is {losses[-1]:.3g} after {len(losses)} rounds and was {losses[0]:.3g} after the first; raise "
        f"{server}training.client_lr (now {recipe.training.client_lr:g}) tenfold, or lower them if it grows"
    )


def chooser(experiment: Experiment, sampler: Sampler | None) -> Callable[[int], list[int]] | None:
    """Who takes part in a round, as a function of its number; None: clients that are all equally likely."""
    recipe, federation = experiment.recipe, experiment.federation
    clients = len(federation)
    count = recipe.clients_per_round or clients
    sizes = [federation.size(s) for s in range(clients)]
    if sampler is None and recipe.sampling == "by-size":
        return lambda t: cohort_by_size(recipe.seed, t, sizes, count)
    named = sampler or (named_object(recipe.sampling, "sampling") if ":" in recipe.sampling else None)
    if named is None:
        return None

    def choose(t: int) -> list[int]:
        rng = stream(recipe.seed, "round", t, "cohort").numpy
        try:
            chosen = sorted({operator.index(s) for s in named(t, sizes, count, rng)})
        except TypeError as error:
            raise SettingError(
                f"a sampler must take (round, points of each client, how many, rng) and give numbers of clients: {error}."
            ) from error
        if not chosen or not 0 <= chosen[0] <= chosen[-1] < clients:
            raise SettingError(
                f"a sampler must give numbers of clients, 0 to {clients - 1}. In round {t} it gave {chosen}."
            )
        return chosen

    return choose


def judged_by(line: MetricsLine, by: str) -> float | None:
    """What an evaluation is judged by: a kind of accuracy on validation data, or a measure with the server's weights."""
    if by in VALIDATION_KINDS:
        accuracies: Mapping[str, Any] = line["accuracy"]["validation"]
        value = accuracies[by]
        mean: float | None = value["mean"] if isinstance(value, dict) else value
        return mean
    measures = line.get("scores", {})
    if by in MORE_MEASURES and by not in measures:
        raise SettingError(
            f"evaluation.best_by = {by!r} needs clients with validation points of two classes. None has them."
        )
    if by not in measures:
        raise SettingError(one_of("evaluation.best_by", by, [*VALIDATION_KINDS, *measures]))
    return measures[by]


def _has_ended(checkpoint: Checkpoint, summary: Summary | None, rounds: int) -> bool:
    """Whether nothing is left to train: a run that is to have more rounds than before has not ended."""
    if summary is None or checkpoint.round != summary["rounds"]:
        return False
    asked_for = summary["stopped"]["of"] if "stopped" in summary else summary["rounds"]
    return rounds in (asked_for, summary["rounds"])


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
