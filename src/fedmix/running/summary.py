"""summary.json: what came out of a run, and what it cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from fedmix.core.server import State
from fedmix.running import evaluate
from fedmix.running.accounting import guarantee_of_run
from fedmix.running.carried import Carried, Evaluation, OfClients, fine_tuned_rounds, mean_of_clients
from fedmix.running.evaluate import NoIdentity, Scores
from fedmix.running.loop import Engine
from fedmix.schema import VALIDATION_KINDS, Accuracy, Clusters, LeftOut, MetricsLine, OverClients, Summary, mean_of
from fedmix.settings.build import Experiment


def summarise(
    experiment: Experiment, engine: Engine, state: State, carried: Carried, lines: Sequence[MetricsLine], folder: Path
) -> Summary:
    """The summary of a run. folder: the run directory, which has notes of who was asked for noisy answers."""
    recipe, algorithm, federation = experiment.recipe, experiment.algorithm, experiment.federation
    server = evaluate.client_scores(algorithm, engine, state, range(len(federation)), "test", recipe.rounds)
    union = evaluate.no_identity_score(experiment, engine.store, state, "test")
    tuned_at = _fine_tuned_at(experiment, engine, state, carried)
    fine_tuned = carried.fine_tuned_scores(tuned_at)
    judged = carried.judged(recipe.rounds)
    summary: dict[str, Any] = {
        "algorithm": recipe.algorithm,
        "title": experiment.page.title,
        "recipe": recipe.name,
        "scale": recipe.scale,
        "rounds": recipe.rounds,
        "seed": recipe.seed,
        "clients": len(federation),
        "parameters": experiment.model.parameters,
        "bytes_down": sum(line["bytes_down"] for line in lines),
        "bytes_up": sum(line["bytes_up"] for line in lines),
        "bytes_evaluation": sum(line.get("bytes_evaluation", 0) for line in lines) + union.bytes,
        "loss": lines[-1]["loss"],
        "accuracy": _accuracy(fine_tuned, server, union, judged),
        "measured": {"fine_tuned": tuned_at, "validation": [evaluation.round for evaluation in judged]},
        "of_clients": _of_clients(federation.names, fine_tuned, server, judged),
        "scores": {
            "test": {
                "fine_tuned": fine_tuned.summaries(),
                "server": server.summaries(),
                "no_identity": union.numbers,
            }
        },
        "seconds": round(carried.seconds, 2),
        **algorithm.describe(state),
        "warnings": [*_troubles(lines), *_unanswered(server, len(federation))],
    }
    return cast(Summary, summary | _where_known(experiment, engine, carried, union, summary.get("q_zs"), folder))


def _fine_tuned_at(experiment: Experiment, engine: Engine, state: State, carried: Carried) -> list[int]:
    """The rounds whose fine-tuned scores count; the last round is one of them."""
    recipe = experiment.recipe
    if recipe.rounds not in carried.fine_tuned:
        # The last round was trained by a version of fedmix that fine-tuned later.
        tuned = evaluate.fine_tuned_scores(experiment, engine, state, recipe.rounds)
        carried.note_fine_tuned(recipe.rounds, tuned)
    return [t for t in fine_tuned_rounds(recipe, len(experiment.federation)) if t in carried.fine_tuned]


def _accuracy(fine_tuned: Scores, server: Scores, union: NoIdentity, judged: Sequence[Evaluation]) -> Accuracy:
    return {
        "test": {"fine_tuned": fine_tuned.summary(), "server": server.summary(), "no_identity": union.accuracy},
        "validation": {
            "as_sent": _over_clients(mean_of_clients(judged, "as_sent")),
            "server": _over_clients(mean_of_clients(judged, "server")),
            "no_identity": mean_of([evaluation.no_identity for evaluation in judged]),
        },
    }


def _over_clients(accuracies: OfClients) -> OverClients:
    return Scores({int(s): {"accuracy": value} for s, value in accuracies.items()}).summary()


def _of_clients(
    names: Sequence[str], fine_tuned: Scores, server: Scores, judged: Sequence[Evaluation]
) -> dict[str, Any]:
    """Accuracy by data, kind and name of the client."""

    def by_name(scores: Scores) -> OfClients:
        return {names[s]: numbers["accuracy"] for s, numbers in scores.of.items()}

    validation = {
        kind: {names[int(s)]: value for s, value in mean_of_clients(judged, kind).items()} for kind in VALIDATION_KINDS
    }
    return {"test": {"fine_tuned": by_name(fine_tuned), "server": by_name(server)}, "validation": validation}


def _where_known(
    experiment: Experiment, engine: Engine, carried: Carried, union: NoIdentity, q_zs: Any, folder: Path
) -> dict[str, Any]:
    """What only some runs have: what their noise guarantees, notes, the true groups of their clients."""
    recipe, federation = experiment.recipe, experiment.federation
    more: dict[str, Any] = {}
    if recipe.privacy.noise:
        guarantee = guarantee_of_run(recipe, experiment.algorithm.noisy_parts, folder, carried.releases)
        more["privacy"] = {"noise": recipe.privacy.noise, **guarantee}
    if union.why:
        more["notes"] = {"accuracy.test.no_identity": union.why}
    if federation.groups is not None:
        more["groups"] = list(federation.groups)
        if q_zs is not None:
            more["clusters"] = _clusters(q_zs, federation.groups, engine.store.clients())
    return more


def _clusters(q_zs: Sequence[Sequence[float]], groups: Sequence[int], took_part: Sequence[int]) -> Clusters:
    """How well experts tell the groups of clients that took part apart; nothing is known about the others."""
    return evaluate.clusters([q_zs[s] for s in took_part], [groups[s] for s in took_part])


def _troubles(lines: Sequence[MetricsLine]) -> list[str]:
    """What went wrong with experts at any time, the last message of each kind; and who was left out."""
    warnings = [warning for line in lines for warning in line.get("warnings", [])]
    last_of_kind = {warning.split(":")[0]: warning for warning in warnings}
    absent = _left_out("absent", [(line["round"], line.get("absent", [])) for line in lines])
    refused = _left_out("refused", [(line["round"], line.get("refused", [])) for line in lines])
    return [*last_of_kind.values(), *absent, *refused]


def _left_out(kind: str, rounds: Sequence[tuple[int, Sequence[LeftOut]]]) -> list[str]:
    with_some = [(t, clients) for t, clients in rounds if clients]
    if not with_some:
        return []
    t, clients = with_some[-1]
    last = clients[-1]
    who = last.get("name", last["client"])
    return [
        f"{kind}: clients in {len(with_some):,} of {len(rounds):,} rounds, last client {who} in round "
        f"{t} ({last['reason']})"
    ]


def _unanswered(scores: Scores, clients: int) -> list[str]:
    if not scores.unanswered:
        return []
    s, reason = next(iter(scores.unanswered.items()))
    answered = clients - len(scores.unanswered)
    return [f"unanswered: accuracy is over {answered:,} of {clients:,} clients; client {s}: {reason}"]
