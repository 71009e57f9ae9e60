"""The gate (eq:gate_design), the log-joint, the bound, the losses and the mixture, against loops in float64."""

import math

import pytest
import torch

from fedmix.core import gate, objective

K, B, H, CLASSES = 3, 6, 4, 5


@pytest.fixture
def world():
    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    theta = {"pi": draw(K), "A": draw(H, K), "b": draw(K)}
    return theta, draw(K, B, H), draw(K, B, CLASSES), torch.randint(CLASSES, (B,), generator=g)


def softmax(values):
    exps = [math.exp(v) for v in values]
    return [e / sum(exps) for e in exps]


def naive_gate(theta, features, i, held, over):
    pi = softmax([float(theta["pi"][k]) for k in held])
    h = [sum(pi[j] * float(features[j, i, d]) for j in range(len(held))) for d in range(H)]
    logits = [sum(float(theta["A"][d, k]) * h[d] for d in range(H)) + float(theta["b"][k]) for k in over]
    return softmax(logits)


def test_gate_equals_the_papers_formula(world):
    theta, features, _, _ = world
    p = gate.log_gate(theta, features, [0, 1, 2]).exp()
    for i in range(B):
        assert p[i].tolist() == pytest.approx(naive_gate(theta, features, i, [0, 1, 2], [0, 1, 2]), abs=1e-12)


def test_gate_of_a_pruned_client_renormalises_pi_and_in_prediction_the_softmax(world):
    theta, features, _, _ = world
    held = [0, 2]
    training = gate.log_gate(theta, features[held], held).exp()
    prediction = gate.log_gate(theta, features[held], held, over=held).exp()
    for i in range(B):
        assert training[i].tolist() == pytest.approx(naive_gate(theta, features[held], i, held, [0, 1, 2]), abs=1e-12)
        assert prediction[i].tolist() == pytest.approx(naive_gate(theta, features[held], i, held, held), abs=1e-12)


def test_new_gate_is_uniform():
    theta = gate.new_gate(H, K)
    p = gate.log_gate(theta, torch.randn(K, B, H), [0, 1, 2]).exp()
    assert torch.allclose(p, torch.full((B, K), 1 / K))


def test_mean_gate_equals_a_loop_over_clients(world):
    _, features, _, _ = world
    g = torch.Generator().manual_seed(5)
    thetas = [
        {
            "pi": torch.randn(K, generator=g).double(),
            "A": torch.randn(H, K, generator=g).double(),
            "b": torch.randn(K, generator=g).double(),
        }
        for _ in range(7)
    ]
    p_s = torch.tensor([0.1, 0.2, 0.05, 0.25, 0.1, 0.1, 0.2], dtype=torch.float64)
    wanted = sum(p * gate.log_gate(theta, features, [0, 1, 2]).exp() for p, theta in zip(p_s, thetas, strict=True))
    for chunk in (1, 3, 64):
        got = gate.mean_log_gate(thetas, p_s.log(), features, [0, 1, 2], chunk=chunk).exp()
        assert torch.allclose(got, wanted, atol=1e-12)
    p_sx = torch.softmax(
        torch.randn(features.shape[1], 7, generator=g, dtype=torch.float64), dim=1
    )  # p(s|x): of each x
    wanted = sum(p_sx[:, s : s + 1] * gate.log_gate(theta, features, [0, 1, 2]).exp() for s, theta in enumerate(thetas))
    for chunk in (1, 3, 64):
        got = gate.mean_log_gate(thetas, p_sx.log(), features, [0, 1, 2], chunk=chunk).exp()
        assert torch.allclose(got, wanted, atol=1e-12)


