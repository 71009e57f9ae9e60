"""Where data files are looked for, and their checksums. Nothing is downloaded here."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedmix.errors import DataError


def folders(data_dir: str | None) -> list[Path]:
    """Where data is looked for, in this order: the one that was named, $FEDMIX_DATA, the user's cache."""
    named = [data_dir, os.environ.get("FEDMIX_DATA")]
    return [Path(name).expanduser() for name in named if name] + [cache_folder() / "data"]


def cache_folder() -> Path:
    """Decoded arrays live here: $FEDMIX_CACHE, or fedmix in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FEDMIX_CACHE") or Path(home) / "fedmix")


@dataclass(frozen=True)
class FileSet:
    """The files of a data set: where publishers and torchvision lay them, and their published checksums."""

    name: str
    about: str
    layouts: tuple[str, ...]  # subfolders of a data folder
    md5: Mapping[str, str]  # of each file, as it is published; a .gz may also be there unpacked
    publisher: str

    def look(self, data_dir: str | None) -> tuple[list[Path], list[str]]:
        """What is there in the first folder that has any of the files, and the names of those that are missing."""
        for folder in (place / layout for place in folders(data_dir) for layout in self.layouts):
            found = {name: _plain_or_packed(folder, name) for name in self.md5}
            missing = [name for name, path in found.items() if path is None]
            if len(missing) < len(found):
                return [path for path in found.values() if path is not None], missing
        return [], list(self.md5)

    def find(self, data_dir: str | None) -> list[Path]:
        """All the files, or an error that says what is missing and where to get it."""
        paths, missing = self.look(data_dir)
        if paths and missing:
            raise DataError(
                f"{self.name} must have all its files. {paths[0].parent} has no {', '.join(missing)}; get them from "
                f"{self.publisher}."
            )
        if missing:
            where = ", ".join(str(place) for place in folders(data_dir))
            raise DataError(
                f"{self.name} was not found in {where}. Get it from {self.publisher}, unpack it, and name the folder with "
                "--data-dir or FEDMIX_DATA."
            )
        return paths


def _plain_or_packed(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / name.removesuffix(".gz")) if path.is_file()), None)


def verify(path: Path, data: bytes, md5: str | None) -> None:
    """Compare a file with its published checksum, where there is one."""
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if md5 and found != md5:
        raise DataError(
            f"{path} must have the published checksum {md5}. It has {found}; it is damaged or another file."
        )
