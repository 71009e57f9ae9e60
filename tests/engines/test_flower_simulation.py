"""--engine flower for real: Flower's simulation on Ray, from the command line."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr")
pytest.importorskip("ray")


def fedmix(*args):
    done = subprocess.run([sys.executable, "-m", "fedmix", *args], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def weights(run, t):
    return load_file(run / "checkpoints" / f"round-{t:06d}" / "server.safetensors")


def rays():
    return subprocess.run(["pgrep", "-f", "raylet|gcs_server"], capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_same_numbers_on_ray_stopped_and_resumed(tmp_path):
    train = [
        "train",
        "digits-skew",
        "--scale",
        "small",
        "--set",
        "fedmix.eta=0.9",
        "--set",
        "fedmix.gamma=0.3",
        "--json",
    ]
    before = rays()
    fedmix(*train, "--rounds", "2", "--engine", "flower", "--out", str(tmp_path / "ray"))
    files = sorted(path.name for path in (tmp_path / "ray" / "clients" / "0").iterdir())
    assert files == ["000001.safetensors", "000002.safetensors"]
    done = fedmix(*train, "--rounds", "3", "--engine", "flower", "--out", str(tmp_path / "ray"), "--resume")
    summary = json.loads(done.stdout)  # and nothing else on standard output
    assert "deprecated" not in done.stderr
    fedmix(*train, "--rounds", "3", "--engine", "serial", "--out", str(tmp_path / "serial"), "--quiet")
    one, other = weights(tmp_path / "ray", 3), weights(tmp_path / "serial", 3)
    for name, value in one.items():
        assert torch.allclose(value.double(), other[name].double(), atol=1e-5), name
    there = json.loads((tmp_path / "serial" / "summary.json").read_text())
    assert summary["bytes_up"] == there["bytes_up"] < 3 * 8 * 4 * 10**6
    assert summary["accuracy"]["test"]["server"]["mean"] == pytest.approx(
        there["accuracy"]["test"]["server"]["mean"], abs=0.02
    )
    assert summary["accuracy"]["test"]["no_identity"] is not None
    assert rays() == before
    refused = subprocess.run(
        [sys.executable, "-m", "fedmix", *train, "--rounds", "4", "--out", str(tmp_path / "ray"), "--resume"],
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2
    assert "must go on with --engine flower" in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["fedmix", "fedavg", "biased-fedavg"])
def test_every_method_gives_the_same_numbers_on_ray(method, tmp_path):
    train = ["train", "digits-skew", "--scale", "small", "--rounds", "3", "--algorithm", method, "--json", "--quiet"]
    ray, serial = (
        json.loads(fedmix(*train, "--engine", engine, "--out", str(tmp_path / engine)).stdout)
        for engine in ("flower", "serial")
    )
    one, other = weights(tmp_path / "flower", 3), weights(tmp_path / "serial", 3)
    assert all(torch.allclose(value.double(), other[name].double(), atol=1e-5) for name, value in one.items())
    assert ray["bytes_up"] == serial["bytes_up"]
