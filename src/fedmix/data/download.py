"""`fedmix data get`: publishers' files into the user's data folder, with progress, resume and checksums.

Nothing is downloaded that was not asked for. A connection that breaks is taken up again where it broke, in the same
command or in the next one; what does not have its published checksum is removed and refused.
"""

import fcntl
import os
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import IO

from fedmix.data.files import Dataset, Download, Version, digest_like, intact
from fedmix.errors import DataError

CHUNK = 1 << 20
ATTEMPTS = 4  # in a row without a single new byte
TIMEOUT = 30.0
PARTIAL_CONTENT, NO_SUCH_RANGE = 206, 416  # of HTTP
Watch = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all if the server says


def get(dataset: Dataset, folder: Path, mirror: str | None = None, watch: Watch = lambda *_: None) -> list[Path]:
    """Download, verify and lay out the files of a data set under `folder`; those that are there already are kept.

    mirror: an address to take the publisher's files from, by their names.
    """
    version = dataset.offered
    if version is None:
        raise DataError(f"{dataset.name} is not offered as a download. See {dataset.publisher}.")
    target = folder / version.layouts[0]
    target.mkdir(parents=True, exist_ok=True)
    with _alone(target):
        _get_all(version, target, mirror, watch)
    return [target / name for name in version.checksums]


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Allow one download into a folder at a time: another process waits."""
    with open(target / ".lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


def _get_all(version: Version, target: Path, mirror: str | None, watch: Watch) -> None:
    for download in version.downloads:
        if not _is_here(version, download, target):
            _get_file(version, download, target, mirror, watch)


def _is_here(version: Version, download: Download, target: Path) -> bool:
    paths = [target / name for name in _files_of(version, download)]
    return all(path.is_file() for path in paths) and intact(version, paths)


def _files_of(version: Version, download: Download) -> list[str]:
    """Name the files that a download brings: itself, or all of the version if it is an archive."""
    return [download.name] if download.name in version.checksums else list(version.checksums)


def _get_file(version: Version, download: Download, target: Path, mirror: str | None, watch: Watch) -> None:
    address = f"{mirror.rstrip('/')}/{download.name}" if mirror else download.url
    fetched = _fetch(address, download, target / f"{download.name}.part", watch)
    if download.name in version.checksums:
        os.replace(fetched, target / download.name)
    else:
        _unpack(fetched, version, target)
        fetched.unlink()


def _fetch(address: str, download: Download, part: Path, watch: Watch) -> Path:
    """Fetch a file, whole and with its checksum, under its temporary name."""
    _receive_all(address, part, download.name, watch)
    digest = digest_like(part, download.checksum) if download.checksum else ""
    if digest != download.checksum:
        part.unlink()
        raise DataError(
            f"{address} must have the published checksum {download.checksum}. What came has {digest} and was removed; "
            "try again, or get the file another way."
        )
    return part


def _receive_all(address: str, part: Path, name: str, watch: Watch) -> None:
    """Receive a file over as many connections as it takes, unless ATTEMPTS of them in a row bring nothing new."""
    failures = 0
    while True:
        before = _size_of(part)
        try:
            _receive(address, part, before, name, watch)
            return
        except (OSError, HTTPException) as error:
            if _nothing_is_left(error, before):
                return
            _raise_if_hopeless(address, error)
            after = _size_of(part)
            failures = failures + 1 if after == before else 0
            if failures >= ATTEMPTS:
                raise _given_up(address, error, after) from error
        time.sleep(min(2.0**failures / 4, 4.0))


def _nothing_is_left(error: Exception, before: int) -> bool:
    """Say whether nothing is left to send: what is here is whole, or is not this file. The checksum will tell."""
    return before > 0 and _status_in(error) == NO_SUCH_RANGE


def _raise_if_hopeless(address: str, error: Exception) -> None:
    """Raise what another try would not change: the server refuses, or it is our own disk that failed."""
    if 0 < _status_in(error) < 500:
        raise DataError(f"{address} could not be had: the server says {error}.") from error
    if _is_our_own_disk(error):
        raise error


def _given_up(address: str, error: Exception, received: int) -> DataError:
    reason = getattr(error, "reason", None) or error
    return DataError(
        f"{address} could not be had ({reason}). {received:,} bytes are here; the same command goes on from there."
    )


def _size_of(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _status_in(error: Exception) -> int:
    """Return the status that the server answered with, or 0 if it did not get so far."""
    return error.code if isinstance(error, urllib.error.HTTPError) else 0


def _is_our_own_disk(error: Exception) -> bool:
    """Say whether it was not the network that failed. An HTTPError has a file name as well, which is the address."""
    if isinstance(error, urllib.error.HTTPError):
        return False
    return isinstance(error, OSError) and bool(error.filename)


def _receive(address: str, part: Path, before: int, name: str, watch: Watch) -> None:
    """Append what is missing of a file; start anew where the server cannot go on from the middle."""
    with urllib.request.urlopen(_request(address, before), timeout=TIMEOUT) as answer:
        goes_on = answer.status == PARTIAL_CONTENT
        mode, done = ("ab", before) if goes_on else ("wb", 0)
        length = answer.headers.get("Content-Length")
        total = done + int(length) if length else None
        with open(part, mode) as file:
            while block := answer.read(CHUNK):
                file.write(block)
                done += len(block)
                watch(name, done, total)
        if total is not None and done < total:
            raise HTTPException(f"the connection ended after {done:,} of {total:,} bytes")


def _request(address: str, before: int) -> urllib.request.Request:
    """Ask for a file, or for what follows the bytes that are here already."""
    headers = {"User-Agent": "fedmix"}
    if before:
        headers["Range"] = f"bytes={before}-"
    try:
        return urllib.request.Request(address, headers=headers)
    except ValueError as error:
        raise DataError(f"an address must begin like https://. Got {address!r} instead.") from error


def _unpack(archive: Path, version: Version, target: Path) -> None:
    """Take the files of a version out of an archive: no others, by their names, whatever folder they are in there."""
    wanted = set(version.checksums)
    for name, stream in _members(archive):
        if name in wanted:
            _write(stream, target / name)
            wanted.discard(name)
    if wanted:
        raise DataError(f"{archive.name} must hold {', '.join(sorted(wanted))}. It does not; get it again.")


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Go through the plain files of a .zip or .tar.*: base name and content."""
    if zipfile.is_zipfile(archive):
        return _zip_members(archive)
    return _tar_members(archive)


def _zip_members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as packed:
        for entry in packed.infolist():
            if not entry.is_dir():
                with packed.open(entry) as stream:
                    yield Path(entry.filename).name, stream


def _tar_members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with _readable(archive), tarfile.open(archive, "r:*") as packed:
        for entry in packed:
            stream = packed.extractfile(entry) if entry.isfile() else None
            if stream is not None:
                yield Path(entry.name).name, stream


@contextmanager
def _readable(archive: Path) -> Iterator[None]:
    """Turn what a damaged archive raises into one clear line."""
    try:
        yield
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{archive.name} must be a whole archive. It is not ({error}); get it again.") from error


def _write(stream: IO[bytes], path: Path) -> None:
    """Write a file that is there whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            while block := stream.read(CHUNK):
                file.write(block)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
