"""The command line as a person uses it: real processes, right and wrong input."""

import contextlib
import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from fedmix.cli import main
from fedmix.settings.reading import shipped

QUICK = [
    "--set",
    "training.epochs=1",
    "--set",
    "data.clients=4",
    "--set",
    "data.permutations=2",
    "--set",
    "fedmix.experts=2",
]
NEEDED = [
    *("algorithm", "recipe", "rounds", "seed", "parameters", "bytes_down", "bytes_up", "accuracy.test.fine_tuned.mean"),
    *(
        "accuracy.validation.server.mean",
        "accuracy.test.no_identity",
        "accuracy.test.fine_tuned.worst_decile",
        "clusters.adjusted_rand_index",
        "q_zs",
    ),
]


def fedmix(*args):
    """Call the command line in this process: exit status."""
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    return ended.value.code


def refused(capsys, *args):
    """The one line that bad input gets."""
    assert fedmix(*args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert "Traceback" not in err
    return err


def process(*args, **options):
    return subprocess.run(
        [sys.executable, "-m", "fedmix", *args], capture_output=True, text=True, timeout=120, **options
    )


def test_train_prints_json_and_nothing_else(tmp_path):
    done = process(
        "train", "digits-permutation", "--rounds", "2", "--seed", "0", "--out", str(tmp_path / "r"), "--json", *QUICK
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert json.loads((tmp_path / "r" / "summary.json").read_text()) == summary
    for path in NEEDED:
        value = summary
        for key in path.split("."):
            value = value[key]
        assert value is not None, path
    assert len(summary["q_zs"]) == 4
    assert len(summary["q_zs"][0]) == 2
    assert re.search(r"round 2/2  loss \d+\.\d+  as sent .*% server .*%  sent", done.stderr)
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == [
        "checkpoints", "environment.json", "federation.json", "lock", "metrics.jsonl", "recipe.toml",
        "run.json", "summary.json",
    ]  # fmt: skip


def test_missing_and_damaged_data_is_one_line(tmp_path, capsys, monkeypatch, small_files):
    monkeypatch.setenv("FEDMIX_DATA", str(tmp_path / "empty"))
    wrong = refused(capsys, "train", "cifar10", "--out", str(tmp_path / "r"))
    assert "cifar10 was not found in" in wrong
    assert "--data-dir or FEDMIX_DATA" in wrong
    batch = small_files / "cifar-10-batches-bin" / "data_batch_3.bin"
    whole = batch.read_bytes()
    batch.write_bytes(whole[:-1] + b"\x07")
    there = ["train", "cifar10", "--out", str(tmp_path / "r"), "--data-dir", str(small_files)]
    assert "data_batch_3.bin must have the published checksum" in refused(capsys, *there)
    batch.unlink()
    assert "has no data_batch_3.bin" in refused(capsys, *there)
    assert not (tmp_path / "r").exists()


def test_on_a_terminal_there_is_a_bar_with_loss_accuracy_bytes_and_time_left(tmp_path):
    server, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (40, 140))
    command = [
        sys.executable,
        "-m",
        "fedmix",
        "train",
        "digits-permutation",
        "--rounds",
        "5",
        "--out",
        str(tmp_path / "r"),
        *QUICK,
    ]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=terminal)
    os.close(terminal)
    seen = b""
    with contextlib.suppress(OSError):  # the terminal closes with the process
        while chunk := os.read(server, 4096):
            seen += chunk
    os.close(server)
    assert running.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert re.search(r"fedmix, seed 0 .* 5/5 loss \d\.\d+ as sent .*% server .*% .* MiB \d:\d\d:\d\d", text), text[
        -500:
    ]


