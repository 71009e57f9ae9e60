"""Runs that differ in their seed alone are a group: one line of a table, one curve with a band. Its name says what it is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from fedmix.catalogue import TITLES
from fedmix.report.runs import Run, part_of
from fedmix.report.statistics import OverSeeds, over_seeds
from fedmix.report.words import GIB
from fedmix.schema import METRICS

# switches that are on by default
ON = ("gate_through_features",)


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone."""

    name: str
    runs: list[Run]

    @property
    def ended(self) -> list[Run]:
        return [run for run in self.runs if run.ended]

    @property
    def seeds(self) -> str:
        """How many of its seeds have a result."""
        ended, total = len(self.ended), len(self.runs)
        if total == 1:
            return "one seed"
        return f"{total} seeds" if ended == total else f"{ended} of {total} seeds"


def groups(runs: Sequence[Run]) -> list[Group]:
    """Runs by method; the name says what tells it from the others."""
    by_settings: dict[str, list[Run]] = {}
    for run in runs:
        settings = json.dumps(run.settings, sort_keys=True, default=str)
        by_settings.setdefault(settings, []).append(run)
    members = sorted(by_settings.values(), key=_order)
    switches = _switches(members)
    several_recipes = len({run.name for run in runs}) > 1
    names = [_name(of_group[0], members, switches, several_recipes) for of_group in members]
    return [Group(_unique(names, i), of_group) for i, of_group in enumerate(members)]


def _order(of_group: Sequence[Run]) -> int:
    """Shipped methods in the order of the catalogue, then users' own."""
    titles = list(TITLES.values())
    method = of_group[0].method
    return titles.index(method) if method in titles else len(titles)


def _name(run: Run, members: Sequence[Sequence[Run]], switches: Sequence[str], several_recipes: bool) -> str:
    """The method, its recipe where there are several, and the settings that tell it from others of the same method."""
    same_method = [other for other in members if other[0].method == run.method and other[0].name == run.name]
    keys = dict.fromkeys([*differing(same_method), *switches])
    recipe = [run.name] if several_recipes else []
    return ", ".join([run.method, *recipe, *called(run.settings, list(keys))])


