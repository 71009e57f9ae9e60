"""Named data sets: files -> arrays. `digits` is embedded; the others are read from the user's folders.

Decoded images are cached as memory-mapped arrays, so that a second start is quick and workers share one copy.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmix.data.files import FileSet, cache_folder, verify
from fedmix.data.formats import Bytes, cifar_binary, idx, read_whole

Decoded = tuple[Bytes, Bytes, int]  # images, labels, how many of them are to train


@dataclass(frozen=True)
class Source:
    """Labelled data before anybody owns it: images of bytes or numbers x [N, ...], labels y [N].

    The first `train` points are the publisher's training set, the rest its test set; train = N: there is no such division.
    mean, std: what to subtract and divide by, channel by channel, of values in [0, 1].
    """

    x: Tensor
    y: Tensor
    classes: int
    train: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


def digits(data_dir: str | None = None) -> Source:
    """1,797 handwritten digits, 8 x 8, from scikit-learn (DIGITS.md): x [1797, 1, 8, 8] in [0, 1]."""
    with (files("fedmix.data") / "digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        x = torch.from_numpy(arrays["x"].astype(np.float32) / 16).unsqueeze(1)
        return Source(x, torch.from_numpy(arrays["y"].astype(np.int64)), 10, len(x))


CIFAR10 = FileSet(
    name="cifar10",
    about="CIFAR-10 (Krizhevsky, 2009), binary version: 60,000 colour images of 32 x 32, 10 classes",
    layouts=("cifar-10-batches-bin", "cifar10", "."),
    md5={
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
    publisher="https://www.cs.toronto.edu/~kriz/cifar.html (binary version)",
)
MNIST = FileSet(
    name="mnist",
    about="MNIST (LeCun et al., 2010): 70,000 handwritten digits of 28 x 28",
    layouts=("MNIST/raw", "mnist"),
    md5={
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    publisher="http://yann.lecun.com/exdb/mnist",
)
FASHION_MNIST = FileSet(
    name="fashion-mnist",
    about="Fashion-MNIST (Xiao et al., 2017): 70,000 articles of clothing of 28 x 28, 10 classes",
    layouts=("FashionMNIST/raw", "fashion-mnist"),
    md5={
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
    publisher="https://github.com/zalandoresearch/fashion-mnist",
)


def cifar10(data_dir: str | None = None) -> Source:
    """x [60000, 3, 32, 32] bytes; 50,000 to train."""
    paths = CIFAR10.find(data_dir)

    def decode() -> Decoded:
        batches = []
        for path in paths:
            data = path.read_bytes()
            verify(path, data, CIFAR10.md5[path.name])
            batches.append(cifar_binary(path, data, labels=1))
        x, y = np.concatenate([x for x, _ in batches]), np.concatenate([y[:, 0] for _, y in batches])
        return x, y, len(x) - len(batches[-1][0])

    x, y, train = _cached("cifar10", paths, decode)
    return Source(x, y, 10, train, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def mnist(data_dir: str | None = None) -> Source:
    """x [70000, 1, 28, 28] bytes; 60,000 to train."""
    return _idx_source(MNIST, data_dir, (0.1307,), (0.3081,))


def fashion_mnist(data_dir: str | None = None) -> Source:
    """x [70000, 1, 28, 28] bytes; 60,000 to train."""
    return _idx_source(FASHION_MNIST, data_dir, (0.2860,), (0.3530,))


def _idx_source(files: FileSet, data_dir: str | None, mean: tuple[float, ...], std: tuple[float, ...]) -> Source:
    """Images and labels to train, then to test, as idx files, packed or not."""
    paths = files.find(data_dir)

    def decode() -> Decoded:
        arrays = []
        for path in paths:
            verify(path, path.read_bytes(), files.md5.get(path.name))
            arrays.append(idx(path, read_whole(path)))
        x, y = np.concatenate([arrays[0], arrays[2]])[:, None], np.concatenate([arrays[1], arrays[3]])
        return x, y, len(arrays[0])

    x, y, train = _cached(files.name, paths, decode)
    return Source(x, y, 10, train, mean, std)


def _cached(name: str, paths: list[Path], decode: Callable[[], Decoded]) -> tuple[Tensor, Tensor, int]:
    """Decoded once for these files (by place, size and time); then mapped from the cache."""
    seen = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    key = hashlib.blake2b(repr(seen).encode(), digest_size=8).hexdigest()
    targets = [cache_folder() / "arrays" / f"{name}-{key}-{part}.npy" for part in ("x", "y", "train")]
    if not all(target.exists() for target in targets):
        targets[0].parent.mkdir(parents=True, exist_ok=True)
        for target, array in zip(targets, decode(), strict=True):
            part = target.with_suffix(f".{os.getpid()}.part")
            with open(part, "wb") as file:
                np.save(file, np.asarray(array), allow_pickle=False)
            os.replace(part, target)
    x, y, train = (np.load(target, mmap_mode="c", allow_pickle=False) for target in targets)
    return torch.from_numpy(x), torch.from_numpy(np.asarray(y, dtype=np.int64)), int(train)


SOURCES: dict[str, Callable[[str | None], Source]] = {
    "digits": digits,
    "cifar10": cifar10,
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
}
FILE_SETS = (CIFAR10, MNIST, FASHION_MNIST)


def survey(data_dir: str | None = None) -> list[dict[str, Any]]:
    """What there is of every data set: where it was found, what is missing, where its publisher offers it."""
    rows: list[dict[str, Any]] = [
        {
            "source": "digits",
            "about": "embedded: 1,797 handwritten digits of 8 x 8",
            "ready": True,
            "found": "",
            "missing": [],
            "publisher": "",
        }
    ]
    for each in FILE_SETS:
        paths, missing = each.look(data_dir)
        found = str(paths[0].parent) if paths else ""
        row = {"source": each.name, "about": each.about, "ready": not missing, "found": found}
        rows.append(row | {"missing": missing, "publisher": each.publisher})
    return rows
