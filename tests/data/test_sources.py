"""Publishers' files: found where users put them, verified, decoded once; what is damaged is refused by name."""

import gzip
import hashlib
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedmix.data import partition, sources
from fedmix.data.files import Version
from fedmix.data.formats import cifar_binary, idx
from fedmix.errors import DataError
from fedmix.rng import stream
from fedmix.settings.build import build_federation
from fedmix.settings.recipe import DataSettings

REAL = os.environ.get("FEDMIX_DATA")


def test_cifar10_is_what_the_files_hold(small_files):
    source = sources.load("cifar10")
    assert source.x.shape == (2000, 3, 32, 32)
    assert source.train == 1500
    rows = np.frombuffer((small_files / "cifar-10-batches-bin" / "data_batch_2.bin").read_bytes(), np.uint8).reshape(
        300, -1
    )
    assert source.y[300:600].tolist() == rows[:, 0].tolist()
    assert np.array_equal(source.x[305].numpy(), rows[5, 1:].reshape(3, 32, 32))


def test_mnist_is_read_plain_or_packed(small_files):
    packed = sources.load("mnist")
    assert packed.x.shape == (2000, 1, 28, 28)
    assert (packed.train, packed.y[:11].tolist()) == (1500, [*range(10), 0])
    for path in (small_files / "MNIST" / "raw").glob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    plain = sources.load("mnist")
    assert torch.equal(plain.x, packed.x)


def test_fashion_mnist_is_not_mistaken_for_mnist(small_files):
    assert not torch.equal(sources.load("fashion-mnist").x, sources.load("mnist").x)
    assert sources.load("fashion-mnist").train == 1500


def test_the_survey_says_what_is_here_and_what_is_missing(small_files):
    (small_files / "FashionMNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").unlink()
    rows = {row["source"]: row for row in sources.survey()}
    assert rows.keys() == {"digits", *sources.DATASETS}
    assert rows["mnist"]["ready"]
    assert rows["mnist"]["found"] == str(small_files / "MNIST" / "raw")
    assert rows["fashion-mnist"]["missing"] == ["t10k-labels-idx1-ubyte.gz"]
    assert not rows["fashion-mnist"]["ready"]
    nowhere = {row["source"]: row for row in sources.survey(None) if row["source"] != "digits"}
    assert all(row["publisher"].startswith("http") for row in nowhere.values())


def test_the_second_time_files_are_not_decoded_again(small_files, monkeypatch):
    first = sources.load("cifar10")
    monkeypatch.setattr("fedmix.data.formats.np.frombuffer", None)
    second = sources.load("cifar10", str(small_files))
    assert torch.equal(first.x, second.x)
    assert second.train == 1500


def test_files_that_changed_are_decoded_again_and_refused_if_they_are_wrong(small_files):
    sources.load("mnist")
    path = small_files / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte.gz must have the published checksum"):
        sources.load("mnist")


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (b"PK\x03\x04", "must be an idx file of unsigned bytes or integers"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x05abc", "must hold 13 bytes by its own header. It has 11"),
        (b"\x00\x00\x08\x03\x00", "by its own header"),
    ],
)
def test_idx_files_that_are_not_whole_are_refused(data, wrong):
    with pytest.raises(DataError, match=wrong):
        idx(Path("x"), data)


def test_cifar_files_that_are_not_whole_are_refused():
    for data in (b"", b"\x00" * 3074):
        with pytest.raises(DataError, match="must hold rows of 3073 bytes"):
            cifar_binary(Path("x"), data, labels=1)


def test_clients_get_validation_and_test_points_like_their_training_labels():
    labels = np.random.default_rng(0).integers(0, 10, size=30_000)
    train = partition.hsu(labels[:20_000], 50, 2.0, stream(0))
    test = partition.like_training(labels, np.arange(20_000, 30_000), train, stream(1))
    assert {len(part) for part in test} == {200}
    everything = np.concatenate(test)
    assert len(np.unique(everything)) == 10_000
    assert everything.min() >= 20_000
    distances = []
    for own, other in zip(train, test, strict=True):
        a, b = (np.bincount(labels[index], minlength=10) / len(index) for index in (own, other))
        distances.append(np.abs(a - b).sum() / 2)
    assert np.median(distances) < 0.1  # the last clients get what is left; most get what they should


def test_a_published_test_set_stays_a_test_set(small_files):
    federation = build_federation(DataSettings(source="mnist", clients=10, split="hsu"), seed=0)
    for s in range(10):
        assert federation.parts["train"][s].max() < 1500 <= federation.parts["test"][s].min()
        assert federation.parts["validation"][s].max() < 1500
    assert sum(federation.size(s) for s in range(10)) == 1350
    assert federation.x.dtype == torch.uint8
    x = federation.examples(0, "train").x
    wanted = (federation.x[federation.parts["train"][0]].double() / 255 - 0.1307) / 0.3081
    assert torch.allclose(x.double(), wanted, atol=1e-5)


def test_rotated_bytes_stay_bytes(small_files):
    federation = build_federation(DataSettings(source="mnist", clients=5, shift="rotate", side="rotation"), seed=0)
    assert federation.x.dtype == torch.uint8
    assert len(federation.c.unique()) == 8


@pytest.mark.skipif(
    not REAL or not (Path(REAL) / "cifar-10-batches-bin").is_dir(), reason="no real data in $FEDMIX_DATA"
)
def test_the_real_files_are_read_and_a_second_start_is_quick(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMIX_CACHE", str(tmp_path))
    cifar, mnist = sources.load("cifar10"), sources.load("mnist")
    assert np.bincount(cifar.y[: cifar.train]).tolist() == [5000] * 10
    assert mnist.y[:5].tolist() == [5, 0, 4, 1, 9]
    pixels = cifar.x[: cifar.train].float() / 255
    assert pixels.mean(dim=(0, 2, 3)).tolist() == pytest.approx(cifar.mean, abs=1e-3)
    assert pixels.std(dim=(0, 2, 3)).tolist() == pytest.approx(cifar.std, abs=1e-3)
    began = time.monotonic()
    sources.load("cifar10")
    assert time.monotonic() - began < 1


def test_the_published_rows_in_another_order_are_taken_and_said(tmp_path):
    """A row too many, a changed byte: refused. The same rows in another order: read, with a note."""
    rng = np.random.default_rng(0)
    rows = [bytes(rng.integers(0, 256, size=3074, dtype=np.uint8)) for _ in range(6)]
    path = tmp_path / "train.bin"
    path.write_bytes(b"".join(rows))
    published = hashlib.md5(path.read_bytes()).hexdigest()
    sorted_rows = hashlib.sha256(b"".join(sorted(rows))).hexdigest()
    version = Version(("x",), {"train.bin": published}, lambda paths: {}, rows={"train.bin": (3074, sorted_rows)})
    assert version.verify(path)
    path.write_bytes(b"".join(reversed(rows)))
    assert not version.verify(path)
    for wrong in ([*rows, rows[0]], [*rows[:-1], bytes(3074)]):
        path.write_bytes(b"".join(wrong))
        with pytest.raises(DataError, match="must have the published checksum"):
            version.verify(path)
    dataset = replace(sources.CIFAR100, versions=(replace(version, decode=lambda paths: {"train": np.array(6)}),))
    assert dataset.mean
    path.write_bytes(b"".join(reversed(rows)))
    (tmp_path / "x").mkdir()
    path.rename(tmp_path / "x" / "train.bin")
    assert "train.bin are the published ones in another order" in str(dataset.arrays(str(tmp_path))["note"])
