"""A user's own files: arrays, tables, images. What cannot be used is refused with file, row and column."""

import sys

import numpy as np
import pytest
from PIL import Image

from fedmix.data.user_files import images, npz, table
from fedmix.errors import DataError, DataMissing, SettingError
from fedmix.settings.federate import build_federation
from fedmix.settings.recipe import DataSettings


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDMIX_DATA", raising=False)


def write_csv(path, rows):
    path.write_text("\n".join([*rows]) + "\n")
    return str(path)


def whole(source):
    """A source whose rows are all trained on."""
    return source.with_statistics_of(np.arange(len(source.y)))


PATIENTS = [
    "age,blood,hospital,ward,outcome",
    *(
        f"{20 + i},{'AB0'[i % 3]},{'north' if i % 2 else 'south'},{i % 4},{'ill' if i % 5 == 0 else 'well'}"
        for i in range(60)
    ),
]


def test_a_table_becomes_a_federation_of_its_clients(tmp_path):
    file = write_csv(tmp_path / "patients.csv", PATIENTS)
    args = {"file": file, "label": "outcome", "client": "hospital", "side": "ward"}
    settings = DataSettings(source="csv", clients=0, split="by-client", side="column", args=args)
    federation = build_federation(settings, seed=0)
    assert list(federation.names) == ["north", "south"]
    assert (federation.classes, federation.categories, federation.x.shape) == (2, 4, (60, 4))
    assert federation.labels == ["ill", "well"]
    assert federation.y.tolist() == [0 if i % 5 == 0 else 1 for i in range(60)]
    ages = np.arange(20, 80)
    of_training = ages[np.concatenate(federation.parts["train"])]  # validation and test rows tell nothing
    assert np.allclose(federation.x[:, 0], (ages - of_training.mean()) / of_training.std(), atol=1e-6)
    assert federation.x[:, 1:].tolist() == np.eye(3)[[[1, 2, 0][i % 3] for i in range(60)]].tolist()  # words: 0, A, B
    everything = np.concatenate([federation.parts[part][1] for part in ("train", "validation", "test")])
    assert sorted(everything) == list(range(0, 60, 2))


def test_columns_can_be_chosen_and_numbers_left_alone(tmp_path):
    file = write_csv(tmp_path / "patients.csv", PATIENTS)
    source = whole(table(None, file, label="ward", features=["age"], standardise=False))
    assert source.x[:3].tolist() == [[20], [21], [22]]
    assert source.y[:5].tolist() == [0, 1, 2, 3, 0]
    assert source.owner is None


@pytest.mark.parametrize(
    ("rows", "args", "wrong"),
    [
        (["a,y", "1,0", "2"], {}, "line 3 must have 2 values. It has 1"),
        (["a,y", "1,0", ",1"], {}, "line 3: 'a' must have a value"),
        (["a,y", "1,0", "nan,1"], {}, "line 3: 'a' must have a value"),
        (["a,y", "1,0", "inf,1"], {}, "'a' must be finite"),
        (["a,y"], {}, "must have rows below its header"),
        ([""], {}, "must be a CSV file in UTF-8 with a header"),
        (["a,a,y", "1,2,0"], {}, "a name of its own for each column"),
        (["a,y", "1,0"], {"label": "outcome"}, "must have a column 'outcome'. It has a, y"),
        (["y", "0"], {}, "must have columns beside y to learn from"),
        (["a,y", "1,0", "", "2,"], {}, "line 4: 'y' must have a value"),
        (["a,y,who", "1,0,x", "2,1,"], {"client": "who"}, "line 3: 'who' must have a value"),
        (["a, a,y", "1,2,0"], {}, "a name of its own for each column"),
        (["a,y", "1,0"], {"features": ["a", "y"]}, "data.args.features must not name 'y'"),
        (["a,y", "1e308,0", "-1e308,1"], {}, "must be numbers of ordinary size"),
        (["a,y", *(f"w{i},0" for i in range(60))], {}, "words of at most 50 kinds. It has 60 kinds"),
    ],
)
def test_tables_that_cannot_be_used_are_refused(rows, args, wrong, tmp_path):
    with pytest.raises(DataError, match=wrong):
        whole(table(None, write_csv(tmp_path / "t.csv", rows), **({"label": "y"} | args)))


