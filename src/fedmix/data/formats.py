"""Publishers' file formats -> arrays. A file that is truncated or of another format is refused by name."""

import gzip
import io
import json
import pickle
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmix.errors import DataError

Bytes = npt.NDArray[np.uint8]
Whole = npt.NDArray[np.integer[Any]]
WRITERS = ("train_writer", "test_writer")
IDX_KINDS: dict[bytes, np.dtype[Any]] = {
    b"\x00\x00\x08": np.dtype(np.uint8),
    b"\x00\x00\x0c": np.dtype(">i4"),
}


def read_whole(path: Path) -> bytes:
    """Read a file's bytes; .gz is unpacked."""
    data = path.read_bytes()
    if path.suffix != ".gz":
        return data
    with _format(path, "a whole gzip file"):
        return gzip.decompress(data)


@contextmanager
def _format(path: Path, what: str) -> Iterator[None]:
    """Turn whatever a reader stumbles over inside the block into one clear line. what: the form that the file must have."""
    try:
        yield
    except DataError:
        raise
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        zlib.error,
        zipfile.BadZipFile,
        pickle.PickleError,
    ) as error:
        raise DataError(f"{path} must be {what}. It is not ({error}); get it again.") from error


def idx(path: Path, data: bytes) -> Whole:
    """Decode LeCun's idx format: 0 0 type rank, sizes as big-endian numbers, then unsigned bytes or 32-bit integers."""
    if len(data) < 4 or data[:3] not in IDX_KINDS:
        raise DataError(f"{path} must be an idx file of unsigned bytes or integers. It does not begin like one.")
    kind, rank = IDX_KINDS[data[:3]], data[3]
    shape = _idx_shape(data, rank)
    start = 4 + 4 * rank
    wanted = start + int(np.prod(shape)) * kind.itemsize
    if not shape or len(data) != wanted:
        raise DataError(f"{path} must hold {wanted} bytes by its own header. It has {len(data)}; get it again.")
    return np.frombuffer(data, kind, offset=start).reshape(shape)


def _idx_shape(data: bytes, rank: int) -> tuple[int, ...]:
    """Read the sizes in an idx header, or nothing if the file ends within its header."""
    if len(data) < 4 + 4 * rank:
        return ()
    return tuple(int(size) for size in np.frombuffer(data, ">u4", count=rank, offset=4))


def cifar_binary(path: Path, data: bytes, labels: int) -> tuple[Bytes, Bytes]:
    """Decode CIFAR's binary version: images [N, 3, 32, 32] and labels [N, L].

    A row of the file holds `labels` label bytes, then 3 x 32 x 32 values.
    """
    row = labels + 3072
    if not data or len(data) % row:
        raise DataError(f"{path} must hold rows of {row} bytes. It has {len(data)} bytes; get it again.")
    rows = np.frombuffer(data, np.uint8).reshape(-1, row)
    return rows[:, labels:].reshape(-1, 3, 32, 32), rows[:, :labels]


def cifar_python(path: Path, data: bytes, labels: Sequence[str]) -> tuple[Bytes, Bytes]:
    """Decode CIFAR's python version, a pickled dict: images [N, 3, 32, 32] and the labels under these keys [N, L]."""
    with _format(path, "a batch of CIFAR's python version"):
        batch = _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
        x = np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, 32, 32)
        y = np.array([batch[key.encode()] for key in labels], np.uint8).T
        if y.shape != (len(x), len(labels)):
            raise ValueError(f"{len(x)} images and labels {list(y.shape)}")
        return x, y


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that admits numpy arrays and plain containers: no name is looked up that is not in this table."""

    ADMITTED: Mapping[tuple[str, str], Any] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        # Python 3 writes bytes in this way when it pickles for Python 2.
        ("_codecs", "encode"): lambda text, encoding: text.encode("latin1"),
    } | {
        (f"numpy.{core}.multiarray", "_reconstruct"): lambda kind, shape, code: np.ndarray((0,), np.dtype("b"))
        for core in ("core", "_core")
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ADMITTED:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, and only arrays and plain containers are admitted"
            )
        return self.ADMITTED[module, name]


def leaf_json(paths: Sequence[Path]) -> tuple[Bytes, Whole, Whole, list[str]]:
    """Decode LEAF's all_data_*.json: images [N, 1, 28, 28], labels [N], each point's user as a number [N], users' names."""
    x: list[Bytes] = []
    y: list[Whole] = []
    names: list[str] = []
    for path in paths:
        with _format(path, "a file of LEAF's FEMNIST"):
            content = json.loads(path.read_bytes())
            for user in content["users"]:
                images, labels = _leaf_user(user, content["user_data"][user])
                x.append(images)
                y.append(labels)
                names.append(str(user))
    sizes = [len(labels) for labels in y]
    return np.concatenate(x), np.concatenate(y), np.repeat(np.arange(len(names)), sizes), names


