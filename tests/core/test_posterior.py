"""phi: the closed form, dampening, the server's update (sec:fixedformmath, Algorithm 1)."""

import math

import pytest
import torch

from fedmix.core import posterior
from fedmix.core.objective import lower_bound


@pytest.fixture
def batch():
    """log p(y, z|x, s) [B, K] in float64, categories c [B] out of 4 of which one is missing."""
    g = torch.Generator().manual_seed(3)
    log_joint = -3 * torch.rand(23, 5, generator=g, dtype=torch.float64)
    c = torch.tensor([0, 1, 3])[torch.randint(3, (23,), generator=g)]
    return log_joint, c


def naive_phi(log_joint, c, categories, beta):
    """eq:phi_solution, as it is written: a product over the points of c, to the power 1/(M_c beta), over its sum."""
    rows = []
    for category in range(categories):
        points = [i for i in range(len(c)) if int(c[i]) == category]
        powers = []
        for k in range(log_joint.shape[1]):
            product = 1.0
            for i in points:
                product *= math.exp(float(log_joint[i, k]))
            powers.append(product ** (1 / (len(points) * beta)) if points else 1.0)
        rows.append([p / sum(powers) for p in powers])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("beta", [0.3, 0.8, 1.0, 2.5])
def test_closed_form_equals_the_papers_product(batch, beta):
    log_joint, c = batch
    phi, present = posterior.solve_phi(log_joint, c, 4, beta)
    assert torch.allclose(phi, naive_phi(log_joint, c, 4, beta), atol=1e-13)
    assert present.tolist() == [True, True, False, True]


def test_points_that_are_not_there_do_not_count(batch):
    log_joint, c = batch
    there = torch.arange(len(c)) % 3 > 0
    filled, present = posterior.solve_phi(log_joint, c, 4, 0.8, there)
    alone, wanted = posterior.solve_phi(log_joint[there], c[there], 4, 0.8)
    assert torch.allclose(filled, alone, atol=1e-14)
    assert torch.equal(present, wanted)


@pytest.mark.parametrize("beta", [0.3, 0.8, 2.5])
def test_closed_form_satisfies_the_optimality_conditions(batch, beta):
    """On the simplex's interior the bound's gradient must be constant over k: its tangent part vanishes."""
    log_joint, c = batch
    phi = posterior.solve_phi(log_joint, c, 4, beta)[0].requires_grad_()
    (gradient,) = torch.autograd.grad(lower_bound(log_joint, phi[c], beta).sum(), phi)
    tangent = gradient - gradient.mean(dim=1, keepdim=True)
    counts = torch.bincount(c, minlength=4).clamp(min=1).unsqueeze(1)
    assert (tangent / counts).abs().max() < 1e-10


def test_no_point_of_the_simplex_beats_the_closed_form(batch):
    log_joint, c = batch
    best, _ = posterior.solve_phi(log_joint, c, 4, 0.8)
    reached = lower_bound(log_joint, best[c], 0.8).sum()
    g = torch.Generator().manual_seed(0)
    for scale in (0.01, 0.3, 3.0):
        for _ in range(200):
            noise = torch.randn(best.shape, generator=g, dtype=torch.float64)
            other = torch.softmax(best.log() + scale * noise, dim=1)
            assert lower_bound(log_joint, other[c], 0.8).sum() <= reached + 1e-12


def test_limits_of_beta(batch):
    log_joint, c = batch
    cold, _ = posterior.solve_phi(log_joint, c, 4, 1e-4)
    hot, _ = posterior.solve_phi(log_joint, c, 4, 1e6)
    for category in (0, 1, 3):
        mean = log_joint[c == category].mean(dim=0)
        assert cold[category].argmax() == mean.argmax()
        assert cold[category].max() > 1 - 1e-6
    assert torch.allclose(hot, torch.full_like(hot, 1 / 5), atol=1e-5)


def test_temperature_goes_from_its_start_to_beta_and_stays():
    assert [posterior.temperature(1.2, 2.0, 4, t) for t in range(1, 7)] == pytest.approx([2.0, 1.8, 1.6, 1.4, 1.2, 1.2])
    assert posterior.temperature(0.8, 0.0, 10, 1) == 0.8


