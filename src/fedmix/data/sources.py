"""Named data sets: files -> arrays. `digits` is embedded; the others are read from the user's folders.

Decoded images are cached as memory-mapped arrays, so that a second start is quick and workers share one copy.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedmix.data.files import cache_folder, find, verify
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


CIFAR10_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}


def cifar10(data_dir: str | None = None) -> Source:
    """CIFAR-10 (Krizhevsky, 2009), the official binary version: x [60000, 3, 32, 32] bytes; 50,000 to train."""
    publisher = "https://www.cs.toronto.edu/~kriz/cifar.html (binary version)"
    paths = find("cifar10", ["cifar-10-batches-bin", "cifar10", "."], list(CIFAR10_MD5), data_dir, publisher)

    def decode() -> Decoded:
        batches = []
        for path in paths:
            data = read_whole(path)
            verify(path, data, CIFAR10_MD5[path.name.removesuffix(".gz")])
            batches.append(cifar_binary(path, data, labels=1))
        x, y = np.concatenate([x for x, _ in batches]), np.concatenate([y[:, 0] for _, y in batches])
        return x, y, len(x) - len(batches[-1][0])

    x, y, train = _cached("cifar10", paths, decode)
    return Source(x, y, 10, train, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}


def mnist(data_dir: str | None = None) -> Source:
    """MNIST (LeCun et al., 2010), idx files, plain or gz: x [70000, 1, 28, 28] bytes; 60,000 to train."""
    names = [name.removesuffix(".gz") for name in MNIST_MD5]
    paths = find("mnist", ["MNIST/raw", "mnist", "."], names, data_dir, "http://yann.lecun.com/exdb/mnist")

    def decode() -> Decoded:
        arrays = []
        for path in paths:
            verify(path, path.read_bytes(), MNIST_MD5.get(path.name))
            arrays.append(idx(path, read_whole(path)))
        x, y = np.concatenate([arrays[0], arrays[2]])[:, None], np.concatenate([arrays[1], arrays[3]])
        return x, y, len(arrays[0])

    x, y, train = _cached("mnist", paths, decode)
    return Source(x, y, 10, train, (0.1307,), (0.3081,))


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


SOURCES: dict[str, Callable[[str | None], Source]] = {"digits": digits, "cifar10": cifar10, "mnist": mnist}
