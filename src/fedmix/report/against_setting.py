"""Accuracy against a setting, where runs of one method differ in it: what a sweep leaves."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedmix.report.groups import Group, called, differing, table
from fedmix.report.thinning import rounded

MOST_BESIDE = 6
_Rows = list[tuple[Group, dict[str, Any]]]


def against_settings(members: Sequence[Group]) -> dict[str, Any] | None:
    """For each setting of numbers that groups of one method differ in: a line for each choice of the others.

    Methods without such groups are beside it, as a line without a slope.
    """
    by_method: dict[str, _Rows] = {}
    for group, row in zip(members, table(members), strict=True):
        by_method.setdefault(f"{group.runs[0].method}, {group.runs[0].name}", []).append((group, row))
    varied = max(by_method.values(), key=len)
    method = varied[0][0].runs[0].method
    keys = differing([group.runs for group, _ in varied])
    lines = {key: _lines(varied, key, keys, method) for key in keys}
    lines = {key: of_key for key, of_key in lines.items() if of_key}
    if not lines:
        return None
    beside = [rounded(row) for rows in by_method.values() if rows is not varied for _, row in rows]
    return {"keys": lines, "method": method, "beside": beside[:MOST_BESIDE]}


def _lines(varied: _Rows, key: str, keys: Sequence[str], method: str) -> list[dict[str, Any]]:
    """Nothing, where the setting is no number, or no line has two points."""
    if not all(_is_number(_setting(group, key)) for group, _ in varied):
        return []
    others = [other for other in keys if other != key]
    lines: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
    for group, row in varied:
        name = ", ".join(called(group.runs[0].settings, others))
        lines.setdefault(name, []).append((_setting(group, key), row))
    if max(len(points) for points in lines.values()) < 2:
        return []
    return [_line(name or (method if len(lines) > 1 else ""), points) for name, points in lines.items()]


def _line(name: str, points: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[str, Any]:
    ordered = sorted(points, key=lambda point: point[0])
    return {
        "name": name,
        "values": [value for value, _ in ordered],
        "rows": rounded([dict(row) for _, row in ordered]),
    }


def _setting(group: Group, key: str) -> Any:
    return group.runs[0].settings.get(key)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