def test_compare_over_seeds_prints_mean_and_deviation_and_the_map(tmp_path, capsys):
    command = ["compare", "digits-permutation", "--algorithms", "fedmix,fedavg", "--seeds", "0,1", "--rounds", "2"]
    assert fedmix(*command, "--out", str(tmp_path / "c"), "--quiet", *QUICK) == 0
    out = capsys.readouterr().out
    assert re.search(r"FedMix +test +\d+\.\d ± \d+\.\d ", out)
    assert "q(z|s), client by expert" in out
    assert re.search(r"[░▒▓█]{3}", out)
    assert "2 seeds" in out
    assert fedmix(*command, "--out", str(tmp_path / "c"), "--quiet", "--resume", "--json", *QUICK) == 0
    comparison = json.loads(capsys.readouterr().out)
    rows = comparison["rows"]
    assert [row["seeds"] for row in rows] == [[0, 1], [0, 1]]


def test_plan_tells_the_bytes_that_are_then_sent(tmp_path, capsys):
    for method in ("fedmix", "fedavg", "biased-fedavg", "local-global", "independent"):
        given = ["digits-skew", "--algorithm", method, "--rounds", "2", "--set", "clients_per_round=3"]
        assert fedmix("plan", *given, "--json") == 0
        plan = json.loads(capsys.readouterr().out)
        assert fedmix("train", *given, "--out", str(tmp_path / method), "--quiet", "--json") == 0
        summary = json.loads(capsys.readouterr().out)
        assert plan["bytes"]["total"] == summary["bytes_down"] + summary["bytes_up"]
        assert plan["parameters"] == summary["parameters"] == 64 * 64 + 64 + 64 * 10 + 10
        per_step = 3 * 2 * 10 * (64 * 64 + 64 * 10) * (4 if method == "fedmix" else 1)  # forward and backward products
        assert 0.7 < plan["flop_per_round"] / (per_step * plan["steps_per_client"] * 3) < 1.3
    assert fedmix("plan", "digits-skew") == 0
    assert "phi and q(z|s) sent" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("recipe", "method", "rounds", "weights"),
    [
        ("cifar10", "biased-fedavg", 2000, 140_564_480_000),
        ("cifar10", "fedavg", 2000, 140_566_080_000),
        ("femnist", "fedavg", 5200, 608_702 * 8 * 10 * 5200),  # 235.83 GiB
        ("cifar100", "fedavg", 10_000, 275_572 * 8 * 10 * 10_000),  # 205.32 GiB
        ("cifar100", "local-global", 6000, (275_572 - 14_480) * 8 * 10 * 6000),  # 116.7 GiB in the paper
    ],
)
def test_the_papers_bytes_are_planned_without_the_data(recipe, method, rounds, weights, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDMIX_DATA", str(tmp_path))
    monkeypatch.setenv("FEDMIX_CACHE", str(tmp_path))
    monkeypatch.setattr("fedmix.running.plan.MEASURE_SECONDS", 0.0)
    assert fedmix("plan", recipe, "--algorithm", method, "--rounds", str(rounds), "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["bytes"]["weights"] == weights
    assert plan["bytes"]["posterior"] == 0
    assert f"{recipe} is not here, its published sizes were used" in plan["note"]


@pytest.mark.parametrize("recipe", shipped())
def test_every_recipe_is_planned_without_data(recipe, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDMIX_DATA", str(tmp_path))
    monkeypatch.setenv("FEDMIX_CACHE", str(tmp_path))
    monkeypatch.setattr("fedmix.running.plan.MEASURE_SECONDS", 0.0)
    assert fedmix("plan", recipe, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["bytes"]["posterior"] > 0
    points = {"cifar10": 450, "cifar10-permutation": 2250, "cifar100": 90, "mnist-liang": 540, "rotated-mnist": 540}
    if recipe in points:
        assert plan["points_per_client"] == points[recipe]
    clients = {"femnist": 3400, "mnist-writers": 539, "cifar100": 500, "cifar10": 100}
    if recipe in clients:
        assert plan["clients"] == clients[recipe]


def test_a_scaled_down_run_says_so_in_every_output(tmp_path, capsys):
    small = ["digits-permutation", "--scale", "small"]
    run = ["--rounds", "1", "--out", str(tmp_path / "r"), "--set", "training.epochs=1"]
    said = "scaled down (--scale small)"
    assert fedmix("train", *small, *run) == 0
    out, err = capsys.readouterr()
    assert said in out
    assert "scale small" in err
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert (summary["scale"], summary["recipe"], summary["clients"]) == ("small", "digits-permutation-small", 8)
    assert fedmix("train", str(tmp_path / "r"), "--resume", "--json") == 0
    assert json.loads(capsys.readouterr().out)["scale"] == "small"
    for command in (["plan"], ["split", "--overwrite", "--out", str(tmp_path / "s.svg")]):
        assert fedmix(command[0], *small, *command[1:]) == 0
        assert said in " ".join(capsys.readouterr().out.split())
        assert fedmix(command[0], *small, *command[1:], "--json") == 0
        assert json.loads(capsys.readouterr().out)["scale"] == "small"
    assert fedmix("compare", *small, "--algorithms", "fedavg", "--rounds", "1", "--out", str(tmp_path / "c")) == 0
    assert said in capsys.readouterr().out
    assert "scale cannot be set by itself" in refused(capsys, "plan", "digits-skew", "--set", "scale=small")
    assert "--scale of digits-permutation-small must be one of small" in refused(
        capsys, "plan", str(tmp_path / "r"), "--scale", "full"
    )
    wrong = refused(capsys, "train", "digits-skew", "--scale", "tiny")
    assert "--scale of digits-skew must be one of full, small. Got 'tiny' instead" in wrong


def test_split_draws_a_picture_and_a_table(tmp_path, capsys, monkeypatch):
    for ending, begins in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        file = tmp_path / f"split{ending}"
        assert fedmix("split", "digits-rotation", "--out", str(file)) == 0
        assert file.read_bytes().startswith(begins)
        assert "points: " in capsys.readouterr().out
    assert fedmix("split", "digits-permutation", "--seed", "3", "--json", "--out", str(tmp_path / "p.png")) == 0
    split = json.loads(capsys.readouterr().out)
    assert len(split["clients"]) == 20
    assert sorted(row["group"] for row in split["clients"]) == sorted([0, 1, 2, 3] * 5)
    assert ".png" in refused(capsys, "split", "digits-skew", "--out", str(tmp_path / "x.jpg"))
    assert "is there already" in refused(capsys, "split", "digits-skew", "--out", str(tmp_path / "split.png"))
    assert fedmix("split", "digits-skew", "--out", str(tmp_path / "split.png"), "--overwrite") == 0
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'fedmix[plots]'" in refused(capsys, "split", "digits-skew", "--out", str(tmp_path / "x.png"))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("data = 3", "data must be a table"),
        ("scales = 3", "scales must be tables"),
        ("[scales]\nsmall = 3", "scales must be tables"),
        ("methods = 'x'", "methods must be tables"),
        ("algorithm = ['fedmix']", "algorithm must be text"),
        ("[data]\nside = ['label']", "data.side must be text"),
        ("[data]\nsplit = 'hsu'\nconcentration = inf", "data.concentration must be more than 0, and finite"),
        ("[data]\nsource = 'csv'\n[data.args]\nfile = 3\nlabel = 'y'", "data.args.file must be text"),
        ("[data]\nsource = 'csv'\n[data.args]\nfile = 'x'\nlabel = 'y'\nstandardise = 'no'", "must be true or false"),
        (
            "[data]\nsource = 'images'\n[data.args]\nfolder = 'x'\nsize = -1",
            "size must be from 0 (as they are) to 4096 pixels",
        ),
        (
            "[data]\nsource = 'mine:sites'\nholdout_clients = 2",
            "data.holdout_clients cannot be used with data of a function",
        ),
        ("[data]\nsource = 'mine:nothing'", "must give a Federation or a dict of clients. It gave NoneType"),
        ("[data]\nsource = 'mine:number'", "must name a function"),
        ("name = '../elsewhere'", "name must be printable text without / and"),
        ('name = "\\u001b[2J"', "name must be printable text without / and"),
        ("name = ' .. '", "name must be printable text without / and"),
        ("[data]\nsource = 'mine:nothing'\n[data.args]\nm = 3", "data.args of mine:nothing must be of"),
    ],
)
def test_malformed_recipes_are_one_line(text, wrong, tmp_path, capsys, mine):
    mine("number = 3\ndef nothing(): pass\n")
    (tmp_path / "r.toml").write_text(text)
    assert wrong in refused(capsys, "split", "r.toml")
    assert "must be a TOML file" in refused(capsys, "split", self_made_binary(tmp_path))


def self_made_binary(folder):
    (folder / "x.toml").write_bytes(b"\xff\xfe\x00")
    return str(folder / "x.toml")


def test_names_with_brackets_are_names(tmp_path, capsys):
    rows = [f"{i},{i % 2},[/ward {i % 2}]" for i in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["x,y,who", *rows]))
    args = f'file = "{tmp_path / "t.csv"}"\nlabel = "y"\nclient = "who"\n'
    (tmp_path / "r.toml").write_text(f'[data]\nsource = "csv"\nsplit = "by-client"\nclients = 0\n[data.args]\n{args}')
    assert fedmix("split", str(tmp_path / "r.toml"), "--out", str(tmp_path / "p.png")) == 0
    assert "[/ward 1]" in capsys.readouterr().out


def test_recipes_lists_what_there_is(capsys):
    assert fedmix("recipes", "--json") == 0
    assert [row["recipe"] for row in json.loads(capsys.readouterr().out)] == shipped()
    assert fedmix("recipes") == 0
    assert "digits-rotation" in capsys.readouterr().out


def test_data_lists_what_is_here_and_where_to_get_the_rest(small_files, capsys, monkeypatch):
    assert fedmix("data", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["ready"] for row in found["sources"]] == [True] * 13
    monkeypatch.setenv("FEDMIX_DATA", "/nowhere")
    assert fedmix("data") == 0
    assert "cs.toronto.edu" in capsys.readouterr().out


def test_help_waits_for_no_library():
    code = (
        "import sys\nfrom fedmix.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(' '.join({'torch', 'numpy', 'rich', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "commands:" in done.stdout


def test_help_teaches(capsys):
    for args in (
        ["--help"],
        ["train", "--help"],
        ["compare", "--help"],
        ["plan", "--help"],
        ["recipes", "--help"],
        ["split", "--help"],
        ["data", "--help"],
        ["data", "get", "--help"],
        ["sweep", "--help"],
        ["evaluate", "--help"],
        ["audit", "--help"],
    ):
        assert fedmix(*args) == 0
    out = capsys.readouterr().out
    assert "fedmix train runs/first --resume" in out
    assert "--set KEY=VALUE" in out


def test_help_does_not_wait_for_torch():
    code = "import sys, fedmix.cli\ntry: fedmix.cli.main(['--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip().endswith("False")


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        (["train", "digits-skw"], "did you mean 'digits-skew'"),
        (["train", "digits-skew", "--set", "fedmix.etta=1"], "did you mean 'eta'"),
        (["train", "digits-skew", "--set", "fedmix.beta=0"], "fedmix.beta must be more than 0"),
        (["train", "digits-skew", "--set", "nonsense"], "--set must be key=value"),
        (["train", "digits-skew", "--algorithm", "fedprox"], "algorithm must be one of"),
        (["train", "digits-skew", "--engine", "quantum"], "--engine must be one of flower, local, serial"),
        (["train", "digits-skew", "--workers", "0"], "--workers must be 1 or more"),
        (["train", "digits-skew", "--rounds", "many"], "argument --rounds: invalid int value: 'many'"),
        (["train", "digits-skew", "--set", "data.source=imagenet"], "data.source must be one of"),
        (["train", "digits-skew", "--set", "data.clients=5000"], "needs at least 5000 points"),
        (["train", "digits-skew", "--set", "data.side=rotation"], "'rotation' is not there"),
        (["train", "digits-skew", "--warm-start", "nowhere"], "must be a run directory"),
        (["compare", "digits-skew", "--seeds", "a,b"], "--seeds must be whole numbers"),
        (["compare", "digits-skew", "--algorithms", ","], "--algorithms must name methods"),
        (["fly"], "invalid choice: 'fly'"),
        ([], "required: COMMAND"),
    ],
)
def test_bad_input_is_one_line_and_status_2(args, wrong, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert wrong in refused(capsys, *args)


def test_a_run_is_not_overwritten_and_not_resumed_with_other_settings(tmp_path, capsys):
    out = ["--out", str(tmp_path / "r"), "--quiet", *QUICK]
    assert fedmix("train", "digits-permutation", "--rounds", "1", *out) == 0
    capsys.readouterr()
    before = {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()}
    assert "--overwrite" in refused(capsys, "train", "digits-permutation", "--rounds", "1", *out)
    assert "own settings" in refused(
        capsys, "train", "digits-permutation", "--rounds", "1", *out, "--resume", "--seed", "9"
    )
    assert {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()} == before
    assert fedmix("train", "digits-permutation", "--rounds", "1", *out, "--overwrite", "--seed", "9") == 0


def test_a_corrupt_checkpoint_is_one_line(tmp_path, capsys):
    out = ["--out", str(tmp_path / "r"), "--quiet", *QUICK]
    assert fedmix("train", "digits-permutation", "--rounds", "1", *out) == 0
    capsys.readouterr()
    next((tmp_path / "r").rglob("server.safetensors")).write_bytes(b"\x00" * 50)
    assert "is damaged" in refused(capsys, "train", "digits-permutation", "--rounds", "2", *out, "--resume")


def test_a_full_disk_is_one_line_and_the_last_checkpoint_is_good(tmp_path):
    """Files may not grow beyond what a checkpoint needs: writing fails as on a full disk."""
    base = ["train", "digits-permutation", "--out", str(tmp_path / "r"), "--set", "checkpoint.every=1", *QUICK]
    assert process(*base, "--rounds", "1").returncode == 0

    def small_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    full = process(*base, "--rounds", "3", "--resume", "--engine", "serial", preexec_fn=small_files)
    assert full.returncode == 2
    lines = [line for line in full.stderr.splitlines() if "error" in line]
    assert len(lines) == 1
    assert "File too large" in lines[0]
    assert "Traceback" not in full.stderr
    after = process(*base, "--rounds", "3", "--resume", "--json")
    assert after.returncode == 0, after.stderr
    assert json.loads(after.stdout)["rounds"] == 3


def test_killed_from_outside_and_resumed_by_the_command_it_was_started_with(tmp_path):
    """The real command with worker processes, killed with SIGKILL; no worker outlives it."""
    base = ["train", "digits-permutation", "--rounds", "8", "--set", "checkpoint.every=1", *QUICK]
    whole = process(*base, "--out", str(tmp_path / "whole"), "--json")
    command = [sys.executable, "-m", "fedmix", *base, "--out", str(tmp_path / "cut")]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = tmp_path / "cut" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        time.sleep(0.01)
    children = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == running.pid]
    assert len(children) >= 1
    running.kill()
    running.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() and _state(pid) != "Z" for pid in children):
        assert time.monotonic() < deadline, "workers outlived the server"
        time.sleep(0.05)
    again = process("train", str(tmp_path / "cut"), "--resume", "--json")
    assert again.returncode == 0, again.stderr
    one, other = json.loads(whole.stdout), json.loads(again.stdout)
    one.pop("seconds"), other.pop("seconds")
    assert one == other


def _stat(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["Z", "0"]


def _parent(pid):
    return int(_stat(pid)[1])


def _state(pid):
    return _stat(pid)[0]


def test_ctrl_c_finishes_the_checkpoint_and_says_how_to_go_on(tmp_path):
    command = [
        sys.executable,
        "-m",
        "fedmix",
        "train",
        "digits-permutation",
        "--rounds",
        "500",
        "--out",
        str(tmp_path / "r"),
        *QUICK,
    ]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    metrics = tmp_path / "r" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        time.sleep(0.01)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to the workers too
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert re.search(r"fedmix: stopped after round \d+. Go on with: fedmix train .*/r --resume", err)
    assert "Traceback" not in err
    stopped = int(re.search(r"after round (\d+)", err)[1])
    assert (tmp_path / "r" / "checkpoints" / f"round-{stopped:06d}").is_dir()
