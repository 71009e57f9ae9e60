"""`fedmix evaluate`: every kind of inference, against the run's own summary and against the parts it is made of."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import METHODS, small_experiment, small_federation, small_recipe

from fedmix.after.inference import evaluate_run
from fedmix.after.options import Options
from fedmix.after.restore import restore
from fedmix.core.score import MEASURES, score
from fedmix.core.vae import VAE
from fedmix.data.federation import Federation
from fedmix.engines.client import ADAPTED, Task, labelled, perform
from fedmix.errors import DataError, RunError, SettingError
from fedmix.running.directory import RunDirectory
from fedmix.running.run import run
from fedmix.running.where import Where
from fedmix.settings.build import build

SERIAL = Options(Where("serial"))


def pixels(federation):
    """The same federation with inputs in [0, 1], of which a density can be learnt."""
    low, high = federation.x.min(), federation.x.max()
    held_out = federation.held_out
    return replace(
        federation,
        x=(federation.x - low) / (high - low),
        held_out=None if held_out is None else pixels(held_out),
    )


def with_new_clients(side="label"):
    federation = small_federation(points=40, side=side)
    new = small_federation(clients=2, points=30, side=side, seed=5)
    new = replace(new, names=["new-0", "new-1"], c=new.c + (4 if side == "client" else 0))
    return pixels(replace(federation, held_out=new))


def trained(path, method="fedmix", federation=None, **changes):
    """A run directory, its data, and its summary."""
    recipe = small_recipe(method, **changes)
    federation = federation or with_new_clients(recipe.data.side)
    directory = RunDirectory.open(path, recipe, resume=False, overwrite=False)
    try:
        return federation, run(build(recipe, federation), directory, Where("serial"))
    finally:
        directory.close()


@pytest.mark.parametrize("method", METHODS)
def test_it_says_what_the_summary_says_and_more(method, tmp_path):
    federation, summary = trained(tmp_path / "r", method)
    result = evaluate_run(restore(tmp_path / "r", federation), SERIAL)
    for kind in ("fine_tuned", "server"):
        assert result[kind]["accuracy"] == summary["accuracy"]["test"][kind]
        measured = summary["scores"]["test"][kind]
        assert {m: result[kind][m] for m in measured} == measured
        assert {*MEASURES, "f1"} <= set(measured)
    assert result["no_identity"]["averaged"]["union"] == summary["scores"]["test"]["no_identity"]
    assert result["as_sent"]["clients"] == 4
    curve = result["new_clients"]["labelled"]
    assert [row["points"] for row in curve] == [5, 20, None]
    sizes = [federation.held_out.size(s) for s in range(2)]
    assert curve[-1]["mean_points"] == np.mean(sizes)
    gates = method == "fedmix"
    assert set(result["new_clients"]["unlabelled"]) == {"averaged"} | (
        {"uniform", "pooled", "generative", "distilled"} if gates else set()
    )
    for row in result["new_clients"]["unlabelled"].values():
        assert row["union"]["points"] == sum(len(part) for part in federation.held_out.parts["test"])
    assert ("label_counts" in result) == ("label_counts" in curve[0]) == (method in ("fedmix", "fedavg"))
    if method == "fedavg":  # nothing private to train: every amount of data gives the server's weights
        assert curve[0]["private_parts"] == curve[-1]["private_parts"]
        assert curve[0]["fine_tuned"] != curve[0]["private_parts"]


def test_a_new_clients_gate_is_trained_once_and_scored_before_and_after_fine_tuning():
    experiment = small_experiment("fedmix")
    algorithm, clients = experiment.algorithm, experiment.federation
    message, own = algorithm.newcomer(algorithm.init(0), True), algorithm.new_client(0)

    def numbers(**asked):
        answer, kept = perform(algorithm, clients, 0, Task("evaluate", 1, 0, message, "test", **asked), own)
        assert kept is own
        return answer.numbers

    both, gate = numbers(adapt=3, finetune=1, points=20), numbers(adapt=3, points=20)
    assert {name.removeprefix(ADAPTED): both[name] for name in both if name.startswith(ADAPTED)} == gate
    after = {name: both[name] for name in both if not name.startswith(ADAPTED)}
    assert after.keys() == gate.keys()
    assert after["nll"] != gate["nll"]
    assert gate["nll"] != numbers()["nll"]


def test_bytes_are_those_of_what_is_handed_over(tmp_path):
    federation, _ = trained(tmp_path / "r")
    found = restore(tmp_path / "r", federation)
    rows = evaluate_run(found, SERIAL)["new_clients"]["unlabelled"]
    gates = sum(v.numel() * 4 for s in found.store.clients() for v in found.store.get(s).values())
    assert rows["averaged"]["bytes_from_clients"] == gates
    assert rows["uniform"]["bytes_from_clients"] == rows["pooled"]["bytes_from_clients"] == 0
    densities = 4 * sum(4 * w.numel() for w in VAE(2).parameters())
    assert rows["generative"]["bytes_from_clients"] == gates + densities
    assert rows["distilled"]["bytes_from_clients"] == gates
    assert rows["distilled"]["bytes_to_new_client"] == gates / 4  # one gate, whatever the number of clients


def test_own_label_counts_are_bayes_by_hand(tmp_path):
    federation, _ = trained(tmp_path / "r", "fedavg")
    found = restore(tmp_path / "r", federation)
    result = evaluate_run(found, replace(SERIAL, densities=False))
    message = found.experiment.algorithm.broadcast(found.state, None)
    p_y = np.bincount(np.concatenate([federation.y[own] for own in federation.parts["train"]]), minlength=3) + 1 / 3
    p_y = p_y / p_y.sum()

    def by_hand(data, s, counts):
        test = data.examples(s, "test")
        p = found.experiment.algorithm.predict(message, {}, test.x).exp().double().numpy()
        right = 0
        for row, y in zip(p, test.y.tolist(), strict=True):
            right += int(np.argmax([row[v] * (counts[v] / p_y[v] + 1) for v in range(3)])) == y
        return right / len(test.y)

    everything = [np.bincount(federation.y[own], minlength=3) for own in federation.parts["train"]]
    assert result["label_counts"]["accuracy"]["mean"] == pytest.approx(
        np.mean([by_hand(federation, s, everything[s]) for s in range(4)])
    )
    new = federation.held_out
    mine = [np.bincount(new.y[own], minlength=3) for own in new.parts["train"]]
    curve = result["new_clients"]["labelled"]
    assert curve[-1]["label_counts"]["accuracy"]["mean"] == pytest.approx(
        np.mean([by_hand(new, s, mine[s]) for s in range(2)])
    )
    few = []  # the five points that a new client's private parts are trained on, too
    for s in range(2):
        rng = Task("evaluate", found.experiment.recipe.rounds, s, message).stream(found.experiment.recipe.seed)
        few.append(np.bincount(labelled(new.examples(s, "train"), 5, rng.child("points")).y, minlength=3))
    assert few[0].sum() == curve[0]["points"] == 5
    assert curve[0]["label_counts"]["accuracy"]["mean"] == pytest.approx(
        np.mean([by_hand(new, s, few[s]) for s in range(2)])
    )


def test_label_counts_in_training_are_not_counted_twice(tmp_path):
    """What is shared has learnt labels in equal shares: with a client's counts it is what the client predicts with."""
    uneven = np.random.default_rng(0).choice(3, size=(4, 90), p=[0.8, 0.15, 0.05])
    x = np.random.default_rng(1).normal(size=(4, 90, 2)).astype(np.float32) + uneven[:, :, None]
    federation = Federation.from_clients({str(s): {"x": x[s], "y": uneven[s]} for s in range(4)})
    trained(tmp_path / "r", "fedavg", federation, **{"training.label_counts": True})
    result = evaluate_run(restore(tmp_path / "r", federation), replace(SERIAL, densities=False))
    for measure in ("accuracy", "nll"):
        assert result["label_counts"][measure]["mean"] == pytest.approx(result["server"][measure]["mean"], abs=1e-6)


