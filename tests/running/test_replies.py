"""Replies that are wrong are refused by client, field and reason, and the round goes on with the others."""

import json
import re
from dataclasses import replace

import pytest
import torch
from conftest import METHODS, small_experiment, train_serially

from fedmix.core import guard
from fedmix.core.settings import ServerSettings
from fedmix.core.tree import flatten
from fedmix.core.types import Message
from fedmix.engines.client import Absent
from fedmix.engines.serial import SerialEngine
from fedmix.engines.store import MemoryStore
from fedmix.errors import RunError
from fedmix.running.directory import RunDirectory
from fedmix.running.loop import rounds
from fedmix.running.run import run
from fedmix.running.where import ENGINES
from fedmix.schema import read_metrics
from fedmix.settings.build import build

LIAR = 2


class Lying(SerialEngine):
    """One client's answers are changed on their way, or do not come."""

    def __init__(self, *args, lie):
        super().__init__(*args)
        self.lie = lie

    def run(self, tasks):
        return [
            self.lie(answer) if task.client == LIAR and task.kind == "train" else answer
            for task, answer in zip(tasks, super().run(tasks), strict=True)
        ]


def one_round(experiment, lie, server=None):
    recipe, algorithm = experiment.recipe, experiment.algorithm
    engine = Lying(algorithm, experiment.federation, recipe.seed, MemoryStore(), lie=lie)
    settings = server or recipe.server
    return next(rounds(algorithm, engine, algorithm.init(recipe.seed), recipe.seed, 4, 0, 1, settings))


def changed(name, change):
    def lie(answer):
        return Message({**answer.tensors, name: change(answer.tensors[name])}, answer.numbers)

    return lie


def numbers(**given):
    return lambda answer: Message(answer.tensors, {**answer.numbers, **given})


def without(name):
    return lambda answer: Message({n: v for n, v in answer.tensors.items() if n != name}, answer.numbers)


def with_another(name, value):
    return lambda answer: Message({**answer.tensors, name: value}, answer.numbers)


LIES = {
    "nan": (changed("expert.1.out.weight", lambda w: w * float("nan")), "expert.1.out.weight", "not finite"),
    "infinite phi": (changed("phi", lambda w: w + float("inf")), "phi", "not finite"),
    "shape": (changed("expert.0.out.bias", lambda w: w[:2]), "expert.0.out.bias", r"must be \[3\], is \[2\]"),
    "type": (changed("expert.0.out.bias", lambda w: w.double()), "expert.0.out.bias", "float64"),
    "phi's shape": (changed("phi", lambda w: w[:, :2]), "phi", "must be"),
    "an expert that was not sent": (with_another("expert.7.out.bias", torch.zeros(3)), "expert.7.out.bias", "not sent"),
    "phi off the simplex": (changed("phi", lambda w: w * 1.1), "phi", "off the simplex"),
    "negative phi": (changed("phi", lambda w: w + torch.tensor([0.6, -0.6, 0.0])), "phi", "off the simplex"),
    "q off the simplex": (changed("q_zs", lambda w: w * 0.5), "q_zs", "off the simplex"),
    "half an expert": (without("expert.1.out.weight"), "expert.1.out.weight", "missing"),
    "no phi": (without("phi"), "phi", "missing"),
    "no q": (without("q_zs"), "q_zs", "missing"),
    "nothing": (lambda answer: Message({}, answer.numbers), "expert.0", "missing"),
    "negative count": (numbers(n=-5), "n", "must be a whole number of points"),
    "half a point": (numbers(n=2.5), "n", "whole number"),
    "absurd count": (numbers(n=10**12), "n", "whole number"),
    "a count beyond the cohort's": (numbers(n=10**6), "n", "cohort's median"),
    "no loss": (lambda a: Message(a.tensors, {"n": a.numbers["n"]}), "loss", "finite"),
    "infinite loss": (numbers(loss=float("inf")), "loss", "finite"),
}


OTHERWISE = {
    "phi off the simplex",
    "negative phi",
    "a count beyond the cohort's",
}  # linear: these numbers say other things
LIES_IN_SUMS = {
    **{name: lie for name, lie in LIES.items() if name not in OTHERWISE},
    "phi off the simplex": (changed("phi", lambda w: w + 100), "phi", "off the simplex"),
    "a count that is not that of q": (numbers(n=10**6), "q_zs", "off the simplex"),
}


