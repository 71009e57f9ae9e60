"""Objects that a recipe names as `package.module:name`: a user's own model, data or method."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedmix.errors import SettingError

# The folders of recipes that were read: what these recipes name may lie beside them.
_beside: list[str] = []


def importable_from(folder: Path) -> None:
    """What lies in this folder can be named in recipes; installed packages come first."""
    if str(folder) not in _beside:
        _beside.append(str(folder))


def folders_beside() -> list[str]:
    """Where named objects may lie, for processes that must find them too."""
    return list(_beside)


def named_object(name: str, setting: str) -> Any:
    """The object that `package.module:name` stands for: in an installed package, in the current folder, or beside a recipe."""
    module, _, attribute = name.partition(":")
    try:
        with _found_in([str(Path.cwd()), *_beside]):
            return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(f"{setting} must name something that can be imported. {name!r} cannot: {error}.") from error


@contextmanager
def _found_in(folders: Sequence[str]) -> Iterator[None]:
    """Inside the block, modules are looked for in these folders too; installed packages come first."""
    added = [folder for folder in folders if folder not in sys.path]
    sys.path.extend(added)
    # A file may be newer than the last look at its folder.
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)
