"""Runs: what a directory holds; killed at any moment and resumed, a run ends as if it had never stopped."""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from conftest import METHODS, small_experiment
from safetensors.torch import load_file

from fedmix.core.tree import flatten
from fedmix.engines.store import MemoryStore
from fedmix.errors import RunError
from fedmix.running.carried import Carried
from fedmix.running.checkpoint import Checkpoints
from fedmix.running.directory import RunDirectory, commit
from fedmix.running.run import Stopped, run
from fedmix.running.where import Where
from fedmix.schema import read_metrics

FORK = multiprocessing.get_context("fork")
TIMES = {"seconds", "seconds_evaluation"}


def train(experiment, path, resume=False, engine="serial", watch=None):
    directory = RunDirectory.open(Path(path), experiment.recipe, resume=resume, overwrite=False)
    try:
        return run(experiment, directory, Where(engine, 2), watch)
    finally:
        directory.close()


def without_times(path):
    lines = [{k: v for k, v in line.items() if k not in TIMES} for line in read_metrics(path)]
    summary = json.loads((path / "summary.json").read_text())
    summary.pop("seconds")
    return lines, summary


def final_weights(path):
    folder = sorted((path / "checkpoints").glob("round-*"))[-1]
    weights = load_file(folder / "server.safetensors")
    manifest = json.loads((folder / "manifest.json").read_text())
    for client, (file, _) in manifest["clients"].items():
        if file:
            private = load_file(path / "checkpoints" / "clients" / file)
            weights |= {f"client {client} {name}": value for name, value in private.items()}
    return weights


