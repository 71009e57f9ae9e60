"""What a reader wants first: who is ahead and by how much, what was spent, what went wrong."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from fedmix.report.comparison import JUDGED
from fedmix.report.groups import Group
from fedmix.report.runs import Run
from fedmix.report.statistics import Difference, over_seeds, paired_difference
from fedmix.report.words import duration, percent, scaled_down, size
from fedmix.schema import WORDS


def glance(members: Sequence[Group]) -> dict[str, Any]:
    """What stands above everything else, in words."""
    runs = [run for group in members for run in group.runs]
    # each note once, in the order of the runs
    notes = list(dict.fromkeys(note for run in runs for note in run.notes))
    return {"verdict": _verdict(members), "spent": _spent(runs), "wrong": _wrong(members), "notes": notes}


def _wrong(members: Sequence[Group]) -> list[dict[str, str]]:
    """What went wrong, and in which run."""
    return [
        {"run": f"{group.name}, seed {run.seed}", "what": what}
        for group in members
        for run in group.runs
        for what in run.troubles
    ]


def _spent(runs: Sequence[Run]) -> str:
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    rounds = sum(len(run.lines) for run in runs)
    sent = size(sum(run.bytes for run in runs))
    trained = duration(sum(run.seconds for run in runs))
    return f"{count}, {rounds:,} rounds, {sent} sent, {trained} of training{_smaller(runs)}"


def _smaller(runs: Sequence[Run]) -> str:
    """Which runs are not their recipe at full size."""
    scales = {str(run.recipe.get("scale", "full")) for run in runs} - {"full"}
    return "".join(f"; {scaled_down(scale)}" for scale in sorted(scales))


def _verdict(members: Sequence[Group]) -> str:
    ended = [group for group in members if group.ended]
    if not ended:
        return "No run has ended yet: there is no result on test data."
    if len(ended) == 1:
        return _alone(ended[0])
    datasets = {_data(group.runs[0]) for group in ended}
    if len(datasets) > 1:
        return "These runs are of different data or splits of it: nobody is ahead. The table has each."
    best, second = sorted(ended, key=_fine_tuned, reverse=True)[:2]
    return _of_two(best, second)


def _fine_tuned(group: Group) -> float:
    """Accuracy on test data, the mean over seeds."""
    return over_seeds([run.final("fine_tuned") for run in group.runs])["mean"] or 0.0


def _alone(group: Group) -> str:
    tuned = percent(over_seeds([run.final("fine_tuned") for run in group.runs]))
    server = percent(over_seeds([run.validation("server") for run in group.ended]))
    return (
        f"{group.name}: fine-tuned accuracy {tuned} % on test data; with the server's weights {server} % on validation "
        f"data, the mean of the last evaluations ({group.seeds})."
    )


def _of_two(first: Group, second: Group) -> str:
    """Who of two is ahead, by each kind of accuracy, paired over clients and seeds."""
    differences = {(part, kind): _paired(first, second, part, kind) for part, kind in JUDGED}
    sentences = [
        _sentence(first.name, second.name, f"{WORDS[kind]} ({part})", difference)
        for (part, kind), difference in differences.items()
        if difference is not None
    ]
    if not sentences:
        return (
            f"{first.name} has {100 * _fine_tuned(first):.1f} % and {second.name} {100 * _fine_tuned(second):.1f} % "
            "fine-tuned on test data. Their clients or seeds are not the same, so nobody is said to be ahead."
        )
    return f"{first.name} against {second.name}, {_seeds(differences.values())}: {'; '.join(sentences)}."


def _paired(first: Group, second: Group, part: str, kind: str) -> Difference | None:
    others = {run.seed: run for run in second.ended}
    pairs = [
        (run.of_clients(part, kind), others[run.seed].of_clients(part, kind))
        for run in first.ended
        if run.seed in others
    ]
    return paired_difference(pairs)


def _sentence(first: str, second: str, what: str, difference: Difference) -> str:
    mean, low, high = (100 * difference[key] for key in ("mean", "low", "high"))
    interval = f"{mean:+.1f} points, {low:+.1f} to {high:+.1f}"
    if difference["verdict"] == "level":
        return f"{what} level ({interval})"
    leader = first if difference["verdict"] == "ahead" else second
    return f"{what} {leader} is ahead ({interval})"


def _seeds(differences: Iterable[Difference | None]) -> str:
    """What a difference was paired over."""
    seeds = max((difference["seeds"] for difference in differences if difference), default=0)
    if seeds == 1:
        return "paired over clients of one seed, so how much another seed would change is not known"
    return f"paired over clients and {seeds} seeds"


def _data(run: Run) -> str:
    """What must be the same where accuracies are compared: the data and who holds it, but not what c is."""
    settings = {key: value for key, value in run.settings.items() if key.startswith("data.") and key != "data.side"}
    if settings.get("data.source") == "own":
        settings["points"] = run.federation.get("points")
    return json.dumps(settings, sort_keys=True, default=str)
