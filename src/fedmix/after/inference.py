"""Every kind of inference after training: for a client that took part, for a new one with labelled points, for one without.

Inference at test time, sec:server_w, sec:NewShardInf.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmix.after.restore import Restored
from fedmix.core import objective, vae
from fedmix.core.score import MEASURES, score
from fedmix.core.tree import nbytes
from fedmix.core.types import Message
from fedmix.data.federation import Federation
from fedmix.engines.client import ADAPTED, CHUNK, Task, from_shared, labelled
from fedmix.engines.store import MemoryStore
from fedmix.errors import DataError, SettingError
from fedmix.rng import stream
from fedmix.running import evaluate
from fedmix.running.evaluate import Crowd, Scores
from fedmix.running.loop import Engine, everyone
from fedmix.running.run import make_engine

LABELLED = (5, 20, 100, 0)  # points of a new client; 0: all that it has
QUICK = 10_000_000  # numbers in the clients' training inputs: minutes of training their densities, not hours
AT_ONCE = 10  # clients that train a density between two looks at the clock
Watch = Callable[[str, int, int], None]  # (what is being done, how much of it is done, of how much)

ONE_MODEL = "one model for all"  # what averaging is, where nothing is private


@dataclass(frozen=True)
class Where:
    """Which clients are looked at, and where that runs."""

    clients: int = 0  # so many of them, drawn at random; 0: all
    engine: str = "local"
    workers: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.clients < 0:
            raise SettingError(f"--clients must be 0 (for all) or more. Got {self.clients} instead.")


@dataclass(frozen=True)
class Options(Where):
    """And what is evaluated."""

    densities: bool | None = None  # train a generative model on each client for p(s|x); None: where that is quick
    points: int = 2000  # of a new client's inputs for p(s|x), whose cost is clients x points; 0: all

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.points < 0:
            raise SettingError(f"--points must be 0 (for all) or more. Got {self.points} instead.")


def evaluate_run(run: Restored, options: Options, watch: Watch = lambda *_: None) -> dict[str, Any]:
    """All of it, as plain numbers: what `fedmix evaluate` prints and writes."""
    began = time.perf_counter()
    return {**run.about, **_Evaluation(run, options, watch).everything(), "seconds": time.perf_counter() - began}


class _Evaluation:
    def __init__(self, run: Restored, options: Options, watch: Watch) -> None:
        self.run, self.options, self.watch = run, options, watch
        self.recipe = run.experiment.recipe
        self.algorithm = run.experiment.algorithm
        self.federation = run.experiment.federation
        self.chosen = sample(len(self.federation), options.clients, self.recipe.seed)
        self.crowd = evaluate.crowd(self.algorithm, run.store, self.federation, self.recipe.evaluation.share_private)
        self.message = self.algorithm.broadcast(run.state, None)
        self.everybodys_labels = self.federation.label_counts()
        self.notes: dict[str, str] = {}

    def everything(self) -> dict[str, Any]:
        held_out = self.federation.held_out
        with self._engine(self.federation) as engine:
            mine = self._taking_part(engine)
            densities = self._densities(engine) if self.crowd and self.algorithm.distils else None
        union = self._without_identity(self.federation, self.chosen, "global")
        with_labels = None
        if held_out is None:
            self.notes["new_clients"] = (
                "no client was held out of training (data.holdout_clients); without labels, the union of all test sets "
                "stands in for new clients, as in the paper"
            )
            new, who, unlabelled = self.federation, self.chosen, dict(union)
        else:
            new, who = held_out, sample(len(held_out), self.options.clients, self.recipe.seed)
            with_labels = self._with_labels(new, who)
            unlabelled = self._without_identity(new, who, "new clients without labels")
        unlabelled |= self._cleverer(new, who, densities)
        return {
            "evaluated": len(self.chosen),
            **mine,
            "global": union,
            "new_clients": {
                "held_out": 0 if held_out is None else len(held_out),
                "evaluated": len(who),
                "private": bool(self.algorithm.new_client(self.recipe.seed)),
                "adapts": self.algorithm.method.adapts,
                "labelled": with_labels,
                "unlabelled": unlabelled,
            },
            "notes": self.notes,
        }

    def _engine(self, federation: Federation) -> "closing[Engine]":
        store = self.run.store if federation is self.federation else MemoryStore()
        made = replace(self.run.experiment, federation=federation)
        return closing(make_engine(self.options.engine, self.options.workers, made, store, self.options.device))

    def _taking_part(self, engine: Engine) -> dict[str, Any]:
        """local, proxy, server, counts: clients that took part, on their own test data."""
        t, epochs = self.recipe.rounds, self.recipe.evaluation.finetune_epochs
        self.watch("server weights", 0, 1)
        server = evaluate.client_scores(self.algorithm, engine, self.run.state, self.chosen, "test", t)
        self.watch("fine-tuning", 0, 1)
        local = evaluate.client_scores(self.algorithm, engine, self.run.state, self.chosen, "test", t, finetune=epochs)
        proxy = {int(s): numbers for s, numbers in self.run.carried["proxy"].items()}
        known = {
            s: proxy[s] for s in self.chosen if s in proxy and (not proxy[s]["points"] or MEASURES[-1] in proxy[s])
        }
        communicated = evaluate.scores_of(known)
        own = ", own private parts" if self.algorithm.new_client(self.recipe.seed) else ""
        return {
            "local": {"what": f"fine-tuned, epochs: {epochs}", **_of_clients(local)},
            "proxy": {"what": "last communicated (validation)", **_of_clients(communicated)},
            "server": {"what": f"server weights{own}", **_of_clients(server)},
            **self._counts(self.federation, self.chosen, 0),
        }

    def _counts(self, federation: Federation, clients: Sequence[int], points: int) -> dict[str, Any]:
        """What is shared, and how often each label occurs among some of a client's own points; nothing is trained."""
        shared = from_shared(self.algorithm, self.message, federation.side)
        if shared is None:
            return {}
        classes = federation.classes
        p_y = torch.full((classes,), 1 / classes, dtype=torch.float64)
        if not self.algorithm.counts_labels:  # else what is shared has learnt labels in equal shares
            p_y = evaluate.label_shares(self.everybodys_labels)
        found = {}
        for s in clients:
            rng = Task("evaluate", self.recipe.rounds, s, self.message).stream(self.recipe.seed).child("points")
            y = labelled(federation.examples(s, "train"), points, rng).y
            data = federation.examples(s, "test")
            counts = torch.bincount(y, minlength=classes).to(torch.float64)
            if len(data):
                log_p = objective.log_counted(shared(data.x), counts, p_y)
                found[s] = score(log_p, data.y)
        return {"counts": {"what": "server weights, own label counts", **_of_clients(evaluate.scores_of(found))}}

    def _without_identity(self, federation: Federation, clients: Sequence[int], stage: str) -> dict[str, Any]:
        """The union of test sets: gates (biases, representations) averaged; experts averaged; experts pooled."""
        self.watch(stage, 0, 1)
        rows: dict[str, Any] = {"averaged": None}
        crowd = self.crowd
        if not self.algorithm.predicts_anonymously:
            self.notes[f"{stage}: averaged"] = evaluate.NO_ANONYMOUS
        elif crowd is None:
            self.notes[f"{stage}: averaged"] = evaluate.NOT_SHARED
        else:
            rows["averaged"] = self._row(
                federation,
                clients,
                anonymous.what if (anonymous := self.algorithm.method.anonymous) else ONE_MODEL,
                lambda x: self.algorithm.predict_anonymous(self.message, crowd.privates, crowd.log_p_s, x),
                crowd.nbytes,
                crowd.nbytes,
            )
        if self.algorithm.distils:
            alone = self.algorithm.new_client(self.recipe.seed)  # a gate that knows nothing: 1/K
            rows["uniform"] = self._row(
                federation, clients, "experts averaged", lambda x: self.algorithm.predict(self.message, alone, x)
            )
        shared = from_shared(self.algorithm, self.message, federation.side)
        if shared and self.algorithm.pools:
            rows["pooled"] = self._row(federation, clients, "experts pooled, q(z|y) divided out", shared)
        return rows

    def _with_labels(self, new: Federation, who: Sequence[int]) -> list[dict[str, Any]]:
        """Clients that never took part: their private parts alone are trained on a few labelled points, then all."""
        message = self.algorithm.newcomer(self.run.state, new.side != "client")
        known = new if new.side != "client" else replace(new, c=torch.zeros_like(new.c))
        curve = []
        most = max(new.size(s) for s in who)
        amounts = [points for points in LABELLED if points < most]
        with self._engine(known) as engine:
            for done, points in enumerate(amounts):
                self.watch("new clients with labels", done, len(amounts))
                private, all_of_it = self._newcomers(engine, message, new, who, points)
                sizes = [min(points or new.size(s), new.size(s)) for s in who]
                curve.append(
                    {
                        "points": points or None,
                        "mean_points": float(np.mean(sizes)),
                        "private_parts": _of_clients(private),
                        "finetuned": _of_clients(all_of_it),
                        **self._counts(new, who, points),
                        "bytes_to_new_client": message.nbytes,
                    }
                )
        return curve

    def _newcomers(
        self, engine: Engine, message: Message, new: Federation, who: Sequence[int], points: int
    ) -> tuple[Scores, Scores]:
        """Scores with their own private parts and the server's weights, and after fine-tuning all of it."""
        settings, tasks = self.recipe.evaluation, []
        for s in who:
            n = min(points or new.size(s), new.size(s))
            epochs = math.ceil(settings.adapt_steps / math.ceil(n / self.recipe.training.batch_size))
            t = self.recipe.rounds
            tasks.append(Task("evaluate", t, s, message, "test", settings.finetune_epochs, epochs, points))
        answers = {s: answer.numbers for s, answer in zip(who, everyone(engine.run(tasks)), strict=True)}
        before = {
            s: {name.removeprefix(ADAPTED): value for name, value in numbers.items() if name.startswith(ADAPTED)}
            for s, numbers in answers.items()
        }
        return evaluate.scores_of(before), evaluate.scores_of(answers)

    def _densities(self, engine: Engine) -> list[Message] | None:
        """Each client's generative model of its own inputs."""
        assert self.crowd is not None
        asked, numbers = self.options.densities, self._numbers_to_learn()
        if asked is False or (asked is None and numbers > QUICK):
            long = f"left out: a VAE on each client would learn {numbers / 1e6:,.0f} million numbers; --vae asks for it"
            self.notes["generative"] = "not asked for (--no-vae)" if asked is False else long
            return None
        try:
            for federation in (self.federation, self.federation.held_out or self.federation):
                federation.unit(
                    federation.inputs(torch.arange(len(federation.x)) if not federation.mean else torch.arange(2))
                )
        except DataError as error:
            self.notes["generative"] = str(error)
            return None
        clients, trained = list(self.crowd.clients), list[Message]()
        for start in range(0, len(clients), AT_ONCE):
            self.watch("a VAE on each client", start, len(clients))
            tasks = [Task("density", self.run.state.round, s, Message({})) for s in clients[start : start + AT_ONCE]]
            trained += everyone(engine.run(tasks))
        return trained

    def _numbers_to_learn(self) -> int:
        """Of all clients' training inputs: what training their densities costs grows with it."""
        assert self.crowd is not None
        return sum(self.federation.size(s) for s in self.crowd.clients) * self.federation.x[0].numel()

    def _cleverer(self, new: Federation, who: Sequence[int], densities: Sequence[Message] | None) -> dict[str, Any]:
        """p(s|x) in place of p(s), and one gate in place of all."""
        crowd = self.crowd
        if not self.algorithm.distils:
            return {}
        if crowd is None:
            self.notes["generative"] = self.notes["distilled"] = evaluate.NOT_SHARED
            return {"generative": None, "distilled": None}
        rows: dict[str, Any] = {"generative": None, "distilled": None}
        if densities is not None:
            size = crowd.nbytes + sum(message.nbytes for message in densities)
            some, sampled = self._some_points(new, who)
            predict = self._by_density(crowd, densities, new, sum(len(own) for own in some.parts["test"]))
            what = f"gates with p(s|x), {sampled}"
            rows["generative"] = self._row(some, who, what, predict, size, size)
        self.watch("one gate from all", 0, 1)
        inputs = self._server_inputs()
        if not len(inputs):
            self.notes["distilled"] = "no client has validation data, which stands in for what the server may have"
            return rows
        theta = self.algorithm.distil(self.message, crowd.privates, crowd.log_p_s, inputs)
        what = f"one gate from {len(crowd.clients):,}, on {len(inputs):,} inputs"
        rows["distilled"] = self._row(
            new, who, what, lambda x: self.algorithm.predict(self.message, theta, x), crowd.nbytes, nbytes(theta)
        )
        return rows

    def _server_inputs(self) -> Tensor:
        """The union of the clients' validation inputs, in place of unlabelled data that a server may have."""
        index = torch.from_numpy(np.concatenate(self.federation.parts["validation"]))
        most = stream(self.recipe.seed, "evaluate", "inputs").permutation(len(index))[:10_000]
        return self.federation.inputs(index[torch.from_numpy(np.sort(most))])

    def _some_points(self, new: Federation, who: Sequence[int]) -> tuple[Federation, str]:
        """At most options.points of the test points, from all clients alike."""
        own = [np.arange(0) if s not in set(who) else part for s, part in enumerate(new.parts["test"])]
        total, most = sum(map(len, own)), self.options.points or sum(map(len, own))
        if most >= total:
            return new, f"{total:,} inputs"
        kept = set(stream(self.recipe.seed, "evaluate", "points").permutation(total)[:most].tolist())
        position, parts = 0, []
        for part in own:
            parts.append(part[[position + i in kept for i in range(len(part))]])
            position += len(part)
        return replace(new, parts={**new.parts, "test": parts}), f"{most:,} of {total:,} inputs"

    def _by_density(
        self, crowd: Crowd, densities: Sequence[Message], new: Federation, points: int
    ) -> Callable[[Tensor], Tensor]:
        models = [dict(message.tensors) for message in densities]
        chunks: Iterator[int] = iter(range(points))

        def predict(x: Tensor) -> Tensor:
            at = next(chunks)
            self.watch("p(s|x) of new inputs", min(at * CHUNK, points), points)
            rng = stream(self.recipe.seed, "evaluate", "density", at)
            log_x = vae.log_densities(models, new.unit(x).flatten(1), rng)
            posterior = torch.log_softmax(log_x.to(torch.float64) + crowd.log_p_s, dim=1)  # log p(s|x) [B, S]
            return self.algorithm.predict_anonymous(self.message, crowd.privates, posterior, x)

        return predict

    def _row(
        self,
        federation: Federation,
        clients: Sequence[int],
        what: str,
        predict: Callable[[Tensor], Tensor],
        from_clients: int = 0,
        to_new_client: int = 0,
    ) -> dict[str, Any] | None:
        """bytes beyond the experts: what clients hand over for it, and what a new client needs to predict by itself."""
        anyone = evaluate.for_anyone(self.algorithm, self.everybodys_labels, predict)
        numbers, each = evaluate.on_union(federation, clients, "test", anyone)
        if not numbers["points"]:
            return None
        return {
            "what": what,
            "union": dict(numbers),
            "clients": _of_clients(each),
            "bytes_from_clients": from_clients,
            "bytes_to_new_client": to_new_client,
        }


def _of_clients(scores: Scores) -> dict[str, Mapping[str, float | None] | int]:
    return {"clients": len(scores.of), **scores.summaries()}


def sample(total: int, most: int, seed: int) -> list[int]:
    """Clients to look at: all, or some drawn at random."""
    if not 0 < most < total:
        return list(range(total))
    return sorted(stream(seed, "evaluate", "clients").permutation(total)[:most].tolist())
