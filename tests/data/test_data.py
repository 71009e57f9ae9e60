"""Sources, splits, shifts and federations."""

import time

import numpy as np
import pytest
import torch
from scipy import stats

from fedmix.data import partition, shift
from fedmix.data.federation import Federation, client_number
from fedmix.data.sources import digits
from fedmix.errors import DataError
from fedmix.rng import cohort, stream
from fedmix.settings.build import build_federation
from fedmix.settings.recipe import DataSettings

LABELS = np.repeat(np.arange(10), 500)[np.random.default_rng(0).permutation(5000)]

SPLITS = {
    "iid": lambda rng: partition.iid(LABELS, 20, rng),
    "hsu": lambda rng: partition.hsu(LABELS, 20, 1.0, rng),
    "dirichlet": lambda rng: partition.dirichlet(LABELS, 20, 0.5, 5, rng),
    "shards": lambda rng: partition.shards(LABELS, 20, 2, rng),
}


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    theirs = load_digits()
    ours = digits()
    assert np.array_equal(ours.x.squeeze(1).numpy() * 16, theirs.images)
    assert np.array_equal(ours.y.numpy(), theirs.target)


@pytest.mark.parametrize("split", SPLITS)
def test_nothing_is_used_twice_and_the_seed_decides(split):
    one, again, other = (SPLITS[split](stream(seed, "split")) for seed in (0, 0, 1))
    everything = np.concatenate(one)
    assert len(one) == 20
    assert len(np.unique(everything)) == len(everything)
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    if split != "hsu":
        assert len(everything) == len(LABELS)


def test_hsu_gives_equal_sizes_and_clients_near_their_drawn_marginals():
    """Clients drawn before a class runs out: a chi-square test against the shares that the same stream draws."""
    rng = stream(4, "split")
    parts = partition.hsu(LABELS, 50, 5.0, rng)
    assert {len(part) for part in parts} == {100}
    again = stream(4, "split")
    for k in range(10):
        again.numpy.permutation(np.flatnonzero(k == LABELS))
    available = np.full(10, 500)
    p_values = []
    for part in parts[:15]:
        shares = again.numpy.dirichlet(np.full(10, 0.5))
        drawn = partition.draw_counts(shares, available, 100, again)
        counts = np.bincount(LABELS[part], minlength=10)
        assert np.array_equal(drawn, counts)
        if (available > 100).all():
            likely = shares * 100 >= 1
            observed = np.append(counts[likely], counts[~likely].sum())
            expected = np.append(shares[likely], shares[~likely].sum()) * 100
            if expected[-1] < 1e-9:
                observed, expected = observed[:-1], expected[:-1]
            p_values.append(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)
        available = available - counts
    assert len(p_values) >= 5
    assert min(p_values) > 1e-4


def test_hsu_is_more_skewed_than_iid_and_less_with_a_larger_concentration():
    def largest_share(parts):
        return np.mean([np.bincount(LABELS[p], minlength=10).max() / len(p) for p in parts])

    skewed, mild, plain = (
        largest_share(partition.hsu(LABELS, 20, 1.0, stream(0))),
        largest_share(partition.hsu(LABELS, 20, 100.0, stream(0))),
        largest_share(partition.iid(LABELS, 20, stream(0))),
    )
    assert skewed > 0.4 > mild > plain


def test_shards_give_each_client_few_labels():
    parts = partition.shards(LABELS, 50, 2, stream(0))
    assert max(len(np.unique(LABELS[p])) for p in parts) <= 4
    assert {len(p) for p in parts} == {100}


def test_a_split_that_cannot_be_ends_with_an_error_not_a_loop():
    began = time.monotonic()
    with pytest.raises(DataError, match=r"at least 200.*Raise data.concentration"):
        partition.dirichlet(LABELS, 20, 0.01, 200, stream(0))
    with pytest.raises(DataError, match="needs at least 6000 points"):
        partition.iid(LABELS, 6000, stream(0))
    with pytest.raises(DataError, match="client 3 must have points for training"):
        partition.three_parts(np.arange(2), 0.1, 0.2, stream(0), 3)
    assert time.monotonic() - began < 10


