"""`check_method` holds any method against the laws that every method obeys, as scikit-learn's check_estimator does.

from fedmix.testing import check_method
check_method("mine:fedprox", mu=0.1)
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmix.catalogue import CATALOGUE
from fedmix.core.algorithm import Algorithm
from fedmix.core.mixture import ClientModule
from fedmix.core.tree import Params, flatten
from fedmix.core.types import Message, Reply
from fedmix.data.federation import Federation
from fedmix.engines.client import Task, perform, perform_group
from fedmix.engines.serial import SerialEngine
from fedmix.engines.store import MemoryStore
from fedmix.methods.page import Page
from fedmix.rng import stream
from fedmix.running.directory import RunDirectory
from fedmix.running.loop import Round, rounds
from fedmix.running.run import run
from fedmix.running.where import Where
from fedmix.settings.build import Experiment, build, find_page
from fedmix.settings.reading import make_recipe
from fedmix.settings.recipe import OWN

NEAR = 1e-5  # how far engines may be apart after three rounds


def check_method(method: str | Page, **settings: Any) -> list[str]:
    """Train a small federation with this method, and hold it against every law. Gives the names of the laws it passed.

    method: a name, `package.module:name`, or a page. settings: the method's. An AssertionError says what does not hold.
    """
    trial = _Trial(method, settings)
    for law in LAWS:
        try:
            law(trial)
        except Exception as error:  # whatever goes wrong, the law that it breaks is named
            what = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            words = (law.__doc__ or law.__name__).strip()
            raise AssertionError(f"{trial.title}: {words} {what}".strip()) from error
    return [law.__name__ for law in LAWS]


class _Trial:
    """Small experiments with one method."""

    def __init__(self, method: str | Page, settings: dict[str, Any]) -> None:
        self.page = method if isinstance(method, Page) else None
        self.name = OWN if isinstance(method, Page) else method
        section = CATALOGUE[self.name].section if self.name in CATALOGUE else "own"
        self.settings = {f"{section}.{key}": value for key, value in settings.items()}
        self.federation = _blobs()

    @property
    def title(self) -> str:
        return find_page(self.name, self.page).title

    def experiment(self, **changes: Any) -> Experiment:
        base = {
            "rounds": 3,
            "data.source": OWN,
            "model.hidden": [8],
            "training.batch_size": 6,
            "training.client_lr": 0.1,
            "server.server_lr": 0.02,
            "evaluation.share_private": True,
            "checkpoint.every": 1,
        }
        recipe = make_recipe({"name": "check"}, self.name, base | self.settings | changes)
        return build(recipe, self.federation, page=self.page)


def _blobs(clients: int = 4, points: int = 24) -> Federation:
    """Clients of different sizes with three classes of points in the plane, moved a little on each client."""
    rng = np.random.default_rng(0)
    centres = np.array([[0, 2], [2, 0], [-2, -2]])
    sites = {}
    for s in range(clients):
        y = rng.integers(0, 3, size=points + 4 * s)
        x = centres[y] + 0.3 * s + rng.normal(size=(len(y), 2))
        sites[f"site-{s}"] = {"x": x, "y": y}
    return Federation.from_clients(sites)


def _train(experiment: Experiment) -> tuple[list[Round], dict[int, Params]]:
    """The rounds of a run, and the clients' private states after it."""
    algorithm, federation, recipe = experiment.algorithm, experiment.federation, experiment.recipe
    store, seed = MemoryStore(), recipe.seed
    engine = SerialEngine(algorithm, federation, seed, store)
    state = algorithm.init(seed)
    steps = list(rounds(algorithm, engine, state, seed, len(federation), 0, recipe.rounds))
    return steps, {s: store.get(s) or {} for s in store.clients()}


def _same(tensors: Params, other: Params, near: float = 0.0) -> None:
    """Refuse tensors that are more than `near` apart."""
    assert tensors.keys() == other.keys(), f"Names differ: {sorted(tensors.keys() ^ other.keys())[:5]}."
    for name, value in tensors.items():
        apart = float((value.double() - other[name].double()).abs().max()) if value.numel() else 0.0
        assert apart <= near, f"{name} differs by {apart:.2g}."


def same_seed_same_numbers(trial: _Trial) -> None:
    """The same recipe and seed must give the same numbers."""
    first, _ = _train(trial.experiment())
    again, _ = _train(trial.experiment())
    _same(flatten(first[-1].state), flatten(again[-1].state))


def it_learns(trial: _Trial) -> None:
    """The training loss must fall."""
    steps, _ = _train(trial.experiment(rounds=12))
    assert steps[-1].loss < 0.9 * steps[0].loss, (
        f"It was {steps[0].loss:.3f} and is {steps[-1].loss:.3f} after 12 rounds."
    )


def nothing_given_is_changed(trial: _Trial) -> None:
    """Messages, states and private states must not be changed in place."""
    experiment = trial.experiment()
    algorithm, data = experiment.algorithm, experiment.federation.examples(0, "train")
    state, private = algorithm.init(0), algorithm.new_client(0, 0)
    message = algorithm.broadcast(state, 0)
    given = [flatten(state), private, dict(message.tensors)]
    before = [{name: value.clone() for name, value in flat.items()} for flat in given]
    reply, _ = algorithm.client_update(message, private, data, stream(0, "x"), None)
    algorithm.server_update(state, [Reply(0, reply)])
    for flat, copy in zip(given, before, strict=True):
        _same(flat, copy)


