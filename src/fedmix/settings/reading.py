"""Recipes are read from files and written back: a shipped one by name, a TOML file, or a run directory.

A recipe may have exceptions for a scale, a kind of side information or a method, and its reader may change settings.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import tomli_w

from fedmix.catalogue import CATALOGUE, SECTIONS
from fedmix.errors import SettingError, one_of
from fedmix.methods.registry import settings_of_section
from fedmix.settings import tables
from fedmix.settings.importing import importable_from
from fedmix.settings.recipe import SIDES, DataSettings, Recipe, is_method
from fedmix.settings.tables import settings_from, typed

EXCEPTIONS = ("scales", "sides", "methods")


def shipped() -> list[str]:
    """The names of the recipes that come with fedmix."""
    names = [path.name for path in files("fedmix.recipes").iterdir()]
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def folder_of_run(recipe: Recipe, name: str = "") -> str:
    """What a run's folder is called by default. The user's own method has a colon in its name, which a folder may not."""
    method = recipe.algorithm.replace(":", "-")
    return f"{name}{method}-seed{recipe.seed}"


# -- reading -----------------------------------------------------------------------------------------------------------


def read_recipe(
    name: str, algorithm: str | None = None, changes: Mapping[str, Any] | None = None, scale: str | None = None
) -> Recipe:
    """A shipped recipe by name, or a file or run directory by path, with its exceptions and `changes` (`make_recipe`)."""
    try:
        table = tomllib.loads(_text_of(name))
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"recipe {name} must be valid TOML: {error}.") from error
    table.setdefault("name", Path(name).stem)
    return make_recipe(table, algorithm, changes, scale)


def _text_of(name: str) -> str:
    effective = Path(name) / "recipe.toml"
    if effective.is_file():
        return effective.read_text()
    if name in shipped():
        return (files("fedmix.recipes") / f"{name}.toml").read_text()
    if not Path(name).is_file():
        raise SettingError(one_of("a recipe", name, shipped()).removesuffix(".") + ", and no file of that name exists.")
    importable_from(Path(name).resolve().parent)
    try:
        return Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SettingError(f"recipe {name} must be a TOML file. It is not text.") from error


def make_recipe(
    table: Mapping[str, Any],
    algorithm: str | None = None,
    changes: Mapping[str, Any] | None = None,
    scale: str | None = None,
) -> Recipe:
    """Settings from nested tables. `changes` has dotted keys: {"fedmix.eta": 0.5}.

    A recipe's exceptions are taken in this order, a later one over an earlier: [scales.X] of the scale that is asked for,
    [sides.X] of the side information that is used, [methods.X] of the method; then the changes.
    """
    plain, exceptions = _without_exceptions(table)
    changes = changes or {}
    if "scale" in changes:
        raise SettingError("scale cannot be set by itself; --scale takes a recipe's smaller settings.")
    asked_method = algorithm or changes.get("algorithm") or plain.get("algorithm", "fedmix")
    asked_side = changes.get("data.side") or plain.get("data", {}).get("side", DataSettings.side)
    method = typed(str, asked_method, "algorithm")
    side = typed(str, asked_side, "data.side")
    settings = _scaled(plain, exceptions.scales, scale)
    settings = tables.merged(settings, exceptions.sides.get(side, {}))
    settings = tables.merged(settings, exceptions.methods.get(method, {}))
    settings["algorithm"] = method
    return _recipe_from(tables.merged(settings, tables.nested(changes)))


def _scaled(table: Mapping[str, Any], scales: Mapping[str, Any], scale: str | None) -> dict[str, Any]:
    """The table with the settings of the scale that is asked for; None: as the recipe has them."""
    present = table.get("scale", "full")
    if scale is None or scale == present:
        return dict(table)
    if scale not in scales:
        raise SettingError(one_of(f"--scale of {table.get('name', 'this recipe')}", scale, [present, *scales]))
    name = f"{table.get('name', 'unnamed')}-{scale}"
    return tables.merged(table, scales[scale]) | {"scale": scale, "name": name}


class _Exceptions(NamedTuple):
    """The tables [scales.X], [sides.X] and [methods.X] of a recipe."""

    scales: dict[str, Any]
    sides: dict[str, Any]
    methods: dict[str, Any]


def _without_exceptions(table: Mapping[str, Any]) -> tuple[dict[str, Any], _Exceptions]:
    """A recipe's table without its exceptions, and the exceptions. Wrong ones are refused even where they are not used."""
    if not isinstance(table.get("data", {}), Mapping):
        raise SettingError(f"data must be a table of settings. Got {table['data']!r} instead.")
    plain = {key: value for key, value in table.items() if key not in EXCEPTIONS}
    exceptions = _Exceptions(*(table.get(kind, {}) for kind in EXCEPTIONS))
    for kind, of_kind in zip(EXCEPTIONS, exceptions, strict=True):
        _refuse_wrong_exceptions(kind, of_kind, plain)
    return plain, exceptions


