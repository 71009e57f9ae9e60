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
    assert result.pop("picture") == str(out / "new-clients.png")
    assert result == json.loads((out / "evaluation.json").read_text())
    assert result["algorithm"] == method
    for kind in ("fine_tuned", "as_sent", "server"):
        for measure in ("accuracy", "balanced_accuracy", "nll", "ece"):
            assert set(result[kind][measure]) == {"mean", "std", "worst_decile"}
    assert 0 <= result["no_identity"]["averaged"]["union"]["accuracy"] <= 1
    assert [row["points"] for row in result["new_clients"]["labelled"]][:2] == [5, 20]
    wanted = {"averaged", "uniform", "pooled", "generative", "distilled"} if method == "fedmix" else {"averaged"}
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
    assert result.pop("picture") == str(out / "audit.png")
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
    assert "best by as sent accuracy on validation data: fedmix.eta = " in printed
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
    from fedmix.settings.reading import parse_grid

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


def test_runs_without_test_data_have_no_figures_to_draw_and_no_traceback(tmp_path, capsys):
    nothing = ["--set", "data.test=0", *SMALL]
    out = str(tmp_path / "r")
    assert fedmix("train", "digits-skew", "--out", out, "--set", "data.holdout_clients=2", *nothing) == 0
    assert fedmix("evaluate", out, "--no-vae", "--quiet") == 0
    assert fedmix("sweep", "digits-skew", "--set", "fedmix.beta=0.8,1.2", "--out", str(tmp_path / "s"), *nothing) == 0
    assert fedmix("audit", out, "--clients", "1", "--quiet") == 0
    assert "Traceback" not in capsys.readouterr().err


def test_only_seeds_can_vary_and_conflicts_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fedmix("sweep", "digits-skew", "--set", "seed=0,1", "--json", *SMALL) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["settings"] for row in rows] == [{"seed": 0}, {"seed": 1}]
    rounds = ["sweep", "digits-skew", "--set", "rounds=1,2", "--rounds", "2"]
    assert "rounds must be given once" in refused(capsys, *rounds)
    assert "each once" in refused(capsys, "sweep", "digits-skew", "--set", "fedmix.eta=0,1", "--seeds", "0,0")
    run = str(next((tmp_path / "runs").glob("*/seed=0-seed0")))
    assert "--clients must be 0" in refused(capsys, "audit", run, "--clients", "-1")


def test_on_a_narrow_terminal_numbers_stay_whole(digits_run, capsys, monkeypatch):
    from rich.console import Console

    from fedmix.report.audit import audit_table
    from fedmix.report.evaluation import evaluation_table

    _, out = digits_run
    for command, file, table in (
        ("evaluate", "evaluation.json", evaluation_table),
        ("audit", "audit.json", audit_table),
    ):
        if not (out / file).exists():
            assert fedmix(command, str(out), "--quiet") == 0
        result = json.loads((out / file).read_text())
        console = Console(width=80)
        with console.capture() as captured:
            console.print(table(result))
        text = captured.get()
        wanted = result["fine_tuned"]["accuracy"]["mean"] if command == "evaluate" else None
        number = (
            f"{100 * wanted:.1f} ±" if wanted is not None else f"{result['guess']['total_variation']['mean']:.3f} ±"
        )
        assert number in text, text


def test_a_run_that_goes_on_forgets_what_was_said_of_it(tmp_path):
    train = [
        "train",
        "digits-skew",
        "--scale",
        "small",
        "--quiet",
        "--out",
        str(tmp_path / "r"),
        "--algorithm",
        "fedavg",
    ]
    assert fedmix(*train, "--rounds", "1") == 0
    assert fedmix("audit", str(tmp_path / "r"), "--quiet") == 0
    assert fedmix(*train, "--rounds", "2", "--resume") == 0
    assert not (tmp_path / "r" / "audit.json").exists()


@pytest.mark.parametrize("text", ["{", "{}", "[1]"])
def test_a_damaged_description_of_the_data_is_one_line(text, tmp_path, capsys):
    out = tmp_path / "r"
    assert fedmix("train", "digits-skew", "--out", str(out), *SMALL, "--rounds", "1", "--algorithm", "fedavg") == 0
    (out / "federation.json").write_text(text)
    capsys.readouterr()
    assert "federation.json must describe" in refused(capsys, "evaluate", str(out), "--quiet")
