"""Publishers' file formats -> arrays. What is truncated or is another format is refused by name."""

import gzip
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedmix.errors import DataError

Bytes = npt.NDArray[np.uint8]


def read_whole(path: Path) -> bytes:
    """A file's bytes; .gz is unpacked."""
    data = path.read_bytes()
    if path.suffix != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} must be a whole gzip file. It is not ({error}); get it again.") from error


def idx(path: Path, data: bytes) -> Bytes:
    """LeCun's idx format of unsigned bytes: 0 0 8 rank, sizes as big-endian numbers, then the values."""
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise DataError(f"{path} must be an idx file of unsigned bytes. It does not begin like one.")
    rank = data[3]
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", count=rank, offset=4)) if len(data) >= 4 + 4 * rank else ()
    start, wanted = 4 + 4 * rank, int(np.prod(shape))
    if not shape or len(data) != start + wanted:
        raise DataError(f"{path} must hold {start + wanted} bytes by its own header. It has {len(data)}; get it again.")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def cifar_binary(path: Path, data: bytes, labels: int) -> tuple[Bytes, Bytes]:
    """CIFAR's binary version: rows of `labels` label bytes and 3 x 32 x 32 values -> images [N, 3, 32, 32], labels [N, L]."""
    row = labels + 3072
    if not data or len(data) % row:
        raise DataError(f"{path} must hold rows of {row} bytes. It has {len(data)} bytes; get it again.")
    rows = np.frombuffer(data, np.uint8).reshape(-1, row)
    return rows[:, labels:].reshape(-1, 3, 32, 32), rows[:, :labels]
