"""Where data files are looked for, and their checksums. Nothing is downloaded here."""

import hashlib
import os
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


def find(name: str, layouts: list[str], files: list[str], data_dir: str | None, publisher: str) -> list[Path]:
    """The files of a data set in the first folder and layout that has any of them; each plain or as .gz.

    layouts: subfolders that publishers and torchvision use.
    """
    looked = folders(data_dir)
    for folder in (place / layout for place in looked for layout in layouts):
        found = [next((p for p in (folder / file, folder / f"{file}.gz") if p.is_file()), None) for file in files]
        missing = [file for file, path in zip(files, found, strict=True) if path is None]
        if len(missing) < len(files):
            if missing:
                raise DataError(
                    f"{name} must have all its files. {folder} has no {', '.join(missing)}; get them from {publisher}."
                )
            return [path for path in found if path is not None]
    where = ", ".join(str(place) for place in looked)
    raise DataError(
        f"{name} was not found in {where}. Get it from {publisher}, unpack it, and name the folder with --data-dir or "
        "FEDMIX_DATA."
    )


def verify(path: Path, data: bytes, md5: str | None) -> None:
    """Compare a file with its published checksum, where there is one."""
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if md5 and found != md5:
        raise DataError(
            f"{path} must have the published checksum {md5}. It has {found}; it is damaged or another file."
        )