def test_a_label_that_only_new_clients_have_is_rare_not_certain(tmp_path):
    rng = np.random.default_rng(0)

    def clients(number, labels):
        y = rng.integers(0, labels, size=(number, 60))
        x = (rng.normal(size=(number, 60, 2)) + y[:, :, None]).astype(np.float32)
        return Federation.from_clients({str(s): {"x": x[s], "y": y[s]} for s in range(number)}, classes=3)

    federation = replace(clients(4, 2), held_out=clients(2, 3))
    trained(tmp_path / "r", "fedavg", federation)
    result = evaluate_run(restore(tmp_path / "r", federation), replace(SERIAL, densities=False))
    for row in result["new_clients"]["labelled"]:
        assert np.isfinite(row["label_counts"]["nll"]["mean"])
        assert row["label_counts"]["accuracy"]["mean"] > 0.3


def test_engines_agree_and_a_sample_of_clients_is_a_part_of_them(tmp_path):
    federation, _ = trained(tmp_path / "r")
    found = restore(tmp_path / "r", federation)
    one = evaluate_run(found, SERIAL)
    other = evaluate_run(found, Options(Where(workers=2)))
    assert one["server"] == other["server"]
    for kind in ("averaged", "uniform", "pooled", "generative", "distilled"):
        a, b = (result["new_clients"]["unlabelled"][kind]["union"] for result in (one, other))
        assert a == pytest.approx(b, abs=1e-5), kind
    for a, b in zip(one["new_clients"]["labelled"], other["new_clients"]["labelled"], strict=True):
        assert a["private_parts"]["accuracy"] == b["private_parts"]["accuracy"]
    some = evaluate_run(found, replace(SERIAL, clients=2, densities=False))
    assert some["evaluated"] == some["server"]["clients"] == 2
    assert some["notes"]["generative"] == "not asked for (--no-vae)"


