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

from fedmix.data.files import Dataset, Download, Version, intact, verify
from fedmix.errors import DataError

CHUNK = 1 << 20
ATTEMPTS = 4  # in a row without a single new byte
TIMEOUT = 30.0
Watch = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all if the server says


def get(dataset: Dataset, folder: Path, mirror: str | None = None, watch: Watch = lambda *_: None) -> list[Path]:
    """The files of a data set, downloaded, verified and laid out under `folder`; those that are there already are kept.

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
    """One download into a folder at a time: another process waits."""
    with open(target / ".lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


def _get_all(version: Version, target: Path, mirror: str | None, watch: Watch) -> None:
    for download in version.downloads:
        there = [target / name for name in _files_of(version, download)]
        if all(path.is_file() for path in there) and intact(version, there):
            continue
        address = f"{mirror.rstrip('/')}/{download.name}" if mirror else download.url
        fetched = _fetch(address, download, target / f"{download.name}.part", watch)
        if download.name in version.checksums:
            os.replace(fetched, target / download.name)
        else:
            _unpack(fetched, version, target)
            fetched.unlink()


def _files_of(version: Version, download: Download) -> list[str]:
    return [download.name] if download.name in version.checksums else list(version.checksums)


def _fetch(address: str, download: Download, part: Path, watch: Watch) -> Path:
    """One file, whole and with its checksum, under its temporary name."""
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _receive(address, part, before, download.name, watch)
            break
        except (OSError, HTTPException) as error:
            code = error.code if isinstance(error, urllib.error.HTTPError) else None
            if code == 416 and before:  # nothing is left to send: what is here is whole, or is not this file
                break
            if code is not None and code < 500:
                raise DataError(f"{address} could not be had: the server says {error}.") from error
            if code is None and isinstance(error, OSError) and error.filename:
                raise  # our own disk, not the network
            after = part.stat().st_size if part.exists() else 0
            failures = failures + 1 if after == before else 0
            if failures >= ATTEMPTS:
                raise DataError(
                    f"{address} could not be had ({getattr(error, 'reason', None) or error}). {after:,} bytes are here; "
                    "the same command goes on from there."
                ) from error
            time.sleep(min(2.0**failures / 4, 4.0))
    try:
        verify(part, download.checksum)
    except DataError as error:
        part.unlink()
        found = str(error).partition("It has ")[2].split(";")[0]
        raise DataError(
            f"{address} must have the published checksum {download.checksum}. What came has {found} and was removed; "
            "try again, or get the file another way."
        ) from error
    return part


def _receive(address: str, part: Path, before: int, name: str, watch: Watch) -> None:
    """Append what is missing of a file; start anew where the server cannot go on from the middle."""
    headers = {"User-Agent": "fedmix"} | ({"Range": f"bytes={before}-"} if before else {})
    try:
        request = urllib.request.Request(address, headers=headers)
    except ValueError as error:
        raise DataError(f"an address must begin like https://. Got {address!r} instead.") from error
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        goes_on = answer.status == 206
        done = before if goes_on else 0
        length = answer.headers.get("Content-Length")
        total = done + int(length) if length else None
        with open(part, "ab" if goes_on else "wb") as file:
            while block := answer.read(CHUNK):
                file.write(block)
                done += len(block)
                watch(name, done, total)
        if total is not None and done < total:
            raise HTTPException(f"the connection ended after {done:,} of {total:,} bytes")


def _unpack(archive: Path, version: Version, target: Path) -> None:
    """The files of a version out of an archive: only they, by their names, whatever folder they are in there."""
    wanted = set(version.checksums)
    for name, stream in _members(archive):
        if name in wanted:
            _write(stream, target / name)
            wanted.discard(name)
    if wanted:
        raise DataError(f"{archive.name} must hold {', '.join(sorted(wanted))}. It does not; get it again.")


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The plain files of a .zip or .tar.*: base name and content."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for entry in packed.infolist():
                if not entry.is_dir():
                    with packed.open(entry) as stream:
                        yield Path(entry.filename).name, stream
        return
    with _readable(archive), tarfile.open(archive, "r:*") as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None:
                yield Path(member.name).name, content


@contextmanager
def _readable(archive: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{archive.name} must be a whole archive. It is not ({error}); get it again.") from error


def _write(stream: IO[bytes], path: Path) -> None:
    """A file that is there whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            while block := stream.read(CHUNK):
                file.write(block)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
