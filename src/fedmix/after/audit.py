"""What the server could have learnt about the clients' labels: attacks on replies that are replayed from the run's seed.

The server follows the protocol and looks at what it gets (sec:privacy, 'Privacy implications'). With
server.aggregation = "linear" it gets sums over a cohort, and learns what they say about its members.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from fedmix.after import leakage
from fedmix.after.leakage import Vector
from fedmix.after.options import Options, Stages, nobody
from fedmix.after.restore import Restored
from fedmix.core.method import VECTORS
from fedmix.core.optim import rate_factor
from fedmix.core.placement import wire_name
from fedmix.core.privacy import summed
from fedmix.core.server import State
from fedmix.core.tree import Params
from fedmix.core.types import Message
from fedmix.engines.client import Task
from fedmix.engines.store import MemoryStore, Store
from fedmix.running.accounting import guarantee_of_run
from fedmix.running.evaluate import worst_decile
from fedmix.running.loop import everyone
from fedmix.running.start import starting_state
from fedmix.running.where import Stage
from fedmix.schema import AuditFile
from fedmix.settings.build import Experiment, build_algorithm
from fedmix.settings.recipe import Recipe

# The answers of this many clients are held at a time.
AT_ONCE = 10
# An estimate that is nearer to the truth than this is exact.
EXACT = 1e-6
Attack = Callable[["_Seen"], Vector | None]


@dataclass(frozen=True)
class _Seen:
    """What the server holds after a client's answer, or after the sum of several: numbers on which attacks work.

    points: how many points all members have together. steps: how many a member takes on average, each as long as one step of
    plain SGD at the recipe's rate. bias: b_s - b, summed over experts. phi_before: phi as it was sent. shares: p(c|s), where
    clients report it.
    """

    members: Sequence[int]
    points: float
    steps: float
    bias: Vector | None
    q: Vector | None
    phi: Vector | None
    phi_before: Vector | None
    shares: Vector | None

    @property
    def support(self) -> Any:
        """The values of c that some member holds, by the rows of phi that changed."""
        if self.phi is None or self.phi_before is None:
            return None
        return leakage.rows_changed(self.phi_before, self.phi)


def audit_run(run: Restored, options: Options, watch: Stages = nobody) -> AuditFile:
    """All attacks, at the start of training and at its end, as plain numbers: what `fedmix audit` prints and writes."""
    leakage.scipy_or_complain()
    began = time.perf_counter()
    result = {**run.about, **_Audit(run, options, watch).everything()}
    return cast(AuditFile, {**result, "seconds": time.perf_counter() - began})


class _Audit:
    def __init__(self, run: Restored, options: Options, watch: Stages) -> None:
        self.run, self.where, self.watch = run, options.where, watch
        self.recipe = run.experiment.recipe
        self.federation = run.experiment.federation
        self.everybody = range(len(self.federation))
        self.chosen = options.sample(len(self.federation), self.recipe.seed)
        self.labels = self._marginals(self.federation.y, self.federation.classes)
        # shares of c, where c is a category
        self.sides = {} if self.is_vector else self._marginals(self.federation.c, self.federation.categories)
        self.linear = self.recipe.server.aggregation == "linear"
        self.notes: dict[str, str] = {}
        if self.recipe.evaluation.share_private and run.experiment.algorithm.uses_private:
            self.notes["evaluation.share_private"] = (
                "clients also hand over private parts for accuracy without identity; the audit is of training, and does not "
                "look at them"
            )

    @property
    def is_vector(self) -> bool:
        return self.federation.side in VECTORS

    def _marginals(self, values: torch.Tensor, kinds: int) -> dict[int, Vector]:
        """How often each of the values 0, 1, ..., kinds - 1 occurs among each client's training points, as shares."""
        marginals = {}
        for s in self.everybody:
            points = torch.from_numpy(self.federation.parts["train"][s])
            counts = np.bincount(values[points].numpy(), minlength=kinds)
            marginals[s] = counts / counts.sum()
        return marginals

    def everything(self) -> dict[str, Any]:
        seen = self._replays()
        attacks: dict[str, dict[str, Any]] = {"start": {}, "end": {}}
        absent: dict[str, Any] = {"start": None, "end": None}
        self._attack_biases(seen, attacks)
        self._attack_posteriors(seen, attacks, absent)
        nothing_more = self.federation.side == "label" or self.is_vector
        return {
            "audited": len(self.chosen),
            "side": self.federation.side,
            "names": [self.federation.names[s] for s in self.chosen],
            "points": [self.federation.size(s) for s in self.chosen],
            "true": self._of_chosen(self.labels),
            "true_side": None if nothing_more else self._of_chosen(self.sides),
            "guess": self._guess(self.labels),
            "guess_side": None if nothing_more else self._guess(self.sides),
            "attacks": attacks,
            "absent": absent,
            "protection": self._protection(),
            "notes": self.notes,
        }

    def _of_chosen(self, marginals: dict[int, Vector]) -> list[list[float]]:
        return [marginals[s].tolist() for s in self.chosen]

    def _replays(self) -> dict[str, list["_Seen"]]:
        """What the server sees in a single full-batch step, in the first round, and in a round at the end."""
        start = starting_state(self.run.experiment)
        trained = MemoryStore()
        for s in self.run.store.clients():
            trained.put(s, self.run.store.get(s) or {})
        full_batch = max(self.federation.size(s) for s in self.everybody)
        once = replace(self.recipe.training, batch_size=full_batch, epochs=1, schedule="constant")
        single = self._experiment(replace(self.recipe, training=once))
        return {
            "single step": self._replay("a single step from the start", single, start, MemoryStore()),
            "start": self._replay("a round from the start", self.run.experiment, start, MemoryStore()),
            "end": self._replay("a round from the end", self.run.experiment, self.run.state, trained, again=True),
        }

    def _protection(self) -> dict[str, Any]:
        noisy_parts = self.run.experiment.algorithm.noisy_parts
        return {
            "aggregation": self.recipe.server.aggregation,
            "clip": self.recipe.privacy.clip,
            "noise": self.recipe.privacy.noise,
            **guarantee_of_run(self.recipe, noisy_parts, self.run.path, self.run.carried.releases),
        }

    def _attack_biases(self, seen: Mapping[str, Sequence[_Seen]], attacks: dict[str, dict[str, Any]]) -> None:
        """What the movement of the output bias says about labels."""
        if not self._bias_is_sent():
            self.notes["bias"] = "the output bias is not sent in training, or the model has none"
            return
        by_steps = partial(_by_steps, self.recipe.training.client_lr)
        attacks["start"]["bias_single_step"] = self._judge(seen["single step"], by_steps, self.labels)
        for when in attacks:
            attacks[when]["bias_steps"] = self._judge(seen[when], by_steps, self.labels)
            attacks[when]["bias_normalised"] = self._judge(seen[when], _normalised, self.labels)
            if self.recipe.training.label_counts:
                attacks[when]["bias_size"] = self._judge(seen[when], _by_size, self.labels)
        if self.recipe.training.label_counts:
            self.notes["training.label_counts"] = (
                "counts are in front of what is shared, and its bias moves by what they do not explain; "
                "estimates by steps take it to be near zero"
            )

    def _attack_posteriors(
        self, seen: Mapping[str, Sequence[_Seen]], attacks: dict[str, dict[str, Any]], absent: dict[str, Any]
    ) -> None:
        """What q(z|s), phi and the rows that come back unchanged say about c."""
        if not self._posterior_says_something():
            return
        for when in attacks:
            self.watch(f"solving for p(y|s), {when}", 0, 1)
            attacks[when]["posterior"] = self._judge(seen[when], _least_squares, self.sides)
            attacks[when]["posterior_whole"] = self._judge(seen[when], _whole, self.sides)
            if self._field("shares"):
                attacks[when]["reported"] = self._judge(seen[when], _reported, self.sides)
            absent[when] = self._absent(seen[when])

    def _experiment(self, recipe: Recipe) -> Experiment:
        """The run's experiment with other settings."""
        trained = self.run.experiment
        example = self.federation.inputs(torch.arange(2))
        clients, categories = len(self.federation), self.federation.categories
        algorithm = build_algorithm(recipe, trained.model, clients, categories, example, trained.page)
        return replace(trained, recipe=recipe, algorithm=algorithm)

    def _groups(self) -> list[list[int]]:
        """Clients that answer together: some at a time; where the server sees sums, whole cohorts as in a round."""
        if self.linear:
            return self._cohorts()
        return [self.chosen[start : start + AT_ONCE] for start in range(0, len(self.chosen), AT_ONCE)]

    def _cohorts(self) -> list[list[int]]:
        """Cohorts of a round's size that together have every chosen client."""
        everybody = list(self.everybody)
        size = self.recipe.clients_per_round or len(everybody)
        # The last cohort is filled up with the first clients.
        twice = everybody + everybody
        cohorts = [twice[start : start + size] for start in range(0, len(everybody), size)]
        return [cohort for cohort in cohorts if set(cohort) & set(self.chosen)]

    def _replay(
        self, stage: str, experiment: Experiment, state: State, store: Store, again: bool = False
    ) -> list[_Seen]:
        """Every client's answer to what it would be sent now, reduced to what attacks use. The answers are not kept.

        again: replay the last round that was trained, not the one after it, for which a rate schedule has no rate.
        """
        t = state.round if again else state.round + 1
        seen: list[_Seen] = []
        groups = self._groups()
        with self.where.open(Stage(experiment, lambda: store)) as engine:
            for done, cohort in enumerate(groups):
                self.watch(stage, done, len(groups))
                sent = [_in_round(experiment.algorithm.broadcast(state, s, training=True), t) for s in cohort]
                tasks = [Task("train", t, s, message) for s, message in zip(cohort, sent, strict=True)]
                answers = everyone(engine.run(tasks))
                seen += self._seen_of_cohort(experiment.recipe, cohort, sent, answers)
        return seen

    def _seen_of_cohort(
        self, recipe: Recipe, cohort: list[int], sent: Sequence[Message], answers: Sequence[Message]
    ) -> list["_Seen"]:
        if self.linear:
            return [self._sum_seen(recipe, cohort, sent[0], answers)]
        pairs = zip(cohort, sent, answers, strict=True)
        return [self._seen(recipe, [s], message, answer) for s, message, answer in pairs]

    def _field(self, tells: str) -> str | None:
        """The name of the reply's field that tells this about a client."""
        fields = self.run.experiment.algorithm.method.reply
        return next((name for name, field in fields.items() if field.tells == tells), None)

    def _tensor_that(self, tells: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The tensor of a reply that tells this about a client."""
        name = self._field(tells)
        return tensors.get(name) if name else None

    def _sent_before(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The posterior as it was sent, which a client's answer moved from."""
        name = self._field("posterior")
        return tensors.get(self.run.experiment.algorithm.method.reply[name].moved_from) if name else None

    def _seen(self, recipe: Recipe, members: list[int], sent: Message, answer: Message) -> _Seen:
        before, after = sent.tensors, answer.tensors
        moved = [_array(after[name] - before[name]) for name in self._bias_names(after)]
        n = float(answer.numbers["n"])
        q = _maybe(self._tensor_that("marginal", after))
        returned = list(self.run.experiment.algorithm.layout.unpack(after).experts)
        return _Seen(
            members=members,
            points=n,
            steps=self._steps(recipe, n, sent, None if q is None else q[returned]),
            bias=_total(moved),
            q=q,
            phi=_maybe(self._tensor_that("posterior", after)),
            phi_before=_maybe(self._sent_before(before)),
            shares=_maybe(self._tensor_that("shares", after)),
        )

    def _sum_seen(self, recipe: Recipe, members: list[int], sent: Message, answers: Sequence[Message]) -> _Seen:
        """The cohort's sums as if they were one client's: mean movement, mean q, mean phi."""
        total = summed([answer.tensors for answer in answers])
        n = sum(float(answer.numbers["n"]) for answer in answers)
        weighed = self._tensor_that("marginal", total)
        moved = [-_array(total[name] / self._weight_of(name, total, weighed, n)) for name in self._bias_names(total)]
        before = self._sent_before(sent.tensors)
        phi = _moved_by_sum(before, self._tensor_that("posterior", total), n)
        q = _mean(weighed, n)
        return _Seen(
            members=members,
            points=n,
            steps=self._steps(recipe, n / len(members), sent, q),
            bias=_total(moved),
            q=q,
            phi=_maybe(phi),
            phi_before=None if phi is None else _maybe(before),
            shares=_mean(self._tensor_that("shares", total), n),
        )

    def _weight_of(self, name: str, total: Params, weighed: torch.Tensor | None, n: float) -> Any:
        """What a sum over the cohort is divided by: its points, or what they count for the expert."""
        experts = self.run.experiment.algorithm.layout.unpack({name: total[name]}).experts
        if weighed is None or not experts:
            return n
        return weighed[next(iter(experts))]

    def _bias_names(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """The names of the output layer's bias: that of the shared model, or those of the experts that are there."""
        algorithm = self.run.experiment.algorithm
        bias = f"{self.run.experiment.model.output}.bias"
        wire = [bias] if bias in algorithm.layout.shared else []
        if bias in algorithm.layout.expert:
            wire = [wire_name(k, bias) for k in range(algorithm.layout.experts)]
        return [name for name in wire if name in tensors]

    def _bias_is_sent(self) -> bool:
        message = self.run.experiment.algorithm.broadcast(self.run.state, self.chosen[0])
        return bool(self._bias_names(message.tensors))

    def _posterior_says_something(self) -> bool:
        algorithm = self.run.experiment.algorithm
        if not self._field("posterior"):
            if self._field("marginal"):
                self.notes["posterior"] = "phi is not sent in training"
            return False
        if algorithm.layout.experts == 1:
            self.notes["posterior"] = "one expert: q(z|s) is 1 whatever the labels are"
            return False
        if self.federation.side == "client":
            self.notes["posterior"] = "c is the client itself: q(z|s) says nothing of its labels"
            return False
        if self.federation.side != "label":
            self.notes["posterior"] = f"c is the {self.federation.side}: what leaks is p(c|s), not p(y|s)"
        return True

    def _steps(self, recipe: Recipe, points: float, sent: Message, q: Vector | None) -> float:
        """How many steps of plain SGD at the recipe's rate a client's steps are worth.

        The server knows the schedule and the momentum, how much longer a method's steps are together, and that label_counts
        leave 1/(N_s + 1) of a step. q: q(z|s) of the experts that came back.
        """
        settings = recipe.training
        steps = max(int(np.ceil(points / settings.batch_size)), 1) * settings.epochs
        factor = rate_factor(settings.schedule, int(sent.numbers["round"]), recipe.rounds)
        momentum = sum((1 - settings.momentum**i) / (1 - settings.momentum) for i in range(1, steps + 1))
        scale = self.run.experiment.algorithm.method.longer_steps
        longer = scale(q) if q is not None and scale is not None else 1.0
        shorter = points + 1 if settings.label_counts else 1
        return float(max(factor, 1e-12) * momentum * longer / shorter)

    def _judge(self, seen: Sequence[_Seen], attack: Attack, true: dict[int, Vector]) -> dict[str, Any] | None:
        """How near an attack comes to each client's truth; a sum's estimate is the same for all of its members."""
        estimates = self._estimates(seen, attack)
        if not estimates:
            return None
        of_clients = {s: _compared(estimate, true[s]) for s, estimate in estimates.items()}
        distances = [row["total_variation"] for row in of_clients.values()]
        ranks = [row["rank_correlation"] for row in of_clients.values()]
        return {
            "clients": len(estimates),
            "total_variation": _spread(distances),
            "rank_correlation": _mean_of_known(ranks),
            "exact": sum(distance < EXACT for distance in distances),
            "of_clients": [of_clients.get(s) for s in self.chosen],
        }

    def _estimates(self, seen: Sequence[_Seen], attack: Attack) -> dict[int, Vector]:
        """What an attack makes of each chosen client; the first estimate of a client counts."""
        estimates: dict[int, Vector] = {}
        for of_members in seen:
            estimate = attack(of_members)
            if estimate is not None:
                new = [s for s in of_members.members if s in self.chosen and s not in estimates]
                estimates |= dict.fromkeys(new, estimate)
        return estimates

    def _absent(self, seen: Sequence[_Seen]) -> dict[str, int]:
        """Values of c that clients do not hold, and how many of them rows that came back unchanged give away."""
        missing = noticed = wrong = 0
        for of_members in seen:
            unchanged = ~of_members.support
            for s in set(of_members.members) & set(self.chosen):
                absent = self.sides[s] == 0
                missing += int(absent.sum())
                noticed += int((absent & unchanged).sum())
                wrong += int((~absent & unchanged).sum())
        return {"absent": missing, "found": noticed, "wrong": wrong}

    def _guess(self, true: dict[int, Vector]) -> dict[str, Any]:
        """How near anybody comes who looks at nothing, and says that a client is like the average of all."""
        sizes = np.array([self.federation.size(s) for s in self.everybody], dtype=np.float64)
        mean = np.average([true[s] for s in self.everybody], axis=0, weights=sizes)
        return {"total_variation": _spread([leakage.total_variation(true[s], mean) for s in self.chosen])}


def _compared(estimate: Vector, true: Vector) -> dict[str, Any]:
    return {
        "estimate": estimate.tolist(),
        "total_variation": leakage.total_variation(true, estimate),
        "rank_correlation": leakage.rank_correlation(true, estimate),
    }


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _by_steps(rate: float, seen: _Seen) -> Vector | None:
    return None if seen.bias is None else leakage.from_bias(seen.bias, rate, seen.steps)


def _normalised(seen: _Seen) -> Vector | None:
    return None if seen.bias is None else leakage.from_bias_normalised(seen.bias)


def _by_size(seen: _Seen) -> Vector | None:
    return None if seen.bias is None else leakage.from_bias_size(seen.bias)


def _least_squares(seen: _Seen) -> Vector | None:
    if seen.q is None or seen.phi is None:
        return None
    return leakage.from_posterior(seen.q, seen.phi, seen.support)


def _reported(seen: _Seen) -> Vector | None:
    return seen.shares


def _whole(seen: _Seen) -> Vector | None:
    if seen.q is None or seen.phi is None:
        return None
    whole = leakage.whole_numbers(seen.q, seen.phi, seen.support, round(seen.points))
    return _least_squares(seen) if whole is None else whole


def _in_round(message: Message, t: int) -> Message:
    """A message as it would be sent in round t."""
    return Message(message.tensors, {**message.numbers, "round": t})


def _moved_by_sum(before: torch.Tensor | None, total: torch.Tensor | None, n: float) -> torch.Tensor | None:
    """The posterior that the mean of the cohort's moves leads to."""
    if before is None or total is None:
        return None
    return before + total / n


def _mean(total: torch.Tensor | None, n: float) -> Vector | None:
    return None if total is None else _array(total / n)


def _total(moved: Sequence[Vector]) -> Vector | None:
    return np.sum(moved, axis=0) if moved else None


def _maybe(tensor: torch.Tensor | None) -> Vector | None:
    return None if tensor is None else _array(tensor)


def _array(tensor: torch.Tensor) -> Vector:
    return tensor.to(torch.float64).numpy()


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation. most_exposed: the mean over the tenth of the clients that is known best."""
    return {"mean": float(np.mean(values)), "std": float(np.std(values)), "most_exposed": worst_decile(values)}
