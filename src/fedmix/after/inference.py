"""Every kind of inference after training (sec:server_w, sec:NewShardInf).

There are clients that took part, new clients with labelled points, and new clients without labels.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedmix.after.densities import Densities
from fedmix.after.options import Options, Stages, nobody
from fedmix.after.restore import Restored
from fedmix.core import objective
from fedmix.core.score import score
from fedmix.core.tree import nbytes
from fedmix.core.types import Message
from fedmix.data.federation import Federation
from fedmix.data.partition import Indices
from fedmix.engines.client import ADAPTED, Task, from_shared, labelled
from fedmix.engines.store import MemoryStore
from fedmix.rng import stream
from fedmix.running import evaluate
from fedmix.running.evaluate import Crowd, Scores
from fedmix.running.loop import Engine, everyone
from fedmix.running.where import Stage
from fedmix.schema import EvaluationFile

# How many labelled points a new client has; 0: all of its points.
LABELLED = (5, 20, 100, 0)
MOST_SERVER_INPUTS = 10_000
# What averaging comes to, where nothing is private.
ONE_MODEL = "one model for all"

Predict = Callable[[Tensor], Tensor]
Row = dict[str, Any]


def evaluate_run(run: Restored, options: Options, watch: Stages = nobody) -> EvaluationFile:
    """Every kind of inference, as plain numbers: what `fedmix evaluate` prints and writes."""
    began = time.perf_counter()
    result = {**run.about, **_Evaluation(run, options, watch).everything()}
    return cast(EvaluationFile, {**result, "seconds": time.perf_counter() - began})


class _Evaluation:
    def __init__(self, run: Restored, options: Options, watch: Stages) -> None:
        self.run, self.options, self.watch = run, options, watch
        self.recipe = run.experiment.recipe
        self.algorithm = run.experiment.algorithm
        self.federation = run.experiment.federation
        self.chosen = options.sample(len(self.federation), self.recipe.seed)
        self.crowd = evaluate.crowd(self.algorithm, run.store, self.federation, self.recipe.evaluation.share_private)
        self.message = self.algorithm.broadcast(run.state, None)
        self.everybodys_labels = self.federation.label_counts()
        self.notes: dict[str, str] = {}

    def everything(self) -> dict[str, Any]:
        with self._engine(self.federation) as engine:
            took_part = self._taking_part(engine)
            densities = self._densities(engine)
        union = self._without_identity(self.federation, self.chosen, "no identity")
        return {
            "evaluated": len(self.chosen),
            **took_part,
            "no_identity": union,
            "new_clients": self._new_clients(union, densities),
            "notes": self.notes,
        }

    def _engine(self, federation: Federation) -> "closing[Engine]":
        store = self.run.store if federation is self.federation else MemoryStore()
        experiment = replace(self.run.experiment, federation=federation)
        return self.options.where.open(Stage(experiment, lambda: store))

    # -- clients that took part ----------------------------------------------------------------------------------------

    def _taking_part(self, engine: Engine) -> dict[str, Any]:
        """Scores of clients that took part, on their own data: fine-tuned, as sent, server's weights, label counts."""
        algorithm, state, t = self.algorithm, self.run.state, self.recipe.rounds
        epochs = self.recipe.evaluation.finetune_epochs
        self.watch("server weights", 0, 1)
        server = evaluate.client_scores(algorithm, engine, state, self.chosen, "test", t)
        self.watch("fine-tuning", 0, 1)
        tuned = evaluate.client_scores(algorithm, engine, state, self.chosen, "test", t, finetune=epochs)
        as_sent = self.run.carried.scores_as_sent(self.chosen)
        private_parts = ", private parts" if algorithm.new_client(self.recipe.seed) else ""
        rows = {
            "fine_tuned": {"what": f"server weights, then {_epochs(epochs)} on the client", **_of_clients(tuned)},
            "as_sent": {"what": "weights that the client sent last", **_of_clients(as_sent)},
            "server": {"what": f"server weights{private_parts}", **_of_clients(server)},
            **self._label_counts(self.federation, self.chosen, 0),
        }
        return {kind: {"part": "validation" if kind == "as_sent" else "test", **row} for kind, row in rows.items()}

    def _label_counts(self, federation: Federation, clients: Sequence[int], points: int) -> dict[str, Any]:
        """Predictions from what is shared and from how often each label occurs among some of a client's own points.

        Nothing is trained for it. points: how many of a client's points are counted; 0: all.
        """
        shared = from_shared(self.algorithm, self.message, federation.side)
        if shared is None:
            return {}
        classes = federation.classes
        p_y = self._label_shares(classes)
        scores = {}
        for s in clients:
            data = federation.examples(s, "test")
            if len(data):
                rng = Task("evaluate", self.recipe.rounds, s, self.message).stream(self.recipe.seed).child("points")
                y = labelled(federation.examples(s, "train"), points, rng).y
                counts = torch.bincount(y, minlength=classes).to(torch.float64)
                scores[s] = score(objective.log_counted(shared(data.x), counts, p_y), data.y)
        row = {"what": "server weights, label counts of the client", **_of_clients(evaluate.scores_of(scores))}
        return {"label_counts": row}

    def _label_shares(self, classes: int) -> Tensor:
        """The p(y) that the shared model has learnt: equal shares where label counts stood in front of it in training."""
        if self.algorithm.counts_labels:
            return torch.full((classes,), 1 / classes, dtype=torch.float64)
        return evaluate.label_shares(self.everybodys_labels)

    # -- without identity ----------------------------------------------------------------------------------------------

    def _without_identity(self, federation: Federation, clients: Sequence[int], stage: str) -> dict[str, Any]:
        """Scores on the union of test sets: with gates (biases, representations) averaged; experts averaged; experts pooled."""
        self.watch(stage, 0, 1)
        rows: dict[str, Any] = {"averaged": self._averaged(federation, clients, stage)}
        if self.algorithm.distils:
            # A gate that knows nothing gives every expert 1/K.
            gate = self.algorithm.new_client(self.recipe.seed)
            rows["uniform"] = self._row(
                federation, clients, "experts averaged", lambda x: self.algorithm.predict(self.message, gate, x)
            )
        shared = from_shared(self.algorithm, self.message, federation.side)
        if shared and self.algorithm.pools:
            rows["pooled"] = self._row(federation, clients, "experts pooled, q(z|y) divided out", shared)
        return rows

    def _averaged(self, federation: Federation, clients: Sequence[int], stage: str) -> Row | None:
        crowd = self.crowd
        if not self.algorithm.predicts_anonymously:
            self.notes[f"{stage}: averaged"] = evaluate.NO_ANONYMOUS
            return None
        if crowd is None:
            self.notes[f"{stage}: averaged"] = evaluate.NOT_SHARED
            return None
        anonymous = self.algorithm.method.anonymous
        what = anonymous.what if anonymous else ONE_MODEL

        def predict(x: Tensor) -> Tensor:
            return self.algorithm.predict_anonymous(self.message, crowd.privates, crowd.log_p_s, x)

        return self._row(federation, clients, what, predict, crowd.nbytes, crowd.nbytes)

    # -- new clients ---------------------------------------------------------------------------------------------------

    def _new_clients(self, union: dict[str, Any], densities: Densities | None) -> dict[str, Any]:
        held_out = self.federation.held_out
        with_labels = None
        if held_out is None:
            self.notes["new_clients"] = (
                "no client was held out of training (data.holdout_clients); without labels, the union of all test sets "
                "stands in for new clients, as in the paper"
            )
            new, clients, without_labels = self.federation, self.chosen, dict(union)
        else:
            new, clients = held_out, self.options.sample(len(held_out), self.recipe.seed)
            with_labels = self._with_labels(new, clients)
            without_labels = self._without_identity(new, clients, "new clients without labels")
        return {
            "held_out": 0 if held_out is None else len(held_out),
            "evaluated": len(clients),
            "private": bool(self.algorithm.new_client(self.recipe.seed)),
            "adapts": self.algorithm.method.adapts,
            "labelled": with_labels,
            "unlabelled": without_labels | self._by_one_gate(new, clients, densities),
        }

    def _with_labels(self, new: Federation, clients: Sequence[int]) -> list[Row]:
        """Scores of clients that never took part, with more and more labelled points.

        First their private parts alone are trained on these points, then everything.
        """
        known_values = new.side != "client"
        message = self.algorithm.newcomer(self.run.state, known_values)
        # Where c is the client, a new client has a value that nobody knows.
        known = new if known_values else replace(new, c=torch.zeros_like(new.c))
        most = max(new.size(s) for s in clients)
        amounts = [points for points in LABELLED if points < most]
        curve = []
        with self._engine(known) as engine:
            for done, points in enumerate(amounts):
                self.watch("new clients with labels", done, len(amounts))
                curve.append(self._with_labelled_points(engine, message, new, clients, points))
        return curve

    def _with_labelled_points(
        self, engine: Engine, message: Message, new: Federation, clients: Sequence[int], points: int
    ) -> Row:
        private, tuned = self._newcomers(engine, message, new, clients, points)
        sizes = [_points_of(new, s, points) for s in clients]
        return {
            "points": points or None,
            "mean_points": float(np.mean(sizes)),
            "private_parts": _of_clients(private),
            "fine_tuned": _of_clients(tuned),
            **self._label_counts(new, clients, points),
            "bytes_to_new_client": message.nbytes,
        }

    def _newcomers(
        self, engine: Engine, message: Message, new: Federation, clients: Sequence[int], points: int
    ) -> tuple[Scores, Scores]:
        """Scores of new clients with their own private parts and the server's weights, and after fine-tuning everything."""
        settings, t = self.recipe.evaluation, self.recipe.rounds
        tasks = []
        for s in clients:
            steps_per_epoch = math.ceil(_points_of(new, s, points) / self.recipe.training.batch_size)
            epochs = math.ceil(settings.adapt_steps / steps_per_epoch)
            tasks.append(Task("evaluate", t, s, message, "test", settings.finetune_epochs, epochs, points))
        answers = zip(clients, everyone(engine.run(tasks)), strict=True)
        tuned = {s: answer.numbers for s, answer in answers}
        adapted = {s: _adapted(numbers) for s, numbers in tuned.items()}
        return evaluate.scores_of(adapted), evaluate.scores_of(tuned)

    def _densities(self, engine: Engine) -> Densities | None:
        """Each client's generative model of its own inputs, where the method can use them."""
        if self.crowd is None or not self.algorithm.distils:
            return None
        densities = Densities(self.federation, self.crowd, self.recipe.seed, self.watch)
        why_not = densities.train(engine, self.run.state.round, self.options.densities)
        if why_not:
            self.notes["generative"] = why_not
            return None
        return densities

    def _by_one_gate(self, new: Federation, clients: Sequence[int], densities: Densities | None) -> dict[str, Any]:
        """Scores of clients without labels: with p(s|x) in place of p(s), and with one gate in place of all."""
        if not self.algorithm.distils:
            return {}
        if self.crowd is None:
            self.notes["generative"] = self.notes["distilled"] = evaluate.NOT_SHARED
            return {"generative": None, "distilled": None}
        generative = self._generative(new, clients, densities, self.crowd) if densities else None
        return {"generative": generative, "distilled": self._distilled(new, clients, self.crowd)}

    def _generative(self, new: Federation, clients: Sequence[int], densities: Densities, crowd: Crowd) -> Row | None:
        some, sampled = self._some_points(new, clients)
        points = sum(len(part) for part in some.parts["test"])
        log_p_sx = densities.posterior(new, points)

        def predict(x: Tensor) -> Tensor:
            return self.algorithm.predict_anonymous(self.message, crowd.privates, log_p_sx(x), x)

        size = crowd.nbytes + densities.nbytes
        return self._row(some, clients, f"gates with p(s|x), {sampled}", predict, size, size)

    def _distilled(self, new: Federation, clients: Sequence[int], crowd: Crowd) -> Row | None:
        self.watch("one gate from all", 0, 1)
        inputs = self._server_inputs()
        if not len(inputs):
            self.notes["distilled"] = "no client has validation data, which stands in for what the server may have"
            return None
        theta = self.algorithm.distil(self.message, crowd.privates, crowd.log_p_s, inputs)
        what = f"one gate from {len(crowd.clients):,}, on {len(inputs):,} inputs"

        def predict(x: Tensor) -> Tensor:
            return self.algorithm.predict(self.message, theta, x)

        return self._row(new, clients, what, predict, crowd.nbytes, nbytes(theta))

    def _server_inputs(self) -> Tensor:
        """The union of the clients' validation inputs, in place of unlabelled data that a server may have."""
        index = torch.from_numpy(np.concatenate(self.federation.parts["validation"]))
        order = stream(self.recipe.seed, "evaluate", "inputs").permutation(len(index))
        return self.federation.inputs(index[torch.from_numpy(np.sort(order[:MOST_SERVER_INPUTS]))])

    def _some_points(self, new: Federation, clients: Sequence[int]) -> tuple[Federation, str]:
        """At most options.points of the clients' test points, drawn from all clients alike; and how many they are, in words."""
        tests = _test_points(new, clients)
        total = sum(map(len, tests))
        most = self.options.points or total
        if most >= total:
            return new, f"{total:,} inputs"
        kept = np.zeros(total, dtype=bool)
        kept[stream(self.recipe.seed, "evaluate", "points").permutation(total)[:most]] = True
        ends = np.cumsum([len(part) for part in tests])
        parts = [part[kept[end - len(part) : end]] for part, end in zip(tests, ends, strict=True)]
        return replace(new, parts={**new.parts, "test": parts}), f"{most:,} of {total:,} inputs"

    def _row(
        self,
        federation: Federation,
        clients: Sequence[int],
        what: str,
        predict: Predict,
        from_clients: int = 0,
        to_new_client: int = 0,
    ) -> Row | None:
        """The score of a way to predict without identity.

        from_clients: the bytes that clients hand over for it beyond the experts. to_new_client: the bytes beyond the experts
        that a new client needs to predict by itself.
        """
        anyone = evaluate.for_anyone(self.algorithm, self.everybodys_labels, predict)
        numbers, of_clients = evaluate.on_union(federation, clients, "test", anyone)
        if not numbers["points"]:
            return None
        return {
            "what": what,
            "union": dict(numbers),
            "clients": _of_clients(of_clients),
            "bytes_from_clients": from_clients,
            "bytes_to_new_client": to_new_client,
        }


def _test_points(federation: Federation, clients: Sequence[int]) -> list[Indices]:
    """The test points of each client; those that are not in `clients` get none."""
    nothing = np.arange(0)
    looked_at = set(clients)
    return [points if s in looked_at else nothing for s, points in enumerate(federation.parts["test"])]


def _points_of(new: Federation, client: int, points: int) -> int:
    """How many labelled points a new client has, if it may have `points` at most; 0: any number."""
    return min(points or new.size(client), new.size(client))


def _epochs(count: int) -> str:
    return "one epoch" if count == 1 else f"{count} epochs"


def _adapted(numbers: evaluate.Numbers) -> dict[str, float]:
    """The score between adapting private parts and fine-tuning, out of an answer that has both."""
    return {name.removeprefix(ADAPTED): value for name, value in numbers.items() if name.startswith(ADAPTED)}


def _of_clients(scores: Scores) -> dict[str, Any]:
    return {"clients": len(scores.of), **scores.summaries()}
