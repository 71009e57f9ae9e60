"""`fedmix data get` against a real server on loopback: whole, broken off, corrupted, resumed, refused."""

import hashlib
import io
import json
import multiprocessing
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from published import TEST, TRAIN, cifar_rows, write_idx

from fedmix.cli import main
from fedmix.data import download, sources
from fedmix.data.files import Download, Version
from fedmix.data.sources import load
from fedmix.errors import DataError


class Server(ThreadingHTTPServer):
    """Files from memory; `faults` are what goes wrong with the next answers, one after the other."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.faults, self.asked, self.ranges = {}, [], [], True

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}/mirror"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        name, start = self.path.rsplit("/", 1)[-1], 0
        if "Range" in self.headers and self.server.ranges:
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        self.server.asked.append((name, start))
        fault = self.server.faults.pop(0) if self.server.faults else None
        if name not in self.server.files or isinstance(fault, int):
            return self.send_error(fault or 404)
        whole = self.server.files[name]
        if start and start >= len(whole):
            return self.send_error(416)
        data = whole[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if fault == "corrupted":
            data = data[:-1] + bytes([data[-1] ^ 1])
        self.wfile.write(data[: len(data) // 2] if fault == "broken off" else data)
        return None

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDMIX_DATA", raising=False)
    monkeypatch.setattr(download.time, "sleep", lambda _: None)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def offer(server, monkeypatch, dataset, name, data):
    """The server offers `data` as the archive of a data set, with the checksum that it has."""
    version = dataset.offered
    known = Download(version.downloads[0].url, hashlib.md5(data).hexdigest())
    assert known.name == name
    monkeypatch.setitem(
        sources.DATASETS,
        dataset.name,
        dataset.__class__(**(vars(dataset) | {"versions": (Version(**(vars(version) | {"downloads": (known,)})),)})),
    )
    server.files[name] = data


@pytest.fixture
def cifar(server, monkeypatch):
    """A small cifar-100-binary.tar.gz on the server, with members that must not be unpacked."""
    rng, packed = np.random.default_rng(0), io.BytesIO()
    checksums = sources.CIFAR100.offered.checksums
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, count in (("train.bin", TRAIN), ("test.bin", TEST), ("../../evil.bin", 1)):
            data = cifar_rows(rng, count, 2, 100).tobytes()
            entry = tarfile.TarInfo(f"cifar-100-binary/{name}")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
            if name in checksums:
                monkeypatch.setitem(checksums, name, hashlib.md5(data).hexdigest())
    offer(server, monkeypatch, sources.CIFAR100, "cifar-100-binary.tar.gz", packed.getvalue())
    return server


def get(server, *args):
    with pytest.raises(SystemExit) as ended:
        main(["data", "get", *args, "--mirror", server.address])
    return ended.value.code


def test_an_archive_is_downloaded_verified_unpacked_and_used(cifar, tmp_path, capsys):
    assert get(cifar, "cifar100", "--json") == 0
    out, err = capsys.readouterr()
    folder = tmp_path / "cache" / "data" / "cifar-100-binary"
    assert json.loads(out) == {"cifar100": str(folder)}
    assert "cifar-100-binary.tar.gz: downloading" in err
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["test.bin", "train.bin"]
    assert not list(tmp_path.rglob("evil*"))
    assert load("cifar100").train == TRAIN
    assert get(cifar, "cifar100") == 0  # the second time nothing is asked for
    assert len(cifar.asked) == 1


def test_a_connection_that_breaks_is_taken_up_where_it_broke(cifar, tmp_path):
    size = len(cifar.files["cifar-100-binary.tar.gz"])
    cifar.faults = ["broken off", "broken off"]
    assert get(cifar, "cifar100", "--data-dir", str(tmp_path / "d")) == 0
    assert [start for _, start in cifar.asked] == [0, size // 2, size // 2 + (size - size // 2) // 2]
    assert (tmp_path / "d" / "cifar-100-binary" / "train.bin").is_file()


def test_the_next_command_goes_on_and_a_server_without_ranges_starts_anew(cifar, tmp_path, capsys):
    size = len(cifar.files["cifar-100-binary.tar.gz"])
    cifar.faults = ["broken off", 503, 503, 503, 503]
    assert get(cifar, "cifar100") == 2
    assert "the same command goes on from there" in capsys.readouterr().err
    part = tmp_path / "cache" / "data" / "cifar-100-binary" / "cifar-100-binary.tar.gz.part"
    assert part.stat().st_size == size // 2
    cifar.ranges = False
    assert get(cifar, "cifar100") == 0
    assert cifar.asked[-1] == ("cifar-100-binary.tar.gz", 0)
    assert load("cifar100").train == TRAIN
    assert not part.exists()


def test_what_has_another_checksum_is_removed_and_refused(cifar, tmp_path, capsys):
    cifar.faults = ["corrupted"]
    assert get(cifar, "cifar100") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "must have the published checksum" in err
    assert "was removed; try again" in err
    assert len(err.strip().splitlines()) == 2  # that a download began, and the error
    assert not list((tmp_path / "cache").rglob("*.part"))
    assert get(cifar, "cifar100") == 0


def test_a_whole_file_that_was_not_unpacked_yet_is_not_asked_for_again(cifar, tmp_path):
    folder = tmp_path / "cache" / "data" / "cifar-100-binary"
    folder.mkdir(parents=True)
    (folder / "cifar-100-binary.tar.gz.part").write_bytes(cifar.files["cifar-100-binary.tar.gz"])
    assert get(cifar, "cifar100") == 0
    assert load("cifar100").train == TRAIN


def test_a_damaged_file_is_fetched_again_and_a_partial_folder_does_not_hide_a_whole_one(cifar, tmp_path, monkeypatch):
    assert get(cifar, "cifar100") == 0
    damaged = tmp_path / "cache" / "data" / "cifar-100-binary" / "test.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert get(cifar, "cifar100") == 0
    assert len(cifar.asked) == 2
    (tmp_path / "partial" / "cifar-100-binary").mkdir(parents=True)
    (tmp_path / "partial" / "cifar-100-binary" / "test.bin").write_bytes(b"x")
    monkeypatch.setenv("FEDMIX_DATA", str(tmp_path / "partial"))
    assert load("cifar100").train == TRAIN


def test_two_downloads_at_once_do_not_get_into_each_others_way(cifar, tmp_path):
    processes = [
        multiprocessing.get_context("fork").Process(
            target=download.get, args=(sources.DATASETS["cifar100"], tmp_path / "d", cifar.address)
        )
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(cifar.asked) == 1
    assert load("cifar100", str(tmp_path / "d")).train == TRAIN


def test_files_that_are_offered_one_by_one_are_kept_as_they_are(server, tmp_path, monkeypatch):
    write_idx(tmp_path / "publisher", sources.MNIST, np.random.default_rng(0))
    version = sources.MNIST.versions[0]
    offered = []
    for known in version.downloads:
        data = (tmp_path / "publisher" / "MNIST" / "raw" / known.name).read_bytes()
        server.files[known.name] = data
        offered.append(Download(known.url, hashlib.md5(data).hexdigest()))
        monkeypatch.setitem(version.checksums, known.name, offered[-1].checksum)
    small = Version(**(vars(version) | {"downloads": tuple(offered)}))
    dataset = sources.MNIST.__class__(**(vars(sources.MNIST) | {"versions": (small,)}))
    server.faults = [None, None, "broken off"]
    paths = download.get(dataset, tmp_path / "d", server.address)
    assert [path.read_bytes() for path in paths] == [server.files[path.name] for path in paths]
    assert len(dataset.arrays(str(tmp_path / "d"))["y"]) == TRAIN + TEST


def test_a_zip_is_unpacked_too(server, monkeypatch):
    packed = io.BytesIO()
    dataset = sources.DATASETS["emnist-letters"]
    with zipfile.ZipFile(packed, "w") as archive:
        for name in dataset.offered.checksums:
            archive.writestr(f"gzip/{name}", b"x")
    offer(server, monkeypatch, dataset, "gzip.zip", packed.getvalue())
    assert get(server, "emnist-letters") == 0


def test_what_cannot_be_had_is_one_clear_line(server, cifar, capsys, tmp_path):
    def refused(*args):
        assert get(server, *args) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    assert "a data set must be one of" in refused("cifar11")
    assert "the server says HTTP Error 404" in refused("cifar10")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz"):
        pass
    empty = Download("http://x/a.tar.gz", hashlib.md5(packed.getvalue()).hexdigest())
    server.files["a.tar.gz"] = packed.getvalue()
    version = Version(("there",), {"train.bin": ""}, dict, (empty,))
    with pytest.raises(DataError, match=r"a.tar.gz.part must hold train.bin. It does not"):
        download.get(
            sources.CIFAR10.__class__(**(vars(sources.CIFAR10) | {"versions": (version,)})), tmp_path, server.address
        )
    with pytest.raises(SystemExit):
        main(["data", "get", "cifar10", "--mirror", "nonsense"])
    assert "an address must begin like https://" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["data", "get", "cifar10", "--mirror", "http://127.0.0.1:1"])
    assert "could not be had" in capsys.readouterr().err
