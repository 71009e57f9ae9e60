"""How good the models are: for clients that took part, and without client identity."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedmix.core.algorithm import Algorithm
from fedmix.core.score import LOWER_IS_BETTER, MEASURES, score
from fedmix.core.server import State
from fedmix.core.tree import nbytes
from fedmix.core.types import Message, Private
from fedmix.data.federation import Federation
from fedmix.engines.client import CHUNK, Absent, Task
from fedmix.engines.store import Store
from fedmix.errors import ClientError
from fedmix.running.loop import Engine
from fedmix.schema import Clusters, OverClients
from fedmix.settings.build import Experiment

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Scores:
    """Each client's score on its own points (core.score); clients without points are left out."""

    of: Mapping[int, Numbers]
    unanswered: Mapping[int, str] = field(default_factory=dict)  # clients that could not be asked, and why

    def values(self, measure: str = "accuracy") -> list[float]:
        return [numbers[measure] for numbers in self.of.values()]

    def summary(self, measure: str = "accuracy") -> OverClients:
        """Mean, standard deviation and worst decile over clients."""
        values = self.values(measure)
        if not values:
            return {"mean": None, "std": None, "worst_decile": None}
        worst = worst_decile(values, measure in LOWER_IS_BETTER)
        return {"mean": float(np.mean(values)), "std": float(np.std(values)), "worst_decile": worst}

    def mean_over_points(self, measure: str) -> float | None:
        """Over all points alike, whoever they belong to; None where clients do not tell it."""
        told = [numbers for numbers in self.of.values() if measure in numbers]
        points = sum(numbers["points"] for numbers in told)
        return sum(numbers["points"] * numbers[measure] for numbers in told) / points if points else None

    def summaries(self) -> dict[str, OverClients]:
        return {measure: self.summary(measure) for measure in MEASURES}


def worst_decile(values: Sequence[float], lower_is_better: bool = False) -> float:
    """Mean over the worst ceil(S/10) clients."""
    worst = sorted(values, reverse=lower_is_better)[: math.ceil(len(values) / 10)]
    return sum(worst) / len(worst)


def scores_of(numbers: Mapping[int, Numbers]) -> Scores:
    return Scores({s: numbers[s] for s in sorted(numbers) if numbers[s]["points"]})


def client_scores(
    algorithm: Algorithm,
    engine: Engine,
    state: State,
    clients: Sequence[int],
    part: str,
    t: int,
    finetune: int = 0,
) -> Scores:
    """Clients on their own `part`: the server's weights with their private parts, fine-tuned for some epochs or not."""
    tasks = [Task("evaluate", t, s, algorithm.broadcast(state, s), part=part, finetune=finetune) for s in clients]
    answers = dict(zip(clients, engine.run(tasks), strict=True))
    found = scores_of({s: answer.numbers for s, answer in answers.items() if isinstance(answer, Message)})
    return replace(found, unanswered={s: a.reason for s, a in answers.items() if isinstance(a, Absent)})


def fine_tuned_scores(experiment: Experiment, engine: Engine, state: State, t: int) -> Scores:
    """All clients on their test data, after the server's weights were fine-tuned on each of them."""
    everyone, epochs = range(len(experiment.federation)), experiment.recipe.evaluation.finetune_epochs
    return client_scores(experiment.algorithm, engine, state, everyone, "test", t, finetune=epochs)


@dataclass(frozen=True)
class Crowd:
    """The clients that ever took part, as the server knows them where they share their private states: p(s) = N_s/N."""

    privates: Sequence[Private]
    log_p_s: Tensor  # [S]
    clients: Sequence[int]

    @property
    def nbytes(self) -> int:
        """What they handed over."""
        return sum(nbytes(private) for private in self.privates)


NO_ANONYMOUS = "the method has no predictions without client identity"
NOT_SHARED = "it needs the clients' private state, which evaluation.share_private does not allow"


def label_shares(counts: Sequence[Sequence[int]]) -> Tensor:
    """p(y) of everybody's labels together, from each client's counts of them [S, classes] -> [classes].

    One more point is spread evenly: a label that nobody has is rare, not impossible.
    """
    everybody = torch.tensor(counts, dtype=torch.float64).sum(dim=0)
    return (everybody + 1 / len(everybody)) / (everybody.sum() + 1)