def assert_same_run(one, other):
    assert without_times(one) == without_times(other)
    a, b = final_weights(one), final_weights(other)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_directory_explains_itself(method, tmp_path):
    summary = train(small_experiment(method, rounds=5, clients_per_round=3), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    lines = read_metrics(tmp_path / "run")
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["round"] for line in lines if "accuracy" in line] == [2, 4, 5]
    assert summary["bytes_up"] == sum(line["bytes_up"] for line in lines)
    for name in ("fine_tuned", "server"):
        parts = summary["accuracy"]["test"][name]
        assert 0 <= parts["worst_decile"] <= parts["mean"] <= 1
        values = list(summary["of_clients"]["test"][name].values())
        assert parts["mean"] == pytest.approx(sum(values) / 4)
        assert parts["worst_decile"] == min(values)
    assert 0 <= summary["accuracy"]["test"]["no_identity"] <= 1
    assert (lines[0]["divergence"] is None) == (method == "independent")
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["sessions"][0]["engine"] == "serial"
    assert "commit" in environment["sessions"][0]
    assert len(list((tmp_path / "run" / "checkpoints").glob("round-*"))) == 3


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_checkout_and_of_nobody_elses(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    file = tmp_path / "ours.py"
    file.write_text("x = 1\n")
    assert commit(file) is None
    git("init")
    assert commit(file) is None
    git("add", ".")
    git("commit", "-m", "one")
    assert commit(file) == git("rev-parse", "--short=12", "HEAD")
    git("tag", "-a", "v1", "-m", "a tag is not a commit")
    assert commit(file) == git("rev-parse", "--short=12", "HEAD")
    file.write_text("x = 2\n")
    assert commit(file) == git("rev-parse", "--short=12", "HEAD") + "-dirty"
    installed = tmp_path / ".venv" / "theirs.py"
    installed.parent.mkdir()
    installed.write_text("")
    assert commit(installed) is None


def test_global_accuracy_is_null_and_says_why_where_private_state_may_not_be_shared(tmp_path):
    summary = train(small_experiment(**{"evaluation.share_private": False}), tmp_path / "a")
    assert summary["accuracy"]["test"]["no_identity"] is None
    assert "share_private" in summary["notes"]["accuracy.test.no_identity"]
    assert summary["bytes_evaluation"] == 0
    plain = train(small_experiment("fedavg", **{"evaluation.share_private": False}), tmp_path / "b")
    assert plain["accuracy"]["test"]["no_identity"] is not None


def kill_at_random(experiment, path, rng, longest):
    """Start or go on in a process of its own, and kill it with SIGKILL after a random while; True if it ended by itself."""
    process = FORK.Process(target=train, args=(experiment, path, path.exists(), "serial"))
    process.start()
    process.join(rng.uniform(0.0, longest))
    ended = process.exitcode is not None
    if not ended:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    else:
        assert process.exitcode == 0
    return ended


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_killed_at_random_moments_and_resumed_equals_never_stopped(tmp_path, store):
    experiment = small_experiment(
        rounds=25, clients_per_round=2, **{"checkpoint.every": 2, "checkpoint.clients": store, "fedmix.eta": 0.5}
    )
    began = time.monotonic()
    train(experiment, tmp_path / "whole")
    longest = time.monotonic() - began
    rng = random.Random(7)
    kills = attempts = 0
    while kills < 12:
        path = tmp_path / f"cut-{attempts}"
        attempts += 1
        for _ in range(4):
            if kill_at_random(experiment, path, rng, longest / 2):
                break
            kills += 1
        train(experiment, path, resume=path.exists())
        assert_same_run(tmp_path / "whole", path)


@pytest.mark.parametrize("call", ["fsync", "replace", "rmtree", "unlink"])
@pytest.mark.parametrize("number", [2, 5, 8])
def test_killed_inside_the_writing_of_a_checkpoint(tmp_path, call, number, monkeypatch):
    """SIGKILL at the n-th time that a file is made durable, renamed, or an old checkpoint removed."""
    experiment = small_experiment(rounds=6)
    train(experiment, tmp_path / "whole")

    def deadly(original):
        left = [number]

        def wrapped(*args, **kwargs):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return wrapped

    def child():
        import shutil

        target = {"rmtree": shutil, "unlink": Path}.get(call, os)
        setattr(target, call, deadly(getattr(target, call)))
        train(experiment, tmp_path / "cut")

    process = FORK.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    train(experiment, tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_asked_to_stop_a_run_finishes_its_checkpoint_and_says_how_to_go_on(tmp_path, engine):
    experiment = small_experiment(rounds=6, **{"checkpoint.every": 100})
    train(experiment, tmp_path / "whole", engine=engine)

    def interrupt(step):
        if step.done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Stopped, match=rf"stopped after round 3. Go on with: fedmix train {tmp_path}/cut --resume"):
        train(experiment, tmp_path / "cut", engine=engine, watch=interrupt)
    train(experiment, tmp_path / "cut", resume=True, engine=engine)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_run_can_be_made_longer(tmp_path):
    train(small_experiment(rounds=6), tmp_path / "whole")
    train(small_experiment(rounds=4), tmp_path / "longer")
    told = []
    summary = train(small_experiment(rounds=6), tmp_path / "longer", resume=True, watch=told.append)
    assert summary["rounds"] == 6
    assert [progress.done for progress in told] == [5, 6]
    assert told[-1].sent == summary["bytes_down"] + summary["bytes_up"]
    a, b = final_weights(tmp_path / "whole"), final_weights(tmp_path / "longer")
    assert all(torch.equal(a[name], b[name]) for name in a)
    with pytest.raises(RunError, match="at round 6 already; it cannot end at round 5"):
        train(small_experiment(rounds=5), tmp_path / "longer", resume=True)


def test_metrics_have_six_digits_in_the_file_and_for_whoever_watches(tmp_path):
    told = []
    train(small_experiment(), tmp_path / "run", watch=lambda progress: told.append(progress.metrics))
    digits: list[str] = []
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_float=digits.append)
    assert all(float(own) == float(f"{float(own):.6g}") for own in digits)
    assert read_metrics(tmp_path / "run") == told


def test_a_run_that_ended_is_left_as_it_is(tmp_path):
    train(small_experiment(), tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("summary.json")}
    assert train(small_experiment(), tmp_path / "run", resume=True)["rounds"] == 3
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("summary.json")} == before


def test_nothing_is_overwritten_unless_told_to(tmp_path):
    recipe = small_experiment().recipe
    train(small_experiment(), tmp_path / "run")
    kept = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match=r"holds a run already. Use --resume .* --overwrite"):
        RunDirectory.open(tmp_path / "run", recipe, resume=False, overwrite=False)
    with pytest.raises(RunError, match=r"own settings. fedmix.beta was 0.8, now it is 0.5"):
        train(small_experiment(**{"fedmix.beta": 0.5}), tmp_path / "run", resume=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(RunError, match="must be a run directory or not exist"):
            RunDirectory.open(tmp_path / "other", recipe, resume=False, overwrite=overwrite)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=re.escape("holds files that are not of a run (notes.txt); nothing was removed")):
        RunDirectory.open(tmp_path / "run", recipe, resume=False, overwrite=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == kept
    (tmp_path / "run" / "notes.txt").unlink()
    RunDirectory.open(tmp_path / "run", recipe, resume=False, overwrite=True).close()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="It is a file"):
        RunDirectory.open(tmp_path / "file", recipe, resume=False, overwrite=True)