def _refuse_wrong_exceptions(kind: str, of_kind: Any, plain: Mapping[str, Any]) -> None:
    if not isinstance(of_kind, dict) or not all(isinstance(settings, dict) for settings in of_kind.values()):
        raise SettingError(f"{kind} must be tables [{kind}.X]. Got {of_kind!r} instead.")
    for name, settings in of_kind.items():
        _refuse_unknown_exception(kind, name)
        # Each exception by itself must give a recipe.
        _recipe_from(tables.merged(plain, settings))


def _refuse_unknown_exception(kind: str, name: str) -> None:
    if kind == "sides" and name not in SIDES:
        raise SettingError(one_of("a table [sides.X]", name, SIDES))
    if kind == "methods" and not is_method(name):
        raise SettingError(one_of("a table [methods.X]", name, CATALOGUE))


def _recipe_from(table: Mapping[str, Any]) -> Recipe:
    """A recipe from its table, in which the sections of shipped methods stand beside the others."""
    tables.refuse_what_is_no_table(table, "")
    types = get_type_hints(Recipe)
    types.pop("sections")
    kinds = {name: settings_of_section(name) for name in SECTIONS}
    values: dict[str, Any] = {}
    sections: dict[str, Any] = {}
    for key, value in table.items():
        if key in kinds:
            sections[key] = settings_from(kinds[key], value, key)
        else:
            values[key] = tables.value_of(types, key, value, "", kinds)
    listed = CATALOGUE.get(values.get("algorithm", Recipe.algorithm))
    if listed and listed.section:
        # The method's section is always there, with defaults where the recipe says nothing.
        sections.setdefault(listed.section, kinds[listed.section]())
    return Recipe(**values, sections=sections)


# -- writing -----------------------------------------------------------------------------------------------------------


def dump_recipe(recipe: Recipe) -> str:
    """The effective settings as TOML; reading it again gives the same recipe."""
    return tomli_w.dumps(recipe_table(recipe))


def recipe_table(recipe: Recipe) -> dict[str, Any]:
    """A recipe as nested tables; the sections of methods stand beside the others."""
    table = tables.settings_table(recipe)
    sections = table.pop("sections")
    if not recipe.own:
        table.pop("own")
    return table | {section: tables.settings_table(settings) for section, settings in sections.items()}


def flat_settings(recipe: Recipe) -> dict[str, Any]:
    """Every setting of a recipe under its dotted name."""
    return tables.flat(recipe_table(recipe))


# -- the command line's way to say settings ----------------------------------------------------------------------------


def parse_changes(items: Iterable[str]) -> dict[str, Any]:
    """['fedmix.eta=0.5', 'data.side=label'] -> {'fedmix.eta': 0.5, 'data.side': 'label'}; values as in TOML, or bare words."""
    changes: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise SettingError(f"--set must be key=value, as in fedmix.eta=0.5. Got {item!r} instead.")
        changes[key.strip()] = _value(text)
    return changes


def parse_grid(items: Iterable[str]) -> dict[str, list[Any]]:
    """['fedmix.eta=0,0.5'] -> {'fedmix.eta': [0, 0.5]}: every value that a setting is to take. Lists keep their brackets."""
    grid: dict[str, list[Any]] = {}
    for item in items:
        key, _, text = item.partition("=")
        key = key.strip()
        if not key or not text.strip():
            raise SettingError(f"--set must be key=value,value,..., as in fedmix.eta=0,0.5. Got {key!r} instead.")
        grid[key] = _values(text)
        different = set(map(repr, grid[key]))
        if len(different) != len(grid[key]):
            raise SettingError(f"--set {key} must name each value once. Got {text!r} instead.")
    return grid


def _values(text: str) -> list[Any]:
    """'0,0.5' -> [0, 0.5]; a comma inside brackets does not separate."""
    parts = re.split(r",(?![^\[]*\])", text)
    return [_value(part) for part in parts if part.strip()]


def _value(text: str) -> Any:
    """A value as in TOML, or a bare word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()
