"""`fedmix audit`: attacks whose answer is known, and whole runs."""

import math
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
import torch
from conftest import METHODS, small_experiment, small_federation, small_recipe
from rich.console import Console
from safetensors.torch import load_file
from scipy.stats import norm
from test_inference import trained
from torch import nn

from fedmix.after import leakage
from fedmix.after.audit import audit_run
from fedmix.after.options import Options
from fedmix.after.restore import restore
from fedmix.core.privacy import repeatable_noise
from fedmix.core.tree import subtree
from fedmix.engines.client import Task, perform
from fedmix.errors import SettingError
from fedmix.report.audit import audit_table
from fedmix.report.tables import summary_table
from fedmix.rng import stream
from fedmix.running.accounting import guarantee
from fedmix.running.checkpoint import Checkpoints
from fedmix.running.directory import RunDirectory
from fedmix.running.releases import FIRST, cohorts
from fedmix.running.run import run
from fedmix.running.where import Where
from fedmix.schema import read_metrics
from fedmix.settings.build import build
from fedmix.settings.reading import make_recipe

SERIAL = Options(Where("serial"))


def skewed():
    """Every client lacks one of the three labels."""
    base = small_federation()
    parts = {part: [own[base.y[own] != s % 3] for s, own in enumerate(base.parts[part])] for part in base.parts}
    return replace(base, parts=parts)


class Wide(nn.Module):
    """Enough parameters for a cosine to mean something."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2000)
        self.out = nn.Linear(2000, 3)

    def forward(self, x):
        return self.out(torch.relu(self.fc(x)))


class ZeroOutput(nn.Module):
    """A classifier whose output layer starts at zero: every softmax is uniform."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 8)
        self.out = nn.Linear(8, 3)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x):
        return self.out(torch.relu(self.fc(x)))


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedmix", {}),
        ("fedmix", {"fedmix.full_steps": True, "fedmix.gamma": 1.0}),
        ("fedavg", {}),
        ("fedavg", {"training.label_counts": True}),
        ("local-global", {}),
    ],
)
def test_from_a_zero_output_layer_the_marginal_is_exact(method, changes, tmp_path):
    recipe = small_recipe(method, **{"model.name": "own", "rounds": 1}, **changes)
    federation = small_federation()
    directory = RunDirectory.open(tmp_path / "r", recipe, resume=False, overwrite=False)
    run(build(recipe, federation, ZeroOutput), directory, Where("serial"))
    directory.close()
    result = audit_run(restore(tmp_path / "r", federation, ZeroOutput), SERIAL)
    found = result["attacks"]["start"]["bias_single_step"]
    assert found["total_variation"]["mean"] < 1e-5
    for s, own in enumerate(found["of_clients"]):
        y = federation.examples(s, "train").y
        assert np.allclose(own["estimate"], np.bincount(y, minlength=3) / len(y), atol=1e-5)


def test_full_steps_hide_nothing(tmp_path):
    """Experts that have parted: all of them together step 1/max q(z|s) as far, which the server knows."""
    far = {}
    for full in (False, True):
        changes = {"fedmix.full_steps": full, "fedmix.gamma": 0.0, "fedmix.beta": 0.3, "training.batch_size": 1000}
        federation, _ = trained(tmp_path / str(full), federation=skewed(), **changes)
        attacks = audit_run(restore(tmp_path / str(full), federation), SERIAL)["attacks"]
        far[full] = attacks["start"]["bias_steps"]["total_variation"]["mean"]
    assert far[True] == pytest.approx(far[False], abs=0.02)


def test_with_label_counts_the_size_of_a_bias_tells_more_than_its_sign_at_first(tmp_path):
    federation, _ = trained(tmp_path / "r", "fedavg", skewed(), **{"training.label_counts": True, "rounds": 10})
    result = audit_run(restore(tmp_path / "r", federation), SERIAL)
    found = {kind: attack["total_variation"]["mean"] for kind, attack in result["attacks"]["start"].items()}
    assert found["bias_size"] < found["bias_normalised"]
    assert "training.label_counts" in result["notes"]
    assert "output bias, a local update, by its size" in text_of(audit_table(result))
    assert leakage.from_bias_size(np.array([0.2, -0.2, 0.0, 0.1])).tolist() == pytest.approx([0.4, 0.4, 0, 0.2])
    assert leakage.from_bias_size(np.zeros(4)).tolist() == [0.25] * 4


