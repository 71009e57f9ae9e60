"""Every publisher's format: what the reader gives is what the writer put in; what is damaged is refused by name."""

import json
import os
import pickle
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from published import TEST, TRAIN, idx_bytes, own_checksums, write_cifar_python, write_leaf, write_tff

from fedmix.data import sources
from fedmix.data.formats import cifar_python, idx, read_whole
from fedmix.data.sources import load
from fedmix.errors import DataError, DataMissing, SettingError
from fedmix.settings.federate import build_federation
from fedmix.settings.recipe import DataSettings


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """A data folder with nothing in it yet."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.setenv("FEDMIX_DATA", str(folder))
    monkeypatch.setenv("FEDMIX_CACHE", str(tmp_path / "cache"))
    return folder


def test_cifar100_has_fine_and_coarse_labels(small_files):
    fine, coarse = load("cifar100"), load("cifar100", labels="coarse")
    assert (fine.x.shape, fine.train, fine.classes) == ((TRAIN + TEST, 3, 32, 32), TRAIN, 100)
    assert torch.equal(fine.coarse, fine.y % 20)
    assert torch.equal(coarse.y, fine.coarse)
    assert coarse.classes == 20
    rows = np.frombuffer((small_files / "cifar-100-binary" / "test.bin").read_bytes(), np.uint8).reshape(-1, 3074)
    assert np.array_equal(fine.x[TRAIN + 7].numpy(), rows[7, 2:].reshape(3, 32, 32))
    with pytest.raises(SettingError, match=r"data.args.labels of cifar100 must be one of coarse, fine"):
        load("cifar100", labels="rough")
    with pytest.raises(SettingError, match=r"data.args.labels of mnist must be one of fine"):
        load("mnist", labels="coarse")


@pytest.mark.parametrize(("dataset", "key"), [(sources.CIFAR10, b"labels"), (sources.CIFAR100, b"fine_labels")])
def test_the_python_version_of_cifar_is_read(dataset, key, empty, monkeypatch):
    _, batches = write_cifar_python(empty, dataset, np.random.default_rng(0))
    own_checksums(empty, monkeypatch)
    source = load(dataset.name)
    assert np.array_equal(
        source.x.numpy(), np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32)
    )
    assert source.y.tolist() == [k for batch in batches for k in batch[key]]
    assert source.train == 20 * (len(batches) - 1)
    if dataset.coarse:
        assert source.coarse.tolist() == [k for batch in batches for k in batch[b"coarse_labels"]]


class _Trap:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_wants_more_than_arrays_is_refused(protocol, tmp_path):
    data = np.zeros((2, 3072), np.uint8)
    for unwanted in (_Trap(tmp_path / "sprung"), Path("x"), np.random.default_rng(0), eval):
        pickled = pickle.dumps({b"data": data, b"labels": [0, 1], b"more": unwanted}, protocol=protocol)
        with pytest.raises(DataError, match="only arrays and plain containers are admitted"):
            cifar_python(tmp_path / "data_batch_1", pickled, ["labels"])
    assert not (tmp_path / "sprung").exists()
    x, y = cifar_python(tmp_path, pickle.dumps({b"data": data, b"labels": [0, 1]}, protocol=protocol), ["labels"])
    assert (x.shape, y.tolist()) == ((2, 3, 32, 32), [[0], [1]])


@pytest.mark.parametrize("data", [b"", b"\x80\x02}q\x00.", b"PK\x03\x04", pickle.dumps({b"data": [1], b"labels": []})])
def test_what_is_no_batch_of_cifar_is_refused(data, tmp_path):
    with pytest.raises(DataError, match=r"must be a batch of CIFAR's python version"):
        cifar_python(tmp_path / "data_batch_1", data, ["labels"])


def test_emnist_is_turned_upright_and_letters_start_at_0(small_files):
    letters, balanced = load("emnist-letters"), load("emnist-balanced")
    assert (letters.y.min(), letters.y.max(), letters.classes) == (0, 25, 26)
    assert (balanced.y.min(), balanced.y.max(), balanced.classes) == (0, 46, 47)
    name = "emnist-letters-train-images-idx3-ubyte.gz"
    path = small_files / "EMNIST" / "raw" / name
    raw = idx(path, read_whole(path))
    assert np.array_equal(letters.x[3, 0].numpy(), raw[3].T)
    pixels = letters.x[: letters.train].double() / 255
    assert letters.mean == pytest.approx([pixels.mean().item()], abs=1e-9)
    assert letters.std == pytest.approx([pixels.std(correction=0).item()], abs=1e-9)


def test_leafs_femnist_is_read_user_by_user(empty):
    written = write_leaf(empty, np.random.default_rng(0))
    source = load("femnist")
    assert list(source.owners) == list(written)
    assert source.train == len(source.y)
    for number, (pixels, labels) in enumerate(written.values()):
        own = source.owner == number
        assert np.array_equal(source.x[own].numpy().reshape(len(labels), -1), pixels)
        assert source.y[own].tolist() == labels
    federation = build_federation(DataSettings(source="femnist", clients=0, split="by-writer"), seed=0)
    assert list(federation.names) == list(written)
    assert federation.held_out is None


def test_tffs_femnist_keeps_each_writers_test_points(empty):
    there = write_tff(empty, np.random.default_rng(0))
    source = load("femnist")
    with h5py.File(there / "fed_emnist_test.h5") as file:
        last = file["examples/f0007_07"]
        assert np.allclose(source.x[-len(last["label"]) :, 0].numpy() / 255, last["pixels"][:], atol=1e-6)
        assert source.y[-len(last["label"]) :].tolist() == last["label"][:].tolist()
    federation = build_federation(DataSettings(source="femnist", clients=0, split="by-writer"), seed=0)
    for s in range(8):
        train, validation, test = (federation.parts[part][s] for part in ("train", "validation", "test"))
        assert (len(train) + len(validation), len(test)) == (14 + s, 3 + s)
        assert max(train.max(), validation.max()) < source.train <= test.min()
        assert set(source.owner[np.concatenate([train, validation, test])].tolist()) == {s}


def test_femnist_that_is_no_femnist_is_refused(empty):
    folder = empty / "femnist"
    folder.mkdir()
    for content, wrong in [
        ("{", "must be a file of LEAF's FEMNIST"),
        (json.dumps({"users": ["a"], "user_data": {}}), "must be a file of LEAF's FEMNIST"),
        (json.dumps({"users": ["a"], "user_data": {"a": {"x": [[3.0] * 784], "y": [1]}}}), "not from 0 to 1"),
        (json.dumps({"users": ["a"], "user_data": {"a": {"x": [[0.0] * 784], "y": []}}}), "1 images and 0 labels"),
    ]:
        (folder / "all_data_0.json").write_text(content)
        with pytest.raises(DataError, match=wrong):
            load("femnist")
    (folder / "all_data_0.json").unlink()
    (folder / "fed_emnist_train.h5").write_bytes(b"no h5")
    with pytest.raises(DataError, match=r"has no fed_emnist_test.h5"):
        load("femnist")
    (folder / "fed_emnist_test.h5").write_bytes(b"no h5")
    with pytest.raises(DataError, match="must be a file of TFF's federated EMNIST"):
        load("femnist")


def test_h5_files_without_h5py_say_what_to_install(empty, monkeypatch):
    write_tff(empty, np.random.default_rng(0))
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(DataError, match=r"pip install 'fedmix\[h5\]'"):
        load("femnist")


def test_writers_come_from_the_npz_or_from_qmnists_labels(small_files, monkeypatch):
    from_npz = load("mnist-writers")
    assert torch.equal(from_npz.x, load("mnist").x)
    with np.load(small_files / "mnist-writers" / "mnist_writers.npz") as arrays:
        writers = np.concatenate([arrays["train_writer"], arrays["test_writer"]])
    assert [from_npz.owners[k] for k in from_npz.owner] == writers.astype(str).tolist()
    (small_files / "mnist-writers" / "mnist_writers.npz").unlink()
    with pytest.raises(DataMissing, match="fedmix data get mnist-writers"):
        load("mnist-writers")
    qmnist = small_files / "QMNIST" / "raw"
    qmnist.mkdir(parents=True)
    for part, some in (("train", writers[:TRAIN]), ("test", writers[TRAIN:])):
        table = np.zeros((len(some), 8), ">i4")
        table[:, 2] = some
        (qmnist / f"qmnist-{part}-labels-idx2-int").write_bytes(idx_bytes(table, kind=12))
    from_qmnist = load("mnist-writers")
    assert torch.equal(from_qmnist.owner, from_npz.owner)
    assert list(from_qmnist.owners) == list(from_npz.owners)


def test_writers_of_other_digits_are_refused(small_files):
    np.savez(small_files / "mnist-writers" / "mnist_writers.npz", train_writer=np.arange(5), test_writer=np.arange(5))
    with pytest.raises(
        DataError, match=r"must name the writer of each of MNIST's 2000 digits \(1500 to train\). It has 10"
    ):
        load("mnist-writers")
    np.savez(small_files / "mnist-writers" / "mnist_writers.npz", other=np.arange(5))
    with pytest.raises(DataError, match="must be an npz with train_writer and test_writer"):
        load("mnist-writers")


def test_a_stand_in_has_the_sizes_of_the_real_files(small_files):
    for name in sources.DATASETS:
        real, stand_in = load(name), sources.stand_in(name)
        assert stand_in.x.shape[1:] == real.x.shape[1:], name
        assert stand_in.classes == real.classes, name
        assert (stand_in.owner is None) == (real.owner is None), name
        assert (stand_in.coarse is None) == (real.coarse is None), name
        assert (stand_in.train == len(stand_in.y)) == (real.train == len(real.y)), name
    writers = sources.stand_in("mnist-writers")
    assert len(writers.owner[: writers.train].unique()) == 539
    assert len(writers.owner[writers.train :].unique()) == 297
