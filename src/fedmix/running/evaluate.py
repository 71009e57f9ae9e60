"""How good the models are: for clients that took part, and for somebody whose client identity is not known."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedmix.core.algorithm import Algorithm
from fedmix.core.score import LOWER_IS_BETTER, MEASURES, Measure, score
from fedmix.core.server import State
from fedmix.core.tree import nbytes
from fedmix.core.types import Message, Private
from fedmix.data.federation import Federation
from fedmix.engines.client import BOUND, CHUNK, Absent, Task
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
    # Clients that could not be asked, and why.
    unanswered: Mapping[int, str] = field(default_factory=dict)

    def values(self, measure: str = "accuracy") -> list[float]:
        return [numbers[measure] for numbers in self.of.values() if measure in numbers]

    @property
    def measures(self) -> list[str]:
        """What was measured on some client; what a method reports of its own is no measure."""
        named = dict.fromkeys(name for numbers in self.of.values() for name in numbers)
        return [name for name in named if name not in ("points", BOUND)]

    def summary(self, measure: str = "accuracy") -> OverClients:
        """Mean, standard deviation and worst decile over clients."""
        values = self.values(measure)
        if not values:
            return {"mean": None, "std": None, "worst_decile": None}
        worst = worst_decile(values, measure in LOWER_IS_BETTER)
        return {"mean": float(np.mean(values)), "std": float(np.std(values)), "worst_decile": worst}

    def mean_over_points(self, measure: str) -> float | None:
        """The mean over all points alike, whoever they belong to; None where clients do not tell this measure."""
        scores = [numbers for numbers in self.of.values() if measure in numbers]
        points = sum(numbers["points"] for numbers in scores)
        if not points:
            return None
        return sum(numbers["points"] * numbers[measure] for numbers in scores) / points

    def summaries(self) -> dict[str, OverClients]:
        return {measure: self.summary(measure) for measure in self.measures or MEASURES}


def worst_decile(values: Sequence[float], lower_is_better: bool = False) -> float:
    """The mean over the worst ceil(S/10) clients."""
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
    """The scores of clients on their own `part`: the server's weights with their private parts, fine-tuned or not.

    finetune: how many epochs the weights are fine-tuned for on the client.
    """
    tasks = [Task("evaluate", t, s, algorithm.broadcast(state, s), part=part, finetune=finetune) for s in clients]
    answers = dict(zip(clients, engine.run(tasks), strict=True))
    scores = scores_of({s: answer.numbers for s, answer in answers.items() if isinstance(answer, Message)})
    unanswered = {s: answer.reason for s, answer in answers.items() if isinstance(answer, Absent)}
    return replace(scores, unanswered=unanswered)


def fine_tuned_scores(experiment: Experiment, engine: Engine, state: State, t: int) -> Scores:
    """The scores of all clients on their test data, after the server's weights were fine-tuned on each of them."""
    everyone, epochs = range(len(experiment.federation)), experiment.recipe.evaluation.finetune_epochs
    return client_scores(experiment.algorithm, engine, state, everyone, "test", t, finetune=epochs)


@dataclass(frozen=True)
class Crowd:
    """The clients that ever took part, as the server knows them where they share their private states.

    log_p_s: log p(s) = log N_s/N, [S].
    """

    privates: Sequence[Private]
    log_p_s: Tensor
    clients: Sequence[int]

    @property
    def nbytes(self) -> int:
        """The size of what they handed over."""
        return sum(nbytes(private) for private in self.privates)


NO_ANONYMOUS = "the method has no predictions without client identity"
NOT_SHARED = "it needs the clients' private state, which evaluation.share_private does not allow"


