"""Clipping, noise, projection: against scipy and against what they promise."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import kstest

from fedmix.core import health, privacy
from fedmix.rng import stream


def test_the_projection_is_the_nearest_point_of_the_simplex():
    g = torch.Generator().manual_seed(0)
    for _ in range(10):
        v = torch.randn(2, 5, generator=g, dtype=torch.float64)
        got = privacy.project_to_simplex(v)
        assert torch.allclose(got.sum(dim=1), torch.ones(2, dtype=torch.float64))
        assert (got >= 0).all()
        for row, nearest in zip(v.numpy(), got.numpy(), strict=True):
            found = minimize(
                lambda p, row=row: ((p - row) ** 2).sum(),
                np.full(5, 0.2),
                bounds=[(0, 1)] * 5,
                constraints={"type": "eq", "fun": lambda p: p.sum() - 1},
                method="SLSQP",
                options={"ftol": 1e-14},
            )
            assert np.allclose(found.x, nearest, atol=1e-5)
    inside = torch.tensor([[0.2, 0.3, 0.5]])
    assert torch.allclose(privacy.project_to_simplex(inside), inside)


def test_an_update_is_clipped_as_a_whole():
    moved = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}
    assert privacy.clipped(moved, 10.0) == moved
    short = privacy.clipped(moved, 1.0)
    assert torch.allclose(torch.cat([v.flatten() for v in short.values()]), torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("source", [privacy.noise_of_this_machine, privacy.repeatable_noise(stream(0))])
def test_noise_has_the_size_it_says_and_is_normal(source):
    sent = {"w": torch.zeros(20_000)}
    back = {"w": torch.full((20_000,), 0.5)}
    clip, size = 2.0, 0.3
    got = privacy.noisy_weights(sent, back, clip, size, source)["w"]
    mean = clip / 20_000**0.5  # of each number, once the whole is clipped
    assert float(got.mean()) == pytest.approx(mean, abs=5 * 1.2 / 20_000**0.5)
    assert float(got.std()) == pytest.approx(size * 2 * clip, rel=0.05)
    assert kstest((got - mean).numpy() / (size * 2 * clip), "norm").pvalue > 1e-6
    no_noise = privacy.noisy_weights(sent, back, 1e9, 0.0, source)["w"]
    assert torch.allclose(no_noise, back["w"])


def test_noise_of_this_machine_follows_no_seed():
    """Two numbers of a pair, and two calls, have nothing to do with each other, whatever torch and numpy are seeded with."""
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002 (the global generator is what must not matter)
        draws.append(privacy.noise_of_this_machine([3, 10_001]))
    assert draws[0].shape == (3, 10_001)
    together = torch.stack([draws[0].flatten(), draws[1].flatten(), draws[0].flatten().roll(15_002)])
    correlations = torch.corrcoef(together)[~torch.eye(3, dtype=torch.bool)]
    assert float(correlations.abs().max()) < 0.04
    repeated = [privacy.repeatable_noise(stream(0, "a"))([4]) for _ in range(2)]
    assert torch.equal(*repeated)


@pytest.mark.parametrize("source", [privacy.noise_of_this_machine, privacy.repeatable_noise(stream(0))])
def test_noisy_posteriors_are_posteriors(source):
    rows = torch.softmax(torch.randn(7, 4), dim=1)
    got = privacy.noisy_rows(rows, 0.5, source)
    assert torch.allclose(got.sum(dim=1), torch.ones(7), atol=1e-5)
    assert (got >= 0).all()
    assert not torch.allclose(got, rows, atol=0.05)
    assert torch.allclose(privacy.noisy_rows(rows[0], 0.0, source), rows[0], atol=1e-6)


def test_troubles_are_said():
    even = torch.full((6, 4), 0.25)
    assert health.of_clients(even, 0.5, 3, 100) == []  # nobody has answered yet
    good = torch.eye(4)[[0, 1, 2, 3, 0, 1]] * 0.96 + 0.01
    assert health.of_clients(good, 0.0, 3, 100) == []
    taken = torch.tensor([[0.97, 0.01, 0.01, 0.01]]).expand(6, 4)
    assert health.of_clients(taken, 0.0, 3, 100) == ["collapse: expert 0 has 97 % of all use"]
    idle = torch.tensor([[0.6, 0.39, 0.005, 0.005]]).expand(6, 4)
    assert health.of_clients(idle, 0.0, 3, 100) == ["idle: experts 2, 3 are used by almost nobody"]
    early, late = (health.of_clients(idle, 0.5, t, 100) for t in (3, 90))
    assert early[1].startswith("premature pruning: experts 2, 3 are sent to no client any more after round 3 of 100")
    assert late[1].startswith("pruned away: ")
    one_keeps_it = idle.clone()
    one_keeps_it[0] = torch.tensor([0.06, 0.06, 0.82, 0.06])
    assert health.of_clients(one_keeps_it, 0.5, 3, 100) == [
        "premature pruning: expert 3 is sent to no client any more after round 3 of 100; nobody trains it"
    ]
    between = torch.tensor([[0.4, 0.36, 0.12, 0.12]]).expand(
        6, 4
    )  # below the client's eta/K, above the server's 0.9 eta/K
    assert health.of_clients(between, 0.5, 90, 100) == []  # they are sent again, and trained
    below = torch.tensor([[0.4, 0.39, 0.105, 0.105]]).expand(6, 4)
    assert "experts 2, 3 are sent to no client" in health.of_clients(below, 0.5, 90, 100)[0]
    assert health.of_use(torch.ones(1)) == []
