"""What was measured can be had: a client's fine-tuned model, new clients, results as a table, ONNX, predictions of files."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import METHODS, small_federation
from conftest import fedmix as command_line

import fedmix
from fedmix.data.federation import Federation
from fedmix.errors import DataError, FedmixError, RunError, SettingError
from fedmix.rng import stream

SETTINGS = {
    "engine": "serial",
    "rounds": 6,
    "training": {"batch_size": 8, "client_lr": 0.2},
    "server": {"server_lr": 0.05},
}


def train(out, method="fedmix", federation=None, **changes):
    return fedmix.train(
        federation=federation or small_federation(), out=out, algorithm=method, **{**SETTINGS, **changes}
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_fine_tuned_client_is_the_model_of_the_headline(method, tmp_path):
    run = train(tmp_path / "run", method, evaluation={"finetune_evaluations": 1})
    federation = small_federation()
    for s in range(4):
        tuned = run.client(s).fine_tune(federation)
        data = federation.examples(s, "test")
        accuracy = (tuned.predict(data.x) == data.y.numpy()).mean()
        assert accuracy == pytest.approx(run.summary["of_clients"]["test"]["fine_tuned"][f"site-{s}"])
    own = federation.examples(0, "train")
    from_arrays = run.client(0).fine_tune((own.x, own.y))
    x = federation.x[:5]
    assert torch.allclose(from_arrays.log_prob(x), run.client(0).fine_tune(federation).log_prob(x), atol=1e-6)
    before = run.client(0).log_prob(x)
    assert not torch.allclose(before, from_arrays.log_prob(x), atol=1e-4)
    assert torch.equal(before, run.client(0).log_prob(x))  # the run itself is as it was


def test_fine_tuning_takes_more_epochs_and_refuses_what_it_does_not_know(tmp_path):
    run = train(tmp_path / "run")
    data = small_federation().examples(1, "train")
    once, often = (run.client(1).fine_tune((data.x, data.y), epochs=n) for n in (1, 40))
    assert often.score(data.x, data.y)["nll"] < once.score(data.x, data.y)["nll"]
    with pytest.raises(DataError, match=r"labels must be of 0, 1, 2. Got '7' as well"):
        run.client(1).fine_tune((data.x, [7] * len(data.y)))
    with pytest.raises(DataError, match="fine_tune needs the client's labelled points"):
        run.client(1).fine_tune()


def test_scores_have_a_confusion_matrix(tmp_path):
    run, data = train(tmp_path / "run"), small_federation().examples(1, "train")
    scored = run.client(1).score(data.x, data.y)
    assert scored["confusion"].sum() == len(data)
    assert scored["confusion"].diagonal().sum() / len(data) == pytest.approx(scored["accuracy"])


@pytest.mark.parametrize("side", ["label", "client"])
def test_a_new_client_with_labels_trains_its_gate_and_then_everything(side, tmp_path):
    federation = small_federation(side=side)
    run = train(tmp_path / "run", federation=federation)
    data = small_federation(seed=5).examples(2, "train")
    new = run.new_client((data.x, data.y))
    algorithm = run._algorithm
    message = algorithm.newcomer(run._state, side != "client")
    steps = -(-len(data) // 8)
    c = data.y if side == "label" else torch.zeros_like(data.y)
    examples = type(data)(data.x, data.y, c)
    rng = stream(0, "new client").child("adapt")
    adapted, private = algorithm.adapt(message, algorithm.new_client(0), examples, rng, -(-100 // steps))
    expected = algorithm.predict(adapted, private, data.x)
    assert torch.allclose(new.log_prob(data.x), expected, atol=1e-6)
    tuned = new.fine_tune(epochs=20)
    assert tuned.score(data.x, data.y)["nll"] < new.score(data.x, data.y)["nll"]


def test_a_new_client_without_labels_gets_one_gate_for_everybody(tmp_path):
    federation = small_federation()
    run = train(tmp_path / "run", evaluation={"share_private": True})
    x = federation.x[:20]
    assert np.array_equal(run.new_client(inputs=x).predict(x), run.predict(x))  # pooled, since c is the label
    averaged = run.new_client(inputs=x, gate="averaged").log_prob(x)
    distilled = run.new_client(inputs=x, gate="distilled").log_prob(x)
    assert torch.allclose(averaged.exp().sum(dim=1), torch.ones(20), atol=1e-5)
    assert (averaged - distilled).abs().max() < 0.5
    result = fedmix.evaluate(run.path, federation=federation, densities=False, engine="serial")
    index = np.concatenate(federation.parts["test"])
    predicted = run.new_client(gate="averaged").predict(federation.x[index])
    union = result["new_clients"]["unlabelled"]["averaged"]["union"]
    assert (predicted == federation.y[index].numpy()).mean() == pytest.approx(union["accuracy"])
    private = train(tmp_path / "private")
    with pytest.raises(RunError, match=r"evaluation.share_private does not allow"):
        private.new_client(inputs=x, gate="averaged")
    with pytest.raises(SettingError, match="labelled data, or inputs"):
        private.new_client()
    with pytest.raises(SettingError, match="gate must be one of averaged, distilled, pooled"):
        private.new_client(inputs=x, gate="mean")


def test_results_of_clients_are_a_data_frame(tmp_path):
    run = train(tmp_path / "run")
    results = run.results()
    assert isinstance(results, pd.DataFrame)
    assert results.index.tolist() == run.clients
    assert results.loc["site-2", "server_test"] == run.summary["of_clients"]["test"]["server"]["site-2"]
    assert {"train_points", "fine_tuned_test", "as_sent_validation", "expert_0"} <= set(results.columns)


def test_a_client_is_written_as_onnx_and_gives_the_same(tmp_path):
    from onnx import load as load_onnx
    from onnx.reference import ReferenceEvaluator

    run = train(tmp_path / "run")
    file = run.client(1).to_onnx(tmp_path / "client.onnx")
    session = ReferenceEvaluator(load_onnx(file))
    x = small_federation().x[:7]
    (log_p,) = session.run(None, {session.input_names[0]: x.numpy()})
    assert np.allclose(log_p, run.client(1).log_prob(x), atol=1e-5)


# -- from files, on the command line -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"age": rng.normal(50, 10, 80), "sex": rng.choice(["f", "m"], 80)})
    table["hospital"] = np.array(["Bern", "Basel"])[np.arange(80) % 2]
    table["ill"] = np.where(table["age"] > 50, "yes", "no")
    table.loc[3, "age"] = np.nan
    table.to_csv(folder / "patients.csv", index=False)
    (folder / "own.toml").write_text(
        f"""name = "own"
