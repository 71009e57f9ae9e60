"""Several runs beside each other: methods over the same seeds, or a grid of settings."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NotRequired, TypedDict

from fedmix.errors import SettingError, one_of
from fedmix.report.statistics import Difference, OverSeeds, over_seeds, paired_difference
from fedmix.report.words import GIB, title_of
from fedmix.schema import TEST_KINDS, VALIDATION_KINDS, WORDS, Summary

# what two methods are compared by: the data, and the kind of accuracy;
# validation figures are means over the last evaluations
JUDGED: tuple[tuple[str, str], ...] = (
    ("test", "fine_tuned"),
    ("validation", "as_sent"),
    ("validation", "server"),
    ("validation", "no_identity"),
)


class SeedsRow(TypedDict):
    """Runs that differ in their seed alone."""

    recipe: str
    scale: str
    rounds: int
    seeds: list[int]
    test: dict[str, OverSeeds]
    validation: dict[str, OverSeeds]
    worst_decile: OverSeeds
    gib: OverSeeds
    adjusted_rand_index: NotRequired[OverSeeds]


class MethodRow(SeedsRow):
    """A method in a comparison."""

    algorithm: str
    title: str


class PairedDifference(TypedDict):
    """First minus second, by one kind of accuracy on one part of the data.

    difference: None where a run does not have each client's accuracy.
    """

    first: str
    second: str
    part: str
    kind: str
    difference: Difference | None


class Comparison(TypedDict):
    """comparison.json."""

    rows: list[MethodRow]
    differences: list[PairedDifference]


class SweepRow(SeedsRow):
    """A point of the grid in a sweep: its settings that vary, and what its runs warned of."""

    settings: dict[str, Any]
    warnings: list[str]


class Sweep(TypedDict):
    """sweep.json. best: the row with the highest validation accuracy of the kind `by`; None: no run ended."""

    rows: list[SweepRow]
    failed: list[str]
    by: str
    best: int | None


def compared(summaries: Sequence[Summary]) -> Comparison:
    """One row for each method over its seeds, and the differences of every two of them."""
    by_method: dict[str, list[Summary]] = {}
    for summary in summaries:
        by_method.setdefault(summary["algorithm"], []).append(summary)
    rows = [_method_row(runs) for runs in by_method.values()]
    differences = [
        _difference(first, second, part, kind)
        for first, second in combinations(by_method.values(), 2)
        for part, kind in JUDGED
    ]
    return {"rows": rows, "differences": differences}


def _method_row(runs: Sequence[Summary]) -> MethodRow:
    return {"algorithm": runs[0]["algorithm"], "title": title_of(runs[0]), **row_over_seeds(runs)}


def row_over_seeds(runs: Sequence[Summary]) -> SeedsRow:
    """Means and sample deviations of runs that differ in their seed alone."""
    first = runs[0]
    row: SeedsRow = {
        "recipe": first["recipe"],
        "scale": first["scale"],
        "rounds": first["rounds"],
        "seeds": [run["seed"] for run in runs],
        "test": {kind: _accuracy_over_seeds(runs, "test", kind) for kind in TEST_KINDS},
        "validation": {kind: _accuracy_over_seeds(runs, "validation", kind) for kind in VALIDATION_KINDS},
        "worst_decile": _accuracy_over_seeds(runs, "test", "fine_tuned", "worst_decile"),
        "gib": over_seeds([_gib(run) for run in runs]),
    }
    indices = _rand_indices(runs)
    if indices:
        row["adjusted_rand_index"] = over_seeds(indices)
    return row


def _rand_indices(runs: Sequence[Summary]) -> list[float | None]:
    """How well true groups were found, of the runs whose groups are known."""
    return [run["clusters"]["adjusted_rand_index"] for run in runs if "clusters" in run]


def _accuracy_over_seeds(runs: Sequence[Summary], part: str, kind: str, what: str = "mean") -> OverSeeds:
    return over_seeds([accuracy_of(run, part, kind, what) for run in runs])


def _gib(summary: Summary) -> float:
    return (summary["bytes_down"] + summary["bytes_up"]) / GIB


def accuracy_of(summary: Summary, part: str, kind: str, what: str = "mean") -> float | None:
    """A figure of a summary. The accuracy without identity is one number; the others are over clients."""
    tables: Mapping[str, Any] = summary["accuracy"]
    value = tables.get(part, {}).get(kind)
    return value.get(what) if isinstance(value, Mapping) else value


def _difference(first: Sequence[Summary], second: Sequence[Summary], part: str, kind: str) -> PairedDifference:
    others = {run["seed"]: run for run in second}
    pairs = [
        (_of_clients(run, part, kind), _of_clients(others[run["seed"]], part, kind))
        for run in first
        if run["seed"] in others
    ]
    return {
        "first": first[0]["algorithm"],
        "second": second[0]["algorithm"],
        "part": part,
        "kind": kind,
        "difference": paired_difference(pairs),
    }


def _of_clients(summary: Summary, part: str, kind: str) -> dict[str, float]:
    return summary["of_clients"].get(part, {}).get(kind, {})


def swept(runs: Sequence[tuple[Mapping[str, Any], Summary]], by: str, failed: Sequence[str] = ()) -> Sweep:
    """A row for each point of the grid, over its seeds, and which of them is best.

    runs: of each, the settings that vary, and its summary. by: the kind of accuracy on validation data that the best row is
    chosen by.
    """
    kind = chosen_kind(by)
    points: list[Mapping[str, Any]] = []
    for settings, _ in runs:
        if settings not in points:
            points.append(settings)
    rows = [_sweep_row(point, [summary for settings, summary in runs if settings == point]) for point in points]
    return {"rows": rows, "failed": list(failed), "by": kind, "best": _best(rows, kind)}


def chosen_kind(by: str) -> str:
    """A kind of validation accuracy from its name or its words: as_sent, as-sent, 'as sent'."""
    kind = by.replace("-", "_").replace(" ", "_")
    if kind not in VALIDATION_KINDS:
        raise SettingError(one_of("--by", by, [WORDS[known].replace(" ", "-") for known in VALIDATION_KINDS]))
    return kind


def _sweep_row(settings: Mapping[str, Any], summaries: Sequence[Summary]) -> SweepRow:
    warnings = sorted({warning for summary in summaries for warning in summary["warnings"]})
    return {"settings": dict(settings), "warnings": warnings, **row_over_seeds(summaries)}


def _best(rows: Sequence[SweepRow], kind: str) -> int | None:
    """The number of the row with the highest mean; the first of them, where several are level."""
    accuracies = [row["validation"][kind]["mean"] for row in rows]
    known = {i: accuracy for i, accuracy in enumerate(accuracies) if accuracy is not None}
    return max(known, key=lambda i: known[i]) if known else None
