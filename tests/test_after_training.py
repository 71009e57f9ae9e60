"""evaluate, audit and sweep as a person uses them."""

import json

import pytest
from test_cli import fedmix, refused

SMALL = ["--scale", "small", "--rounds", "2", "--quiet"]


@pytest.fixture(scope="module", params=["fedmix", "fedavg"])
def digits_run(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / request.param
    train = ["train", "digits-skew", "--algorithm", request.param, "--out", str(out), "--set", "data.holdout_clients=3"]
    assert fedmix(*train, *SMALL) == 0
    return request.param, out


def test_evaluate_answers_for_old_new_and_unknown_clients(digits_run, capsys):
    method, out = digits_run
    capsys.readouterr()
    assert fedmix("evaluate", str(out), "--json", "--quiet") == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((out / "evaluation.json").read_text())
    assert result["algorithm"] == method
    for kind in ("local", "proxy", "server"):
        for measure in ("accuracy", "balanced_accuracy", "nll", "ece"):
            assert set(result[kind][measure]) == {"mean", "std", "worst_decile"}
    assert 0 <= result["global"]["averaged"]["union"]["accuracy"] <= 1
    assert [row["points"] for row in result["new_clients"]["labelled"]][:2] == [5, 20]
    wanted = {"averaged", "uniform", "generative", "distilled"} if method == "fedmix" else {"averaged"}
    assert set(result["new_clients"]["unlabelled"]) == wanted
    assert (out / "new-clients.png").read_bytes().startswith(b"\x89PNG")
    assert fedmix("evaluate", str(out), "--no-vae", "--clients", "3", "--engine", "serial") == 0
    printed, progress = capsys.readouterr()
    assert "every kind of inference" in printed
    assert "3 of 8 clients" in printed
    assert "scaled down" in printed
    assert "new clients with labels" in progress


def test_audit_shows_what_the_server_could_learn(digits_run, capsys):
    method, out = digits_run
    capsys.readouterr()
    assert fedmix("audit", str(out), "--json", "--quiet") == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((out / "audit.json").read_text())
    single = result["attacks"]["start"]["bias_single_step"]
    assert single["total_variation"]["mean"] < 0.5 * result["guess"]["total_variation"]["mean"]
    assert len(single["of_clients"]) == len(result["true"]) == result["clients"] == 8
    assert ("posterior_whole" in result["attacks"]["end"]) == (method == "fedmix")
    assert (out / "audit.png").read_bytes().startswith(b"\x89PNG")
    assert fedmix("audit", str(out)) == 0
    printed, progress = capsys.readouterr()
    assert "what the server can learn" in printed
    assert "no noise, so no guarantee" in printed
    assert "a round from the end" in progress


def test_a_sweep_is_one_table_one_figure_and_runs_that_can_be_resumed(tmp_path, capsys):
    out = tmp_path / "sweep"
    command = ["sweep", "digits-skew", "--set", "fedmix.eta=0,0.9", "--seeds", "0,1", "--out", str(out), *SMALL]
    assert fedmix(*command) == 0
    printed = capsys.readouterr().out
    assert "fedmix.eta" in printed
    assert "±" in printed
    assert "best local accuracy" in printed
    rows = json.loads((out / "sweep.json").read_text())["rows"]
    assert [row["settings"] for row in rows] == [{"fedmix.eta": 0}, {"fedmix.eta": 0.9}]
    assert rows[0]["gib"]["mean"] >= rows[1]["gib"]["mean"]
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == [
        "eta=0-seed0",
        "eta=0-seed1",
        "eta=0.9-seed0",
        "eta=0.9-seed1",
    ]
    assert "holds a run already" in refused(capsys, *command)
    before = (out / "eta=0-seed0" / "metrics.jsonl").stat().st_mtime_ns
    assert fedmix(*command, "--resume", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"] == rows
    assert (out / "eta=0-seed0" / "metrics.jsonl").stat().st_mtime_ns == before  # what is done is not done again


def test_a_point_of_the_grid_that_fails_leaves_the_others(tmp_path, capsys):
    out = tmp_path / "sweep"
    rates = ["--set", "training.client_lr=0.05,1e30", "--set", "seed=3"]
    assert fedmix("sweep", "digits-skew", *rates, "--out", str(out), "--json", *SMALL) == 2
    printed, complaint = capsys.readouterr()
    result = json.loads(printed)
    assert [row["settings"] for row in result["rows"]] == [{"training.client_lr": 0.05}]
    assert result["rows"][0]["seeds"] == [3]
    assert "client_lr=1e+30-seed3: client" in result["failed"][0]
    assert "smaller client_lr" in complaint


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        (["sweep", "digits-skew", "--set", "fedmix.eta=0.5"], "--set must give a setting several values"),
        (["sweep", "digits-skew", "--set", "fedmix.eta=0,0"], "must name each value once"),
        (["sweep", "digits-skew", "--set", "fedmix.eta=0,2"], "fedmix.eta must be in [0, 1]"),
        (["sweep", "digits-skew", "--set", "fedmix.eta"], "--set must be key=value,value"),
        (["sweep", "digits-skew", "--set", "fedmix.eta=0,1", "--set", "seed=1,2", "--seeds", "0"], "given once"),
        (["evaluate", "nowhere"], "must be a run directory"),
        (["audit", "nowhere"], "must be a run directory"),
        (["evaluate", "nowhere", "--clients", "-1"], "--clients must be 0"),
        (["train", "digits-skew", "--set", "privacy.noise=1"], "privacy.clip must be more than 0"),
    ],
)
def test_bad_input_is_one_line_and_status_2(args, wrong, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert wrong in refused(capsys, *args)
    assert not list(tmp_path.iterdir())


def test_lists_in_a_grid_keep_their_brackets():
    from fedmix.experiment.recipe import parse_grid

    assert parse_grid(["model.channels=[8, 16],[16,32]", "data.side=label, client"]) == {
        "model.channels": [[8, 16], [16, 32]],
        "data.side": ["label", "client"],
    }


def test_trouble_is_said_once_while_training(tmp_path, capsys):
    """More experts than labels, no marginal entropy, and a phi that follows every step: some are left over."""
    settings = ["fedmix.experts=12", "fedmix.entropy=0", "fedmix.gamma=0.3", "fedmix.beta=0.3"]
    given = [word for setting in settings for word in ("--set", setting)]
    command = ["train", "digits-skew", "--scale", "small", "--rounds", "6", "--out", str(tmp_path / "r"), "--json"]
    assert fedmix(*command, *given) == 0
    printed, progress = capsys.readouterr()
    summary = json.loads(printed)
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert summary["warnings"] == lines[-1]["warnings"]
    first = next((line for line in lines if line["warnings"]), None)
    assert first is not None
    kind = first["warnings"][0].split(":")[0]
    assert progress.count(f"  {kind}: ") == 1