rounds = 8
[data]
source = "csv"
split = "by-client"
clients = 0
args = {{ file = "{folder}/patients.csv", label = "ill", client = "hospital", missing = "impute" }}
[training]
batch_size = 8
client_lr = 0.2
[server]
server_lr = 0.05
"""
    )
    done = command_line("train", str(folder / "own.toml"), "--out", str(folder / "run"), "--quiet")
    assert done.returncode == 0, done.stderr
    return folder, table


def test_new_rows_of_a_file_are_predicted_on_the_command_line(table_run):
    folder, table = table_run
    args = ("--client", "Bern", "--input", str(folder / "patients.csv"))
    done = command_line("predict", str(folder / "run"), *args, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["labels"], len(result["predictions"])) == (["no", "yes"], 80)
    assert result["accuracy"] > 0.85
    bern = fedmix.load(folder / "run").client("Bern")
    assert bern.predict(table).tolist() == result["predictions"]
    best = command_line("predict", str(folder / "run"), *args, "--round", "best")
    assert best.returncode == 0
    assert best.stdout.splitlines()[0] == "label,p(no),p(yes)"
    anybody = command_line("predict", str(folder / "run"), "--input", str(folder / "patients.csv"))
    assert "somebody who is none of the clients" in anybody.stderr


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        (["--client", "Genf"], "a client must be one of 2"),
        (["--client", "Bern", "--round", "99"], "'last', 'best' or one of the checkpoints"),
        (["--client", "Bern", "--input", "gone.csv"], "gone.csv is not there"),
        (["--site", "x"], "a run directory, or --site DIR, and not both"),
    ],
)
def test_predictions_that_cannot_be_made_say_why_in_one_line(table_run, args, wrong):
    folder, _ = table_run
    given = args if "--input" in args else [*args, "--input", str(folder / "patients.csv")]
    done = command_line("predict", str(folder / "run"), *given)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert wrong in done.stderr


def test_wrong_inputs_in_python_get_one_clear_line(tmp_path):
    run = train(tmp_path / "run")
    for rows, wrong in [
        (np.zeros(2), r"inputs must be \[N, 2\]. Got \[2\]; for a single input give x\[None\]"),
        (np.zeros((3, 5)), r"inputs must be \[N, 2\]. Got \[3, 5\]"),
        ([["a", "b"]], "inputs must be numbers"),
        (np.full((1, 2), np.nan), "finite"),
        ("new.csv", "new.csv is not there"),
    ]:
        with pytest.raises(DataError, match=wrong):
            run.client(0).predict(rows)
    wide = torch.nn.Sequential(torch.nn.Linear(5, 3))
    for model, wrong in [("mlp", "model must be an nn.Module class"), (wide, "the model must take the data's inputs")]:
        with pytest.raises(FedmixError, match=wrong):
            fedmix.train(federation=small_federation(), model=model, output="0", out=tmp_path / "x", rounds=1)
    assert not (tmp_path / "x").exists()
    assert isinstance(Federation.from_clients([(np.eye(9), np.arange(9) % 2)]), Federation)