def test_one_gate_takes_the_place_of_many():
    """Distilled from gates that are all the same it is that gate; from different ones it is nearer to their mean than any."""
    g = torch.Generator().manual_seed(6)
    features = torch.randn(K, 400, H, generator=g)
    held = list(range(K))

    def some_gate():
        return {n: torch.randn(s, generator=g) for n, s in (("pi", (K,)), ("A", (H, K)), ("b", (K,)))}

    def kl(theta, target):
        return float((target * (target.log() - gate.log_gate(theta, features, held))).sum(dim=1).mean())

    one = some_gate()
    target = gate.log_gate(one, features, held).exp()
    assert kl(gate.distil(features, target), target) < 1e-3
    many = [some_gate() for _ in range(5)]
    p_s = torch.full((5,), 0.2)
    target = gate.mean_log_gate(many, p_s.log(), features, held).exp()
    distilled = kl(gate.distil(features, target), target)
    assert distilled < 0.5 * min(kl(theta, target) for theta in many)
    assert distilled < kl(gate.new_gate(H, K), target)


def test_log_likelihood_is_cross_entropy_of_each_expert(world):
    _, _, logits, y = world
    got = objective.log_likelihood(logits, y)
    for k in range(K):
        wanted = -torch.nn.functional.cross_entropy(logits[k], y, reduction="none")
        assert torch.allclose(got[:, k], wanted, atol=1e-12)


def test_bound_losses_and_mixture_equal_loops(world):
    theta, features, logits, y = world
    log_lik = objective.log_likelihood(logits, y)
    log_gate = gate.log_gate(theta, features, [0, 1, 2])
    joint = objective.log_joint(log_lik, log_gate)
    g = torch.Generator().manual_seed(2)
    phi = torch.softmax(torch.randn(2, K, generator=g, dtype=torch.float64), dim=1)
    c = torch.tensor([0, 1, 1, 0, 1, 0])
    beta = 0.8
    bound = loss = direct = 0.0
    for i in range(B):
        p_gate = naive_gate(theta, features, i, [0, 1, 2], [0, 1, 2])
        p_lik = [softmax(logits[k, i].tolist())[int(y[i])] for k in range(K)]
        q = phi[c[i]].tolist()
        expected = sum(q[k] * (math.log(p_lik[k]) + math.log(p_gate[k])) for k in range(K))
        bound += expected - beta * sum(v * math.log(v) for v in q)
        loss -= expected / B
        direct -= math.log(sum(p_lik[k] * p_gate[k] for k in range(K))) / B
    assert float(objective.lower_bound(joint, phi[c], beta).sum()) == pytest.approx(bound, abs=1e-10)
    assert float(objective.bound_losses(log_lik, log_gate, phi[c], phi[c]).mean()) == pytest.approx(loss, abs=1e-10)
    assert float(objective.direct_losses(joint).mean()) == pytest.approx(direct, abs=1e-10)
    mixture = objective.log_mixture(logits, log_gate).exp()
    for i in range(B):
        p_gate = naive_gate(theta, features, i, [0, 1, 2], [0, 1, 2])
        wanted = [sum(p_gate[k] * softmax(logits[k, i].tolist())[v] for k in range(K)) for v in range(CLASSES)]
        assert mixture[i].tolist() == pytest.approx(wanted, abs=1e-12)


def test_bound_is_never_above_the_direct_objective_for_beta_one(world):
    """Jensen: with beta = 1 the bound holds for any q, and is tight at the true posterior."""
    theta, features, logits, y = world
    joint = objective.log_joint(objective.log_likelihood(logits, y), gate.log_gate(theta, features, [0, 1, 2]))
    direct = -objective.direct_losses(joint).sum()
    g = torch.Generator().manual_seed(4)
    for _ in range(50):
        phi = torch.softmax(2 * torch.randn(B, K, generator=g, dtype=torch.float64), dim=1)
        assert objective.lower_bound(joint, phi, 1.0).sum() <= direct + 1e-12
    exact = torch.softmax(joint, dim=1)
    assert float(objective.lower_bound(joint, exact, 1.0).sum()) == pytest.approx(float(direct), abs=1e-10)


