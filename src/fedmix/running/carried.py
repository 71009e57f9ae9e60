"""What a run carries from round to round beside the server's state. Every checkpoint has it, so a resumed run goes on with it.

All figures follow one protocol. Accuracy moves by two points from one evaluation to the next, so a run is judged by means: on
validation data over the last ten evaluations, after fine-tuning over the last three where that is affordable. Only
evaluations in the last fifth of a run count (schema.judged_rounds).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fedmix.core.score import MEASURES
from fedmix.running.evaluate import Numbers, Scores, scores_of
from fedmix.schema import FINE_TUNED_EVALUATIONS, LAST_EVALUATIONS, Kind, judged_rounds
from fedmix.settings.recipe import Recipe

# Fine-tuning more than once may cost this share of what training costs.
AFFORDABLE = 0.1
# Numbers of a reply that are no score.
NO_SCORES = ("n", "loss")
# An accuracy of each client. Clients have the names that JSON gives them: their numbers as text.
OfClients = dict[str, float]
T = TypeVar("T")


@dataclass(frozen=True)
class Evaluation:
    """One evaluation on validation data: each client's accuracy by kind, and that of all points without identity."""

    round: int
    of_clients: Mapping[str, OfClients]
    no_identity: float | None


@dataclass
class Carried:
    """What a run carries along.

    as_sent: each client's own score of the weights that it sent last.
    evaluations: the last evaluations on validation data.
    fine_tuned: by round, each client's score after fine-tuning.
    seconds: how long training took, in all sessions.
    engine: where clients keep their private states themselves, the round whose state counts, for each of them; None: the
    checkpoint has the states.
    releases: the last line of releases.jsonl that is known; None: there is no noise, or it was drawn from the seed.
    best: the round with the highest accuracy on validation data so far, that accuracy, and how many evaluations came since.
    """

    as_sent: dict[str, Numbers] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    fine_tuned: dict[int, dict[str, Numbers]] = field(default_factory=dict)
    seconds: float = 0.0
    engine: Mapping[str, Any] | None = None
    releases: str | None = None
    best: dict[str, float] = field(default_factory=dict)

    @property
    def best_round(self) -> int | None:
        return int(self.best["round"]) if self.best else None

    def note_best(self, t: int, value: float | None, lower_is_better: bool = False) -> None:
        """Note what an evaluation is judged by."""
        if value is None:
            return
        if self.best and not (value < self.best["value"] if lower_is_better else value > self.best["value"]):
            self.best = {**self.best, "since": self.best["since"] + 1}
        else:
            self.best = {"round": t, "value": value, "since": 0}

    # -- as a table of a checkpoint ------------------------------------------------------------------------------------

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> "Carried":
        """From what a checkpoint holds, of this version or an older one, which had no evaluations in it."""
        evaluations = [Evaluation(**evaluation) for evaluation in table.get("evaluations", [])]
        fine_tuned = {int(t): of_clients for t, of_clients in table.get("fine_tuned", {}).items()}
        return Carried(
            as_sent=dict(table.get("as_sent") or table.get("proxy") or {}),
            evaluations=evaluations,
            fine_tuned=fine_tuned,
            seconds=float(table["seconds"]),
            engine=table.get("engine"),
            releases=table.get("releases"),
            best=dict(table.get("best") or {}),
        )

    def table(self) -> dict[str, Any]:
        """What a checkpoint holds; `from_table` reads it again."""
        table: dict[str, Any] = {
            "as_sent": self.as_sent,
            "evaluations": [vars(evaluation) for evaluation in self.evaluations],
            "fine_tuned": {str(t): of_clients for t, of_clients in self.fine_tuned.items()},
            "seconds": self.seconds,
        }
        if self.best:
            table["best"] = dict(self.best)
        if self.engine is not None:
            table["engine"] = dict(self.engine)
        if self.releases is not None:
            table["releases"] = self.releases
        return table

    # -- scores --------------------------------------------------------------------------------------------------------

    def note_reply(self, client: int, numbers: Numbers) -> None:
        """A client's own score, on validation data, of the weights that it has just sent."""
        self.as_sent[str(client)] = {name: value for name, value in numbers.items() if name not in NO_SCORES}

    def scores_as_sent(self, clients: Sequence[int] | None = None) -> Scores:
        """The scores of these clients, or of all. Older runs did not measure everything; incomplete scores are left out."""
        scores = {int(s): numbers for s, numbers in self.as_sent.items() if _is_complete(numbers)}
        if clients is None:
            return scores_of(scores)
        return scores_of({s: scores[s] for s in clients if s in scores})

    def keep_only(self, due: Sequence[int]) -> None:
        """Forget evaluations that were only made because a run was to end there: a run that goes on does not have them."""
        self.evaluations = [evaluation for evaluation in self.evaluations if evaluation.round in due]
        self.fine_tuned = {t: scores for t, scores in self.fine_tuned.items() if t in due}

    def note_evaluation(self, t: int, scores: Mapping[Kind, Scores], no_identity: float | None) -> None:
        of_clients: dict[str, OfClients] = {kind: _accuracies(of_kind) for kind, of_kind in scores.items()}
        self.evaluations = [*self.evaluations, Evaluation(t, of_clients, no_identity)][-LAST_EVALUATIONS:]

    def note_fine_tuned(self, t: int, scores: Scores) -> None:
        self.fine_tuned[t] = {str(s): dict(numbers) for s, numbers in scores.of.items()}
        for earlier in sorted(self.fine_tuned)[:-FINE_TUNED_EVALUATIONS]:
            del self.fine_tuned[earlier]

    # -- means ---------------------------------------------------------------------------------------------------------

    def judged(self, rounds: int) -> list[Evaluation]:
        """The evaluations that a run of this many rounds is judged by."""
        of_round = {evaluation.round: evaluation for evaluation in self.evaluations}
        return [of_round[t] for t in judged_rounds(sorted(of_round), rounds)]

    def fine_tuned_scores(self, rounds: Sequence[int]) -> Scores:
        """Each client's mean score over the evaluations of these rounds."""
        rows = _by_client([self.fine_tuned[t] for t in rounds])
        return Scores({int(s): _mean_numbers(of_client) for s, of_client in rows.items()})