def test_arrays_of_a_file_are_taken_by_name(tmp_path):
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, size=(40, 8, 8, 3), dtype=np.uint8)
    who, kind = np.array(["b", "a"] * 20), np.array([7, 9, 7, 8] * 10)
    np.savez(tmp_path / "own.npz", pictures=pictures, y=np.arange(40) % 3, client=who, c=kind)
    source = npz(str(tmp_path), "own.npz", x="pictures")
    assert np.array_equal(source.x.numpy(), pictures.transpose(0, 3, 1, 2))
    assert (list(source.owners), source.owner[:2].tolist()) == (["a", "b"], [1, 0])
    assert source.column[:4].tolist() == [0, 2, 0, 1]
    assert whole(source).mean == pytest.approx((pictures / 255).mean(axis=(0, 1, 2)))
    assert whole(source).std == pytest.approx((pictures / 255).std(axis=(0, 1, 2)))
    settings = DataSettings(
        source="npz", clients=0, split="by-client", args={"file": str(tmp_path / "own.npz"), "x": "pictures"}
    )
    x = build_federation(settings, seed=0).examples(0, "train").x
    assert x.shape[1:] == (3, 8, 8)
    assert x.mean().abs() < 0.2


def test_arrays_that_cannot_be_used_are_refused(tmp_path):
    def refused(wrong, **arrays):
        np.savez(tmp_path / "own.npz", **arrays)
        with pytest.raises(DataError, match=wrong):
            npz(None, str(tmp_path / "own.npz"))

    refused("must hold an array 'x'", y=np.arange(3))
    refused("must be an .npz of plain arrays", x=np.array([None, 1]), y=np.arange(2))
    refused("'x' must have a value for each of the 3 labels", x=np.zeros((2, 2)), y=np.arange(3))
    refused("labels must be there for every point", x=np.zeros((2, 2)), y=np.array([1.0, np.nan]))
    refused("inputs must be numbers", x=np.zeros((2, 2), complex), y=np.arange(2))
    refused("inputs must be numbers", x=np.zeros((2, 0, 8)), y=np.arange(2))
    refused("inputs must be finite", x=np.array([[np.nan]]), y=np.arange(1))
    (tmp_path / "own.npz").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(DataError, match=r"must be an .npz of plain arrays"):
        npz(None, str(tmp_path / "own.npz"))
    with pytest.raises(DataMissing, match=r"gone.npz was not found"):
        npz(None, "gone.npz")


