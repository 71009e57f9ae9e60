"""Splits of the paper's experiments: laws, drawn marginals, speed, the same on any platform; held-out clients; augmentation."""

import hashlib
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from fedmix.data import partition, sources
from fedmix.data.augment import PAD, crop_and_flip
from fedmix.errors import DataError, SettingError
from fedmix.rng import Stream, stream
from fedmix.settings.federate import build_federation, describe_split
from fedmix.settings.recipe import DataSettings

REAL = os.environ.get("FEDMIX_DATA")
FINE = np.arange(50_000) % 100
COARSE = FINE % 20
SPLITS = {
    "iid": lambda fine, coarse, clients, rng: partition.iid(fine, clients, rng),
    "hsu": lambda fine, coarse, clients, rng: partition.hsu(fine, clients, 1.0, rng),
    "dirichlet": lambda fine, coarse, clients, rng: partition.dirichlet(fine, clients, 1.0, 5, rng),
    "shards": lambda fine, coarse, clients, rng: partition.shards(fine, clients, 2, rng),
    "pachinko": lambda fine, coarse, clients, rng: partition.pachinko(fine, coarse, clients, 0.1, 10.0, rng),
}


class Recording(Stream):
    """Remembers what was drawn from Dirichlet distributions."""

    def __init__(self, *address):
        super().__init__(*address)
        outer = self

        class Generator:
            def __init__(self, inner):
                self.inner = inner

            def dirichlet(self, alpha):
                drawn = self.inner.dirichlet(alpha)
                outer.drawn.append(drawn)
                return drawn

            def __getattr__(self, name):
                return getattr(self.inner, name)

        self.drawn = []
        self.numpy = Generator(self.numpy)


def test_pachinko_follows_what_it_draws_for_coarse_and_fine_labels():
    """Clients drawn before a class runs out: chi-square against the drawn shares, coarse, and fine inside a coarse label."""
    rng = Recording(3, "pachinko")
    parts = partition.pachinko(FINE, COARSE, 500, 0.1, 10.0, rng)
    assert {len(part) for part in parts} == {100}
    assert len(np.unique(np.concatenate(parts))) == 50_000
    left = np.full(100, 500)
    coarse_p, fine_p = [], []
    for s in range(40):
        own = np.bincount(FINE[parts[s]], minlength=100)
        left -= own
        if left.min() <= 0:
            break
        root, *within = rng.drawn[21 * s : 21 * (s + 1)]
        big = root * 100 >= 1
        seen = np.bincount(COARSE[parts[s]], minlength=20)
        observed, expected = [*seen[big], seen[~big].sum()], [*(root[big] * 100), root[~big].sum() * 100 + 1e-9]
        coarse_p.append(stats.chisquare(observed, np.array(expected) * 100 / np.sum(expected)).pvalue)
        most = int(seen.argmax())
        fine_p.append(stats.chisquare(own[most::20], within[most] * seen[most]).pvalue)
    assert len(coarse_p) > 10
    for p_values in (coarse_p, fine_p):
        assert stats.kstest(p_values, "uniform").pvalue > 1e-3
        assert min(p_values) > 1e-5


def test_pachinko_is_skewed_over_coarse_labels_and_even_inside_them():
    parts = partition.pachinko(FINE, COARSE, 500, 0.1, 10.0, stream(0))
    coarse = [np.sort(np.bincount(COARSE[part], minlength=20))[::-1] / 100 for part in parts[:200]]
    assert 0.5 < np.mean([shares[0] for shares in coarse]) < 0.75  # E max of Dir(0.1 x 20) is about 0.6
    inside = [
        np.bincount(FINE[part], minlength=100)[int(np.bincount(COARSE[part]).argmax()) :: 20] for part in parts[:100]
    ]
    assert np.median([counts.max() / counts.sum() for counts in inside]) < 0.45