@pytest.mark.parametrize(
    ("aggregation", "lie"),
    [("clients", lie) for lie in LIES] + [("linear", lie) for lie in LIES_IN_SUMS],
)
def test_a_lie_is_refused_by_name_and_the_others_count(aggregation, lie):
    tell, field, reason = (LIES if aggregation == "clients" else LIES_IN_SUMS)[lie]
    experiment = small_experiment("fedmix", **{"server.aggregation": aggregation})
    step = one_round(experiment, tell)
    (refusal,) = step.refused
    assert refusal.client == LIAR
    assert refusal.field.startswith(field)
    assert re.search(reason, refusal.reason), refusal
    assert [reply.client for reply in step.replies] == [0, 1, 3]
    absent = one_round(experiment, lambda _: Absent("gone"))
    for name, value in flatten(step.state).items():  # as if it had not answered at all
        assert torch.equal(value, flatten(absent.state)[name]), name
        assert torch.isfinite(value).all()


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("fedmix", "independent")])
def test_every_method_guards_its_weights(method):
    experiment = small_experiment(method)
    name = next(iter(experiment.algorithm.broadcast(experiment.algorithm.init(0), 0).tensors))
    for lie, reason in (
        (changed(name, lambda w: w / 0), "not finite"),
        (changed(name, lambda w: w[:1]), "must be"),
        (without(name), "missing"),
        (with_another("gate.A", torch.zeros(2)), "not sent"),
        (numbers(n=0), "whole number"),
    ):
        (refusal,) = one_round(experiment, lie).refused
        assert reason in refusal.reason


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("changes", [{}, {"server.aggregation": "linear"}, {"privacy.clip": 1.0, "privacy.noise": 0.1}])
def test_honest_replies_are_never_refused(method, changes):
    steps, _ = train_serially(small_experiment(method, **changes))
    assert not any(step.refused or step.absent for step in steps)
    assert len(steps[-1].replies) == 4


def test_honest_replies_of_pruned_and_odd_mixtures_are_not_refused_either():
    for changes in (
        {"fedmix.eta": 0.9, "fedmix.gamma": 0.3},
        {"fedmix.phi": "private"},
        {"fedmix.prior": "reported"},
        {"fedmix.objective": "direct", "fedmix.marginal": "exact"},
        {"fedmix.experts": 1},
    ):
        steps, _ = train_serially(small_experiment("fedmix", **changes))
        assert not any(step.refused for step in steps), changes


@pytest.mark.parametrize("aggregation", ["clients", "linear"])
def test_a_norm_far_over_the_cohorts_is_refused_where_the_recipe_says_so(aggregation):
    experiment = small_experiment("fedavg", **{"server.aggregation": aggregation})
    far = changed("out.bias", lambda w: w + 1000)
    assert not one_round(experiment, far).refused
    settings = ServerSettings(norm_limit=10.0, aggregation=aggregation)
    (refusal,) = one_round(experiment, far, settings).refused
    assert (refusal.client, refusal.field) == (LIAR, "weights")
    assert "over 10 times the cohort's median" in refusal.reason
    assert not one_round(experiment, lambda answer: answer, settings).refused


def test_too_few_replies_end_the_run_which_can_be_resumed(tmp_path, monkeypatch):
    experiment = small_experiment("fedmix", **{"server.min_replies": 4, "rounds": 2})
    with pytest.raises(
        RunError, match=r"3 of 4 clients gave an answer that can be used, and server\.min_replies asks for 4"
    ):
        one_round(experiment, lambda _: Absent("its machine is off"))
    everybody_lies = replace(experiment, recipe=replace(experiment.recipe, server=ServerSettings()))
    engine = Lying(experiment.algorithm, experiment.federation, 0, MemoryStore(), lie=lambda a: a)
    engine.run = lambda tasks: [Absent("off") for _ in tasks]
    with pytest.raises(RunError, match="0 of 4 clients"):
        next(rounds(everybody_lies.algorithm, engine, experiment.algorithm.init(0), 0, 4, 0, 1))


def test_refusals_and_absences_are_in_the_metrics(tmp_path, monkeypatch):
    experiment = small_experiment("fedmix", rounds=2)
    lies = iter([LIES["nan"][0], lambda _: Absent("too late")])

    def lying_engine(_, stage):
        made = stage.experiment
        return Lying(
            made.algorithm, made.federation, made.recipe.seed, stage.store(), lie=lambda answer: next(lies)(answer)
        )

    monkeypatch.setitem(ENGINES, "local", ENGINES["local"]._replace(start=lying_engine))
    directory = RunDirectory.open(tmp_path / "r", experiment.recipe, resume=False, overwrite=False)
    run(build(experiment.recipe, experiment.federation), directory)
    directory.close()
    first, second = read_metrics(tmp_path / "r")
    name = experiment.federation.names[LIAR]
    why = {"client": LIAR, "name": name}
    assert first["refused"] == [{**why, "field": "expert.1.out.weight", "reason": "not finite"}]
    assert second["absent"] == [{**why, "reason": "too late"}]
    assert first["absent"] == second["refused"] == []
    json.dumps(first)


def test_large_numbers_are_finite_and_opposite_infinities_are_not():
    assert guard.not_finite({"w": torch.full((4,), 3e38)}) is None  # the sum overflows
    assert guard.not_finite({"w": torch.tensor([1.0, float("inf"), float("-inf")])}) == "w: not finite"
