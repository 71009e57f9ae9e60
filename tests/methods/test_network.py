"""q(z|c) as a network: side information that is not categorical."""

import json

import numpy as np
import pytest
import torch
from conftest import fedmix as command_line
from conftest import small_experiment, train_serially

import fedmix
from fedmix.core import posterior
from fedmix.core.method import Batch
from fedmix.data.federation import Federation
from fedmix.errors import DataError, SettingError
from fedmix.methods import fedmix_network
from fedmix.methods.fedmix_mixture import Mixture
from fedmix.testing import check_method

NETWORK = {"fedmix.phi": "network"}


def by_vector(clients=4, points=40, seed=0):
    """Points whose labels are turned round where the first number of c is above a bound: two experts are needed."""
    rng = np.random.default_rng(seed)
    sites = {}
    for s in range(clients):
        x = rng.normal(size=(points, 2))
        c = rng.normal(size=(points, 3)) * [1, 5, 0.1] + [0, 3, 0]
        y = ((x[:, 0] > 0) ^ (c[:, 0] > 0)).astype(int)
        sites[f"site-{s}"] = {"x": x, "y": y, "c": c}
    return Federation.from_clients(sites, side="vector", seed=seed)


def mixture(**changes):
    algorithm = small_experiment(**NETWORK, **changes).algorithm
    return Mixture(algorithm.setup, small_experiment(**NETWORK, **changes).recipe.fedmix)


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_on_categories_it_climbs_to_the_closed_form(beta):
    """With fixed experts, gradient steps on the bound end where eq:phi_solution is."""
    mix = mixture(**{"fedmix.phi_hidden": 0, "fedmix.entropy": 0.0, "fedmix.phi_step": 1.0})
    generator = torch.Generator().manual_seed(0)
    joint = torch.randn(60, 3, generator=generator)
    c = torch.randint(0, 3, (60,), generator=generator)
    batch = Batch(torch.zeros(60, 2), torch.zeros(60, dtype=torch.int64), c, torch.full((60,), 1 / 60))
    network = fedmix_network.fresh(mix)
    for _ in range(400):
        network = fedmix_network.step(mix, network, joint, batch, beta, torch.full((3,), 1 / 3))
    wanted, present = posterior.solve_phi(joint, c, 3, beta)
    assert bool(present.all())
    assert torch.allclose(fedmix_network.of_points(mix, network, torch.arange(3)), wanted, atol=1e-4)


def test_experts_that_are_used_much_are_held_back():
    mix = mixture(**{"fedmix.phi_hidden": 0})
    batch = Batch(torch.zeros(4, 2), torch.zeros(4).long(), torch.tensor([0, 1, 2, 0]), torch.full((4,), 0.25))
    use = torch.tensor([0.8, 0.1, 0.1])
    network = fedmix_network.step(mix, fedmix_network.fresh(mix), torch.zeros(4, 3), batch, 1.0, use)
    q = fedmix_network.of_points(mix, network, torch.arange(3))
    assert bool((q[:, 0] < 1 / 3).all())


def test_it_starts_from_equal_shares_whatever_c_is():
    federation = by_vector()
    experiment = small_experiment(federation=federation, **NETWORK, **{"data.side": "vector"})
    mix = Mixture(experiment.algorithm.setup, experiment.recipe.fedmix)
    q = fedmix_network.of_points(mix, fedmix_network.fresh(mix), federation.c)
    assert torch.allclose(q, torch.full_like(q, 1 / 3))


def test_vectors_are_standardised_over_training_points():
    federation = by_vector()
    train = federation.c[torch.from_numpy(np.concatenate(federation.parts["train"]))]
    assert train.mean(dim=0).tolist() == pytest.approx([0, 0, 0], abs=1e-5)
    assert train.std(dim=0, correction=0).tolist() == pytest.approx([1, 1, 1], abs=1e-5)
    everything = federation.c.mean(dim=0)
    assert not torch.allclose(everything, torch.zeros(3), atol=1e-4)


def test_experts_specialise_by_a_number_of_c():
    """The labels depend on the sign of c[0] as well; the network finds that out, and the bound says so."""
    changes = {"rounds": 40, "fedmix.experts": 2, "training.epochs": 3, "training.client_lr": 0.3, "model.hidden": [16]}
    changes |= {"fedmix.beta": 0.3}
    experiment = small_experiment(federation=by_vector(points=80), **NETWORK, **{"data.side": "vector"}, **changes)
    steps, _ = train_serially(experiment)
    mix = Mixture(experiment.algorithm.setup, experiment.recipe.fedmix)
    q = fedmix_network.of_points(mix, steps[-1].state.extras["network"], experiment.federation.c)
    positive = experiment.federation.c[:, 0] > experiment.federation.c[:, 0].mean()
    apart = (q[positive].mean(dim=0) - q[~positive].mean(dim=0)).abs().max()
    assert float(apart) > 0.8
    assert q.mean(dim=0).min() > 0.4