def _leaf_user(user: Any, points: Mapping[str, Any]) -> tuple[Bytes, Whole]:
    images = _pictures(points["x"])
    labels = np.asarray(points["y"], np.int64)
    if len(images) != len(labels):
        raise ValueError(f"user {user} has {len(images)} images and {len(labels)} labels")
    return images, labels


def tff_h5(paths: Sequence[Path]) -> tuple[Bytes, Whole, Whole, list[str], int]:
    """Decode TFF's fed_emnist_train.h5 and _test.h5: what `leaf_json` gives, and how many of the points are to train."""
    try:
        import h5py
    except ImportError as error:
        raise DataError("reading .h5 needs h5py; install it with: pip install 'fedmix[h5]'.") from error
    x: list[Bytes] = []
    y: list[Whole] = []
    owner: list[Whole] = []
    numbers: dict[str, int] = {}  # writer's name -> number, in the order in which they appear
    train = 0
    for path in paths:
        with _format(path, "a file of TFF's federated EMNIST"), h5py.File(path) as file:
            for name, group in file["examples"].items():
                images = _pictures(group["pixels"])
                labels = np.asarray(group["label"], np.int64)
                number = numbers.setdefault(str(name), len(numbers))
                x.append(images)
                y.append(labels)
                owner.append(np.full(len(labels), number))
        # The first file is the one to train.
        train = train or sum(map(len, y))
    return np.concatenate(x), np.concatenate(y), np.concatenate(owner), list(numbers), train


def _pictures(values: Any) -> Bytes:
    """Turn values in [0, 1], 784 a point, into images of bytes [N, 1, 28, 28]."""
    return _as_bytes(np.asarray(values, np.float32).reshape(-1, 1, 28, 28))


def _as_bytes(x: npt.NDArray[np.float32]) -> Bytes:
    """Turn values in [0, 1], which both publishers made from bytes, into bytes again."""
    if x.size and not (x.min() >= 0 and x.max() <= 1):
        raise ValueError(f"values from {x.min()} to {x.max()}, not from 0 to 1")
    return np.rint(x * 255).astype(np.uint8)


def writers_npz(path: Path) -> tuple[Whole, Whole]:
    """Read the writer of every MNIST digit, to train and to test, in MNIST's order."""
    with _format(path, f"an npz with {' and '.join(WRITERS)}"):
        arrays = npz_arrays(path, WRITERS)
        train, test = (arrays[name].astype(np.int64) for name in WRITERS)
        return train, test


def npz_arrays(path: Path, names: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
    """Read those of the named arrays that an .npz holds."""
    with (
        _format(path, "an .npz of plain arrays"),
        open(path, "rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        return {name: np.asarray(arrays[name]) for name in names if name in arrays}


def qmnist_writers(paths: Sequence[Path]) -> tuple[Whole, Whole]:
    """Read the same from QMNIST's label files: their third column is the writer, their first 10,000 test digits MNIST's."""
    train, test = (idx(path, read_whole(path))[:, 2].astype(np.int64) for path in paths)
    return train, test[:10_000]