def text_of(table):
    console = Console(width=200, record=True, file=StringIO())
    console.print(table)
    return console.export_text()


def test_a_bias_that_moved_tells_the_labels():
    """One full-batch step of torch's own SGD from a zero layer: p(y|s) = (b_s - b) / rate + 1/C."""
    y = torch.tensor([0, 0, 0, 2, 2, 3])
    layer = nn.Linear(5, 4)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.3)
    nn.functional.cross_entropy(layer(torch.randn(6, 5)), y).backward()
    optimizer.step()
    moved = layer.bias.detach().double().numpy()
    assert np.allclose(leakage.from_bias(moved, 0.3, 1), [0.5, 0, 1 / 3, 1 / 6], atol=1e-6)
    assert leakage.from_bias_normalised(moved)[1] == 0
    assert leakage.from_bias_normalised(np.zeros(4)).tolist() == [0.25] * 4


@pytest.mark.parametrize("seed", [1, 3, 4, 5, 6])
def test_whole_numbers_are_found_where_least_squares_cannot(seed):
    """Ten labels, four experts: three equations for nine unknowns; but N_s p(y|s) are whole numbers."""
    rng = np.random.default_rng(seed)
    phi = rng.dirichlet(np.ones(4), size=10).astype(np.float32).astype(np.float64)
    held = rng.random(10) < 0.7
    counts = np.where(held, rng.integers(1, 20, 10), 0)
    n = int(counts.sum())
    q = (counts / n @ phi).astype(np.float32).astype(np.float64)
    true = counts / n
    squares = leakage.from_posterior(q, phi, held)
    assert np.allclose(squares @ phi, q, atol=1e-3)
    assert squares.sum() == pytest.approx(1)
    whole = leakage.whole_numbers(q, phi, held, n)
    assert np.allclose(whole, true)
    assert held.sum() > 4
    assert leakage.total_variation(squares, true) > 0.05
    elsewhere = np.array([0.97, 0.01, 0.01, 0.01])
    assert leakage.whole_numbers(elsewhere, phi, held, n) is None  # what fits nothing is not forced


def test_as_many_labels_as_experts_are_solved_by_least_squares():
    phi = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.3, 0.3, 0.4]])
    true = np.array([0.5, 0.0, 0.3, 0.2])
    support = true > 0
    assert np.allclose(leakage.from_posterior(true @ phi, phi, support), true, atol=1e-4)
    assert np.allclose(leakage.whole_numbers(true @ phi, phi, support, 10), true)
    assert leakage.from_posterior(np.full(3, 1 / 3), phi, np.zeros(4, dtype=bool)).sum() == pytest.approx(1)
    unchanged = np.zeros(4, dtype=bool)  # rows that do not move any more hide who holds them: any may be held
    assert np.allclose(leakage.whole_numbers(true @ phi, phi, unchanged, 10) @ phi, true @ phi, atol=1e-3)


def test_distances_and_ranks():
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.5, 0.5])
    assert leakage.total_variation(p, p) == 0
    assert leakage.total_variation(p, q) == 0.5
    assert leakage.rank_correlation(np.array([0.1, 0.2, 0.7]), np.array([0.0, 0.3, 0.7])) == pytest.approx(1)
    assert leakage.rank_correlation(np.full(3, 1 / 3), q) is None


@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_audited_from_its_start_and_its_end(method, tmp_path):
    federation, _ = trained(tmp_path / "r", method, skewed())
    before = {s: restore(tmp_path / "r", federation).store.get(s) for s in range(4)}
    result = audit_run(restore(tmp_path / "r", federation), SERIAL)
    sends_bias = method in ("fedmix", "fedavg", "local-global")
    assert ("bias_single_step" in result["attacks"]["start"]) == sends_bias
    assert ("bias" in result["notes"]) != sends_bias
    if sends_bias:
        single = result["attacks"]["start"]["bias_single_step"]["total_variation"]["mean"]
        assert single < 0.6 * result["guess"]["total_variation"]["mean"]
    if method == "fedmix":
        for when in ("start", "end"):
            whole = result["attacks"][when]["posterior_whole"]
            assert whole["exact"] == whole["clients"] == 4  # three labels, three experts, whole numbers
            assert result["absent"][when]["wrong"] == 0
    again = restore(tmp_path / "r", federation)
    assert all(torch.equal(again.store.get(s)[n], v) for s in range(4) for n, v in before[s].items())


