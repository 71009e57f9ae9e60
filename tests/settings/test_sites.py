"""Data at sites: brought into the form that was agreed on, or refused; the server knows names and numbers of points."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedmix.errors import DataError, SettingError
from fedmix.settings.reading import make_recipe
from fedmix.settings.sites import OwnClients, SiteData, agreed, holding, known_to_server

KEY = b"k"


def recipe(side="label", **args):
    common = {"sites": ["a", "b"], "input": [3], "classes": 3} | args
    return make_recipe({"data": {"source": "sites", "side": side, "args": common}})


def written(tmp_path, n=40, **arrays):
    rng = np.random.default_rng(1)
    given = {"x": rng.normal(size=(n, 3)).astype("float32"), "y": rng.integers(0, 3, n)} | arrays
    np.savez(tmp_path / "data.npz", **given)
    return SiteData("npz", {"file": str(tmp_path / "data.npz")}), given


def test_a_site_is_one_client_with_three_parts(tmp_path):
    data, given = written(tmp_path)
    held = holding(recipe(), "a", data)
    assert held.describe(KEY)["clients"] == ["a"]
    assert held.describe(KEY)["points"] == {"train": [28], "validation": [4], "test": [8]}
    index = np.concatenate([held.federation.parts[part][0] for part in held.federation.parts])
    assert sorted(index) == list(range(40))
    assert torch.equal(held.federation.y, torch.from_numpy(given["y"]))


def test_owners_at_a_site_are_clients_of_its_own(tmp_path):
    data, _ = written(tmp_path, client=np.array(["ward 1", "ward 2"] * 20))
    held = holding(recipe(), "a", data)
    assert list(held.clients) == ["a/ward 1", "a/ward 2"]
    names = ["b", "a/ward 1", "a/ward 2"]
    clients = OwnClients(held, names)
    assert len(clients.examples(1, "train")) == len(clients.examples(2, "train")) == 14
    with pytest.raises(DataError, match="client 'b' is not here"):
        clients.examples(0, "train")


def test_words_are_numbered_as_everywhere(tmp_path):
    words = np.array(["yes", "no", "yes", "yes"] * 10)
    data, _ = written(tmp_path, y=words)
    held = holding(recipe(classes=0, labels=["maybe", "no", "yes"]), "a", data)
    assert held.federation.y.tolist()[:4] == [2, 1, 2, 2]
    assert held.federation.classes == 3
    with pytest.raises(DataError, match="labels must be of maybe, yes"):
        holding(recipe(classes=0, labels=["maybe", "yes"]), "a", data)


def test_side_information_is_numbered_as_everywhere(tmp_path):
    data, _ = written(tmp_path, c=np.array(["x", "y"] * 20))
    held = holding(recipe("column", kinds=["z", "y", "x"]), "a", data)
    assert held.federation.c.tolist()[:4] == [2, 1, 2, 1]
    assert held.federation.categories <= 3
    by_client = OwnClients(holding(recipe("client"), "a", data), ["b", "a"])
    assert set(by_client.examples(1, "train").c.tolist()) == {1}  # its number in the whole federation


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": np.zeros((40, 4), "float32")}, r"the shape \[3\]"),
        ({"x": np.zeros((40, 3), "float32"), "y": np.full(40, 7)}, "labels must be of 0, 1, 2"),
        ({"x": np.zeros((40, 8, 8), "uint8")}, r"the shape \[3\]"),
    ],
)
def test_what_does_not_fit_is_refused(change, words, tmp_path):
    data, _ = written(tmp_path, **change)
    with pytest.raises(DataError, match=words):
        holding(recipe(), "a", data)


def test_tables_become_numbers_as_was_agreed(tmp_path):
    rows = "".join(f"{20 + i},{'fm'[i % 2]},{i % 2}\n" for i in range(40))
    (tmp_path / "t.csv").write_text("age,sex,sick\n" + rows)
    columns = [{"column": "age", "mean": 30.0, "std": 10.0}, {"column": "sex", "words": ["d", "f", "m"]}]
    common = recipe(input=[4], classes=2, columns=columns)
    held = holding(common, "a", SiteData("csv", {"file": str(tmp_path / "t.csv"), "label": "sick"}))
    assert held.federation.x[0].tolist() == [-1.0, 0.0, 1.0, 0.0]
    (tmp_path / "u.csv").write_text("age,sex,sick\n20,x,0\n")
    with pytest.raises(DataError, match=r"must be one of d, f, m. It has 'x'"):
        holding(common, "a", SiteData("csv", {"file": str(tmp_path / "u.csv"), "label": "sick"}))


def test_bytes_of_images_are_normalised_alike(tmp_path):
    data, _ = written(tmp_path, x=np.full((40, 8, 8), 51, "uint8"))
    common = recipe(input=[1, 8, 8], mean=[0.1], std=[0.5])
    held = holding(common, "a", data)
    assert held.federation.examples(0, "train").x[0, 0, 0, 0].item() == pytest.approx((51 / 255 - 0.1) / 0.5)
    with pytest.raises(DataError, match="mean and std must be given"):
        holding(recipe(input=[1, 8, 8]), "a", data)


def test_the_fingerprint_knows_the_data_again_and_only_the_site_can_make_it(tmp_path):
    data, given = written(tmp_path)
    one = holding(recipe(), "a", data)
    assert one.digest(KEY) == holding(recipe(), "a", data).digest(KEY)
    assert one.digest(KEY) != one.digest(b"another")
    given["x"][0, 0] += 1
    np.savez(tmp_path / "data.npz", **given)
    assert holding(recipe(), "a", data).digest(KEY) != one.digest(KEY)


def test_the_server_knows_names_and_numbers_of_points(tmp_path):
    said = {
        "a": {"clients": ["a/1", "a/2"], "points": {"train": [5, 6], "validation": [1, 1], "test": [2, 2]}},
        "b": {"clients": ["b"], "points": {"train": [9], "validation": [0], "test": [3]}},
    }
    whole = known_to_server(recipe("client"), said)
    assert list(whole.names) == ["a/1", "a/2", "b"]
    assert [whole.size(s) for s in range(3)] == [5, 6, 9]
    assert whole.categories == 3
    assert len(whole.examples(0, "train")) == 0
    other = known_to_server(
        recipe("client"), said | {"b": {**said["b"], "points": {**said["b"]["points"], "test": [4]}}}
    )
    assert whole.digest() != other.digest()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"sites": []}, "sites must name each site once"),
        ({"sites": ["a", "a"]}, "sites must name each site once"),
        ({"input": []}, "input must be the shape"),
        ({"classes": 0}, "must say what the labels are"),
        ({"classes": 2, "labels": ["x", "y", "z"]}, "classes must be 3"),
        ({"mean": [0.1]}, "of one length"),
        ({"colour": 3}, "a setting of"),
    ],
)
def test_an_agreement_that_is_none_is_refused(args, words):
    with pytest.raises(SettingError, match=words):
        agreed(recipe(**args).data)


def test_settings_that_deal_data_out_are_refused():
    with pytest.raises(SettingError, match=r"data.split cannot be used with data at sites"):
        agreed(replace(recipe().data, split="hsu"))
    with pytest.raises(SettingError, match=r"data.args.kinds"):
        agreed(recipe("column").data)


def test_a_part_of_the_recipes_own_data():
    digits = make_recipe({"data": {"source": "digits", "clients": 5}})
    parts = [holding(digits, "a", SiteData("recipe", {"part": i, "of": 2})) for i in range(2)]
    assert [list(part.clients) for part in parts] == [["0", "2", "4"], ["1", "3"]]
    for wrong in ({"part": 2, "of": 2}, {"part": 0}, {"part": 0, "of": 2, "x": 1}):
        with pytest.raises(DataError, match="which part it holds"):
            holding(digits, "a", SiteData("recipe", wrong))
    with pytest.raises(DataError, match="needs a recipe with data of its own"):
        holding(recipe(), "a", SiteData("recipe", {"part": 0, "of": 2}))


def arrays_of_a_function(n=40):
    return {"x": np.zeros((n, 3)), "y": np.arange(n) % 3}


def test_data_of_a_function(monkeypatch):
    held = holding(recipe(), "a", SiteData(f"{__name__}:arrays_of_a_function", {"n": 30}))
    assert held.describe(KEY)["points"]["train"] == [21]
    with pytest.raises(SettingError, match=r"data.source must be one of"):
        holding(recipe(), "a", SiteData("excel", {}))
    with pytest.raises(SettingError, match="args of 'npz'"):
        holding(recipe(), "a", SiteData("npz", {"path": "x"}))