def test_parts_of_a_client_are_disjoint_and_together_all_it_has():
    train, validation, test = partition.three_parts(np.arange(50, 150), 0.1, 0.2, stream(0), 0)
    assert (len(train), len(validation), len(test)) == (70, 10, 20)
    assert np.array_equal(np.sort(np.concatenate([train, validation, test])), np.arange(50, 150))


def permuted(y, parts, count, moved=0, sizes=()):
    rng = stream(1)
    tables = shift.label_tables(10, count, moved, rng)
    groups = shift.deal_groups(len(parts), count, sizes, rng)
    return shift.permute_labels(y, parts, tables, groups), groups


def tables_of_groups(y, new, parts, groups):
    """What each group calls each label, where all of its clients agree."""
    tables = {}
    for own, group in zip(parts, groups, strict=True):
        table = tables.setdefault(group, {})
        for before, after in zip(y[own].tolist(), new[own].tolist(), strict=True):
            assert table.setdefault(before, after) == after
    assert all(sorted(table.values()) == list(range(10)) for table in tables.values())
    return tables


def test_permuted_labels_differ_between_groups_only():
    y = torch.from_numpy(LABELS)
    parts = partition.iid(LABELS, 20, stream(0))
    new, groups = permuted(y, parts, 4)
    assert sorted(np.bincount(groups).tolist()) == [5, 5, 5, 5]
    tables = tables_of_groups(y, new, parts, groups)
    assert len({tuple(sorted(table.items())) for table in tables.values()}) == 4
    with pytest.raises(DataError, match="at most 2 for 2 labels"):
        shift.label_tables(2, 3, 0, stream(0))


def test_groups_have_the_sizes_and_differ_in_the_labels_that_were_asked_for():
    y = torch.from_numpy(LABELS)
    parts = partition.iid(LABELS, 20, stream(0))
    new, groups = permuted(y, parts, 4, moved=2, sizes=(12, 4, 2, 2))
    assert np.bincount(groups).tolist() == [12, 4, 2, 2]
    tables = tables_of_groups(y, new, parts, groups)
    moved = {group: [k for k in range(10) if table[k] != k] for group, table in tables.items()}
    assert moved[0] == []
    assert sorted(map(len, moved.values())) == [0, 2, 2, 2]
    assert len({tuple(labels) for labels in moved.values()}) == 4
    with pytest.raises(DataError, match="must add up to 20 clients"):
        permuted(y, parts, 2, sizes=(3, 4))
    with pytest.raises(DataError, match="at most 46 for 10 labels that move 2 labels"):
        shift.label_tables(10, 47, 2, stream(0))
    assert len(set(shift.label_tables(4, 1 + 9, 4, stream(0)))) == 10  # all nine derangements of four labels


def test_rotation_turns_counter_clockwise_and_right_angles_are_exact():
    x = torch.rand(3, 1, 9, 9)
    assert torch.equal(shift.rotated(x, 90), torch.rot90(x, 1, dims=(2, 3)))
    assert torch.equal(shift.rotated(shift.rotated(x, 180), 180), x)
    spot = torch.zeros(1, 1, 9, 9)
    spot[0, 0, 4, 8] = 1.0  # right of the centre
    turned = shift.rotated(spot, 45)[0, 0]
    row, column = divmod(int(turned.argmax()), 9)
    assert row < 4 < column  # up and to the right
    from scipy.ndimage import rotate

    image = torch.zeros(1, 1, 9, 9)
    image[0, 0, 3:6, 2:7] = torch.rand(3, 5)
    wanted = rotate(image[0, 0].numpy(), 45, reshape=False, order=1)
    assert np.abs(shift.rotated(image, 45)[0, 0].numpy() - wanted).max() < 0.02


def test_rotations_follow_each_clients_own_distribution():
    x = torch.rand(4000, 1, 4, 4)
    parts = np.split(np.arange(4000), 4)
    new, angle = shift.rotate(x, parts, 0.3, stream(0))
    shares = [np.bincount(angle[p].numpy(), minlength=8) / 1000 for p in parts]
    assert all(share.max() > 0.3 for share in shares)
    assert len({int(share.argmax()) for share in shares}) > 1
    for k in range(8):
        rows = (angle == k).nonzero().squeeze(1)[:3]
        assert torch.allclose(new[rows], shift.rotated(x[rows], 45.0 * k))
    with pytest.raises(DataError, match="square images"):
        shift.rotate(torch.rand(8, 3), [np.arange(8)], 1.0, stream(0))