def test_what_leaks_is_the_side_information_where_that_is_not_the_label(tmp_path):
    for side, word in (("column", "p(c|s)"), ("client", "nothing of its labels")):
        federation, _ = trained(tmp_path / side, federation=small_federation(side=side), **{"data.side": side})
        result = audit_run(restore(tmp_path / side, federation), SERIAL)
        assert word in result["notes"]["posterior"]
        assert ("posterior" in result["attacks"]["start"]) == (side == "column")


def test_rows_that_come_back_unchanged_say_which_labels_are_absent(tmp_path):
    federation, _ = trained(tmp_path / "r", federation=skewed())
    result = audit_run(restore(tmp_path / "r", federation), SERIAL)
    assert result["absent"]["start"] == {"absent": 4, "found": 4, "wrong": 0}


def test_sums_say_the_same_of_every_member_and_noise_hides_the_rest(tmp_path):
    federation, _ = trained(tmp_path / "sums", **{"server.aggregation": "linear"})
    result = audit_run(restore(tmp_path / "sums", federation), SERIAL)
    for found in result["attacks"]["start"].values():
        estimates = [own["estimate"] for own in found["of_clients"]]
        assert all(estimate == estimates[0] for estimate in estimates)
    mean = np.average(result["true"], axis=0, weights=result["points"])
    single = result["attacks"]["start"]["bias_single_step"]["of_clients"][0]["estimate"]
    assert leakage.total_variation(np.array(single), mean) < 0.2  # of the cohort it does say something
    federation, summary = trained(tmp_path / "noise", **{"privacy.clip": 1.0, "privacy.noise": 0.5})
    result = audit_run(restore(tmp_path / "noise", federation), SERIAL)
    assert result["attacks"]["end"]["posterior_whole"]["exact"] == 0
    assert result["absent"]["end"]["found"] == 0  # every row comes back changed
    assert result["protection"]["epsilon"] == summary["privacy"]["epsilon"] > 0


def test_the_guarantee_is_that_of_the_gaussian_mechanism():
    """Balle and Wang (2018): delta(eps) = Phi(1/2s - eps s) - e^eps Phi(-1/2s - eps s), s the noise of all rounds together."""
    recipe = make_recipe({}, "fedmix", {"privacy.clip": 1.0, "privacy.noise": 8.0})
    parts = small_experiment("fedmix").algorithm.noisy_parts
    got = guarantee(recipe, parts, [[0, 1], [1, 2], [1], [0]])
    assert got["rounds_of_a_client"] == 3
    assert parts == 3
    s, eps = 8.0 / math.sqrt(3 * 3), got["epsilon"]
    delta = norm.cdf(1 / (2 * s) - eps * s) - math.exp(eps) * norm.cdf(-1 / (2 * s) - eps * s)
    assert delta == pytest.approx(1e-5, rel=1e-3)
    plain = make_recipe({}, "fedavg", {"privacy.clip": 1.0, "privacy.noise": 8.0})
    assert guarantee(plain, 1, [[0]] * 9)["epsilon"] == pytest.approx(eps)  # nine rounds of one noisy thing: as much
    assert guarantee(make_recipe({}), 3, [[0]])["epsilon"] is None


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"privacy.noise": 1.0}, "privacy.clip must be more than 0 with privacy.noise"),
        ({"privacy.clip": 1.0, "privacy.noise": 1.0, "fedmix.eta": 0.5}, "fedmix.eta must be 0 with privacy.noise"),
        ({"privacy.clip": -1.0}, "privacy.clip"),
        ({"privacy.delta": 0.0}, "privacy.delta"),
        ({"server.aggregation": "secure"}, "server.aggregation must be one of clients, linear"),
        ({"server.aggregation": "linear", "fedmix.eta": 0.5}, "fedmix.eta must be 0 with server.aggregation"),
    ],
)
def test_settings_that_cannot_protect_are_refused(changes, wrong):
    with pytest.raises(SettingError, match=wrong.replace("[", r"\[")):
        make_recipe({}, "fedmix", changes)