def test_a_gate_trained_on_labels_is_better_than_one_that_knows_nothing(tmp_path):
    """Two kinds of clients, told apart by what they call the classes: without labels nobody can know which kind it is."""
    rng = np.random.default_rng(0)
    kinds = {}
    for s in range(10):
        x = rng.normal(size=(60, 2)).astype(np.float32)
        y = (x[:, 0] > 0).astype(np.int64)
        kinds[str(s)] = {"x": x, "y": y if s % 2 else 1 - y}
    everyone = Federation.from_clients(kinds, side="client")
    old = {part: everyone.parts[part][:8] for part in everyone.parts}
    new = {part: everyone.parts[part][8:] for part in everyone.parts}
    federation = replace(
        everyone,
        parts=old,
        names=everyone.names[:8],
        categories=8,
        held_out=replace(everyone, parts=new, names=everyone.names[8:], categories=8),
    )
    changes = {"fedmix.experts": 2, "fedmix.gamma": 0.75, "fedmix.beta": 1.5, "server.server_lr": 0.1, "rounds": 25}
    trained(tmp_path / "r", federation=federation, **changes, **{"data.side": "client", "training.epochs": 3})
    result = evaluate_run(restore(tmp_path / "r", federation), replace(SERIAL, densities=False))
    new_clients = result["new_clients"]
    assert "pooled" not in new_clients["unlabelled"]  # c is not the label: nothing to divide out
    assert result["server"]["accuracy"]["mean"] > 0.9
    assert new_clients["unlabelled"]["averaged"]["union"]["accuracy"] < 0.7
    assert new_clients["labelled"][-1]["private_parts"]["accuracy"]["mean"] > 0.85


def test_what_may_not_be_shared_is_null_and_says_why(tmp_path):
    federation, _ = trained(tmp_path / "r", **{"evaluation.share_private": False})
    result = evaluate_run(restore(tmp_path / "r", federation), SERIAL)
    unlabelled = result["new_clients"]["unlabelled"]
    assert [unlabelled[kind] for kind in ("averaged", "generative", "distilled")] == [None] * 3
    assert "share_private" in result["notes"]["distilled"]
    for kind in ("uniform", "pooled"):
        assert unlabelled[kind]["union"]["accuracy"] > 0  # needs nothing of any client