def test_products_that_underflow_do_not():
    """300 points of log-likelihood -1000: the product of probabilities is zero in any float, the closed form is not."""
    log_joint = torch.full((300, 2), -1000.0)
    log_joint[:, 1] -= 1.0
    phi, _ = posterior.solve_phi(log_joint, torch.zeros(300, dtype=torch.int64), 1, 1.0)
    assert phi[0, 0].item() == pytest.approx(1 / (1 + math.exp(-1)), abs=1e-6)


def test_permuting_experts_permutes_phi(batch):
    log_joint, c = batch
    order = torch.tensor([3, 0, 4, 1, 2])
    phi, _ = posterior.solve_phi(log_joint, c, 4, 0.8)
    permuted, _ = posterior.solve_phi(log_joint[:, order], c, 4, 0.8)
    torch.testing.assert_close(permuted, phi[:, order], rtol=1e-15, atol=0)  # a sum over k in another order


def test_dampening_moves_only_rows_that_the_batch_holds(batch):
    log_joint, c = batch
    old = posterior.uniform(4, 5).double()
    new, present = posterior.solve_phi(log_joint, c, 4, 0.8)
    phi = posterior.dampen(old, new, present, gamma=0.9)
    assert torch.equal(phi[2], old[2])
    assert torch.allclose(phi[0], 0.9 * old[0] + 0.1 * new[0])
    assert torch.allclose(phi.sum(dim=1), torch.ones(4, dtype=torch.float64))


def test_expert_marginal_is_the_mean_of_phi_over_the_points():
    phi = torch.rand(4, 3, dtype=torch.float64)
    c = torch.tensor([0, 0, 3, 1, 3, 3])
    q = posterior.expert_marginal(phi, posterior.category_shares(c, 4))
    assert torch.allclose(q, phi[c].mean(dim=0), atol=1e-7)


def test_entropy_gradient_is_autograds():
    phi = torch.softmax(torch.randn(4, 3, dtype=torch.float64), dim=1).requires_grad_()
    p_c = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    m = p_c @ phi
    (wanted,) = torch.autograd.grad(-(m * m.log()).sum(), phi)
    assert torch.allclose(posterior.entropy_gradient(phi.detach(), p_c), wanted, atol=1e-12)


def test_phi_gradient_is_algorithm_1_in_the_tangent_space():
    phi = torch.softmax(torch.randn(4, 3, dtype=torch.float64), dim=1)
    phi_s = torch.softmax(torch.randn(2, 4, 3, dtype=torch.float64), dim=2)
    n = [30.0, 70.0]
    p_c = torch.full((4,), 0.25, dtype=torch.float64)
    delta = torch.zeros(4, 3, dtype=torch.float64)
    for s in range(2):
        delta += n[s] / sum(n) * (phi - phi_s[s])
    delta -= 0.7 * posterior.entropy_gradient(phi, p_c)
    delta -= delta.mean(dim=1, keepdim=True)
    got = posterior.phi_gradient(phi, posterior.mean_move(phi, phi_s, torch.tensor(n) / sum(n)), p_c, entropy=0.7)
    assert torch.allclose(got, delta, atol=1e-7)
    assert got.sum(dim=1).abs().max() < 1e-12


def test_ascending_the_entropy_gradient_spreads_the_use_of_experts():
    phi = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
    p_c = torch.tensor([0.5, 0.5])
    delta = posterior.phi_gradient(phi, torch.zeros_like(phi), p_c, entropy=1.0)
    after = posterior.to_simplex(phi - 0.1 * delta, 1e-6)
    assert posterior.expert_marginal(after, p_c).max() < posterior.expert_marginal(phi, p_c).max()


@pytest.mark.parametrize("step", [0.0, 1e-3, 0.5, 5.0])
def test_rows_are_on_the_simplex_after_any_step(step):
    g = torch.Generator().manual_seed(1)
    phi = torch.softmax(4 * torch.randn(7, 4, generator=g), dim=1)
    back = posterior.to_simplex(phi + step * torch.randn(7, 4, generator=g), 1e-6)
    assert (back > 0).all()
    assert torch.allclose(back.sum(dim=1), torch.ones(7), atol=1e-6)


def test_rows_that_nobody_changed_are_not_held():
    phi = posterior.uniform(3, 2)
    phi_s = phi.repeat(2, 1, 1)
    phi_s[1, 2] = torch.tensor([0.6, 0.4])
    assert posterior.rows_held(phi, phi_s).tolist() == [False, False, True]
