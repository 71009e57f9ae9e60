"""Where data files are looked for, what they must be, and their decoded arrays in the cache. Nothing is downloaded here."""

import fnmatch
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedmix.errors import DataError, DataMissing

Arrays = dict[str, npt.NDArray[np.generic]]


def folders(data_dir: str | None) -> list[Path]:
    """Where data is looked for, in this order: the one that was named, $FEDMIX_DATA, the user's cache."""
    named = [data_dir, os.environ.get("FEDMIX_DATA")]
    return [Path(os.path.expanduser(name)) for name in named if name] + [cache_folder() / "data"]


_kept_in: ContextVar[Path | None] = ContextVar("kept_in", default=None)


def cache_folder() -> Path:
    """Decoded arrays and downloads live here: $FEDMIX_CACHE, or fedmix in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return _kept_in.get() or Path(os.environ.get("FEDMIX_CACHE") or Path(home) / "fedmix")


@contextmanager
def keep_decoded_in(folder: Path) -> Iterator[None]:
    """Inside this block decoded arrays are kept in that folder: a site's own data stays with the site."""
    token = _kept_in.set(folder)
    try:
        yield
    finally:
        _kept_in.reset(token)


@dataclass(frozen=True)
class Download:
    """A file that a publisher offers. An archive is unpacked; a plain file is kept as it is."""

    url: str
    checksum: str  # MD5 or SHA-256, told apart by their length

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Version:
    """One form in which a data set is published: where its files lie, their checksums, how they are read."""

    layouts: tuple[str, ...]  # subfolders of a data folder, the publisher's or torchvision's first
    checksums: Mapping[str, str]  # of each file, "" where none is published; a name with * stands for one or more files
    decode: Callable[[Sequence[Path]], Arrays]
    downloads: tuple[Download, ...] = ()

    def look(self, data_dir: str | None) -> tuple[list[Path], list[str]]:
        """The files in the first folder that has all of them, else in the first that has any; and what is missing there."""
        begun: list[tuple[list[Path], list[str]]] = []
        for folder in (place / layout for place in folders(data_dir) for layout in self.layouts):
            found = {name: _matches(folder, name) for name in self.checksums}
            missing = [name for name, paths in found.items() if not paths]
            here = [path for paths in found.values() for path in paths]
            if not missing:
                return here, []
            if here:
                begun.append((here, missing))
        return begun[0] if begun else ([], list(self.checksums))


def _matches(folder: Path, name: str) -> list[Path]:
    """A file by name, packed or not; or all that fit a pattern."""
    if "*" in name:
        return sorted(path for path in folder.glob(name) if path.is_file())
    return [path for path in (folder / name, folder / name.removesuffix(".gz")) if path.is_file()][:1]


@dataclass(frozen=True)
class Dataset:
    """A published data set: what it is, its sizes, and the forms in which its files may be here."""

    name: str
    about: str
    publisher: str
    versions: tuple[Version, ...]
    shape: tuple[int, ...]
    classes: int
    train: int  # points of the publisher's training set
    test: int = 0
    owners: int = 0  # people who wrote the points to train, where they are known
    new_owners: int = 0  # others, who wrote test points only
    coarse: int = 0  # coarse labels
    mean: tuple[
        float, ...
    ] = ()  # of values in [0, 1], channel by channel; measured on the training points where not given
    std: tuple[float, ...] = ()

    @property
    def offered(self) -> Version | None:
        """The version that can be downloaded."""
        return next((version for version in self.versions if version.downloads), None)

    def look(self, data_dir: str | None) -> tuple[Version, list[Path], list[str]]:
        """The first version that is all there, else the first of which there is anything; its files; what is missing."""
        seen = [(version, *version.look(data_dir)) for version in self.versions]
        whole = [each for each in seen if not each[2]]
        begun = [each for each in seen if each[1]]
        return (whole or begun or seen)[0]

    def find(self, data_dir: str | None) -> tuple[Version, list[Path]]:
        """A whole version, or an error that says what is missing and where to get it."""
        version, paths, missing = self.look(data_dir)
        if paths and missing:
            raise DataError(
                f"{self.name} must have all its files. {paths[0].parent} has no {', '.join(missing)}; get them from "
                f"{self.publisher}."
            )
        if missing:
            where = ", ".join(str(place) for place in folders(data_dir))
            get = f"run: fedmix data get {self.name}, or " if self.offered else ""
            raise DataMissing(
                f"{self.name} was not found in {where}. To have it, {get}unpack it from {self.publisher} into a folder "
                "and name that with --data-dir or FEDMIX_DATA."
            )
        return version, paths

    def arrays(self, data_dir: str | None) -> Arrays:
        """The decoded files, verified and decoded the first time, mapped from the cache after that."""
        version, paths = self.find(data_dir)

        def decode() -> Arrays:
            for path in paths:
                verify(path, _checksum(version.checksums, path))
            arrays = version.decode(paths)
            return arrays if self.mean else arrays | moments(arrays["x"][: int(arrays["train"])])

        return cached(self.name, paths, decode)


def moments(x: npt.NDArray[np.generic]) -> Arrays:
    """Mean and standard deviation of images of bytes, channel by channel, as values in [0, 1]: exact, from counts."""
    values = np.arange(256) / 255
    means, stds = [], []
    for channel in range(x.shape[1]):
        counts = np.zeros(256, np.int64)
        for start in range(0, len(x), 4096):  # a few at a time: counting turns bytes into large numbers
            counts += np.bincount(x[start : start + 4096, channel].ravel(), minlength=256)
        share = counts / counts.sum()
        means.append(share @ values)
        stds.append(np.sqrt(share @ (values - means[-1]) ** 2) or 1.0)
    return {"mean": np.array(means), "std": np.array(stds)}


def _checksum(checksums: Mapping[str, str], path: Path) -> str:
    """The published checksum of a file; a packed file that was unpacked has none."""
    return next((value for name, value in checksums.items() if fnmatch.fnmatch(path.name, name)), "")


def verify(path: Path, checksum: str) -> None:
    """Compare a file with its published checksum, where there is one."""
    if not checksum:
        return
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "md5" if len(checksum) == 32 else "sha256").hexdigest()
    if found != checksum:
        raise DataError(
            f"{path} must have the published checksum {checksum}. It has {found}; it is damaged or another file."
        )


def intact(version: Version, paths: Sequence[Path]) -> bool:
    """Whether files are what was published, as far as checksums are."""
    try:
        for path in paths:
            verify(path, _checksum(version.checksums, path))
    except DataError:
        return False
    return True


def cached(name: str, paths: Sequence[Path], decode: Callable[[], Arrays], *how: object) -> Arrays:
    """Decoded once for these files (by place, size and time) and this way of reading them; then mapped from the cache."""
    seen = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    key = hashlib.blake2b(repr((seen, how)).encode(), digest_size=8).hexdigest()
    target = cache_folder() / "arrays" / f"{name}-{key}"
    if not target.is_dir():
        part = target.with_suffix(f".{os.getpid()}.part")
        part.mkdir(parents=True, exist_ok=True)
        try:
            for each, array in decode().items():
                np.save(part / f"{each}.npy", array, allow_pickle=False)
            os.replace(part, target)  # whole or not at all
        except OSError:
            if not target.is_dir():  # another process was not quicker
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return {path.stem: np.load(path, mmap_mode="c", allow_pickle=False) for path in target.glob("*.npy")}