def test_without_new_clients_the_union_stands_in_for_them(tmp_path):
    federation, summary = trained(tmp_path / "r", federation=pixels(small_federation()))
    result = evaluate_run(restore(tmp_path / "r", federation), SERIAL)
    assert result["new_clients"]["labelled"] is None
    assert (
        result["new_clients"]["unlabelled"]["averaged"]["union"]["accuracy"]
        == summary["accuracy"]["test"]["no_identity"]
    )
    assert "as in the paper" in result["notes"]["new_clients"]


def test_inputs_that_are_not_pixels_have_no_density_and_the_rest_goes_on(tmp_path):
    federation, _ = trained(tmp_path / "r", federation=small_federation())
    result = evaluate_run(restore(tmp_path / "r", federation), SERIAL)
    assert result["new_clients"]["unlabelled"]["generative"] is None
    assert "[0, 1]" in result["notes"]["generative"]
    assert result["new_clients"]["unlabelled"]["distilled"] is not None
    with pytest.raises(DataError, match=r"\[0, 1\]"):
        federation.unit(federation.x)


def test_some_points_of_the_union_for_p_of_s_given_x(tmp_path):
    federation, _ = trained(tmp_path / "r")
    found = restore(tmp_path / "r", federation)
    row = evaluate_run(found, replace(SERIAL, points=5))["new_clients"]["unlabelled"]["generative"]
    assert row["union"]["points"] == 5
    assert "5 of " in row["what"]


def test_p_of_s_given_x_is_bayes_over_the_clients_densities(tmp_path, monkeypatch):
    """With densities that are sure of one client, its gate alone predicts."""
    federation, _ = trained(tmp_path / "r", federation=pixels(small_federation()))
    found = restore(tmp_path / "r", federation)

    def sure_of_client_2(models, x, rng):
        assert len(models) == 4
        return torch.where(torch.arange(4) == 2, 0.0, -1e4).expand(len(x), 4)

    monkeypatch.setattr("fedmix.core.vae.log_densities", sure_of_client_2)
    row = evaluate_run(found, SERIAL)["new_clients"]["unlabelled"]["generative"]
    algorithm = found.experiment.algorithm
    points = torch.from_numpy(np.concatenate(federation.parts["test"]))
    message = algorithm.broadcast(found.state, None)
    with torch.no_grad():
        log_p = algorithm.predict(message, found.store.get(2), federation.inputs(points))
    assert row["union"] == pytest.approx(score(log_p, federation.y[points]), abs=1e-5)


def test_bytes_of_images_come_back_as_pixels():
    x = torch.arange(48, dtype=torch.uint8).view(1, 3, 4, 4) * 5
    federation = replace(small_federation(), x=x, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.1))
    assert torch.allclose(federation.unit(federation.inputs(torch.tensor([0]))), x.float() / 255, atol=1e-6)


def test_a_run_that_is_not_whole_or_not_with_its_data_is_refused(tmp_path):
    federation, _ = trained(tmp_path / "r")
    with pytest.raises(RunError, match="handed over in Python"):
        restore(tmp_path / "r")
    with pytest.raises(RunError, match="its own data"):
        restore(tmp_path / "r", small_federation(seed=9))
    with pytest.raises(RunError, match="must be a run directory"):
        restore(tmp_path)
    with pytest.raises(SettingError, match="--clients must be 0"):
        Options(clients=-1)
    for folder in (tmp_path / "r" / "checkpoints").glob("round-*"):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    with pytest.raises(RunError, match="must have a checkpoint"):
        restore(tmp_path / "r", federation)


def test_a_new_client_of_a_federation_told_apart_by_client_starts_from_the_mean(tmp_path):
    experiment = small_experiment("fedmix", **{"data.side": "client"})
    algorithm, K = experiment.algorithm, 3
    state = algorithm.init(0)
    q = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.6, 0.2]])
    state = replace(
        state, extras=state.extras | {"q_zs": torch.cat([q, torch.full((2, K), 1 / K)])}
    )  # two of four took part
    phi = algorithm.newcomer(state, False).tensors["phi"]
    assert torch.allclose(phi, q.mean(dim=0).expand(4, K))
    assert torch.equal(algorithm.newcomer(state, True).tensors["phi"], state.extras["phi"])
