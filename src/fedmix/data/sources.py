"""Named data sets: files -> arrays. `digits` is embedded; the others are read from the user's folders.

Decoded images are cached as memory-mapped arrays, so that a second start is quick and workers share one copy.
For example:

    source = load("cifar100", data_dir="~/data")
    source.x  # bytes [60000, 3, 32, 32]
    source.y  # fine labels [60000], the first source.train of them to train
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmix.data.files import Arrays, Dataset, Download, Version, moments
from fedmix.data.formats import (
    cifar_binary,
    cifar_python,
    idx,
    leaf_json,
    qmnist_writers,
    read_whole,
    tff_h5,
    writers_npz,
)
from fedmix.data.labels import Label
from fedmix.data.tables import Table, encode, make_rules
from fedmix.errors import DataError, SettingError, one_of


@dataclass(frozen=True)
class Source:
    """Labelled data before it is dealt out: images of bytes or numbers x [N, ...], labels y [N].

    The first `train` points are the publisher's training set, the rest its test set; train = N: there is no such division.
    mean, std: what values in [0, 1] are normalised with, channel by channel: (value - mean) / std.
    """

    x: Tensor
    y: Tensor
    classes: int
    train: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    owner: Tensor | None = None  # who each point belongs to [N], a number into `owners`, where that is known
    owners: Sequence[str] = ()
    coarse: Tensor | None = None  # a coarser label of each point [N]
    column: Tensor | None = None  # side information that the user gives [N], a number from 0
    vector: Tensor | None = None  # the same as numbers [N, D], which are no categories
    kinds: Sequence[str] = ()  # what the user calls the values of `column`
    labels: Sequence[Label] = ()  # what the user calls the classes
    table: Table | None = None  # rows that become inputs once it is known which of them are trained on; x is empty then
    features: Sequence[Mapping[str, Any]] = ()  # how the columns of a table became numbers
    roles: Mapping[str, Any] = field(default_factory=dict)  # which column of a table is the label, the client, the side
    note: str = ""  # what a user should know of these files

    @property
    def shape(self) -> list[int]:
        """The shape of one input."""
        return [self.table.width] if self.table is not None else list(self.x.shape[1:])

    def with_statistics_of(self, train: npt.NDArray[np.int64]) -> "Source":
        """The same data with what its training points say: how columns become numbers, what images are normalised with."""
        if self.table is not None:
            rules = make_rules(self.table, train)
            return replace(self, x=torch.from_numpy(encode(self.table, rules)), table=None, features=rules)
        if self.x.dtype != torch.uint8 or self.mean or self.x.dim() != 4:
            return self
        found = moments(self.x.numpy()[train])
        return replace(self, mean=tuple(found["mean"].tolist()), std=tuple(found["std"].tolist()))


def digits(data_dir: str | None = None) -> Source:
    """Load scikit-learn's 1,797 handwritten digits of 8 x 8 (DIGITS.md): x [1797, 1, 8, 8] in [0, 1]."""
    with (files("fedmix.data") / "digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        x = torch.from_numpy(arrays["x"].astype(np.float32) / 16).unsqueeze(1)
        y = torch.from_numpy(arrays["y"].astype(np.int64))
    return Source(x, y, classes=10, train=len(x))


def _cifar_arrays(read: Callable[..., Any], labels: Any) -> Callable[[Sequence[Path]], Arrays]:
    """Make a decoder of batches to train and a last one to test.

    The last label of a point is y; if there is one before it, that is the coarse label.
    """

    def decode(paths: Sequence[Path]) -> Arrays:
        batches = [read(path, path.read_bytes(), labels) for path in paths]
        x = np.concatenate([images for images, _ in batches])
        y = np.concatenate([labels_of_batch for _, labels_of_batch in batches])
        test_images, _ = batches[-1]
        arrays = {"x": x, "y": y[:, -1], "train": np.array(len(x) - len(test_images))}
        if y.shape[1] > 1:
            arrays["coarse"] = y[:, 0]
        return arrays

    return decode


def _idx_arrays(paths: Sequence[Path], upright: bool = True, first: int = 0) -> Arrays:
    """Decode four files: images and labels to train, then to test.

    upright: rows come before columns; first: the number of the first class.
    """
    train_x, train_y, test_x, test_y = (idx(path, read_whole(path)) for path in paths)
    x = np.concatenate([train_x, test_x])[:, None]
    y = np.concatenate([train_y, test_y])
    return {"x": x if upright else x.swapaxes(2, 3), "y": y - first, "train": np.array(len(train_x))}


def _leaf_arrays(paths: Sequence[Path]) -> Arrays:
    """Decode LEAF's files, which have no test set of their own."""
    x, y, owner, names = leaf_json(paths)
    return {"x": x, "y": y, "owner": owner, "owners": np.array(names), "train": np.array(len(x))}


def _tff_arrays(paths: Sequence[Path]) -> Arrays:
    """Decode TensorFlow Federated's two files: points to train, then to test."""
    x, y, owner, names, train = tff_h5(paths)
    return {"x": x, "y": y, "owner": owner, "owners": np.array(names), "train": np.array(train)}


def _writer_arrays(read: Callable[[Any], tuple[Any, Any]]) -> Callable[[Sequence[Path]], Arrays]:
    """Make a decoder of who wrote each point. `read` gives the writers of the points to train and to test."""

    def decode(paths: Sequence[Path]) -> Arrays:
        train, test = read(paths)
        owners, owner = np.unique(np.concatenate([train, test]), return_inverse=True)
        return {"owner": owner, "owners": owners.astype(str), "train": np.array(len(train))}

    return decode


KRIZHEVSKY = "https://www.cs.toronto.edu/~kriz/"
CIFAR10 = Dataset(
    name="cifar10",
    about="CIFAR-10 (Krizhevsky, 2009): 60,000 colour images of 32 x 32, 10 classes",
    publisher=f"{KRIZHEVSKY}cifar.html (binary or python version)",
    versions=(
        Version(
            ("cifar-10-batches-bin", "cifar10", "."),
            {
                "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
                "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
                "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
                "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
                "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
                "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
            },
            _cifar_arrays(cifar_binary, 1),
            (Download(f"{KRIZHEVSKY}cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
        ),
        Version(
            ("cifar-10-batches-py", "cifar10"),
            {
                "data_batch_1": "c99cafc152244af753f735de768cd75f",
                "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                "data_batch_4": "634d18415352ddfa80567beed471001a",
                "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
                "test_batch": "40351d587109b95175f43aff81a1287e",
            },
            _cifar_arrays(cifar_python, ["labels"]),
            (Download(f"{KRIZHEVSKY}cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),),
        ),
    ),
    shape=(3, 32, 32),
    classes=10,
    train=50_000,
    test=10_000,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)
CIFAR100 = Dataset(
    name="cifar100",
    about="CIFAR-100 (Krizhevsky, 2009): 60,000 colour images of 32 x 32, 100 fine and 20 coarse classes",
    publisher=f"{KRIZHEVSKY}cifar.html (binary or python version)",
    versions=(
        Version(
            ("cifar-100-binary", "cifar100"),
            {"train.bin": "6172c7755cfe09b2fe270c85cebc1b15", "test.bin": "4499cfba6c016c1be1438163640a0898"},
            _cifar_arrays(cifar_binary, 2),
            (Download(f"{KRIZHEVSKY}cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
            {
                "train.bin": (3074, "e087818905fce27ff63616d8f344858809aab7e66060ba0e155a3bb18453ec1e"),
                "test.bin": (3074, "b8278c7d1bf36d32ce3e9f2a02eb2c80c9458dcf9a15571d082434cc68f5f5ce"),
            },
        ),
        Version(
            ("cifar-100-python", "cifar100"),
            {"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
            _cifar_arrays(cifar_python, ["coarse_labels", "fine_labels"]),
            (Download(f"{KRIZHEVSKY}cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),),
        ),
    ),
    shape=(3, 32, 32),
    classes=100,
    train=50_000,
    test=10_000,
    coarse=20,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)


def _four_idx_files(prefix: str, names: tuple[str, str], checksums: Sequence[str]) -> dict[str, str]:
    """Name the files of images and labels to train and to test, with their checksums."""
    kinds = ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz")
    files_in_order = [f"{prefix}{part}-{kind}" for part in names for kind in kinds]
    return dict(zip(files_in_order, checksums, strict=True))


def _idx_dataset(
    name: str, about: str, publisher: str, layouts: tuple[str, ...], mirror: str, sums: Sequence[str]
) -> Dataset:
    """Describe MNIST or a data set of its form: 60,000 + 10,000 grey images of 28 x 28 in ten classes."""
    checksums = _four_idx_files("", ("train", "t10k"), sums)
    downloads = tuple(Download(mirror + file, checksum) for file, checksum in checksums.items())
    version = Version(layouts, checksums, _idx_arrays, downloads)
    return Dataset(name, about, publisher, (version,), (1, 28, 28), 10, 60_000, 10_000)


MNIST = replace(
    _idx_dataset(
        "mnist",
        "MNIST (LeCun et al., 2010): 70,000 handwritten digits of 28 x 28",
        "http://yann.lecun.com/exdb/mnist",
        ("MNIST/raw", "mnist"),
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    mean=(0.1307,),
    std=(0.3081,),
)
FASHION_MNIST = replace(
    _idx_dataset(
        "fashion-mnist",
        "Fashion-MNIST (Xiao et al., 2017): 70,000 articles of clothing of 28 x 28, 10 classes",
        "https://github.com/zalandoresearch/fashion-mnist",
        ("FashionMNIST/raw", "fashion-mnist"),
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    mean=(0.2860,),
    std=(0.3530,),
)


def _emnist(part: str, classes: int, train: int, test: int) -> Dataset:
    """Describe one of EMNIST's six divisions. Its images lie on their side, and letters are numbered from 1."""
    first = 1 if part == "letters" else 0
    return Dataset(
        name=f"emnist-{part}",
        about=f"EMNIST (Cohen et al., 2017), {part}: {train + test:,} characters of 28 x 28, {classes} classes",
        publisher="https://www.nist.gov/itl/products-and-services/emnist-dataset (binary format, gzip.zip)",
        versions=(
            Version(
                ("EMNIST/raw", "EMNIST/raw/gzip", "gzip", "emnist"),
                _four_idx_files(f"emnist-{part}-", ("train", "test"), [""] * 4),
                partial(_idx_arrays, upright=False, first=first),
                (Download("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e"),),
            ),
        ),
        shape=(1, 28, 28),
        classes=classes,
        train=train,
        test=test,
    )


EMNIST = (
    _emnist("balanced", 47, 112_800, 18_800),
    _emnist("byclass", 62, 697_932, 116_323),
    _emnist("bymerge", 47, 697_932, 116_323),
    _emnist("digits", 10, 240_000, 40_000),
    _emnist("letters", 26, 124_800, 20_800),
    _emnist("mnist", 10, 60_000, 10_000),
)
FEMNIST = Dataset(
    name="femnist",
    about="FEMNIST (Caldas et al., 2018): 749,068 characters of 28 x 28 by 3,400 writers, 62 classes",
    publisher="https://github.com/TalwalkarLab/leaf (all_data_*.json), or TensorFlow Federated (fed_emnist_*.h5)",
    versions=(
        Version(
            ("fed_emnist", "femnist", "."),
            {"fed_emnist_train.h5": "", "fed_emnist_test.h5": ""},
            _tff_arrays,
            (
                Download(
                    "https://storage.googleapis.com/tff-datasets-public/fed_emnist.tar.bz2",
                    "fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
                ),
            ),
        ),
        Version(
            ("femnist/data/all_data", "femnist/all_data", "femnist", "all_data"), {"all_data_*.json": ""}, _leaf_arrays
        ),
    ),
    shape=(1, 28, 28),
    classes=62,
    train=671_585,
    test=77_483,
    owners=3_400,
)
QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/"
QMNIST_LABELS = {
    "qmnist-train-labels-idx2-int.gz": "0058f8dd561b90ffdd0f734c6a30e5e4",
    "qmnist-test-labels-idx2-int.gz": "5b5b05890a5e13444e108efe57b788aa",
}
MNIST_WRITERS = replace(
    MNIST,
    name="mnist-writers",
    about="the writer of every digit of MNIST (Yadav and Bottou, 2019): 539 people to train, 297 others to test",
    publisher="https://github.com/facebookresearch/qmnist (label files), beside MNIST itself",
    versions=(
        Version(("mnist-writers",), {"mnist_writers.npz": ""}, _writer_arrays(lambda paths: writers_npz(paths[0]))),
        Version(
            ("QMNIST/raw", "qmnist"),
            QMNIST_LABELS,
            _writer_arrays(qmnist_writers),
            tuple(Download(QMNIST + name, checksum) for name, checksum in QMNIST_LABELS.items()),
        ),
    ),
    owners=539,
    new_owners=297,
)
_PUBLISHED = (CIFAR10, CIFAR100, MNIST, FASHION_MNIST, *EMNIST, FEMNIST, MNIST_WRITERS)
DATASETS = {dataset.name: dataset for dataset in _PUBLISHED}
NEEDS = {MNIST_WRITERS.name: (MNIST,)}  # data sets that another one is read together with


def load(name: str, data_dir: str | None = None, labels: str = "fine") -> Source:
    """Load a published data set by name. labels: "coarse" takes the coarse classes of CIFAR-100."""
    if name == "digits":
        return digits(data_dir)
    dataset = DATASETS[name]
    _check_labels(dataset, labels)
    arrays = dataset.arrays(data_dir)
    for other in NEEDS.get(name, ()):
        arrays = _together(other.arrays(data_dir), arrays, name)
    source = _source(dataset, arrays)
    if labels == "fine":
        return source
    return replace(source, y=whole_numbers(arrays["coarse"]), classes=dataset.coarse, coarse=None)


def _source(dataset: Dataset, arrays: Arrays) -> Source:
    """Present decoded files with their finest labels."""
    return Source(
        x=torch.from_numpy(arrays["x"]),
        y=whole_numbers(arrays["y"]),
        classes=dataset.classes,
        train=int(arrays["train"]),
        mean=dataset.mean or tuple(arrays["mean"].tolist()),
        std=dataset.std or tuple(arrays["std"].tolist()),
        owner=numbers_if_any(arrays, "owner"),
        owners=arrays["owners"].tolist() if "owners" in arrays else (),
        coarse=numbers_if_any(arrays, "coarse"),
        note=str(arrays.get("note", "")),
    )


def _check_labels(dataset: Dataset, labels: str) -> None:
    known = ("fine", "coarse") if dataset.coarse else ("fine",)
    if labels not in known:
        raise SettingError(one_of(f"data.args.labels of {dataset.name}", labels, known))


def whole_numbers(values: Any) -> Tensor:
    """Turn an array of whole numbers of any kind into a tensor of int64."""
    return torch.from_numpy(np.asarray(values, dtype=np.int64))


def numbers_if_any(arrays: Arrays, key: str) -> Tensor | None:
    """Take an array of whole numbers that is not there for every data set."""
    return whole_numbers(arrays[key]) if key in arrays else None


def _together(images: Arrays, writers: Arrays, name: str) -> Arrays:
    """Add to images who wrote them. Both must be of the same points: as many in all, and as many to train."""
    digits_in_all, digits_to_train = len(images["y"]), int(images["train"])
    writers_in_all, writers_to_train = len(writers["owner"]), int(writers["train"])
    if (digits_in_all, digits_to_train) != (writers_in_all, writers_to_train):
        raise DataError(
            f"{name} must name the writer of each of MNIST's {digits_in_all} digits ({digits_to_train} to train). It has "
            f"{writers_in_all} ({writers_to_train} to train); get both again."
        )
    return images | {key: writers[key] for key in ("owner", "owners")}


def stand_in(name: str, labels: str = "fine") -> Source:
    """Make up a data set that is not at hand: its sizes and shapes alone, which say what training on it will cost."""
    if name not in DATASETS:
        raise DataError(f"the sizes of {name!r} are known only from its files; put them where they are looked for.")
    dataset = DATASETS[name]
    number = torch.arange(dataset.train + dataset.test)
    classes = dataset.coarse if labels == "coarse" else dataset.classes
    y = number % classes
    has_both_labels = dataset.coarse and labels == "fine"
    return Source(
        # A single byte that is seen everywhere takes no memory, however many points there are.
        x=torch.zeros(1, dtype=torch.uint8).expand(len(number), *dataset.shape),
        y=y,
        classes=classes,
        train=dataset.train,
        mean=(0.5,) * dataset.shape[0],
        std=(0.5,) * dataset.shape[0],
        owner=_made_up_owner(dataset, number),
        owners=[str(owner) for owner in range(dataset.owners + dataset.new_owners)],
        coarse=y % dataset.coarse if has_both_labels else None,
    )


def _made_up_owner(dataset: Dataset, number: Tensor) -> Tensor | None:
    """Deal the points with these numbers [N] out to owners in turn; new owners hold test points only."""
    if not dataset.owners:
        return None
    owner = number % dataset.owners
    if not dataset.new_owners:
        return owner
    new_owner = dataset.owners + number % dataset.new_owners
    return torch.where(number >= dataset.train, new_owner, owner)


def survey(data_dir: str | None = None) -> list[dict[str, Any]]:
    """Say of every data set where it was found, what is missing and where its publisher offers it."""
    embedded = {
        "source": "digits",
        "about": "embedded: 1,797 handwritten digits of 8 x 8",
        "ready": True,
        "found": "",
        "missing": [],
        "publisher": "",
        "get": False,
    }
    return [embedded, *(_survey_of(dataset, data_dir) for dataset in DATASETS.values())]


def _survey_of(dataset: Dataset, data_dir: str | None) -> dict[str, Any]:
    _, paths, missing = dataset.look(data_dir)
    for other in NEEDS.get(dataset.name, ()):
        _, _, missing_of_other = other.look(data_dir)
        missing = missing + missing_of_other
    return {
        "source": dataset.name,
        "about": dataset.about,
        "ready": not missing,
        "found": str(paths[0].parent) if paths else "",
        "missing": missing,
        "publisher": dataset.publisher,
        "get": dataset.offered is not None,
    }
