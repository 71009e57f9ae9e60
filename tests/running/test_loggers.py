"""TensorBoard, MLflow and Weights & Biases hold what metrics.jsonl and summary.json hold: each tool's own files are read."""

import json
import socket
import struct

import pytest
from conftest import fedmix

from fedmix import api
from fedmix.errors import SettingError
from fedmix.running.loggers import numbers_of
from fedmix.schema import read_metrics

ALL = "tensorboard,mlflow,wandb"


@pytest.fixture(autouse=True)
def _nothing_outside(tmp_path, monkeypatch):
    for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-own"))
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


def train(out, rounds, *more):
    flags = ["--scale", "small", "--engine", "serial", "--set", "evaluation.every=2", "--quiet"]
    return fedmix("train", "digits-skew", "--rounds", str(rounds), "--out", str(out), *flags, *more)


def tensorboard(run):
    """Every scalar of the event files, in the framing of TFRecord: length, its checksum, an Event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted((run / "tensorboard").iterdir()):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event, data = Event.FromString(data[12 : 12 + length]), data[16 + length :]
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value if not v.HasField("tensor")]
    return found


def mlflow(run):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run.parent}/mlflow.db")
    there = client.get_run(json.loads((run / "logged.json").read_text())["mlflow"]["id"])
    assert there.info.status == "FINISHED"
    assert there.info.run_name == run.name
    assert there.data.params["fedmix.experts"] == "4"
    return [
        (m.key, m.step, m.value)
        for name in there.data.metrics
        for m in client.get_metric_history(there.info.run_id, name)
    ]


def leveldb_log(data):
    """The records of a .wandb file: 7 bytes of its own, then LevelDB's log: blocks of 32 KiB with parts of records."""
    at, whole = 7, b""
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])  # kind: 1 whole, 2 first, 3 middle, 4 last
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def wandb(run):
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for file in sorted((run / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in leveldb_log(file.read_bytes()):
            record = Record.FromString(data)
            items = {
                (item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item
            }
            found += [(k, items["_step"], v) for k, v in items.items() if not k.startswith("_")]
    return found


def expected(run):
    lines = [(line["round"], numbers_of(line)) for line in read_metrics(run)]
    return {(name, step): value for step, numbers in lines for name, value in numbers.items()}


def check_holds(found, run, exact=1e-12):
    rounds = {(name, step): value for name, step, value in found if not name.startswith("summary/")}
    assert len(rounds) == sum(not name.startswith("summary/") for name, _, _ in found), "a number was sent twice"
    assert rounds == pytest.approx(expected(run), rel=exact)
    summary = json.loads((run / "summary.json").read_text())
    test = summary["accuracy"]["test"]
    last = {name: value for name, step, value in found if step == summary["rounds"] and name.startswith("summary/")}
    assert last["summary/accuracy/test/fine_tuned/mean"] == pytest.approx(test["fine_tuned"]["mean"], rel=exact)
    assert last["summary/accuracy/test/no_identity"] == pytest.approx(test["no_identity"], rel=exact)
    assert last["summary/scores/test/fine_tuned/ece/mean"] == pytest.approx(
        summary["scores"]["test"]["fine_tuned"]["ece"]["mean"], rel=exact
    )


def test_each_tool_holds_each_number_once_also_when_a_run_goes_on(tmp_path):
    run = tmp_path / "run"
    assert train(run, 2, "--log", ALL).returncode == 0
    assert train(run, 5, "--log", ALL, "--resume").returncode == 0
    for read, exact in ((tensorboard, 1e-6), (mlflow, 1e-12), (wandb, 1e-12)):  # TensorBoard has 32 bits
        check_holds(read(run), run, exact)


def test_a_run_that_has_ended_is_sent_afterwards_and_is_the_same_run(tmp_path):
    logged, plain = tmp_path / "logged", tmp_path / "plain"
    assert train(plain, 3).returncode == 0
    assert train(logged, 3, "--log", "tensorboard").returncode == 0
    for one, other in zip(read_metrics(logged), read_metrics(plain), strict=True):
        assert {k: v for k, v in one.items() if "seconds" not in k} == {
            k: v for k, v in other.items() if "seconds" not in k
        }
    assert fedmix("train", str(plain), "--resume", "--log", "tensorboard", "--quiet").stderr == ""
    check_holds(tensorboard(plain), plain, 1e-6)
    again = fedmix("train", str(plain), "--resume", "--log", "tensorboard")
    assert again.stderr == f"fedmix: tensorboard --logdir {plain / 'tensorboard'}  (pip install tensorboard)\n"
    check_holds(tensorboard(plain), plain, 1e-6)  # nothing was left to send
    assert train(plain, 3, "--overwrite").returncode == 0
    assert not (plain / "tensorboard").exists()


def test_from_python(tmp_path):
    api.train("digits-skew", out=tmp_path / "run", log="tensorboard, ", rounds=1, engine="serial")
    check_holds(tensorboard(tmp_path / "run"), tmp_path / "run", 1e-6)


def test_a_tool_that_fails_does_not_take_the_run_with_it(tmp_path, monkeypatch):
    run = tmp_path / "run"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{taken.getsockname()[1]}")  # nobody listens
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        told = train(run, 3, "--log", "mlflow,tensorboard")
    assert told.returncode == 0
    assert len(told.stderr.splitlines()) == 1
    assert told.stderr.startswith("fedmix: mlflow failed (")
    assert told.stderr.endswith(f"fedmix train {run} --resume --log mlflow\n")
    check_holds(tensorboard(run), run, 1e-6)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert fedmix("train", str(run), "--resume", "--log", "mlflow", "--quiet").returncode == 0
    check_holds(mlflow(run), run)


def test_names_are_checked_before_anything_is_trained(tmp_path, monkeypatch):
    out = tmp_path / "run"
    told = train(out, 1, "--log", "tensorbord")
    assert told.returncode == 2
    assert "did you mean 'tensorboard'?" in told.stderr
    monkeypatch.setattr("fedmix.running.loggers.find_spec", lambda name: None)
    told = train(out, 1, "--log", "wandb")
    assert told.returncode == 2
    assert "pip install 'fedmix[wandb]'" in told.stderr
    assert not out.exists()
    monkeypatch.undo()
    with pytest.raises(SettingError, match="must be one of"):
        api.train("digits-skew", out=out, log=["wandb", "nothing"])


def test_no_table_and_no_client_is_a_number():
    line = {"round": 3, "loss": 1, "clients": [4, 5], "q_zs": [[0.5, 0.5]], "absent": [{"client": 1, "reason": "late"}]}
    line |= {"accuracy": {"validation": {"as_sent": {"mean": 0.5}, "no_identity": None}}, "expert_use": [0.25, 0.75]}
    assert numbers_of(line) == {
        "loss": 1.0,
        "absent": 1.0,
        "accuracy/validation/as_sent/mean": 0.5,
        "expert_use/0": 0.25,
        "expert_use/1": 0.75,
    }
