"""The line of metrics.jsonl for a round."""

import time
from collections.abc import Sequence
from typing import Any, cast

from fedmix.engines.client import BOUND
from fedmix.running import evaluate
from fedmix.running.carried import Carried
from fedmix.running.evaluate import Scores
from fedmix.running.loop import Engine, Round
from fedmix.schema import Accuracy, Kind, MetricsLine
from fedmix.settings.build import Experiment


def line_of(step: Round, names: Sequence[str]) -> MetricsLine:
    """What is known about a round before anybody is evaluated. names: what clients are called."""
    refused = [
        {"client": r.client, "name": names[r.client], "field": r.field, "reason": r.reason} for r in step.refused
    ]
    absent = [{"client": client, "name": names[client], "reason": reason} for client, reason in step.absent.items()]
    line: dict[str, Any] = {
        "round": step.t,
        "loss": step.loss,
        "bytes_down": step.bytes_down,
        "bytes_up": step.bytes_up,
        "seconds": round(step.seconds, 4),
        "divergence": step.diagnosis.divergence,
        "clients": [reply.client for reply in step.replies],
        **step.diagnosis.detail,
        "refused": refused,
        "absent": absent,
    }
    return cast(MetricsLine, line)


def _means(scores: Scores) -> dict[str, float]:
    """The mean over clients of everything that is measured beside accuracy, with the server's weights on validation data."""
    means = {name: scores.summary(name)["mean"] for name in scores.measures if name != "accuracy"}
    return {name: value for name, value in means.items() if value is not None}


def evaluated(
    experiment: Experiment, engine: Engine, step: Round, carried: Carried, with_fine_tuning: bool
) -> dict[str, Any]:
    """What an evaluation adds to the line of a round; `carried` notes it too."""
    began = time.perf_counter()
    algorithm, everyone = experiment.algorithm, range(len(experiment.federation))
    as_sent = carried.scores_as_sent()
    server = evaluate.client_scores(algorithm, engine, step.state, everyone, "validation", step.t)
    union = evaluate.no_identity_score(experiment, engine.store, step.state, "validation")
    scores: dict[Kind, Scores] = {"as_sent": as_sent, "server": server, "no_identity": union.of_clients}
    carried.note_evaluation(step.t, scores, union.accuracy)
    accuracy: Accuracy = {
        "validation": {"as_sent": as_sent.summary(), "server": server.summary(), "no_identity": union.accuracy}
    }
    if with_fine_tuning:
        tuned = evaluate.fine_tuned_scores(experiment, engine, step.state, step.t)
        carried.note_fine_tuned(step.t, tuned)
        accuracy["test"] = {"fine_tuned": tuned.summary()}
    line: dict[str, Any] = {"accuracy": accuracy, "scores": _means(server)}
    bound = server.mean_over_points(BOUND)
    if bound is not None:
        # The bound on validation points, with the server's weights.
        line["bound"] = bound
    return {
        **line,
        "bytes_evaluation": union.bytes,
        "seconds_evaluation": round(time.perf_counter() - began, 4),
        **algorithm.describe(step.state),
    }
