"""Expert-wise averaging (eq:fedmixPavg), pruning (Algorithm 2), divergence (sec:grad_alignment), optimisers."""

import math

import pytest
import torch

from fedmix.core import aggregate, divergence, prune
from fedmix.core.optim import LARGE, adam, keep_rows, large_and_alone, rate_factor, sgd


def test_expert_weights_equal_bayes_rule():
    q = torch.tensor([[0.7, 0.3, 0.0], [0.2, 0.8, 0.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
    n = torch.tensor([10.0, 30.0, 60.0])
    got = aggregate.expert_weights(q, n)
    for k in range(2):
        joint = [float(q[s, k]) * float(n[s]) / 100 for s in range(3)]
        assert got[:, k].tolist() == pytest.approx([j / sum(joint) for j in joint], abs=1e-12)
    assert got[:, 2].tolist() == [0, 0, 0]  # nobody kept it: zero, not NaN


def test_one_expert_is_fedavgs_weighting():
    n = torch.tensor([10.0, 30.0, 60.0])
    assert torch.allclose(aggregate.expert_weights(torch.ones(3, 1), n)[:, 0], aggregate.client_weights(n))


def test_permuting_clients_permutes_their_weights_and_leaves_the_update():
    g = torch.Generator().manual_seed(0)
    q, n = torch.rand(4, 3, generator=g), torch.tensor([5.0, 7.0, 11.0, 2.0])
    w = {"a": torch.randn(3, 2, generator=g).double()}
    w_s = [{"a": torch.randn(3, 2, generator=g).double()} for _ in range(4)]
    order = [2, 0, 3, 1]
    p = aggregate.expert_weights(q, n)
    assert torch.allclose(aggregate.expert_weights(q[order], n[order]), p[order], atol=1e-15)
    one = aggregate.mean_delta(w, aggregate.deltas(w, w_s), p[:, 0])["a"]
    other = aggregate.mean_delta(w, aggregate.deltas(w, [w_s[i] for i in order]), p[order, 0])["a"]
    assert torch.allclose(one, other, atol=1e-12)


def test_mean_delta_is_the_weighted_sum_and_skips_who_did_not_return():
    w = {"a": torch.zeros(2)}
    w_s = [{"a": torch.tensor([1.0, 2.0])}, None, {"a": torch.tensor([3.0, -1.0])}]
    delta = aggregate.mean_delta(w, aggregate.deltas(w, w_s), torch.tensor([0.25, 0.0, 0.75]))
    assert delta["a"].tolist() == pytest.approx([-2.5, 0.25])


def test_plain_averaging_is_sgd_of_rate_one():
    w = {"a": torch.randn(3)}
    w_s = [{"a": torch.randn(3)} for _ in range(2)]
    p = torch.tensor([0.4, 0.6])
    step = sgd(1.0)
    new, _ = step.update(w, aggregate.mean_delta(w, aggregate.deltas(w, w_s), p), step.init(w), 1.0)
    assert torch.allclose(new["a"], 0.4 * w_s[0]["a"] + 0.6 * w_s[1]["a"], atol=1e-6)


def test_eta_zero_keeps_every_expert_and_changes_nothing():
    q = torch.tensor([0.999, 0.001, 0.0])
    assert prune.kept(q, 0.0) == [0, 1, 2]
    phi = torch.softmax(torch.randn(4, 3), dim=1)
    assert prune.renormalise(phi, [0, 1, 2]) is phi
    assert prune.reweigh(phi, phi, [0, 1, 2]) is phi


def test_kept_experts_are_those_over_the_threshold_and_always_the_largest():
    q = torch.tensor([0.5, 0.3, 0.15, 0.05])
    assert prune.kept(q, 0.8) == [0, 1]  # eta/K = 0.2
    assert prune.kept(q, 0.5) == [0, 1, 2]  # 0.125
    assert prune.kept(q, 0.65) == [0, 1]  # 0.1625
    assert prune.kept(q, 0.65, slack=prune.SERVER_SLACK) == [0, 1, 2]  # 0.14625: the server sends it again
    assert prune.kept(q, 1.0, held=[2, 3]) == [2]  # both under 0.25: the larger of those it was sent stays


def test_pruned_phi_stays_on_the_simplex_and_leaves_pruned_experts_alone():
    g = torch.Generator().manual_seed(0)
    phi = torch.softmax(torch.randn(5, 4, generator=g, dtype=torch.float64), dim=1)
    keep = [0, 3]
    phi_bar = torch.softmax(torch.randn(5, 2, generator=g, dtype=torch.float64), dim=1)
    new = prune.reweigh(phi_bar, phi, keep)
    assert torch.equal(new[:, [1, 2]], phi[:, [1, 2]])
    assert torch.allclose(new.sum(dim=1), torch.ones(5, dtype=torch.float64))
    for c in range(5):
        mass = float(phi[c, 0] + phi[c, 3])
        assert float(new[c, 3]) == pytest.approx(float(phi_bar[c, 1]) * mass)
        assert float(prune.renormalise(phi, keep)[c, 1]) == pytest.approx(float(phi[c, 3]) / mass)


def naive_divergence(deltas, p):
    total = 0.0
    for i in range(len(deltas)):
        for j in range(len(deltas)):
            a, b = deltas[i].tolist(), deltas[j].tolist()
            norm = math.sqrt(sum(v * v for v in a)) * math.sqrt(sum(v * v for v in b))
            if norm:
                total += float(p[i] * p[j]) * 0.5 * (1 - sum(x * y for x, y in zip(a, b, strict=True)) / norm)
    return total


def test_divergence_equals_the_double_loop():
    g = torch.Generator().manual_seed(0)
    deltas = torch.randn(5, 11, generator=g, dtype=torch.float64)
    p = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25], dtype=torch.float64)
    assert divergence.tensor_divergence(deltas, p) == pytest.approx(naive_divergence(deltas, p), abs=1e-12)
    deltas[2] = 0
    assert divergence.tensor_divergence(deltas, p) == pytest.approx(naive_divergence(deltas, p), abs=1e-12)


def test_divergence_of_equal_and_of_opposite_updates():
    same = torch.ones(2, 4)
    assert divergence.tensor_divergence(same, torch.tensor([0.5, 0.5])) == pytest.approx(0, abs=1e-7)
    assert divergence.tensor_divergence(torch.zeros(2, 4), torch.tensor([0.5, 0.5])) == 0
    same[1] *= -1
    assert divergence.tensor_divergence(same, torch.tensor([0.5, 0.5])) == pytest.approx(0.5)


def test_expert_divergence_looks_at_each_tensor_and_leaves_out_who_did_not_return():
    w = {"a": torch.zeros(2), "b": torch.zeros(3)}
    up, down = {"a": torch.ones(2), "b": torch.ones(3)}, {"a": -torch.ones(2), "b": torch.ones(3)}
    got = divergence.expert_divergence(aggregate.deltas(w, [up, None, down]), torch.tensor([0.5, 0.0, 0.5]))
    assert got == pytest.approx({"a": 0.5, "b": 0.0}, abs=1e-7)
    assert divergence.expert_divergence(aggregate.deltas(w, [None, None]), torch.zeros(2)) == {"a": 0.0, "b": 0.0}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (adam(0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
        (adam(0.3, rows=True), lambda p: torch.optim.Adam(p, lr=0.3)),
        (sgd(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (
            sgd(0.1, momentum=0.9, weight_decay=0.01),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        ),
    ],
    ids=["adam", "adam-rows", "sgd", "sgd-momentum-decay"],
)
def test_optimisers_are_torchs(ours, theirs):
    g = torch.Generator().manual_seed(0)
    params = {
        "a": torch.randn(4, 3, generator=g, dtype=torch.float64),
        "b": torch.randn(5, generator=g, dtype=torch.float64),
    }
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    reference = theirs(list(leaves.values()))
    state = ours.init(params)
    for _ in range(50):
        grads = {name: torch.randn(value.shape, generator=g, dtype=torch.float64) for name, value in params.items()}
        params, state = ours.update(params, grads, state, 1.0)
        for name, leaf in leaves.items():
            leaf.grad = grads[name].clone()
        reference.step()
    for name, leaf in leaves.items():
        assert torch.allclose(params[name], leaf.detach(), atol=1e-12)


def test_a_parameter_without_gradient_is_left_alone():
    step = sgd(0.1, momentum=0.9, weight_decay=0.5)
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    new, state = step.update(params, {"a": torch.ones(2)}, step.init(params), 1.0)
    assert torch.equal(new["b"], params["b"])
    assert state["velocity"]["b"].abs().sum() == 0


def test_rows_that_sit_a_round_out_keep_their_adam_state():
    """Stepping row 0 alone, then both: row 1 must look as after its first step."""
    step = adam(0.1, rows=True)
    phi, grad = {"phi": torch.ones(2, 3)}, {"phi": torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])}
    held = torch.tensor([True, False])
    new, after = step.update(phi, grad, step.init(phi), 1.0)
    kept_phi = {"phi": keep_rows(held, new["phi"], phi["phi"])}
    kept_state = {part: {"phi": keep_rows(held, after[part]["phi"], step.init(phi)[part]["phi"])} for part in after}
    both, final = step.update(kept_phi, grad, kept_state, 1.0)
    assert torch.allclose(both["phi"][1], new["phi"][1])
    assert final["step"]["phi"].flatten().tolist() == [2, 1]


def test_rate_schedules():
    assert rate_factor("constant", 7, 10) == 1
    assert rate_factor("cosine", 1, 10) == 1
    assert rate_factor("cosine", 6, 10) == pytest.approx(0.5)
    assert rate_factor("linear", 6, 10) == pytest.approx(0.5)
    assert 0 < rate_factor("linear", 10, 10) < 0.2


def test_steps_over_gradients_are_the_same_and_spare_memory_that_is_not_theirs_alone():
    large = LARGE + 1
    params = {name: torch.randn(large) for name in ("own", "a", "b", "spread", "part")}
    both, whole = torch.randn(large), torch.randn(2 * large)
    grads = {
        "own": torch.randn(large),
        "a": both,
        "b": both,
        "spread": torch.ones(()).expand(large),
        "part": whole[:large],
    }
    assert large_and_alone(grads) == {"own"}
    kept, before = both.clone(), whole.clone()
    expected, _ = sgd(0.1).update(params, {name: g.clone() for name, g in grads.items()}, {}, 1.0)
    found, _ = sgd(0.1, over_gradients=True).update(params, grads, {}, 1.0)
    assert all(torch.equal(found[name], expected[name]) for name in params)
    assert found["own"].data_ptr() == grads["own"].data_ptr()
    assert torch.equal(both, kept)
    assert torch.equal(whole, before)
