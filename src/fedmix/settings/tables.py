"""Settings classes are made from nested tables and turned back into them.

Unknown keys and values of the wrong type are refused by name.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fedmix.errors import SettingError, one_of

T = TypeVar("T")

TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}


def settings_from(kind: type[T], table: Any, where: str = "") -> T:
    """Settings of the class `kind` from a table. `where`: what the table is called, as in [training]."""
    refuse_what_is_no_table(table, where)
    types = get_type_hints(kind)
    values = {key: value_of(types, key, value, where) for key, value in table.items()}
    return kind(**values)


def refuse_what_is_no_table(table: Any, where: str) -> None:
    if not isinstance(table, dict):
        raise SettingError(f"{where or 'a recipe'} must be a table of settings. Got {table!r} instead.")


def value_of(types: Mapping[str, Any], key: str, value: Any, where: str, also_known: Mapping[str, Any] = {}) -> Any:
    """The value of one setting, checked. also_known: names to offer where the key is not one of `types`."""
    if key not in types:
        section = f" of [{where}]" if where else ""
        raise SettingError(one_of(f"a setting{section}", key, [*types, *also_known]))
    label = f"{where}.{key}" if where else key
    if is_dataclass(types[key]):
        return settings_from(types[key], value, label)
    return typed(types[key], value, label)


def typed(kind: Any, value: Any, label: str) -> Any:
    """The value if it is of this type; a whole number becomes a float where a float is wanted."""
    origin = get_origin(kind) or kind
    if origin is Literal:
        return _one_of_literals(kind, value, label)
    if origin in (Union, UnionType):
        return _of_any_type(get_args(kind), value, label)
    plain = _of_plain_type(origin, value, label)
    if origin is list:
        return [typed(get_args(kind)[0], item, label) for item in plain]
    return plain


def _of_plain_type(origin: Any, value: Any, label: str) -> Any:
    if origin not in TYPE_NAMES:
        raise SettingError(f"{label} must be left at its default: a recipe cannot give a value of its type ({origin}).")
    if origin is float and type(value) is int:
        return float(value)
    if not _is_a(origin, value):
        raise SettingError(f"{label} must be {TYPE_NAMES[origin]}. Got {value!r} instead.")
    return value


def _is_a(origin: Any, value: Any) -> bool:
    """In Python True is a whole number; in a recipe it is not."""
    if isinstance(value, bool):
        return origin is bool
    return isinstance(value, origin)


def _one_of_literals(kind: Any, value: Any, label: str) -> Any:
    known = get_args(kind)
    if value not in known:
        raise SettingError(one_of(label, value, map(str, known)))
    return value


def _of_any_type(kinds: tuple[Any, ...], value: Any, label: str) -> Any:
    for kind in kinds:
        try:
            return typed(kind, value, label)
        except SettingError:
            continue
    names = " or ".join(TYPE_NAMES.get(get_origin(kind) or kind, str(kind)) for kind in kinds)
    raise SettingError(f"{label} must be {names}. Got {value!r} instead.")


def settings_table(settings: Any) -> dict[str, Any]:
    """Settings as nested tables."""
    table: dict[str, Any] = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        table[field.name] = settings_table(value) if is_dataclass(value) else value
    return table


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table of tables with dotted keys: {"fedmix": {"eta": 0.5}} -> {"fedmix.eta": 0.5}."""
    settings: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            settings |= {f"{key}.{name}": setting for name, setting in value.items()}
        else:
            settings[key] = value
    return settings


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The other way round: {"fedmix.eta": 0.5} -> {"fedmix": {"eta": 0.5}}."""
    table: dict[str, Any] = {}
    for key, value in settings.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        table = merged(table, value)
    return table


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A table in which the settings of another one replace its own."""
    table = dict(base)
    for key, value in over.items():
        both_are_tables = isinstance(value, Mapping) and isinstance(table.get(key), Mapping)
        table[key] = merged(table[key], value) if both_are_tables else value
    return table
