"""A federation of real processes on loopback: SuperLink, SuperNodes, workers, TLS, keys. One short run in `make test`."""

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr")

from fedmix.deploy import local, serve
from fedmix.deploy.folder import read_server
from fedmix.deploy.secrets import make_node_key
from fedmix.settings.reading import read_recipe

RECIPE = ["--scale", "small", "--rounds", "3"]
SMALL = [*RECIPE, "--quiet", "--json"]
PRUNED = ["--set", "fedmix.eta=0.9", "--set", "fedmix.gamma=0.3"]


def fedmix(*args, timeout=400):
    done = subprocess.run([sys.executable, "-m", "fedmix", *args], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def weights(run, t):
    return load_file(run / "checkpoints" / f"round-{t:06d}" / "server.safetensors")


def close(one, other):
    assert one.keys() == other.keys()
    return all(torch.allclose(value.double(), other[name].double(), atol=1e-5) for name, value in one.items())


def lines(out):
    file = out / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def after_round(out, t, process, seconds=240):
    until = time.monotonic() + seconds
    while len(lines(out)) < t:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.1)


def said(words):
    print(words, file=sys.stderr)


def accept(folder, *what):
    """The owners of all sites accept what the server is going to train."""
    for site in sorted((folder / "sites").iterdir()):
        fedmix("deploy", "accept", str(site), "digits-skew", *what, "--json")


@contextmanager
def federation(folder, sites=2, recipe="digits-skew", **changes):
    local.prepare(folder, sites, read_recipe(recipe, None, changes, "small"))
    with local.up(folder, said) as running:
        yield running


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation") / "f"
    with federation(folder):
        yield folder


def test_a_run_over_sites_gives_the_numbers_of_the_plain_loop(up, tmp_path):
    accept(up, *RECIPE, *PRUNED)
    here = fedmix("deploy", "run", str(up), *SMALL, *PRUNED, "--out", str(tmp_path / "sites"))
    plain = fedmix("train", "digits-skew", *SMALL, *PRUNED, "--engine", "serial", "--out", str(tmp_path / "serial"))
    assert close(weights(tmp_path / "sites", 3), weights(tmp_path / "serial", 3))
    assert here["bytes_up"] == plain["bytes_up"]
    assert here["accuracy"]["test"]["server"]["mean"] == pytest.approx(
        plain["accuracy"]["test"]["server"]["mean"], abs=1e-3
    )
    assert here["accuracy"]["test"]["no_identity"] == pytest.approx(plain["accuracy"]["test"]["no_identity"], abs=1e-2)
    lines = [json.loads(line) for line in (tmp_path / "sites" / "metrics.jsonl").read_text().splitlines()]
    assert [line["absent"] for line in lines] == [[], [], []]
    # a client's gate is on its site's disk, and on no other
    (run,) = (up / "sites" / "site-1" / "runs").iterdir()
    assert sorted(path.name for path in (run / "clients").iterdir()) == ["0", "2", "4", "6"]
    assert not list(tmp_path.rglob("sites/**/clients/*.safetensors"))
    for path in (run / "clients").rglob("*.safetensors"):
        assert path.stat().st_mode & 0o077 == 0
    assert "client 1" in json.loads((run / "federation.json").read_text())["clients"]  # others have no names here
    # predictions there, with the gate and the experts that are there
    data = np.load(Path(sys.modules["fedmix"].__file__).parent / "data" / "digits.npz")
    np.savez(tmp_path / "new.npz", x=(data["x"][:50] / 16).astype("float32")[:, None], y=data["y"][:50])
    where = ("predict", "--site", str(up / "sites" / "site-1"), "--input", str(tmp_path / "new.npz"), "--client", "4")
    found = fedmix(*where, "--json")
    assert found["round"] == 3
    assert len(found["predictions"]) == 50
    assert np.allclose(np.sum(found["probabilities"], axis=1), 1, atol=1e-4)


def test_a_key_that_is_not_registered_gets_nothing(up, tmp_path):
    stranger = tmp_path / "stranger"
    shutil.copytree(up / "sites" / "site-1", stranger, ignore=shutil.ignore_patterns("node.*", "runs", "flower"))
    make_node_key(stranger / "node.key", stranger / "node.pub", "stranger")
    settings = (stranger / "site.toml").read_text()
    (stranger / "site.toml").write_text(re.sub(r"runtime_port = \d+", f"runtime_port = {local.free_port()}", settings))
    done = subprocess.run(
        [sys.executable, "-m", "fedmix", "deploy", "serve", str(stranger), "--wait", "0"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "the server does not know this site's key" in done.stderr
    assert len(serve.nodes(up / "server")) == 2


@pytest.mark.slow
def test_a_node_without_tls_gets_nothing(up, tmp_path):
    port = read_server(up / "server").port
    plain = subprocess.Popen(
        [
            str(Path(sys.executable).parent / "flower-supernode"),
            *("--insecure", "--superlink", f"127.0.0.1:{port}"),
            *("--port", str(local.free_port()), "--max-wait-time", "5"),
        ],
        env={**os.environ, **serve.environment(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        heard, _ = plain.communicate(timeout=40)
    except subprocess.TimeoutExpired:
        os.killpg(plain.pid, signal.SIGKILL)
        heard, _ = plain.communicate()
    assert "SuperNode ID" not in heard
    assert len(serve.nodes(up / "server")) == 2


def test_only_the_federations_own_authority_is_trusted(up):
    settings = read_server(up / "server")
    trusted = ssl.create_default_context(cafile=str(up / "server" / "ca.crt"))
    request = urllib.request.Request(f"https://localhost:{settings.port}/v1/control/list-runs", data=b"")
    try:
        with urllib.request.urlopen(request, context=trusted, timeout=10) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
    assert status != 403  # it is here, and may ask
    with pytest.raises((ssl.SSLError, urllib.error.URLError)):  # a client that trusts other authorities only
        urllib.request.urlopen(request, timeout=10)


@pytest.mark.slow
def test_bytes_are_those_that_flower_counts(tmp_path):
    """One client on each site, payloads of some megabytes."""
    with federation(tmp_path / "f", **{"data.clients": 2}) as running:
        assert set(running) == {"server", "site-1", "site-2"}
        changes = ["--set", "data.clients=2", "--set", "model.hidden=[4000]", "--set", "evaluation.share_private=false"]
        accept(tmp_path / "f", *RECIPE, *changes)
        summary = fedmix("deploy", "run", str(tmp_path / "f"), *SMALL, *changes, "--out", str(tmp_path / "run"))
        (run,) = serve.flower(tmp_path / "f" / "server", "list", serve.LINK)["runs"]
    counted = run["network-traffic"]
    assert summary["bytes_up"] > 20 * 10**6
    assert summary["bytes_up"] == pytest.approx(counted["inbound-bytes"], rel=0.02)