def test_pooled_experts_are_the_true_posterior_whatever_each_has_specialised_on(world):
    """Bayes: an expert that saw label y with weight q(z=k|y) knows p(y|x) q(z=k|y), up to a factor."""
    _, _, logits, _ = world
    truth = torch.softmax(logits[0], dim=1)
    g = torch.Generator().manual_seed(5)
    phi = torch.softmax(2 * torch.randn(CLASSES, K, generator=g, dtype=torch.float64), dim=1)
    experts = torch.empty(K, B, CLASSES, dtype=torch.float64)
    for k in range(K):
        for i in range(B):
            seen = [float(truth[i, v] * phi[v, k]) for v in range(CLASSES)]
            experts[k, i] = torch.tensor([math.log(p / sum(seen)) for p in seen], dtype=torch.float64) + 3 * k - i
    assert objective.log_pooled(experts, phi).exp() == pytest.approx(truth, abs=1e-12)
    alike = torch.full((CLASSES, K), 1 / K, dtype=torch.float64)
    assert (objective.log_pooled(experts, alike).exp() - truth).abs().max() > 0.05


def test_a_label_that_an_expert_never_saw_does_not_decide_alone(world):
    _, _, logits, _ = world
    phi = torch.full((CLASSES, K), 1 / K, dtype=torch.float64)
    phi[0] = torch.tensor([1 - 2e-6, 1e-6, 1e-6], dtype=torch.float64)
    floor = phi.clone()
    floor[0] = torch.tensor([1 - 2e-6, 1e-3, 1e-3], dtype=torch.float64)
    assert torch.equal(objective.log_pooled(logits, phi), objective.log_pooled(logits, floor))


def test_own_label_counts_are_bayes(world):
    """A client whose inputs differ from everybody's by its labels alone: p(x|y) is the same, p(y|s) is not."""
    g = torch.Generator().manual_seed(6)
    p_xy = torch.softmax(torch.randn(CLASSES, B, generator=g, dtype=torch.float64), dim=1)  # p(x|y), B inputs in all
    p_y = torch.softmax(torch.randn(CLASSES, generator=g, dtype=torch.float64), dim=0)
    mine = torch.tensor([4.0, 0.0, 1.0, 7.0, 0.0], dtype=torch.float64)
    everybody = p_xy.T * p_y
    log_p = (everybody / everybody.sum(dim=1, keepdim=True)).log()
    wanted = p_xy.T * (mine + p_y)  # and one more point
    found = objective.log_counted(log_p, mine, p_y).exp()
    assert found == pytest.approx(wanted / wanted.sum(dim=1, keepdim=True), abs=1e-12)
    assert objective.log_counted(log_p, torch.zeros_like(mine), p_y) == pytest.approx(log_p, abs=1e-12)


def test_a_label_that_nobody_has_stays_as_improbable_as_it_was(world):
    log_p = torch.log_softmax(world[2][0], dim=1)
    p_y = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0], dtype=torch.float64)
    found = objective.log_counted(log_p, torch.tensor([3.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64), p_y)
    assert torch.isfinite(found).all()
    assert (found[:, 2] - found[:, 3]) == pytest.approx(log_p[:, 2] - log_p[:, 3], abs=1e-12)


def test_full_steps_are_those_of_the_expert_with_the_largest_share():
    q = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.3, 0.6, 0.1], [0.0, 0.0, 1.0]], dtype=torch.float64)
    weight = torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.0], dtype=torch.float64)  # the last point is not there
    log_lik = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    both = torch.stack([q, q.flip(1)])
    same = objective.full_steps(log_lik, both, weight.expand(2, 4))
    assert torch.equal(same, log_lik)
    (full,) = torch.autograd.grad((both * same).sum(), log_lik)
    shares = [sum(float(q[i, k]) for i in range(3)) / 3 for k in range(3)]  # 0.5, 0.4, 0.1
    for i in range(4):
        for k in range(3):
            assert float(full[0, i, k]) == pytest.approx(float(q[i, k]) / max(shares), abs=1e-12)
    assert (weight @ full[0]).tolist() == pytest.approx([1.0, 0.8, 0.2])
    assert torch.allclose(full[1], full[0].flip(1))
    nobody = objective.full_steps(log_lik[0], q, 0 * weight)  # a client without points in this step of its group
    assert torch.isfinite(torch.autograd.grad(nobody.sum(), log_lik)[0]).all()