@pytest.mark.parametrize("settings", [{"side": "client"}, {"side": "rotation", "shift": "rotate"}, {"side": "label"}])
def test_side_information_is_what_the_recipe_says(settings):
    federation = build_federation(DataSettings(clients=5, **settings), seed=0)
    assert len(federation) == 5
    for s in range(5):
        examples = federation.examples(s, "train")
        if settings["side"] == "client":
            assert examples.c.unique().tolist() == [s]
        elif settings["side"] == "label":
            assert torch.equal(examples.c, examples.y)
    assert federation.categories == {"client": 5, "rotation": 8, "label": 10}[settings["side"]]


def test_side_information_that_is_not_there_is_refused():
    with pytest.raises(DataError, match="'rotation' is not there"):
        build_federation(DataSettings(side="rotation"), seed=0)


def test_own_arrays_become_a_federation():
    arrays = {
        "north": {"x": np.ones((10, 2)), "y": np.arange(10) % 3, "c": list("aabbccaabb")},
        "south": {
            "train": {"x": np.zeros((4, 2)), "y": [0, 1, 2, 0], "c": list("abca")},
            "test": {"x": np.zeros((2, 2)), "y": [1, 1], "c": list("cc")},
        },
    }
    federation = Federation.from_clients(arrays, side="column", validation=0.2, test=0.2)
    assert [federation.size(0, part) for part in ("train", "validation", "test")] == [6, 2, 2]
    assert [federation.size(1, part) for part in ("train", "validation", "test")] == [4, 0, 2]
    assert federation.examples(1, "test").c.tolist() == [2, 2]
    assert federation.examples(1, "train").y.tolist() == [0, 1, 2, 0]
    assert (federation.classes, federation.categories) == (3, 3)
    assert client_number(federation.names, "south") == client_number(federation.names, 1) == 1
    by_client = Federation.from_clients(arrays, side="client")
    assert by_client.examples(1, "train").c.tolist() == [1, 1, 1, 1]
    assert by_client.examples(0, "train").c.unique().tolist() == [0]


@pytest.mark.parametrize(
    ("arrays", "wrong"),
    [
        ({}, "at least one client"),
        ({"a": {"x": [[1.0]]}}, "client a must give arrays x, y. y is missing"),
        ({"a": {"x": [[1.0]], "y": [0, 1]}}, "client a must give arrays of one length"),
        ({"a": {"x": [[1.0]] * 9, "y": [0.5] * 9}}, "client a: labels must be classes. Got 0.5"),
        ({"a": {"x": [[np.nan]] * 9, "y": [0] * 9}}, "client a: x must be finite"),
        ({"a": {"x": [[1.0]] * 9, "y": [-1] * 9}}, "labels must be of two kinds or more. All are -1"),
        ({"a": {"x": [[1.0]] * 9, "y": [1] * 9}, "b": {"x": [[1.0, 2.0]] * 9, "y": [0] * 9}}, "same shape on every client"),
        ({"a": {"x": [], "y": []}}, "a client must have 1 or more points to train on"),
    ],
)  # fmt: skip
def test_arrays_that_cannot_be_used_are_refused_by_client(arrays, wrong):
    with pytest.raises(DataError, match=wrong):
        Federation.from_clients(arrays)


def test_cohorts_are_a_function_of_seed_and_round():
    assert cohort(0, 3, 100, 10) == cohort(0, 3, 100, 10)
    assert cohort(0, 3, 100, 10) != cohort(0, 4, 100, 10) != cohort(1, 4, 100, 10)
    assert len(set(cohort(0, 3, 100, 10))) == 10
    assert cohort(0, 1, 5, 5) == [0, 1, 2, 3, 4]
    seen = {s for t in range(200) for s in cohort(0, t, 100, 10)}
    assert len(seen) == 100


def test_streams_with_other_addresses_are_other_streams():
    seeds = {stream(0, "round", t, "client", s).seed for t in range(50) for s in range(50)}
    assert len(seeds) == 2500
    assert stream(0, "a").child("b").seed == stream(0, "a", "b").seed
    assert stream(0, "round", 1, "client", 11).seed != stream(0, "round", 11, "client", 1).seed
