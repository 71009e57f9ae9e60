"""Everything that is drawn, as plain numbers, thinned to what a screen shows: for the page and for a paper's figures."""

from collections.abc import Callable, Sequence
from typing import Any

from fedmix.report import curves, run_details
from fedmix.report.against_setting import against_settings
from fedmix.report.groups import COLUMNS, LOWER_IS_BETTER, Group, groups, table
from fedmix.report.membership import membership, words_of
from fedmix.report.runs import Run, part_of
from fedmix.report.thinning import rounded
from fedmix.report.verdict import glance

# recipes that the title names
MOST_NAMES = 3


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """The numbers of the page; assets/page.js reads them by these keys."""
    members = groups(runs)
    group_names = [group.name for group in members]
    data = {
        "title": _title(runs),
        "columns": [*COLUMNS, "rounds", "GiB", "minutes"],
        "judged": {name: name in LOWER_IS_BETTER for name in COLUMNS},
        "table": rounded(table(members)),
        "groups": group_names,
        "short": short_names(group_names),
        "curves": [curves.curves(group) for group in members],
        "runs": _runs_data(members),
        "sweep": against_settings(members),
        "missing": _missing(runs),
    }
    # last: what could not be read is known now
    return data | {"glance": glance(members)}


def _title(runs: Sequence[Run]) -> str:
    names = list(dict.fromkeys(run.name for run in runs))
    return " and ".join(names) if len(names) <= MOST_NAMES else "fedmix runs"


def short_names(names: Sequence[str], most: int = 44) -> list[str]:
    """Names for legends: beginning and end of a long one, with a number where that does not tell it from another."""
    head = most * 3 // 5
    tail = most - head - 1
    short = [name if len(name) <= most else f"{name[:head]}…{name[-tail:]}" for name in names]
    return [name if short.count(name) == 1 else f"{i + 1}: {name}" for i, name in enumerate(short)]


def _missing(runs: Sequence[Run]) -> list[str]:
    """What these runs could show and do not, and what to type for it."""
    ended = [run for run in runs if run.ended]
    if not ended:
        return []
    words = []
    if not any(run.evaluation for run in ended):
        words.append("no evaluation of these runs: fedmix evaluate RUN makes it")
    if not any(run.audit for run in ended):
        words.append("no audit of these runs: fedmix audit RUN makes it")
    return words


def _runs_data(members: Sequence[Group]) -> list[dict[str, Any]]:
    """Every run, group by group."""
    return [_run_data(run, group, number) for number, group in enumerate(members) for run in group.runs]


def _membership(run: Run) -> dict[str, Any] | None:
    found = membership(run)
    return found and {**found, "words": words_of(found)}


def _run_data(run: Run, group: Group, number: int) -> dict[str, Any]:
    """What is shown of one run: maps of q, use of experts, clients, evaluation, audit, how to repeat it."""
    # for each part, the file that is to blame if it cannot be made, and what makes it
    parts: dict[str, tuple[str, Callable[[Run], Any]]] = {
        "maps": ("metrics.jsonl", curves.maps),
        "use": ("metrics.jsonl", curves.use),
        "layers": ("metrics.jsonl", curves.layers),
        "membership": ("metrics.jsonl", _membership),
        "clients": ("summary.json or federation.json", run_details.clients),
        "new": ("evaluation.json", run_details.new_clients),
        "evaluation": ("evaluation.json", run_details.evaluation),
        "audit": ("audit.json", run_details.audit),
    }
    nothing: dict[str, Any] = {"recipe": {}, "command": "", "packages": {}, "sessions": 0}
    return {
        "name": f"{group.name}, seed {run.seed}" if len(group.runs) > 1 else group.name,
        "seed": run.seed,
        "group": number,
        "path": run.path,
        **{name: rounded(part_of(run, file, work, None)) for name, (file, work) in parts.items()},
        "about": part_of(run, "environment.json", run_details.about, nothing),
        "troubles": run.troubles,
    }