def test_bias_of_pruned_experts_and_their_sum_is_what_the_clients_moved(tmp_path):
    """The sum over experts of the output biases moves as FedAvg's one bias would: by rate (p(y|s) - mean softmax)."""
    experiment = small_experiment("fedmix", **{"training.batch_size": 1000, "fedmix.gate_through_features": False})
    algorithm, data = experiment.algorithm, experiment.federation.examples(1, "train")
    state = algorithm.init(0)
    message = algorithm.broadcast(state, 1)
    reply, _ = algorithm.client_update(message, algorithm.new_client(0), data, stream(0), None)
    moved = sum(reply.tensors[f"expert.{k}.out.bias"] - message.tensors[f"expert.{k}.out.bias"] for k in range(3))
    assert float(moved.sum()) == pytest.approx(0, abs=1e-6)
    p = torch.bincount(data.y, minlength=3) / len(data)
    phi = reply.tensors["phi"]
    experts = [subtree(message.tensors, f"expert.{k}") for k in range(3)]
    logits, _ = experiment.model.apply_all(experts, data.x, training=False)
    softmax = torch.softmax(logits, dim=2)
    mean = torch.einsum("nk,knc->c", phi[data.c], softmax) / len(data)
    assert torch.allclose(moved / experiment.recipe.training.client_lr, p - mean, atol=1e-4)


def test_sums_are_over_whole_cohorts_whoever_is_looked_at(tmp_path):
    """Seven of eight clients a round: the eighth is not alone in its sum, nor is a single client that is sampled."""
    federation = small_federation(clients=8)
    changes = {"server.aggregation": "linear", "clients_per_round": 7}
    trained(tmp_path / "r", federation=federation, **changes)
    found = restore(tmp_path / "r", federation)
    whole = audit_run(found, SERIAL)["attacks"]["start"]["posterior_whole"]
    assert whole["exact"] == 0
    one = audit_run(found, replace(SERIAL, clients=1))
    assert one["audited"] == one["attacks"]["start"]["posterior_whole"]["clients"] == 1
    assert one["attacks"]["start"]["posterior_whole"]["exact"] == 0
    assert one["guess"]["total_variation"]["mean"] > 0  # everybody's average is not the sampled client's


def test_the_server_knows_the_schedule_and_the_momentum(tmp_path):
    federation, _ = trained(tmp_path / "plain", "fedavg", skewed())
    trained(tmp_path / "cosine", "fedavg", skewed(), **{"training.schedule": "cosine", "training.momentum": 0.9})
    one, other = (audit_run(restore(tmp_path / name, federation), SERIAL)["attacks"] for name in ("plain", "cosine"))
    for when in ("start", "end"):
        for attack in ("bias_steps", "bias_normalised"):
            a, b = (found[when][attack]["total_variation"]["mean"] for found in (one, other))
            assert b < a + 0.15, (when, attack)


def test_what_says_nothing_and_what_is_reported_are_said(tmp_path):
    federation, _ = trained(tmp_path / "one", federation=skewed(), **{"fedmix.experts": 1})
    result = audit_run(restore(tmp_path / "one", federation), SERIAL)
    assert "one expert" in result["notes"]["posterior"]
    assert "posterior" not in result["attacks"]["start"]
    federation, _ = trained(tmp_path / "told", federation=skewed(), **{"fedmix.prior": "reported"})
    result = audit_run(restore(tmp_path / "told", federation), SERIAL)
    assert result["attacks"]["start"]["reported"]["exact"] == 4
    assert "share_private" in " ".join(result["notes"])


NOISY = {"privacy.clip": 1.0, "privacy.noise": 0.5}


def test_a_guarantee_rests_on_releases_that_are_whole(tmp_path):
    """A flipped bit, a missing line, a missing file: no guarantee, and the reason is said."""
    federation, summary = trained(tmp_path / "r", **NOISY)
    assert summary["privacy"]["rounds_of_a_client"] == 3
    file = tmp_path / "r" / "releases.jsonl"
    whole = file.read_text()
    (tmp_path / "r" / "metrics.jsonl").write_text("")  # it does not matter
    for text, why in (
        (whole, None),
        (whole + '{"round": 4, "cli', None),  # cut off while it was written: nobody was asked
        (whole.replace('"clients": [0, 1', '"clients": [2, 1', 1), "not what was written"),
        ("".join(whole.splitlines(keepends=True)[:-1]), "lines that a checkpoint knew are missing"),
        (whole.replace("{", "", 1), "cannot be read"),
        (None, "lines that a checkpoint knew are missing"),
    ):
        file.unlink() if text is None else file.write_text(text)
        found = audit_run(restore(tmp_path / "r", federation), SERIAL)["protection"]
        assert (found["epsilon"] is None) == (why is not None), why
        assert why is None or why in found["why_none"]
    parts = {name: small_experiment(name).algorithm.noisy_parts for name in METHODS}
    assert parts == {"fedmix": 3, "fedavg": 1, "biased-fedavg": 1, "local-global": 1, "independent": 0}