def private_stays_private(trial: _Trial) -> None:
    """What is private or frozen must not be in a message, and bytes must be those of what is placed as shared or expert."""
    experiment = trial.experiment()
    layout, (steps, privates) = experiment.algorithm.layout, _train(experiment)
    for reply in steps[-1].replies:
        names = set(reply.message.tensors)
        crossed = names & set(privates[reply.client])
        assert not crossed, f"{sorted(crossed)} crossed the wire."
        assert not names & {*layout.private, *layout.frozen}
        counted = sum(value.numel() * value.element_size() for value in reply.message.tensors.values())
        assert reply.message.nbytes == counted


def replies_are_as_declared(trial: _Trial) -> None:
    """An honest reply must pass the checks, and one with a name too many must not."""
    experiment = trial.experiment()
    algorithm, data = experiment.algorithm, experiment.federation.examples(1, "train")
    message = algorithm.broadcast(algorithm.init(0), 1)
    reply, _ = algorithm.client_update(message, algorithm.new_client(0, 1), data, stream(0, "x"), None)
    assert algorithm.check(message, reply) is None, str(algorithm.check(message, reply))
    more = Message({**reply.tensors, "expert.x.y": torch.zeros(1)}, reply.numbers)
    assert algorithm.check(message, more) is not None


def engines_agree(trial: _Trial) -> None:
    """Clients side by side must give what each gives alone."""
    experiment = trial.experiment()
    algorithm, (steps, privates) = experiment.algorithm, _train(experiment)
    tasks = [Task("train", 4, s, algorithm.broadcast(steps[-1].state, s)) for s in sorted(privates)]
    known = [privates[task.client] for task in tasks]
    args = (algorithm, experiment.federation, 0)
    together = perform_group(*args, tasks, known)
    for (message, after), task, private in zip(together, tasks, known, strict=True):
        alone, kept = perform(*args, task, private)
        _same(dict(message.tensors), dict(alone.tensors), NEAR)
        _same(after, kept, NEAR)


def a_resumed_run_is_one_that_never_stopped(trial: _Trial) -> None:
    """A run that was stopped and resumed must end where one ends that never stopped."""
    ends = []
    with tempfile.TemporaryDirectory() as folder:
        for name, stops in (("whole", [3]), ("resumed", [2, 3])):
            for last in stops:
                experiment = trial.experiment(rounds=last)
                goes_on = last != stops[0]
                directory = RunDirectory.open(Path(folder) / name, experiment.recipe, resume=goes_on, overwrite=False)
                try:
                    ends.append(run(experiment, directory, Where("serial")))
                finally:
                    directory.close()
    whole, _, resumed = ends
    for measure in ("loss", "bytes_up", "bytes_down"):
        assert whole[measure] == resumed[measure], f"{measure} was {whole[measure]}, now {resumed[measure]}."
    assert whole["scores"] == resumed["scores"]


def predictions_are_probabilities(trial: _Trial) -> None:
    """log p(y|x, s) must be normalised, and the exported module must give the same."""
    experiment = trial.experiment()
    algorithm, (steps, privates) = experiment.algorithm, _train(experiment)
    x = experiment.federation.x[:7]
    message = algorithm.broadcast(steps[-1].state, 1)
    with torch.no_grad():
        log_p = algorithm.predict(message, privates[1], x)
        exported = ClientModule(algorithm, message, privates[1]).eval()(x)
    assert torch.allclose(log_p.exp().sum(dim=1), torch.ones(7), atol=1e-5)
    assert torch.allclose(exported, log_p, atol=1e-5), "The module gives something else."


def adapting_takes_as_long_as_it_is_told(trial: _Trial) -> None:
    """A new client must train its private parts, and only those, for as many epochs as it is told."""
    experiment = trial.experiment()
    algorithm, data = experiment.algorithm, experiment.federation.examples(0, "train")
    message, new = algorithm.newcomer(algorithm.init(0), True), algorithm.new_client(0, 0)
    _, short = algorithm.adapt(message, new, data, stream(0), 1)
    sent_back, long = algorithm.adapt(message, new, data, stream(0), 20)
    moved = {field.moved_from for field in algorithm.method.reply.values()}
    for name, value in message.tensors.items():
        assert name in moved or torch.equal(sent_back.tensors[name], value), f"{name} was changed."
    trained = [name for name in new if not torch.equal(new[name], long[name])]
    if trained:
        longer = any(not torch.equal(short[name], long[name]) for name in trained)
        assert longer, "20 epochs are as long as one."
    else:
        assert not _has_private_parts_to_train(algorithm, new), "Nothing is trained."


def _has_private_parts_to_train(algorithm: Algorithm, private: Params) -> bool:
    return algorithm.keeps_something and any(map(algorithm.method.trains, private))


def sums_are_enough(trial: _Trial) -> None:
    """From sums over the cohort the server must come to the same weights, where the method says that sums are enough."""
    if trial.experiment().algorithm.method.needs_clients:
        return
    ends = []
    for how in ("clients", "linear"):
        steps, _ = _train(trial.experiment(**{"server.optimizer": "average", "server.aggregation": how}))
        state = replace(steps[-1].state, extras={})
        ends.append(flatten(state))
    _same(ends[0], ends[1], NEAR)


LAWS: Sequence[Callable[[_Trial], None]] = (
    same_seed_same_numbers,
    it_learns,
    nothing_given_is_changed,
    private_stays_private,
    replies_are_as_declared,
    engines_agree,
    a_resumed_run_is_one_that_never_stopped,
    predictions_are_probabilities,
    adapting_takes_as_long_as_it_is_told,
    sums_are_enough,
)