def test_a_directory_is_for_one_process_at_a_time(tmp_path):
    recipe = small_experiment().recipe
    mine = RunDirectory.open(tmp_path / "run", recipe, resume=False, overwrite=False)

    def other(pipe):
        try:
            RunDirectory.open(tmp_path / "run", recipe, resume=True, overwrite=False)
            pipe.send("opened")
        except RunError as error:
            pipe.send(str(error))

    here, there = FORK.Pipe()
    process = FORK.Process(target=other, args=(there,))
    process.start()
    assert "in use by another process" in here.recv()
    process.join()
    mine.close()


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "client"])
def test_a_damaged_checkpoint_is_refused_and_nothing_is_lost(tmp_path, damage):
    experiment = small_experiment(rounds=5)
    train(small_experiment(rounds=4), tmp_path / "run")
    newest = sorted((tmp_path / "run" / "checkpoints").glob("round-*"))[-1]
    target = newest / "server.safetensors"
    if damage == "flip":
        data = bytearray(target.read_bytes())
        data[-3] ^= 1
        target.write_bytes(data)
    elif damage == "truncate":
        target.write_bytes(target.read_bytes()[:100])
    elif damage == "remove":
        target.unlink()
    elif damage == "manifest":
        (newest / "manifest.json").write_text('{"round": 4, "serv')
    else:
        (tmp_path / "run" / "checkpoints" / "clients" / "0-000004.safetensors").write_bytes(b"nonsense")
    listing = sorted(str(p) for p in (tmp_path / "run").rglob("*"))
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(
        RunError, match=r"round-000004 must be whole. It is damaged \(.*\); remove .* to go on from round-000003"
    ):
        train(experiment, tmp_path / "run", resume=True)
    assert sorted(str(p) for p in (tmp_path / "run").rglob("*")) == listing
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics


def test_after_removing_a_damaged_checkpoint_the_one_before_it_is_good(tmp_path):
    import shutil

    train(small_experiment(rounds=6), tmp_path / "whole")
    train(small_experiment(rounds=4), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "round-000004")
    train(small_experiment(rounds=6), tmp_path / "run", resume=True)
    a, b = final_weights(tmp_path / "whole"), final_weights(tmp_path / "run")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_only_clients_that_changed_are_written_and_old_files_go(tmp_path):
    experiment = small_experiment("fedavg")
    state = experiment.algorithm.init(0)
    from dataclasses import replace

    checkpoints, store = Checkpoints(tmp_path, keep=2), MemoryStore()
    for t, changed in enumerate([[0, 1, 2], [1], [1], [1]], start=1):
        for s in changed:
            store.put(s, {"a": torch.full((2,), float(t))})
        checkpoints.save(replace(state, round=t), store, Carried())
    files = sorted(path.name for path in (tmp_path / "clients").iterdir())
    assert files == ["0-000001.safetensors", "1-000003.safetensors", "1-000004.safetensors", "2-000001.safetensors"]
    loaded = Checkpoints(tmp_path, keep=2).load_last(experiment.algorithm.state_from)
    assert [float(loaded.clients[s]["a"][0]) for s in range(3)] == [1, 4, 1]
    assert loaded.state.round == 4
    assert flatten(loaded.state).keys() == flatten(state).keys()


def test_warm_start_from_another_run(tmp_path):
    train(small_experiment("fedavg", rounds=10), tmp_path / "first")
    cold = train(small_experiment("fedavg", rounds=1), tmp_path / "cold")
    warm = train(small_experiment("fedavg", rounds=1, warm_start=str(tmp_path / "first")), tmp_path / "warm")
    mixed = train(small_experiment("fedmix", rounds=1, warm_start=str(tmp_path / "first")), tmp_path / "mixed")
    assert warm["loss"] < 0.8 * cold["loss"]
    assert mixed["accuracy"]["test"]["server"]["mean"] > cold["accuracy"]["test"]["server"]["mean"]