def test_a_round_that_is_trained_again_counts_twice(tmp_path, monkeypatch):
    """A crash after the answers of round 2 came in, before its checkpoint: the server has seen them."""
    federation, recipe = small_federation(), small_recipe(**NOISY)
    experiment = build(recipe, federation)
    saved = Checkpoints.save

    def crash(self, state, store, carried):
        if state.round == 2:
            raise KeyboardInterrupt
        saved(self, state, store, carried)

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", crash)
        directory = RunDirectory.open(tmp_path / "r", recipe, resume=False, overwrite=False)
        with pytest.raises(KeyboardInterrupt):
            run(experiment, directory, Where("serial"))
        directory.close()
    directory = RunDirectory.open(tmp_path / "r", recipe, resume=True, overwrite=False)
    summary = run(build(recipe, federation), directory, Where("serial"))
    directory.close()
    assert len(read_metrics(tmp_path / "r")) == 3
    assert summary["privacy"]["rounds_of_a_client"] == 4
    assert summary["privacy"]["epsilon"] == pytest.approx(guarantee(recipe, 3, [[0]] * 4)["epsilon"])


def test_refused_answers_were_seen_and_count(tmp_path):
    """Half of every cohort is over the median norm, and refused: the server has seen them all the same."""
    trained(tmp_path / "r", **NOISY, **{"server.norm_limit": 1.0})
    used = [line["clients"] for line in read_metrics(tmp_path / "r")]
    assert [len(cohort) for cohort in used] == [2, 2, 2]
    assert cohorts(tmp_path / "r", FIRST) == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_the_server_cannot_draw_a_clients_noise_again(tmp_path, engine):
    """Same recipe, same seed, other noise; where a simulation asks for the same noise there is no guarantee."""

    def twice(**changes):
        federation, made = small_federation(), []
        for number in range(2):
            recipe = small_recipe(**NOISY, **changes, rounds=1)
            out = tmp_path / f"{len(changes)}-{number}"
            directory = RunDirectory.open(out, recipe, resume=False, overwrite=False)
            made.append((run(build(recipe, federation), directory, Where(engine)), load_file(_newest(out))))
            directory.close()
        return made

    def _newest(out):
        return out / "checkpoints" / "round-000001" / "server.safetensors"

    (summary, one), (_, other) = twice()
    assert not torch.equal(one["experts.0.out.weight"], other["experts.0.out.weight"])
    assert summary["privacy"]["epsilon"] > 0
    (summary, one), (_, other) = twice(**{"privacy.reproducible": True})
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert summary["privacy"]["epsilon"] is None
    printed = StringIO()
    Console(file=printed, width=200).print(summary_table(summary))
    assert "no guarantee: privacy.reproducible draws the noise from the recipe's seed" in printed.getvalue()


def test_noise_of_a_client_is_independent_of_the_seeds_noise():
    """The attack that was possible: the noise regenerated from the public seed, subtracted from what was sent."""
    experiment = small_experiment("fedavg", **{"privacy.clip": 1.0, "privacy.noise": 5.0}, model=Wide)
    algorithm = experiment.algorithm
    sent = algorithm.broadcast(algorithm.init(0), 0)
    task = Task("train", 1, 0, sent)
    answer, _ = perform(algorithm, experiment.federation, 0, task, algorithm.new_client(0))
    plain = small_experiment("fedavg", **{"privacy.clip": 1.0}, model=Wide)
    true, _ = perform(plain.algorithm, plain.federation, 0, task, algorithm.new_client(0))
    guessed = repeatable_noise(task.stream(0).child("noise"))
    regenerated = {name: -5.0 * 2 * guessed(value.shape) for name, value in sent.tensors.items()}
    moved, hidden, left = (
        torch.cat([tensors[name].flatten() for name in sent.tensors])
        for tensors in (
            {name: true.tensors[name] - w for name, w in sent.tensors.items()},
            {name: answer.tensors[name] - w for name, w in sent.tensors.items()},
            {name: answer.tensors[name] - w - regenerated[name] for name, w in sent.tensors.items()},
        )
    )
    for what in (hidden, left):
        assert abs(float(torch.cosine_similarity(moved, what, dim=0))) < 0.1