def test_every_law_holds_on_categories():
    assert len(check_method("fedmix", phi="network", experts=3)) == 10


def test_a_run_on_vectors_can_be_resumed_evaluated_audited_and_loaded(tmp_path):
    federation = by_vector()
    settings = {"fedmix": {"experts": 2, "phi": "network"}, "evaluation": {"share_private": True}}
    run = fedmix.train(federation=federation, rounds=2, out=tmp_path / "run", **settings)
    run = fedmix.train(federation=federation, rounds=3, out=tmp_path / "run", resume=True, **settings)
    assert len(run.metrics) == 3
    assert all("q_zs" in line for line in run.metrics if "accuracy" in line)
    result = fedmix.evaluate(tmp_path / "run", federation=federation, densities=False)
    assert 0 <= result["no_identity"]["averaged"]["union"]["accuracy"] <= 1
    audited = fedmix.audit(tmp_path / "run", federation=federation)
    assert audited["true_side"] is None
    predicted = run.client("site-1").predict(federation.x[:5])
    assert len(predicted) == 5


def test_a_table_of_rows_for_vectors_is_refused():
    with pytest.raises(SettingError, match=r"fedmix.phi must be 'network' with data.side = 'vector'"):
        small_experiment(federation=by_vector(), **{"data.side": "vector"})


@pytest.mark.parametrize("c", [np.zeros(40), np.full((40, 2), np.nan), np.full((40, 2), "x")])
def test_vectors_that_are_none_are_refused(c):
    site = {"x": np.zeros((40, 2)), "y": np.arange(40) % 2, "c": c}
    with pytest.raises(DataError, match="c must be finite numbers"):
        Federation.from_clients({"a": site, "b": site}, side="vector")


@pytest.mark.parametrize(
    ("setting", "value"),
    [("eta", 0.5), ("evidence", "arriving"), ("marginal", "exact"), ("expert_dropout", 0.5), ("prior", "reported")],
)
def test_what_needs_rows_is_refused(setting, value):
    with pytest.raises(SettingError, match=r"with fedmix.phi = 'network'"):
        small_experiment(**NETWORK, **{f"fedmix.{setting}": value})


def test_columns_of_a_table_make_a_vector(tmp_path):
    rng = np.random.default_rng(0)
    lines = ["age,weight,site,sick"]
    lines += [f"{rng.integers(20, 80)},{rng.normal(70, 9):.1f},{'ab'[i % 2]},{i % 3 % 2}" for i in range(80)]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f"""rounds = 2
[data]
source = "csv"
split = "by-client"
clients = 0
side = "vector"
args = {{ file = "{tmp_path}/t.csv", label = "sick", client = "site", side = ["age", "weight"] }}
[fedmix]
experts = 2
phi = "network"
"""
    )
    done = command_line("train", str(recipe), "--out", str(tmp_path / "run"), "--quiet", "--json")
    assert done.returncode == 0, done.stderr
    about = json.loads((tmp_path / "run" / "federation.json").read_text())
    assert about["categories"] == 2
    assert [column["column"] for column in about["features"]] == ["age", "weight"]
    assert command_line("show", str(tmp_path / "run")).returncode == 0
    assert command_line("plan", str(recipe)).returncode == 0
    recipe.write_text(recipe.read_text().replace('"weight"] }', '"site"] }'))
    done = command_line("train", str(recipe), "--out", str(tmp_path / "other"), "--quiet")
    assert done.returncode == 2
    assert "'site' must be numbers. 'a' (line 2)" in done.stderr


def test_rotations_are_angles_too():
    done = command_line("plan", "digits-rotation", "--set", "data.side=angle", "--set", "fedmix.phi=network", "--json")
    assert done.returncode == 0, done.stderr


def test_large_numbers_that_differ_a_little_are_told_apart():
    """Times in seconds: in float32 they would all be the same."""
    rng = np.random.default_rng(0)
    c = 1.6e9 + rng.normal(size=(40, 1))
    site = {"x": np.zeros((40, 2)), "y": np.arange(40) % 2, "c": c}
    federation = Federation.from_clients({"a": site, "b": site}, side="vector")
    assert federation.c.std() > 0.9
    assert len(federation.c.unique()) == 40


def test_vectors_of_different_lengths_and_without_spread_are_refused():
    site = {"x": np.zeros((40, 2)), "y": np.arange(40) % 2, "c": np.random.default_rng(0).normal(size=(40, 2))}
    other = {**site, "c": site["c"][:, :1]}
    with pytest.raises(DataError, match="c must have the same shape on every client"):
        Federation.from_clients({"a": site, "b": other}, side="vector")
    constant = {**site, "c": np.ones((40, 2))}
    with pytest.raises(DataError, match="Number 0 is the same for all of them"):
        Federation.from_clients({"a": constant, "b": constant}, side="vector")