def for_anyone(
    algorithm: Algorithm, counts: Sequence[Sequence[int]], log_prob: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Predictions for somebody who may have anybody's labels: p(y) is put back where training left it out."""
    if not algorithm.counts_labels:
        return log_prob
    log_p_y = label_shares(counts).log()
    return lambda x: torch.log_softmax(log_prob(x).to(torch.float64) + log_p_y, dim=1)


def crowd(algorithm: Algorithm, store: Store, federation: Federation, share_private: bool) -> Crowd | None:
    """None: what it needs may not leave the clients."""
    if algorithm.uses_private and not share_private:
        return None
    took_part = store.clients()
    sizes = torch.tensor([float(federation.size(s)) for s in took_part], dtype=torch.float64)
    privates = store.many(took_part) if algorithm.uses_private else [{} for _ in took_part]
    return Crowd([algorithm.hand_over(private) for private in privates], torch.log(sizes / sizes.sum()), took_part)


def on_union(
    federation: Federation, clients: Sequence[int], part: str, predict: Callable[[Tensor], Tensor]
) -> tuple[Numbers, Scores]:
    """Clients' `part`, all points alike whoever they belong to: the score of the union, and client by client."""
    own = [federation.parts[part][s] for s in clients]
    index = torch.from_numpy(np.concatenate(own)) if own else torch.zeros(0, dtype=torch.int64)
    if not len(index):
        return {"points": 0.0}, Scores({})
    with torch.no_grad():
        log_p = torch.cat([predict(federation.inputs(some)) for some in torch.split(index, CHUNK)])
    y = federation.y[index]
    sizes = [len(points) for points in own]
    each = zip(clients, torch.split(log_p, sizes), torch.split(y, sizes), strict=True)
    return score(log_p, y), scores_of({s: score(log_p_s, y_s) for s, log_p_s, y_s in each})


@dataclass(frozen=True)
class NoIdentity:
    """All clients' points together, whoever they belong to. why: why there is no number, or "".

    bytes: private state that clients handed over for it. of_clients: the same predictions, client by client.
    """

    numbers: Numbers | None
    why: str = ""
    bytes: int = 0
    of_clients: Scores = Scores({})

    @property
    def accuracy(self) -> float | None:
        return None if self.numbers is None else self.numbers["accuracy"]


def no_identity_score(experiment: Experiment, store: Store, state: State, part: str) -> NoIdentity:
    """The union of all clients' `part` without client identity; p(s) = N_s/N over clients that ever took part."""
    algorithm, federation = experiment.algorithm, experiment.federation
    if not algorithm.predicts_anonymously:
        return NoIdentity(None, NO_ANONYMOUS)
    if federation.elsewhere:
        return NoIdentity(None, "it needs the clients' points, which never leave their sites")
    try:
        known = crowd(algorithm, store, federation, experiment.recipe.evaluation.share_private)
    except ClientError as error:
        return NoIdentity(None, str(error))
    if known is None:
        return NoIdentity(None, NOT_SHARED)
    message = algorithm.broadcast(state, None)

    def predict(x: Tensor) -> Tensor:
        return algorithm.predict_anonymous(message, known.privates, known.log_p_s, x)

    anyone = for_anyone(algorithm, federation.label_counts(), predict)
    numbers, of_clients = on_union(federation, range(len(federation)), part, anyone)
    if not numbers["points"]:
        return NoIdentity(None, f"no client has {part} data")
    return NoIdentity(numbers, "", known.nbytes, of_clients)


def clusters(q_zs: Sequence[Sequence[float]], groups: Sequence[int]) -> Clusters:
    """How well the experts that clients use most tell their true groups apart."""
    found = [max(range(len(row)), key=row.__getitem__) for row in q_zs]
    return {"adjusted_rand_index": adjusted_rand_index(groups, found), "groups": list(groups), "found": found}


def adjusted_rand_index(a: Sequence[int], b: Sequence[int]) -> float:
    """Agreement of two partitions, 1.0 if they are the same, about 0 by chance (Hubert and Arabie, 1985)."""

    def pairs(sizes: Sequence[int]) -> int:
        return sum(math.comb(n, 2) for n in sizes)

    both = pairs(list(Counter(zip(a, b, strict=True)).values()))
    in_a, in_b, total = pairs(list(Counter(a).values())), pairs(list(Counter(b).values())), math.comb(len(a), 2)
    expected, largest = (in_a * in_b / total if total else 0.0), (in_a + in_b) / 2
    return 1.0 if largest == expected else (both - expected) / (largest - expected)
