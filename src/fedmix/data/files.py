"""Where data files are looked for, what they must be, and their decoded arrays in the cache. Nothing is downloaded here."""

import fnmatch
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedmix.errors import DataError, DataMissing

Arrays = dict[str, npt.NDArray[np.generic]]


def folders(data_dir: str | None) -> list[Path]:
    """List where data is looked for, in this order: the folder that was named, $FEDMIX_DATA, the user's cache."""
    named = [data_dir, os.environ.get("FEDMIX_DATA")]
    return [Path(os.path.expanduser(name)) for name in named if name] + [cache_folder() / "data"]


_kept_in: ContextVar[Path | None] = ContextVar("kept_in", default=None)


def cache_folder() -> Path:
    """Return the folder of decoded arrays and downloads: $FEDMIX_CACHE, or fedmix in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return _kept_in.get() or Path(os.environ.get("FEDMIX_CACHE") or Path(home) / "fedmix")


@contextmanager
def keep_decoded_in(folder: Path) -> Iterator[None]:
    """Keep decoded arrays in that folder while inside this block, so that a site's data stays with the site."""
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
    checksums: Mapping[str, str]  # file -> checksum, "" where none is published; * in a name: one file or more
    decode: Callable[[Sequence[Path]], Arrays]
    downloads: tuple[Download, ...] = ()
    # file -> (length of a row in bytes, SHA-256 of all rows in the order of their bytes): the same rows in any order are right
    rows: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    def verify(self, path: Path) -> bool:
        """Say whether a file is the published one, or has its rows in another order; refuse any other file."""
        checksum = _checksum(self.checksums, path)
        if path.name in self.rows and digest_like(path, checksum) != checksum:
            length, wanted = self.rows[path.name]
            if digest_of_rows(path, length) == wanted:
                return False
        verify(path, checksum)
        return True

    def look(self, data_dir: str | None) -> tuple[list[Path], list[str]]:
        """Return the files in the first folder that has all of them, else in the first that has any; and what is missing."""
        incomplete: list[tuple[list[Path], list[str]]] = []
        for folder in self._places(data_dir):
            paths, missing = self._look_in(folder)
            if not missing:
                return paths, []
            if paths:
                incomplete.append((paths, missing))
        return incomplete[0] if incomplete else ([], list(self.checksums))

    def _places(self, data_dir: str | None) -> list[Path]:
        return [folder / layout for folder in folders(data_dir) for layout in self.layouts]

    def _look_in(self, folder: Path) -> tuple[list[Path], list[str]]:
        """Return the files that are in a folder, and the names of those that are not."""
        paths: list[Path] = []
        missing: list[str] = []
        for name in self.checksums:
            matches = _matches(folder, name)
            paths += matches
            if not matches:
                missing.append(name)
        return paths, missing


def _matches(folder: Path, name: str) -> list[Path]:
    """Find a file by name, packed or not; or all that fit a pattern."""
    if "*" in name:
        return sorted(path for path in folder.glob(name) if path.is_file())
    packed_or_not = (folder / name, folder / name.removesuffix(".gz"))
    return [path for path in packed_or_not if path.is_file()][:1]


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
    # Of values in [0, 1], channel by channel; measured on the training points where they are not given.
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def offered(self) -> Version | None:
        """The version that can be downloaded, if there is one."""
        return next((version for version in self.versions if version.downloads), None)

    def look(self, data_dir: str | None) -> tuple[Version, list[Path], list[str]]:
        """Return the first version that is all here, else the first of which anything is; its files; what is missing."""
        candidates = [(version, *version.look(data_dir)) for version in self.versions]
        # Of candidates that are equally far from being whole, min takes the first.
        return min(candidates, key=lambda candidate: _far_from_whole(*candidate[1:]))

    def find(self, data_dir: str | None) -> tuple[Version, list[Path]]:
        """Return a whole version, or raise an error that says what is missing and where to get it."""
        version, paths, missing = self.look(data_dir)
        if paths and missing:
            raise DataError(
                f"{self.name} must have all its files. {paths[0].parent} has no {', '.join(missing)}; get them from "
                f"{self.publisher}."
            )
        if missing:
            where = ", ".join(str(folder) for folder in folders(data_dir))
            get = f"run: fedmix data get {self.name}, or " if self.offered else ""
            raise DataMissing(
                f"{self.name} was not found in {where}. To have it, {get}unpack it from {self.publisher} into a folder "
                "and name that with --data-dir or FEDMIX_DATA."
            )
        return version, paths

    def arrays(self, data_dir: str | None) -> Arrays:
        """Return the decoded files, verified and decoded the first time, mapped from the cache after that."""
        version, paths = self.find(data_dir)

        def decode() -> Arrays:
            reordered = [path.name for path in paths if not version.verify(path)]
            arrays = version.decode(paths)
            if reordered:
                arrays["note"] = np.array(_order_words(reordered))
            if self.mean:
                return arrays
            to_train = int(arrays["train"])
            return arrays | moments(arrays["x"][:to_train])

        return cached(self.name, paths, decode)