def test_images_in_folders_of_classes_and_of_clients(tmp_path):
    for client in ("ward-1", "ward-2"):
        for kind, colour in (("cat", 250), ("dog", 10)):
            folder = tmp_path / "pets" / client / kind
            folder.mkdir(parents=True)
            for i in range(5):
                Image.new("RGB", (10, 8), (colour, 0, 0)).save(folder / f"{i}.png")
    source = images(str(tmp_path), "pets", size=6)
    assert (source.x.shape, list(source.labels), list(source.owners)) == (
        (20, 3, 6, 6),
        ["cat", "dog"],
        ["ward-1", "ward-2"],
    )
    assert source.x[0, 0].unique().tolist() == [250]
    assert (source.y.tolist(), source.owner.tolist()) == (([0] * 5 + [1] * 5) * 2, [0] * 10 + [1] * 10)
    classes = images(str(tmp_path), "pets/ward-1", grey=True)
    assert (classes.x.shape, classes.owner) == ((10, 1, 8, 10), None)
    Image.new("RGB", (4, 4)).save(tmp_path / "pets" / "ward-1" / "cat" / "z.png")
    with pytest.raises(DataError, match=r"images must have one size.*set data.args.size"):
        images(str(tmp_path), "pets")
    (tmp_path / "pets" / "ward-1" / "cat" / "z.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"z.png must be an image"):
        images(str(tmp_path), "pets")
    (tmp_path / "pets" / "z.png").write_bytes(b"")
    with pytest.raises(DataError, match="must hold CLASS/image or CLIENT/CLASS/image files throughout"):
        images(str(tmp_path), "pets")


def test_pictures_that_would_be_misread_are_refused_or_read_right(tmp_path):
    (tmp_path / "deep" / "a").mkdir(parents=True)
    Image.fromarray(np.full((4, 4), 60000, np.uint16)).save(tmp_path / "deep" / "a" / "1.png")
    with pytest.raises(DataError, match="must have 8 bits a channel"):
        images(None, str(tmp_path / "deep"))
    rgba = np.random.default_rng(0).integers(0, 256, size=(6, 8, 9, 4), dtype=np.uint8)
    np.savez(tmp_path / "rgba.npz", x=rgba, y=np.arange(6) % 2)
    assert npz(None, str(tmp_path / "rgba.npz")).x.shape == (6, 4, 8, 9)


def test_the_same_pictures_below_another_folder_are_another_federation(tmp_path):
    for kind in ("cat", "dog"):
        (tmp_path / "all" / "one" / kind).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "all" / "one" / kind / "1.png")
    assert images(None, str(tmp_path / "all" / "one")).owner is None
    assert list(images(None, str(tmp_path / "all")).owners) == ["one"]


def test_labels_that_are_written_differently_are_different(tmp_path):
    source = table(None, write_csv(tmp_path / "t.csv", ["a,y", "1,1", "2,01", "3,1"]), label="y")
    assert (list(source.labels), source.y.tolist()) == (["01", "1"], [1, 0, 1])


def test_how_a_table_became_numbers_is_kept(tmp_path):
    source = whole(
        table(None, write_csv(tmp_path / "patients.csv", PATIENTS), label="outcome", features=["age", "blood"])
    )
    age, blood = source.features
    assert (age["column"], blood["words"]) == ("age", ["0", "A", "B"])
    assert np.allclose(source.x[:, 0], (np.arange(20, 80) - age["mean"]) / age["std"], atol=1e-5)


def test_images_without_pillow_say_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'fedmix\[images\]'"):
        images(None, str(tmp_path))


def test_arguments_that_a_source_does_not_take_are_refused():
    for source, args, wrong in [
        ("csv", {"file": "x.csv"}, "data.args of csv must be of file, label, client, side.*missing.*'label'"),
        ("csv", {"file": "x.csv", "label": "y", "clinet": "z"}, "unexpected keyword argument 'clinet'"),
        ("mnist", {"file": "x"}, "data.args of mnist must be of labels"),
    ]:
        with pytest.raises(SettingError, match=wrong):
            build_federation(DataSettings(source=source, args=args), seed=0)
    with pytest.raises(SettingError, match=r"data.source must be one of .*csv.*did you mean 'mnist'"):
        build_federation(DataSettings(source="mnits"), seed=0)


def test_a_split_by_client_needs_clients(tmp_path):
    with pytest.raises(DataError, match="needs data that knows whose each point is; digits does not"):
        build_federation(DataSettings(split="by-client", clients=0), seed=0)
    file = write_csv(
        tmp_path / "t.csv", ["a,y,who", *(f"{i},{i % 2},{i % 20 if i < 40 else 'rare'}" for i in range(42))]
    )
    args = {"file": file, "label": "y", "client": "who"}
    with pytest.raises(DataError, match="None has"):
        build_federation(DataSettings(source="csv", split="by-client", clients=0, args=args), seed=0)
    small = DataSettings(source="csv", split="by-client", clients=0, min_size=2, validation=0, test=0.3, args=args)
    assert len(build_federation(small, seed=0)) == 21
    with pytest.raises(
        DataError, match=r"must be at most 21, which is how many csv has, and leave somebody to train. Got 20 \+ 2"
    ):
        build_federation(DataSettings(**(vars(small) | {"clients": 20, "holdout_clients": 2})), seed=0)
