"""Every setting of a recipe with its default and what it means, read from the comments beside the settings themselves."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from fedmix.catalogue import SECTIONS
from fedmix.core.settings import ClientSettings, PrivacySettings, ServerSettings
from fedmix.errors import SettingError
from fedmix.methods.registry import settings_of_section
from fedmix.settings.recipe import CheckpointSettings, DataSettings, EvaluationSettings, ModelSettings, Recipe

PLAIN = {"field(default_factory=list)": "[]", "field(default_factory=dict)": "{}"}


@dataclass(frozen=True)
class Setting:
    """One setting. name: with its section, as --set takes it. meaning: "" where its name says it all."""

    name: str
    default: str
    kind: str
    meaning: str


def sections() -> dict[str, type[Any]]:
    """The sections of a recipe, in its order, and the classes that hold them; "" is the recipe itself."""
    return {
        "": Recipe,
        "data": DataSettings,
        "model": ModelSettings,
        "training": ClientSettings,
        "server": ServerSettings,
        **{name: settings_of_section(name) for name in SECTIONS},
        "privacy": PrivacySettings,
        "evaluation": EvaluationSettings,
        "checkpoint": CheckpointSettings,
    }


def settings_of(section: str) -> list[Setting]:
    """The settings of a section, in order."""
    kind = sections()[section]
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    return [_setting(section, field, lines) for field in _fields(node, section)]


def _fields(node: ast.ClassDef, section: str) -> Iterator[ast.AnnAssign]:
    known = sections()
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or field.value is None:
            continue
        name = ast.unparse(field.target)
        if section or (name not in known and name != "sections"):
            yield field


def _setting(section: str, field: ast.AnnAssign, lines: list[str]) -> Setting:
    assert field.value is not None
    default = ast.unparse(field.value)
    end = field.end_lineno or field.lineno
    remark = " ".join(lines[field.lineno - 1 : end]).partition("# ")[2]
    name = f"{section}.{ast.unparse(field.target)}".lstrip(".")
    return Setting(name, PLAIN.get(default, default), ast.unparse(field.annotation), " ".join(remark.split()))


def about_section(section: str) -> str:
    """What a section is about, in a sentence."""
    return (inspect.getdoc(sections()[section]) or "").splitlines()[0]


def find(name: str) -> list[Setting]:
    """The settings that a name stands for: a section, a setting, or the last part of one."""
    name = name.strip().strip("[]")
    if name and name in sections():
        return settings_of(name)
    everything = [setting for section in sections() for setting in settings_of(section)]
    found = [setting for setting in everything if name in (setting.name, setting.name.rpartition(".")[2])]
    if found:
        return found
    names = [setting.name for setting in everything]
    by_last_part = {setting.name.rpartition(".")[2]: setting.name for setting in everything}
    close = get_close_matches(name, [*names, *by_last_part, *filter(None, sections())], n=1)
    hint = f" (did you mean {by_last_part.get(close[0], close[0])!r}?)" if close else ""
    raise SettingError(f"{name!r} must be a section or a setting. It is none{hint}; `fedmix settings` lists them all.")