def mean_of_clients(evaluations: Sequence[Evaluation], kind: Kind) -> OfClients:
    """Each client's mean accuracy over several evaluations, by its number."""
    values = _by_client([evaluation.of_clients.get(kind, {}) for evaluation in evaluations])
    return {s: sum(of_client) / len(of_client) for s, of_client in values.items()}


def _by_client(tables: Sequence[Mapping[str, T]]) -> dict[str, list[T]]:
    """What several tables hold of each client, in the order of the clients' numbers; a table may lack some clients."""
    clients = sorted({s for table in tables for s in table}, key=int)
    return {s: [table[s] for table in tables if s in table] for s in clients}


def _is_complete(numbers: Numbers) -> bool:
    """Whether a score has all measures; one over no points needs none."""
    return not numbers["points"] or MEASURES[-1] in numbers


def _accuracies(scores: Scores) -> OfClients:
    """Each client's accuracy with six digits, as in metrics.jsonl."""
    return {str(s): float(f"{numbers['accuracy']:.6g}") for s, numbers in scores.of.items()}


def _mean_numbers(rows: Sequence[Numbers]) -> dict[str, float]:
    in_all = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: sum(row[name] for row in rows) / len(rows) for name in in_all}


def evaluation_rounds(recipe: Recipe) -> list[int]:
    """The rounds after which everybody is evaluated; the last round is always one of them."""
    every = recipe.evaluation.every
    return [t for t in range(1, recipe.rounds + 1) if t % every == 0 or t == recipe.rounds]


def fine_tuned_rounds(recipe: Recipe, clients: int) -> list[int]:
    """The evaluations at which clients are fine-tuned: as many as the recipe says, or three where that is affordable."""
    times = recipe.evaluation.finetune_evaluations or _affordable_times(recipe, clients)
    return judged_rounds(evaluation_rounds(recipe), recipe.rounds)[-times:]


def _affordable_times(recipe: Recipe, clients: int) -> int:
    """How often all clients can be fine-tuned; costs are counted in epochs of a client."""
    cohort = recipe.clients_per_round or clients
    training = recipe.rounds * cohort * recipe.training.epochs
    beyond_the_first = (FINE_TUNED_EVALUATIONS - 1) * clients * recipe.evaluation.finetune_epochs
    return FINE_TUNED_EVALUATIONS if beyond_the_first <= AFFORDABLE * training else 1