@pytest.mark.parametrize("split", sorted(SPLITS))
def test_fifty_thousand_points_are_split_over_500_clients_in_under_two_seconds(split):
    rng = stream(0, split)
    began = time.perf_counter()
    parts = SPLITS[split](FINE, COARSE, 500, rng)
    partition.like_training(FINE, np.arange(10_000), parts, rng)
    assert time.perf_counter() - began < 2


GOLDEN = {
    "iid": "0116a21a7321e477",
    "hsu": "734e0aa89ee27e2f",
    "dirichlet": "2a26362da50b9a2b",
    "shards": "c964b927b2b4ba39",
    "pachinko": "120b2648953933ca",
}


@pytest.mark.parametrize("split", sorted(GOLDEN))
def test_the_same_seed_gives_the_same_split_on_any_platform(split):
    labels = np.arange(3000) % 20
    parts = SPLITS[split](labels, labels % 4, 30, stream(7, "golden"))
    text = ";".join(",".join(map(str, part.tolist())) for part in parts)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == GOLDEN[split]


def test_a_split_by_writer_keeps_writers_together_and_new_ones_out(small_files):
    settings = DataSettings(source="mnist-writers", clients=0, split="by-writer")
    federation, source = build_federation(settings, seed=0), sources.load("mnist-writers")
    assert (len(federation), len(federation.held_out)) == (30, 10)
    for some in (federation, federation.held_out):
        for s, name in enumerate(some.names):
            own = np.concatenate([some.parts[part][s] for part in ("train", "validation", "test")])
            assert len(np.unique(own)) == len(own)
            assert {source.owners[k] for k in source.owner[own].tolist()} == {name}
            shares = [some.size(s, part) / len(own) for part in ("train", "validation", "test")]
            assert shares == pytest.approx([0.7, 0.1, 0.2], abs=0.03)
    assert max(part.max() for part in federation.parts["test"]) < source.train
    assert min(part.min() for part in federation.held_out.parts["train"]) >= source.train
    some = build_federation(DataSettings(source="mnist-writers", clients=7, split="by-writer"), seed=0)
    assert len(some) == 7
    assert set(some.names) < set(federation.names)
    other = build_federation(DataSettings(source="mnist-writers", clients=7, split="by-writer"), seed=1)
    assert set(some.names) != set(other.names)


def test_clients_can_be_held_out_of_any_split(small_files):
    settings = DataSettings(source="cifar10", clients=8, holdout_clients=2, split="hsu", side="client")
    federation = build_federation(settings, seed=0)
    assert (len(federation), len(federation.held_out), federation.categories) == (8, 2, 8)
    both = [
        np.concatenate([f.parts[p][s] for p in f.parts])
        for f in (federation, federation.held_out)
        for s in range(len(f))
    ]
    assert len(np.unique(np.concatenate(both))) == sum(map(len, both)) == 2000
    assert {*federation.names, *federation.held_out.names} == {str(s) for s in range(10)}
    assert all(federation.c[federation.parts["train"][s]].unique().tolist() == [s] for s in range(8))
    assert federation.held_out.c[federation.held_out.parts["test"][1]].unique().tolist() == [9]
    permuted = DataSettings(clients=6, holdout_clients=2, shift="permute-labels", permutations=4, side="client")
    assert sorted([*build_federation(permuted, 0).groups, *build_federation(permuted, 0).held_out.groups]) == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]


def test_a_share_of_the_data_is_drawn_at_random(small_files):
    whole = build_federation(DataSettings(source="mnist", clients=5), seed=0)
    some = build_federation(DataSettings(source="mnist", clients=5, share=0.2), seed=0)
    for part, points in (("train", 270), ("validation", 30), ("test", 100)):
        assert sum(some.size(s, part) for s in range(5)) == points
        assert sum(whole.size(s, part) for s in range(5)) == 5 * points
    used = np.concatenate([*some.parts["train"], *some.parts["validation"]])
    assert len(np.unique(used)) == 300
    assert 600 < used.mean() < 900