def _order_words(names: Sequence[str]) -> str:
    files = " and ".join(names)
    return f"the rows of {files} are the published ones in another order, so splits differ from those of the publisher's files"


def _far_from_whole(paths: Sequence[Path], missing: Sequence[str]) -> int:
    """Rank what there is of a version: 0 if it is whole, 1 if something is missing, 2 if nothing is here."""
    if not missing:
        return 0
    return 1 if paths else 2


def moments(x: npt.NDArray[np.generic]) -> Arrays:
    """Mean and standard deviation of images of bytes, channel by channel, as values in [0, 1]: exact, from counts."""
    values = np.arange(256) / 255
    means, stds = [], []
    for channel in range(x.shape[1]):
        counts = np.zeros(256, np.int64)
        # A few images at a time: counting turns their bytes into large numbers.
        for start in range(0, len(x), 4096):
            counts += np.bincount(x[start : start + 4096, channel].ravel(), minlength=256)
        share = counts / counts.sum()
        mean = share @ values
        means.append(mean)
        # A channel that never changes has no deviation to divide by.
        stds.append(np.sqrt(share @ (values - mean) ** 2) or 1.0)
    return {"mean": np.array(means), "std": np.array(stds)}


def _checksum(checksums: Mapping[str, str], path: Path) -> str:
    """Return the published checksum of a file; a packed file that was unpacked has none."""
    return next((checksum for name, checksum in checksums.items() if fnmatch.fnmatch(path.name, name)), "")


def digest_like(path: Path, checksum: str) -> str:
    """Compute the digest of a file in the form of a given checksum, MD5 or SHA-256."""
    algorithm = "md5" if len(checksum) == 32 else "sha256"
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def digest_of_rows(path: Path, length: int) -> str:
    """Compute the SHA-256 of a file's rows of `length` bytes, sorted as bytes: the same in whatever order they are."""
    data = path.read_bytes()
    rows = sorted(data[start : start + length] for start in range(0, len(data), length))
    return hashlib.sha256(b"".join(rows)).hexdigest()


def verify(path: Path, checksum: str) -> None:
    """Compare a file with its published checksum, where there is one."""
    if not checksum:
        return
    digest = digest_like(path, checksum)
    if digest != checksum:
        raise DataError(
            f"{path} must have the published checksum {checksum}. It has {digest}; it is damaged or another file."
        )


def intact(version: Version, paths: Sequence[Path]) -> bool:
    """Say whether files are what was published, as far as there are checksums to tell."""
    try:
        for path in paths:
            version.verify(path)
    except DataError:
        return False
    return True


def cached(name: str, paths: Sequence[Path], decode: Callable[[], Arrays], *how: object) -> Arrays:
    """Decode files once, and map their arrays from the cache after that.

    Files are known by place, size and time; how: what else the arrays depend on.
    """
    file_states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    key = hashlib.blake2b(repr((file_states, how)).encode(), digest_size=8).hexdigest()
    target = cache_folder() / "arrays" / f"{name}-{key}"
    if not target.is_dir():
        _fill_cache(target, decode)
    return {path.stem: np.load(path, mmap_mode="c", allow_pickle=False) for path in target.glob("*.npy")}


def _fill_cache(target: Path, decode: Callable[[], Arrays]) -> None:
    """Write decoded arrays into a folder that appears whole or not at all, whoever else is writing the same."""
    part = target.with_suffix(f".{os.getpid()}.part")
    part.mkdir(parents=True, exist_ok=True)
    try:
        for name, array in decode().items():
            np.save(part / f"{name}.npy", array, allow_pickle=False)
        os.replace(part, target)
    except OSError:
        # If the folder is there now, another process was quicker, and its arrays are the same.
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
