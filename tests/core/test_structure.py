"""When an expert is split, and when one goes: against scipy, and on updates that were made up."""

import numpy as np
import pytest
import torch

from fedmix.core import evidence, structure


def planted(sizes, noise, seed=0, length=3000):
    """Updates of clients in groups: a direction for each group, and noise of each client's own."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(len(sizes), length))
    labels = np.repeat(np.arange(len(sizes)), sizes)
    updates = centres[labels] + noise * rng.normal(size=(len(labels), length))
    rows = [structure.direction({"w": torch.from_numpy(row).float().view(30, -1)}) for row in updates]
    return torch.stack(rows), labels.tolist()


@pytest.mark.parametrize("count", [2, 3, 5])
def test_average_linkage_is_scipys(count):
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    rows, _ = planted([4, 3, 5], noise=2.0)
    cosines = (rows @ rows.T).double()
    distance = (1 - cosines).numpy()
    condensed = distance[np.triu_indices(len(rows), k=1)]
    theirs = hierarchy.fcluster(hierarchy.linkage(condensed, "average"), count, criterion="maxclust")
    ours = structure.average_linkage(cosines, count).tolist()
    assert len({(a, b) for a, b in zip(ours, theirs.tolist(), strict=True)}) == count
    assert ours == sorted(ours, key=ours.index) or ours[0] == 0  # labels begin with the first client's


@pytest.mark.parametrize("sizes", [[6, 6], [5, 5, 5, 5], [12, 4, 2, 2], [4] * 6])
def test_clients_that_fall_apart_are_told_apart(sizes):
    rows, labels = planted(sizes, noise=0.7)
    assert structure.clusters(rows, most=8).tolist() == labels


def test_clients_that_are_alike_are_not_split():
    rows, _ = planted([20], noise=1.0)
    assert structure.clusters(rows, most=8) is None
    only_noise = torch.nn.functional.normalize(
        torch.randn(20, structure.SKETCH, generator=torch.Generator().manual_seed(0))
    )
    assert structure.clusters(only_noise, most=8) is None


def test_a_few_clients_and_no_free_slot_are_left_alone():
    rows, _ = planted([2, 1], noise=0.1)
    assert structure.clusters(rows, most=8) is None
    rows, _ = planted([4, 4], noise=0.1)
    assert structure.clusters(rows, most=1) is None


def test_a_direction_keeps_cosines():
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(2, 50_000))
    b = 0.5 * a + b
    rows = [structure.direction({"w": torch.from_numpy(value)}) for value in (a, b)]
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert float(rows[0] @ rows[1]) == pytest.approx(cosine, abs=4 / structure.SKETCH**0.5)
    assert float(rows[0].norm()) == pytest.approx(1, abs=1e-5)


def test_an_expert_goes_whose_clients_another_one_serves_as_well():
    fits = torch.tensor([[-0.10, -0.11, -2.0], [-0.12, -0.10, -2.0], [-2.0, -2.0, -0.1]])
    first, third = torch.tensor([True, True, False]), torch.tensor([False, False, True])
    known = torch.ones(3, 3, dtype=torch.bool)
    assert structure.stand_in(fits, known, 0, [1, 2], first, classes=10) == 1
    assert structure.stand_in(fits, known, 2, [0, 1], third, classes=10) is None


def test_clients_that_have_not_seen_an_expert_do_not_say_that_it_would_do():
    fits = torch.tensor([[-0.5, 0.0], [-0.5, -2.0], [-3.0, -0.1]])
    users, known = torch.tensor([True, True, False]), torch.tensor([[True, False], [True, True], [True, True]])
    assert structure.stand_in(fits, known, 0, [1], users, classes=10) is None
    assert structure.stand_in(fits, known, 0, [1], torch.tensor([True, False, False]), classes=10) is None


def test_an_expert_that_serves_everybody_is_not_split():
    labels = torch.tensor([0, 0, 1, 1])
    assert structure.is_unserved(torch.tensor([0.1, 0.1, 0.9, 0.9]), labels, classes=10)
    assert not structure.is_unserved(torch.tensor([0.1, 0.1, 0.2, 0.2]), labels, classes=10)


def test_evidence_is_the_mean_of_each_value_of_c_minus_that_over_experts():
    rng = np.random.default_rng(0)
    log_lik, c = rng.normal(size=(40, 3)), rng.integers(0, 4, size=40)
    c[c == 2] = 1  # nobody has the value 2
    r, count = evidence.by_category(torch.from_numpy(log_lik), torch.from_numpy(c), 5)
    assert count.tolist() == np.bincount(c, minlength=5).tolist()
    present = count > 0
    squares = []
    for value in (0, 1, 3):
        rows = [log_lik[i] for i in range(40) if c[i] == value]
        mean = sum(rows) / len(rows)
        assert r[value].tolist() == pytest.approx((mean - mean.mean()).tolist())
        squares += ((mean - mean.mean()) ** 2).tolist()
    assert float(evidence.mean_square(r, present)) == pytest.approx(np.mean(squares))
    q = evidence.posterior(r, torch.tensor([0.5]))
    assert q[0].tolist() == pytest.approx((np.exp(r[0].numpy() / 0.5) / np.exp(r[0].numpy() / 0.5).sum()).tolist())


def test_what_a_client_is_not_sent_keeps_its_share():
    phi = torch.tensor([[0.5, 0.2, 0.3], [0.0, 1.0, 0.0]])
    q = torch.tensor([[0.9, 0.1], [0.5, 0.5]])
    assert evidence.among(q, phi, [0, 2])[0].tolist() == pytest.approx([0.72, 0.2, 0.08])
    assert evidence.among(q, phi, [0, 2])[1].tolist() == pytest.approx([0.0, 1.0, 0.0])
    assert evidence.among(q, phi[:, :2], [0, 1]) is q


def test_everybodys_evidence_counts_as_so_many_points():
    r, everybodys = torch.tensor([[1.0, -1.0], [0.0, 0.0]]), torch.tensor([[-1.0, 1.0], [2.0, -2.0]])
    joint = evidence.pooled(r, torch.tensor([30.0, 0.0]), everybodys, 10.0)
    assert joint.tolist() == [[0.5, -0.5], [2.0, -2.0]]
    assert evidence.pooled(r, torch.tensor([30.0, 5.0]), everybodys, 0.0).tolist() == r.tolist()
    some = evidence.full_width(torch.tensor([[0.5, -0.5]]), torch.tensor([[3.0, -4.0, 1.0]]), [0, 2])
    assert some.tolist() == [[2.5, -4.0, 1.5]]


def test_the_penalty_of_use_leads_to_the_largest_evidence_and_entropies_together():
    """Against a numerical maximum of the objective that the docstring names, over all q(z|c)."""
    from scipy.optimize import minimize

    rng = np.random.default_rng(3)
    r, p_c, entropy = rng.normal(size=(5, 3)), np.full(5, 0.2), 2.0

    def softmax(free):
        free = np.exp(free.reshape(5, 3) - free.reshape(5, 3).max(1, keepdims=True))
        return free / free.sum(1, keepdims=True)

    def minus(free):
        q = softmax(free)
        use = p_c @ q
        return -(p_c @ (q * (r - np.log(q))).sum(1) - entropy * (use * np.log(use)).sum())

    best = softmax(minimize(minus, np.zeros(15), method="BFGS", options={"gtol": 1e-10}).x)
    phi = torch.full((5, 3), 1 / 3, dtype=torch.float64)
    for _ in range(200):  # as the server does: half of the way in each round
        penalty = evidence.use_penalty(torch.from_numpy(p_c) @ phi, entropy)
        phi = (phi + evidence.posterior(torch.from_numpy(r), torch.tensor([1.0]), penalty)) / 2
    assert phi.numpy() == pytest.approx(best, abs=1e-4)