def test_pachinko_and_augmentation_need_what_they_need(small_files):
    with pytest.raises(DataError, match="'pachinko' needs coarse labels above the fine ones; mnist has none"):
        build_federation(DataSettings(source="mnist", split="pachinko"), seed=0)
    with pytest.raises(DataError, match="'pachinko' needs coarse labels"):
        build_federation(DataSettings(source="cifar100", split="pachinko", args={"labels": "coarse"}), seed=0)
    with pytest.raises(SettingError, match=r"data.augment must be one of crop-flip, none"):
        DataSettings(augment="flip")


def test_an_angle_that_nobody_draws_is_no_problem():
    settings = DataSettings(clients=2, shift="rotate", rotation_concentration=0.05, side="rotation")
    assert len(build_federation(settings, seed=0).c.unique()) < 8


def test_other_inputs_are_other_data(small_files):
    federation = build_federation(DataSettings(source="mnist", clients=5), seed=0)
    x = federation.x.clone()
    x[1700] += 1
    assert replace(federation, x=x).digest() != federation.digest()


def test_what_a_split_is_can_be_said(small_files):
    settings = DataSettings(source="mnist", clients=5, split="shards", shift="rotate", side="rotation")
    federation = build_federation(settings, seed=0)
    said = describe_split(federation)
    for s, row in enumerate(said["clients"]):
        own = federation.examples(s, "train")
        assert row["labels"] == torch.bincount(own.y, minlength=10).tolist()
        assert row["side"] == torch.bincount(own.c, minlength=8).tolist()
        assert row["train"] == len(own)
    alike = describe_split(build_federation(DataSettings(source="mnist", clients=5), seed=0))
    assert alike["distance"] < 0.1 < 0.5 < said["distance"]


def test_crops_and_mirrored_images_are_what_a_naive_loop_gives():
    rng = np.random.default_rng(0)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    pixels = rng.integers(0, 256, size=(50, 3, 8, 8))
    m, d = (np.array(v)[:, None, None] for v in (mean, std))
    got = crop_and_flip(mean, std, torch.from_numpy((pixels / 255 - m) / d).float(), stream(1, "views"))
    same = stream(1, "views").numpy
    shift, mirrored = same.integers(0, 2 * PAD + 1, size=(2, 50)), same.integers(0, 2, size=50)
    for i in range(50):
        padded = np.zeros((3, 8 + 2 * PAD, 8 + 2 * PAD))
        padded[:, PAD:-PAD, PAD:-PAD] = pixels[i] / 255  # black around, before the mean is taken off
        cut = padded[:, shift[0, i] : shift[0, i] + 8, shift[1, i] : shift[1, i] + 8]
        wanted = ((cut[:, :, ::-1] if mirrored[i] else cut) - m) / d
        assert np.allclose(got[i], wanted, atol=1e-5)
    assert set(shift.ravel()) == set(range(2 * PAD + 1))
    assert 10 < mirrored.sum() < 40


def test_only_training_images_are_augmented_and_from_the_clients_own_stream(small_files):
    settings = DataSettings(source="cifar100", clients=20, split="pachinko", concentration=0.1, augment="crop-flip")
    federation = build_federation(settings, seed=0)
    train, test = federation.examples(0, "train"), federation.examples(0, "test")
    index = torch.arange(10)
    assert torch.equal(test.batch(index, stream(0)).x, test.x[:10])
    first, again, other = (train.batch(index, stream(0, "client", s)).x for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, train.x[:10])
    assert first.shape == train.x[:10].shape


@pytest.mark.skipif(not REAL or not (Path(REAL) / "mnist-writers").is_dir(), reason="no real data in $FEDMIX_DATA")
def test_the_real_writers_of_mnist(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMIX_CACHE", str(tmp_path))
    federation = build_federation(DataSettings(source="mnist-writers", clients=0, split="by-writer"), seed=0)
    assert (len(federation), len(federation.held_out)) == (539, 297)
    sizes = [sum(len(f.parts[p][s]) for p in f.parts) for f in (federation, federation.held_out) for s in range(len(f))]
    assert (sum(sizes[:539]), sum(sizes[539:])) == (60_000, 10_000)
