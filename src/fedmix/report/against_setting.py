"""Accuracy against a setting, where runs of one method differ in it: what a sweep leaves."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedmix.report.groups import Group, called, differing, table
from fedmix.report.thinning import rounded

# rows of other methods beside the lines
MOST_BESIDE = 6
_Rows = list[tuple[Group, dict[str, Any]]]
_Point = tuple[float, Mapping[str, Any]]


def against_settings(members: Sequence[Group]) -> dict[str, Any] | None:
    """The lines of each setting of numbers that groups of one method differ in; None where there is no such setting.

    A setting has one line for each choice of the other settings. Methods that do not vary stand beside it, as lines without
    a slope.
    """
    by_method = _by_method(members)
    varied = max(by_method.values(), key=len)
    lines = _lines_of_settings(varied)
    if not lines:
        return None
    unvaried = [rows for rows in by_method.values() if rows is not varied]
    beside = [rounded(row) for rows in unvaried for _, row in rows]
    return {"keys": lines, "method": _method(varied), "beside": beside[:MOST_BESIDE]}


def _by_method(members: Sequence[Group]) -> dict[str, _Rows]:
    """The groups of each method on each recipe, with their rows of the table."""
    by_method: dict[str, _Rows] = {}
    for group, row in zip(members, table(members), strict=True):
        run = group.runs[0]
        by_method.setdefault(f"{run.method}, {run.name}", []).append((group, row))
    return by_method


def _method(rows: _Rows) -> str:
    group, _ = rows[0]
    return group.runs[0].method


def _lines_of_settings(varied: _Rows) -> dict[str, list[dict[str, Any]]]:
    """The lines of each setting that has some."""
    keys = differing([group.runs for group, _ in varied])
    lines = {key: _lines(varied, key, [other for other in keys if other != key]) for key in keys}
    return {key: lines_of_key for key, lines_of_key in lines.items() if lines_of_key}


def _lines(varied: _Rows, key: str, others: Sequence[str]) -> list[dict[str, Any]]:
    """The lines of one setting; none where it is no number, or where no line has two points."""
    values = [_setting(group, key) for group, _ in varied]
    if not all(map(is_number, values)):
        return []
    lines = _points_of_lines(varied, key, others)
    if max(map(len, lines.values())) < 2:
        return []
    # a line that the other settings give no name is named by its method, if it has to be told from others
    nameless = _method(varied) if len(lines) > 1 else ""
    return [_line(name or nameless, points) for name, points in lines.items()]


def _points_of_lines(varied: _Rows, key: str, others: Sequence[str]) -> dict[str, list[_Point]]:
    """The points of each line, by its name: what the other settings are."""
    lines: dict[str, list[_Point]] = {}
    for group, row in varied:
        name = ", ".join(called(group.runs[0].settings, others))
        lines.setdefault(name, []).append((_setting(group, key), row))
    return lines


def _line(name: str, points: Sequence[_Point]) -> dict[str, Any]:
    ordered = sorted(points, key=lambda point: point[0])
    return {
        "name": name,
        "values": [value for value, _ in ordered],
        "rows": rounded([dict(row) for _, row in ordered]),
    }


def _setting(group: Group, key: str) -> Any:
    return group.runs[0].settings.get(key)


def is_number(value: Any) -> bool:
    """Whether a setting is a number, and not a switch."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
