"""Small files in every publisher's format, for tests: the same names, layouts and encodings, a few random points."""

import gzip
import hashlib
import json
import pickle

import h5py
import numpy as np

from fedmix.data import sources

TRAIN, TEST = 1500, 500


def idx_bytes(array, kind=8):
    header = bytes([0, 0, kind, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.tobytes()


def cifar_rows(rng, count, labels, classes):
    """Rows of CIFAR's binary version; a fine label k belongs to the coarse label k mod 20."""
    rows = rng.integers(0, 256, size=(count, labels + 3072), dtype=np.uint8)
    rows[:, labels - 1] = np.arange(count) % classes
    if labels == 2:
        rows[:, 0] = rows[:, 1] % 20
    return rows


def write_cifar(folder, dataset, rng, labels):
    binary, _ = dataset.versions
    there = folder / binary.layouts[0]
    there.mkdir(parents=True)
    for name in binary.checksums:
        count = TEST if "test" in name else TRAIN // (len(binary.checksums) - 1)
        (there / name).write_bytes(cifar_rows(rng, count, labels, dataset.classes).tobytes())


def write_cifar_python(folder, dataset, rng):
    """The python version: pickles as Python 2 wrote them, and the batches that went into them."""
    python = dataset.versions[1]
    there = folder / python.layouts[0]
    there.mkdir(parents=True)
    batches = []
    for name in python.checksums:
        count = 20
        batch = {b"data": rng.integers(0, 256, size=(count, 3072), dtype=np.uint8), b"batch_label": b"x"}
        fine = [int(k) for k in rng.integers(0, dataset.classes, size=count)]
        batch |= (
            {b"fine_labels": fine, b"coarse_labels": [k % 20 for k in fine]} if dataset.coarse else {b"labels": fine}
        )
        (there / name).write_bytes(pickle.dumps(batch, protocol=2))
        batches.append(batch)
    return there, batches


def write_idx(folder, dataset, rng, first=0):
    there = folder / dataset.versions[0].layouts[0]
    there.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(dataset.versions[0].checksums):
        count = (TRAIN, TEST)[number // 2]
        images = rng.integers(0, 256, size=(count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % dataset.classes + first).astype(np.uint8)
        (there / name).write_bytes(gzip.compress(idx_bytes(images if number % 2 == 0 else labels), mtime=0))


def write_writers(folder, rng, writers=30, new=10):
    there = folder / "mnist-writers"
    there.mkdir()
    train = rng.permutation(np.arange(TRAIN) % writers).astype(np.int16)
    test = (1000 + np.arange(TEST) % new).astype(np.int16)
    np.savez(there / "mnist_writers.npz", train_writer=train, test_writer=test)


def write_leaf(folder, rng, users=8, files=2):
    """LEAF's all_data_*.json; the users' points as they were written."""
    there = folder / "femnist" / "data" / "all_data"
    there.mkdir(parents=True)
    written = {}
    for number in range(files):
        names = [f"f{number}{s:03d}_{s}" for s in range(users // files)]
        data = {}
        for name in names:
            count = int(rng.integers(12, 30))
            pixels = rng.integers(0, 256, size=(count, 784))
            data[name] = {"x": (pixels / 255).tolist(), "y": [int(k) for k in rng.integers(0, 62, size=count)]}
            written[name] = (pixels, data[name]["y"])
        content = {"users": names, "num_samples": [len(data[name]["y"]) for name in names], "user_data": data}
        (there / f"all_data_{number}.json").write_text(json.dumps(content))
    return written


def write_tff(folder, rng, writers=8):
    """TFF's fed_emnist_train.h5 and fed_emnist_test.h5."""
    there = folder / "fed_emnist"
    there.mkdir(parents=True)
    for part, fewest in (("train", 14), ("test", 3)):
        with h5py.File(there / f"fed_emnist_{part}.h5", "w") as file:
            for s in range(writers):
                count = fewest + s
                group = file.create_group(f"examples/f{s:04d}_{s:02d}")
                group["pixels"] = rng.integers(0, 256, size=(count, 28, 28)).astype(np.float32) / 255
                group["label"] = rng.integers(0, 62, size=count).astype(np.int32)
    return there


def own_checksums(folder, monkeypatch):
    """Files that a test wrote have the checksums that they have."""
    for dataset in sources.DATASETS.values():
        for version in dataset.versions:
            for name, published in version.checksums.items():
                for layout in version.layouts:
                    path = folder / layout / name
                    if published and path.is_file():
                        monkeypatch.setitem(version.checksums, name, hashlib.md5(path.read_bytes()).hexdigest())


def write_everything(folder, monkeypatch):
    """A small version of every published data set."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    write_cifar(folder, sources.CIFAR10, rng, 1)
    write_cifar(folder, sources.CIFAR100, rng, 2)
    write_idx(folder, sources.MNIST, rng)
    write_idx(folder, sources.FASHION_MNIST, rng)
    for dataset in sources.EMNIST:
        write_idx(folder, dataset, rng, first=1 if dataset.name == "emnist-letters" else 0)
    write_writers(folder, rng)
    write_tff(folder, rng)
    own_checksums(folder, monkeypatch)