def called(settings: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Settings in a method's name. What is empty, or not there in an older run, is left out."""
    words = []
    for key in keys:
        name, value = key.split(".")[-1], settings.get(key)
        if isinstance(value, bool):
            words += _switch_words(name, value)
        elif value not in (None, [], ""):
            words.append(f"{name} {value}")
    return words


def _switch_words(name: str, value: bool) -> list[str]:
    """A switch is said by its name alone, and not at all where it is as by default."""
    is_default = value == (name in ON)
    if is_default:
        return []
    words = name.replace("_", " ")
    return [words if value else f"no {words}"]


def _switches(members: Sequence[Sequence[Run]]) -> list[str]:
    """What is on in the training of some groups and off in that of others, whatever their methods.

    Names say it, since a comparison that does not is not fair.
    """
    on = [_switched_on(of_group[0]) for of_group in members]
    anywhere = set().union(*on)
    everywhere = anywhere.intersection(*on)
    return sorted(anywhere - everywhere)


def _switched_on(run: Run) -> set[str]:
    return {key for key, value in run.settings.items() if value is True and key.startswith("training.")}


def _unique(names: Sequence[str], i: int) -> str:
    """A name, numbered where others are the same."""
    name = names[i]
    if names.count(name) == 1:
        return name
    number = names[: i + 1].count(name)
    return f"{name} ({number})"


def differing(same: Sequence[Sequence[Run]]) -> list[str]:
    """Settings that are not the same in all of these groups of one method.

    A run that is older than a setting does not have it. Such a setting counts only where nothing else tells that run from
    the others; a switch was off in it.
    """
    tables = [_as_text(of_group[0].settings) for of_group in same]
    # each key once, in the order of the recipes
    keys = dict.fromkeys(chain.from_iterable(tables))
    stated = [key for key in keys if _differs_where_stated(key, tables)]
    if _tell_apart(stated, tables):
        return stated
    return [key for key in keys if _differs(key, tables)]


def _tell_apart(keys: Sequence[str], tables: Sequence[Mapping[str, str]]) -> bool:
    """Whether no two tables are the same in all of these settings."""
    values = {tuple(map(table.get, keys)) for table in tables}
    return len(values) == len(tables)


def _differs_where_stated(key: str, tables: Sequence[Mapping[str, str]]) -> bool:
    return len({table[key] for table in tables if key in table}) > 1


def _differs(key: str, tables: Sequence[Mapping[str, str]]) -> bool:
    return len({table.get(key, "false") for table in tables}) > 1


def _as_text(settings: Mapping[str, Any]) -> dict[str, str]:
    return {key: json.dumps(value, default=str) for key, value in settings.items()}


# -- the table of results ----------------------------------------------------------------------------------------------

# name of a column: kind, measure, what of it, factor; all on test data at the end
TEST_COLUMNS: dict[str, tuple[str, str, str, float]] = {
    "fine-tuned, test": ("fine_tuned", "accuracy", "mean", 100),
    "server, test": ("server", "accuracy", "mean", 100),
    "no identity, test": ("no_identity", "accuracy", "mean", 100),
    "worst decile, fine-tuned, test": ("fine_tuned", "accuracy", "worst_decile", 100),
    "calibration error, fine-tuned, test": ("fine_tuned", "ece", "mean", 100),
    "log loss, fine-tuned, test": ("fine_tuned", "nll", "mean", 1),
}
# name of a column: kind; all means over the last evaluations
VALIDATION_COLUMNS = {
    "as sent, validation": "as_sent",
    "server, validation": "server",
    "no identity, validation": "no_identity",
}
COLUMNS = [*list(TEST_COLUMNS)[:3], *VALIDATION_COLUMNS, *list(TEST_COLUMNS)[3:]]
LOWER_IS_BETTER = [name for name in COLUMNS if name.startswith(("calibration", "log loss"))]


def table(members: Sequence[Group]) -> list[dict[str, Any]]:
    """A row for each group: accuracies, calibration, what was spent."""
    return [_row(group) for group in members]


def _row(group: Group) -> dict[str, Any]:
    """The runs that ended; of a group in which none has ended yet, all of them as far as they have come."""
    shown = group.ended or group.runs
    name = group.name if len(shown) == len(group.runs) else f"{group.name} ({group.seeds})"
    test = {column: _test_cell(group.runs, *about) for column, about in TEST_COLUMNS.items()}
    validation = {column: _validation_cell(shown, kind) for column, kind in VALIDATION_COLUMNS.items()}
    return {"method": name, "seeds": len(shown), **test, **validation, **_spent(shown)}


def _test_cell(runs: Sequence[Run], kind: str, measure: str, what: str, factor: float) -> list[float | None] | None:
    return _cell(over_seeds([run.final(kind, measure, what) for run in runs]), factor)


def _validation_cell(runs: Sequence[Run], kind: str) -> list[float | None] | None:
    return _cell(over_seeds([_validation(run, kind) for run in runs]), 100)


def _spent(runs: Sequence[Run]) -> dict[str, float]:
    """The rounds of the longest run; GiB and minutes of a run on average."""
    return {
        "rounds": max((run.lines[-1]["round"] for run in runs if run.lines), default=0),
        "GiB": sum(run.bytes for run in runs) / GIB / len(runs),
        "minutes": sum(run.seconds for run in runs) / 60 / len(runs),
    }


def _validation(run: Run, kind: str) -> float | None:
    return part_of(run, METRICS, lambda run: run.validation(kind), None)


def _cell(value: OverSeeds, factor: float) -> list[float | None] | None:
    """[mean, sample deviation over seeds], or None."""
    mean, deviation = value["mean"], value["std"]
    if mean is None:
        return None
    return [factor * mean, None if deviation is None else factor * deviation]