def label_shares(counts: Sequence[Sequence[int]]) -> Tensor:
    """p(y) over everybody's labels together, from each client's counts of them [S, classes] -> [classes].

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
    """The clients that ever took part; None: their private states are needed and may not leave them."""
    if algorithm.uses_private and not share_private:
        return None
    took_part = store.clients()
    sizes = torch.tensor([float(federation.size(s)) for s in took_part], dtype=torch.float64)
    log_p_s = torch.log(sizes / sizes.sum())
    return Crowd(_handed_over(algorithm, store, took_part), log_p_s, took_part)


def _handed_over(algorithm: Algorithm, store: Store, clients: Sequence[int]) -> list[Private]:
    """What each client hands over for predictions without identity."""
    if not algorithm.uses_private:
        return [algorithm.hand_over({}) for _ in clients]
    return [algorithm.hand_over(private) for private in store.many(clients)]


def on_union(
    federation: Federation,
    clients: Sequence[int],
    part: str,
    predict: Callable[[Tensor], Tensor],
    measures: Mapping[str, Measure] = {},
) -> tuple[Numbers, Scores]:
    """Predictions for the clients' `part`, whoever a point belongs to: the score of the union, and that of each client."""
    points = [federation.parts[part][s] for s in clients]
    index = torch.from_numpy(np.concatenate(points)) if points else torch.zeros(0, dtype=torch.int64)
    if not len(index):
        return {"points": 0.0}, Scores({})
    with torch.no_grad():
        log_p = torch.cat([predict(federation.inputs(some)) for some in torch.split(index, CHUNK)])
    y = federation.y[index]
    sizes = [len(of_client) for of_client in points]
    return score(log_p, y, measures), _scores_apart(clients, torch.split(log_p, sizes), torch.split(y, sizes))


def _scores_apart(clients: Sequence[int], log_p: Sequence[Tensor], y: Sequence[Tensor]) -> Scores:
    """The scores of clients from the predictions and the labels of each."""
    of_clients = zip(clients, log_p, y, strict=True)
    return scores_of({s: score(log_p_s, y_s) for s, log_p_s, y_s in of_clients})


@dataclass(frozen=True)
class NoIdentity:
    """The score of all clients' points together, whoever they belong to.

    why: why there is no number, or "". bytes: the size of the private states that clients handed over for it. of_clients:
    the scores of the same predictions, client by client.
    """

    numbers: Numbers | None
    why: str = ""
    bytes: int = 0
    of_clients: Scores = Scores({})

    @property
    def accuracy(self) -> float | None:
        return None if self.numbers is None else self.numbers["accuracy"]


def no_identity_score(experiment: Experiment, store: Store, state: State, part: str) -> NoIdentity:
    """The score of all clients' `part` together without client identity; p(s) = N_s/N over clients that ever took part."""
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
    numbers, of_clients = on_union(federation, range(len(federation)), part, anyone, algorithm.setup.measures)
    if not numbers["points"]:
        return NoIdentity(None, f"no client has {part} data")
    return NoIdentity(numbers, "", known.nbytes, of_clients)


def clusters(q_zs: Sequence[Sequence[float]], groups: Sequence[int]) -> Clusters:
    """How well the experts that clients use most tell their true groups apart."""
    most_used = [max(range(len(row)), key=row.__getitem__) for row in q_zs]
    return {"adjusted_rand_index": adjusted_rand_index(groups, most_used), "groups": list(groups), "found": most_used}


def adjusted_rand_index(a: Sequence[int], b: Sequence[int]) -> float:
    """The agreement of two partitions: 1.0 if they are the same, about 0 by chance (Hubert and Arabie, 1985)."""

    def pairs(sizes: Sequence[int]) -> int:
        return sum(math.comb(n, 2) for n in sizes)

    both = pairs(list(Counter(zip(a, b, strict=True)).values()))
    in_a = pairs(list(Counter(a).values()))
    in_b = pairs(list(Counter(b).values()))
    total = math.comb(len(a), 2)
    expected = in_a * in_b / total if total else 0.0
    largest = (in_a + in_b) / 2
    if largest == expected:
        return 1.0
    return (both - expected) / (largest - expected)
