"""Data as people have it: forms of clients' data, labels, sequences, several inputs, tables with gaps and slips."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import fedmix
from fedmix.data.federation import Federation
from fedmix.errors import DataError, FedmixError, ModelError
from fedmix.settings.federate import build_federation
from fedmix.settings.recipe import DataSettings

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3))
Y = (X[:, 0] > 0).astype(int)
QUICK = {
    "engine": "serial",
    "rounds": 2,
    "training": {"batch_size": 8, "client_lr": 0.3},
    "server": {"server_lr": 0.05},
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMIX_CACHE", str(tmp_path / "cache"))


class Pairs(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i].astype(np.float32), int(Y[i])


FORMS = {
    "arrays": {"x": X, "y": Y},
    "tensors": {"x": torch.tensor(X), "y": torch.tensor(Y)},
    "lists": {"x": X.tolist(), "y": Y.tolist()},
    "a pair": (X, Y),
    "a dataset": Pairs(),
    "torch's dataset": TensorDataset(torch.tensor(X, dtype=torch.float32), torch.tensor(Y)),
    "parts": {"train": (X, Y), "test": {"x": X[:5], "y": Y[:5]}},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_clients_data_is_the_same_federation(form):
    federation = Federation.from_clients({"a": FORMS[form], "b": FORMS["arrays"]})
    points = federation.parts["train"][0]
    assert np.allclose(federation.x[points], X[points], atol=1e-6)
    assert federation.y[points].tolist() == Y[points].tolist()
    assert (federation.classes, list(federation.names)) == (2, ["a", "b"])


def test_clients_may_be_a_list_and_hugging_face_datasets():
    from datasets import ClassLabel, Features, Value
    from datasets import Dataset as HuggingFace
    from datasets import Sequence as Listed

    kinds = Features({"tokens": Listed(Value("int64")), "label": ClassLabel(names=["no", "yes"])})
    rows = {"tokens": [[1 + i % 5] * (1 + i % 3) for i in range(30)], "label": [i % 2 for i in range(30)]}
    data = HuggingFace.from_dict(rows, features=kinds)
    federation = Federation.from_clients([data, data])
    assert list(federation.names) == ["0", "1"]
    assert federation.labels == ["no", "yes"]
    (part,) = federation.input_parts
    assert (part.shape, part.kind, part.sequence) == ((3,), "integer", True)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (np.array(["ill", "well"])[Y], ["ill", "well"]),
        (Y.astype(bool), [False, True]),
        (Y.astype(float), [0, 1]),
        (Y + 1.0, [1.0, 2.0]),
        (Y + 1, [1, 2]),
        (pd.Series(np.array(["b", "a"])[Y]), ["a", "b"]),
        (Y[:, None], [0, 1]),
    ],
)
def test_labels_of_any_kind_are_given_back(labels, names, tmp_path):
    federation = Federation.from_clients({"a": (X, labels), "b": (X, labels)})
    assert list(federation.labels) == names
    run = fedmix.train(federation=federation, out=tmp_path / "run", **QUICK)
    predicted = run.client("a").predict(X)
    assert set(predicted.tolist()) <= set(names)
    assert np.array_equal(run.client("a").predict_proba(X).argmax(axis=1), [names.index(v) for v in predicted.tolist()])
    assert np.allclose(run.client("a").predict_proba(X).sum(axis=1), 1)
    assert (predicted == np.asarray(labels).ravel()).mean() > 0.8


@pytest.mark.parametrize(
    ("labels", "wrong"),
    [
        (X[:, 0], "labels must be classes. Got .* a measurement"),
        (np.arange(40), "must be classes. Got 40 different numbers in 80 points"),
        (np.where(Y, 1.0, np.nan), "must be there for every point"),
        ([None, *["a"] * 39], "must be there for every point. 1 are missing"),
        (np.zeros(40, int), "two kinds or more. All are 0"),
        ([["a"], *["a"] * 39], "client a: labels"),
    ],
)
def test_labels_that_are_no_classes_are_refused_with_a_hint(labels, wrong):
    with pytest.raises(DataError, match=wrong):
        Federation.from_clients({"a": (X, labels), "b": (X, labels)})


@pytest.mark.parametrize(
    ("clients", "wrong"),
    [
        (7, "a dict {name: data} or a list"),
        ({"x": X, "y": Y}, "the data of several clients"),
        ({"a": 7}, "client a must give .*Got int"),
        ({"a": (X, Y), "b": {"train": (X, Y), "tset": (X, Y)}}, "'tset' is none of them"),
        ({"a": pd.DataFrame({"u": X[:, 0], "y": Y})}, "label='...' must say"),
        ({"a": ({"u": X}, Y), "b": (X, Y)}, "x must be of one form"),
        ({"a": (X, Y), "b": (X, np.array(["u", "v"])[Y])}, "one kind on every client. Got words and numbers"),
        ([(X, Y[:5])], "client 0 must give arrays of one length"),
    ],
)
def test_clients_that_cannot_be_read_are_refused_by_name(clients, wrong):
    with pytest.raises(DataError, match=wrong):
        Federation.from_clients(clients)


def test_an_argument_that_is_not_known_is_refused_with_a_hint():
    with pytest.raises(DataError, match="did you mean 'min_size'"):
        Federation.from_clients({"a": (X, Y)}, minsize=5)


def test_images_of_bytes_are_normalised_with_training_images_alone():
    images = RNG.integers(0, 256, size=(40, 8, 8, 3), dtype=np.uint8)
    federation = Federation.from_clients({"a": (images, Y), "b": (images, Y)})
    train = np.concatenate(federation.parts["train"]) % 40
    expected = (images[train] / 255).mean(axis=(0, 1, 2))
    assert federation.mean == pytest.approx(expected)
    x = federation.inputs(torch.arange(3))
    first = (images[0] / 255 - expected) / (images[train] / 255).std(axis=(0, 1, 2))
    assert np.allclose(x[0], first.transpose(2, 0, 1), atol=1e-5)


# -- small clients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("small", "names", "left_out"),
    [("keep", ["a", "b", "c"], 1), ("leave-out", ["a"], 3), ("merge", ["a", "small clients"], 1)],
)
def test_small_clients_are_kept_left_out_or_merged_and_that_is_said(small, names, left_out, tmp_path):
    clients = {"a": (X, Y), "b": (X[:2], Y[:2]), "c": (X[2:5], Y[2:5]), "none": (X[:0], Y[:0])}
    federation = Federation.from_clients(clients, min_size=4, small=small)
    assert (list(federation.names), federation.left_out) == (names, left_out)
    assert "none" in federation.note
    if small == "keep":
        assert [federation.size(1, part) for part in ("train", "validation", "test")] == [2, 0, 0]
        assert "no accuracy is measured" in federation.note
    if small == "merge":
        assert sum(federation.size(1, part) for part in ("train", "validation", "test")) == 5
    with pytest.warns(UserWarning, match="left out"):
        run = fedmix.train(federation=federation, out=tmp_path / "run", **QUICK)
    assert run.clients == names


def test_owners_in_a_table_with_few_rows_are_handled_as_asked(tmp_path):
    rows = ["u,who,y", *(f"{i},{'big' if i < 30 else f'small-{i % 2}'},{i % 2}" for i in range(38))]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    args = {"file": str(tmp_path / "t.csv"), "label": "y", "client": "who"}

    def names(**more):
        federation = build_federation(
            DataSettings(source="csv", split="by-client", clients=0, args=args, **more), seed=0
        )
        return list(federation.names), federation.left_out, federation.note

    left = names()
    assert left[:2] == (["big"], 2)
    assert "small-0" in left[2]
    assert names(small="keep")[0] == ["big", "small-0", "small-1"]
    merged = names(small="merge")
    assert merged[0] == ["big", "small clients"]
    assert "small-1) with fewer than 5 points are one client" in merged[2]


# -- whole numbers, sequences, several inputs --------------------------------------------------------------------------


class Tokens(nn.Module):
    """A bag of words that is told which places are filled."""

    def __init__(self, words=50):
        super().__init__()
        self.embed = nn.Embedding(words, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, tokens, mask):
        kept = self.embed(tokens) * mask.unsqueeze(-1)
        return self.out(kept.sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        empty = x == 0
        h = self.body(self.embed(x), src_key_padding_mask=empty)
        return self.out(h.masked_fill(empty.unsqueeze(-1), 0).sum(dim=1))


def sentences(n, seed):
    rng = np.random.default_rng(seed)
    x = [rng.integers(1, 50, size=rng.integers(1, 7)).tolist() for _ in range(n)]
    return x, [int(np.mean(row) >= 25) for row in x]


def test_sequences_of_different_lengths_reach_a_model_with_their_mask(tmp_path):
    clients = {f"c{s}": sentences(40, s) for s in range(3)}
    federation = Federation.from_clients(clients)
    settings = QUICK | {"rounds": 15, "server": {"server_lr": 0.05}}
    run = fedmix.train(federation=federation, model=Tokens, output="out", out=tmp_path / "run", **settings)
    loaded = fedmix.load(tmp_path / "run", Tokens)
    x, y = clients["c1"]
    assert np.array_equal(loaded.client("c1").predict(x), run.client("c1").predict(x))
    assert (loaded.client("c1").predict(x) == np.array(y)).mean() > 0.7
    one, two = loaded.client("c1").log_prob([[3, 4]]), loaded.client("c1").log_prob([[3, 4], [5, 6, 7]])
    assert torch.allclose(one[0], two[0], atol=1e-6)  # how far others are filled up does not matter
    module = loaded.client("c1").module()
    tokens = torch.tensor([[3, 4, 0, 0, 0, 0]])
    assert torch.allclose(module(tokens, mask=tokens > 0), one, atol=1e-6)
    with pytest.raises(DataError, match="at most 6 elements a sequence"):
        loaded.client("c1").predict([[1] * 9])


def test_a_transformer_with_a_padding_mask_is_trained_and_loaded(tmp_path):
    """Zeros are no input of such a model, so loading a run tries nothing with them."""
    x = np.array([row + [0] * (6 - len(row)) for row in sentences(60, 0)[0]])
    y = [int(row[row > 0].mean() > 25) for row in x]
    federation = Federation.from_clients({"a": (x, y), "b": (x, y)})
    assert federation.x.dtype == torch.int64
    run = fedmix.train(federation=federation, model=Transformer, output="out", out=tmp_path / "run", **QUICK)
    loaded = fedmix.load(tmp_path / "run", Transformer)
    assert torch.equal(loaded.client(0).log_prob(x), run.client(0).log_prob(x))
    assert torch.isfinite(loaded.client(0).log_prob(x)).all()


def test_large_whole_numbers_stay_what_they_are():
    federation = Federation.from_clients({"a": (np.full((9, 1), 16777217), [0, 1, 0, 1, 0, 1, 0, 1, 1])})
    assert federation.inputs(torch.arange(1)).item() == 16777217
    several = Federation.from_clients({"a": ({"id": np.full((9, 1), 16777217)}, [0, 1, 0, 1, 0, 1, 0, 1, 1])})
    assert several.x[0].item() == 16777217


def test_whole_numbers_are_made_floats_for_a_model_that_takes_floats(tmp_path):
    counts = RNG.integers(0, 9, size=(40, 3))
    federation = Federation.from_clients({"a": (counts, Y), "b": (counts, Y)})
    run = fedmix.train(federation=federation, out=tmp_path / "run", **QUICK)
    assert run.client("a").predict(counts).shape == (40,)


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.body = nn.Linear(4 + 3 + 3 * 64, 16)
        self.out = nn.Linear(16, 2)

    def forward(self, word, numbers, picture):
        h = torch.cat([self.embed(word), numbers, picture.flatten(1)], dim=1)
        return self.out(torch.relu(self.body(h)))


@pytest.mark.parametrize("method", ["fedmix", "fedavg"])
def test_several_inputs_go_to_a_model_by_name(method, tmp_path):
    inputs = {
        "word": RNG.integers(0, 10, size=40),
        "numbers": X.astype(np.float32),
        "picture": RNG.integers(0, 256, size=(40, 8, 8, 3), dtype=np.uint8),
    }
    federation = Federation.from_clients({"a": (inputs, Y), "b": (inputs, Y)})
    run = fedmix.train(
        federation=federation, model=Several, output="out", algorithm=method, out=tmp_path / "run", **QUICK
    )
    client = fedmix.load(tmp_path / "run", Several).client("a")
    by_hand = client.module()
    picture = federation.input_parts[2]
    images = (inputs["picture"].transpose(0, 3, 1, 2) / 255 - np.reshape(picture.mean, (1, 3, 1, 1))) / np.reshape(
        picture.std, (1, 3, 1, 1)
    )
    with torch.no_grad():
        log_p = by_hand(
            word=torch.tensor(inputs["word"]),
            numbers=torch.tensor(inputs["numbers"]),
            picture=torch.tensor(images, dtype=torch.float32),
        )
    assert torch.allclose(client.log_prob(inputs), log_p, atol=1e-5)
    assert client.expert_weights(inputs).shape[0] == 40
    assert np.array_equal(run.client("a").predict(inputs), client.predict(inputs))
    with pytest.raises(DataError, match="must have the inputs word, numbers, picture"):
        client.predict({"word": inputs["word"]})
    wrong = Federation.from_clients({"a": ({"word": inputs["word"], "nmbers": X}, Y)})
    with pytest.raises(ModelError, match=r"must take word, nmbers by name. It does not take nmbers"):
        fedmix.train(federation=wrong, model=Several, output="out", out=tmp_path / "other", **QUICK)


# -- tables ------------------------------------------------------------------------------------------------------------


def patients(n=60):
    rng = np.random.default_rng(1)
    age = rng.normal(50, 10, n)
    table = pd.DataFrame({"age": age, "sex": rng.choice(["f", "m"], n), "note": "n"})
    table["hospital"] = np.array(["Bern", "Basel"])[np.arange(n) % 2]
    table["ward"] = rng.integers(1, 4, n)
    table["ill"] = np.where(age > 50, "yes", "no")
    return table


def test_a_data_frame_becomes_a_federation_and_new_rows_are_predicted(tmp_path):
    table = patients()
    federation = Federation.from_table(table, label="ill", client="hospital", leave_out=["note", "ward"])
    assert [rule["column"] for rule in federation.features] == ["age", "sex"]
    train = np.concatenate(federation.parts["train"])
    ages = pd.concat([rows for _, rows in table.groupby("hospital")])["age"].to_numpy()[train]
    assert federation.features[0]["mean"] == pytest.approx(ages.mean())
    assert federation.features[0]["std"] == pytest.approx(ages.std())
    run = fedmix.train(federation=federation, out=tmp_path / "run", **QUICK | {"rounds": 10})
    rows = table.iloc[:7]
    bern = fedmix.load(tmp_path / "run").client("Bern")
    expected = bern.predict(rows)
    assert set(expected) <= {"yes", "no"}
    assert np.array_equal(bern.predict(rows.to_dict("records")), expected)
    assert np.array_equal(bern.predict(rows.to_dict("list")), expected)
    rows.to_csv(tmp_path / "new.csv", sep=";", decimal=",", index=False)
    assert np.array_equal(bern.predict(tmp_path / "new.csv"), expected)
    assert (run.client("Bern").predict(table) == table["ill"]).mean() > 0.85
    with pytest.raises(DataError, match=r"'sex' must be one of f, m. It has 'x'"):
        bern.predict({"age": [50], "sex": ["x"]})
    with pytest.raises(DataError, match="must have a column 'sex'"):
        bern.predict({"age": [50]})


def test_a_table_for_each_client_and_side_information_in_a_column(tmp_path):
    table = patients()
    tables = {name: rows.drop(columns=["hospital", "note"]) for name, rows in table.groupby("hospital")}
    federation = Federation.from_clients(tables, label="ill", side="column", side_column="ward")
    assert (federation.categories, list(federation.kinds)) == (3, ["1", "2", "3"])
    assert [rule["column"] for rule in federation.features] == ["age", "sex"]
    run = fedmix.train(federation=federation, out=tmp_path / "run", **QUICK)
    tuned = run.client("Bern").fine_tune(tables["Bern"])
    assert tuned.predict(tables["Bern"]).shape == (30,)


def csv_federation(tmp_path, text, **args):
    (tmp_path / "t.csv").write_text(text)
    described = {"file": str(tmp_path / "t.csv"), "label": "y", **args}
    return build_federation(DataSettings(source="csv", clients=2, args=described), seed=0)


def rows_of(n, cell, separator=","):
    lines = [separator.join(("u", "v", "y"))]
    return "\n".join([*lines, *(separator.join((cell(i), f"{i % 3}", "ab"[i % 2])) for i in range(n))]) + "\n"


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_separators_and_decimal_commas_are_found_out(separator, tmp_path):
    federation = csv_federation(tmp_path, rows_of(40, lambda i: f"1.{i:03d},5", separator), standardise=False)
    assert federation.x[:3, 0].tolist() == [1000.5, 1001.5, 1002.5]
    federation = csv_federation(tmp_path, rows_of(40, lambda i: f"{i}.25", separator), standardise=False)
    assert federation.x[:2, 0].tolist() == [0.25, 1.25]


def test_gaps_are_refused_or_imputed_from_training_rows(tmp_path):
    gaps = ("", "NA", "?", "nan")
    text = rows_of(40, lambda i: gaps[i % 4] if i % 5 == 0 else str(i))
    with pytest.raises(DataError, match=r"line 2: 'u' must have a value. It is empty, as in 8 of 40 rows.*'impute'"):
        csv_federation(tmp_path, text)
    federation = csv_federation(tmp_path, text, missing="impute")
    rule = federation.features[0]
    train = np.concatenate(federation.parts["train"])
    there = np.array([i for i in train if i % 5])
    assert (rule["missing"], rule["mean"]) == pytest.approx((np.median(there), there.mean()))
    assert federation.x[:, 1].tolist() == [float(i % 5 == 0) for i in range(40)]  # where values were missing
    assert np.allclose(federation.x[0, 0], (np.median(there) - there.mean()) / there.std())
    words = rows_of(40, lambda i: "" if i == 3 else ["red", "blue", "red"][i % 3])
    federation = csv_federation(tmp_path, words, missing="impute")
    assert federation.features[0]["missing"] == "red"
    assert federation.x[3, :3].tolist() == [0.0, 1.0, 1.0]  # blue, red, missing
    own_word = rows_of(40, lambda i: "-9" if i == 3 else str(i))
    federation = csv_federation(tmp_path, own_word, missing="impute", missing_values=["-9"])
    assert federation.features[0]["gaps"] == ["-9"]
    assert federation.x[:, 1].sum() == 1


def test_a_few_cells_that_are_no_numbers_are_refused_by_line(tmp_path):
    text = rows_of(40, lambda i: ">60" if i == 7 else str(i))
    with pytest.raises(DataError, match=r"'u' must be numbers. '>60' \(line 9\) are not; .*data.args.words"):
        csv_federation(tmp_path, text)
    assert csv_federation(tmp_path, text, words=["u"], leave_out=["v"]).x.shape == (40, 40)
    codes = csv_federation(tmp_path, rows_of(40, str), words=["v"], features=["v"])
    assert codes.x.sum(dim=1).tolist() == [1.0] * 40


@pytest.mark.parametrize(
    ("rows", "args", "wrong"),
    [
        ([f"{i},{i / 7:.3f}" for i in range(40)], {}, "y must be classes. Got .* a measurement"),
        ([f"{i},{3 * i}" for i in range(60)], {}, "y must be classes. Got 60 different numbers in 60 points"),
        ([f"{i / 7},{i % 2}" for i in range(40)], {"side": "u"}, "side information must be categories.*vector"),
        ([f"{i},{i % 2}" for i in range(40)], {"leave_out": ["w"]}, "must have a column 'w'"),
        ([f"{i},{i % 2}" for i in range(40)], {"missing": "drop"}, "must be 'refuse' or 'impute'"),
        ([f"{i},{i % 2}" for i in range(40)], {"separator": "::"}, "must be one character"),
        ([f"{i},1" for i in range(40)], {}, "two kinds or more"),
    ],
)
def test_tables_whose_columns_are_something_else_are_refused(rows, args, wrong, tmp_path):
    text = "\n".join(["u,y", *rows])
    if "side" in args:
        text = "\n".join(["u,w,y", *(row.replace(",", ",0,") for row in rows)])
    with pytest.raises(DataError, match=wrong):
        csv_federation(tmp_path, text, **args)


def test_a_federation_and_a_run_are_short_in_words(tmp_path):
    federation = Federation.from_clients({f"c{s}": (X, Y) for s in range(50)})
    assert repr(federation) == "Federation(50 clients (c0, c1, c2, ...), 2,000 points of 3, 2 classes)"
    run = fedmix.train(federation=federation, out=tmp_path / "run", **QUICK | {"rounds": 1})
    assert len(repr(run)) < 200
    assert "c7" in repr(run.client(7))


# -- the same in another form ------------------------------------------------------------------------------------------


def coded(kind):
    """Two hospitals with a column of codes and a label, as pandas may hold them."""
    table = pd.DataFrame(
        {"code": [1, 2, 3, 4] * 15, "age": np.arange(60.0), "h": ["a", "b"] * 30, "y": [0, 1, 1, 0] * 15}
    )
    table["code"] = table["code"].astype(kind)
    return table


@pytest.mark.parametrize("kind", ["int64", "float64", "Int64", "string", "category", "object"])
def test_codes_are_the_same_in_every_type_of_pandas(kind):
    federation = Federation.from_table(coded(kind), label="y", client="h", words=["code"])
    assert federation.features[0]["words"] == ["1", "2", "3", "4"]


def test_gaps_of_pandas_and_numbers_that_mean_gaps_are_imputed():
    table = coded("Int64")
    table.loc[3, "code"] = pd.NA
    table["flag"] = pd.array([True, False, pd.NA] * 20, dtype="boolean")
    table["when"] = np.where(np.arange(60) == 7, -9.0, np.arange(60.0))
    federation = Federation.from_table(table, label="y", client="h", missing="impute", missing_values=[-9])
    told = {rule["column"]: rule["indicator"] for rule in federation.features}
    assert told == {"code": True, "age": False, "flag": True, "when": True}
    table["y"] = table["y"].astype("Int64")
    table.loc[5, "y"] = pd.NA
    with pytest.raises(DataError, match="'y' must have a value"):
        Federation.from_table(table, label="y", client="h", missing="impute")


def test_new_gaps_truth_values_and_other_types_are_predicted(tmp_path):
    table = coded("int64")
    table["flag"] = table["age"] > 30
    federation = Federation.from_table(table, label="y", client="h", missing="impute", words=["code"])
    run = fedmix.train(federation=federation, out=tmp_path / "run", **QUICK)
    rows = table.drop(columns=["y", "h"]).iloc[:6]
    expected = run.client("a").predict(rows)
    table.iloc[:6].to_csv(tmp_path / "new.csv", index=False)
    assert np.array_equal(run.client("a").predict(tmp_path / "new.csv"), expected)
    assert np.array_equal(run.client("a").predict(rows.astype({"code": float})), expected)
    assert np.array_equal(run.client("a").predict(rows.convert_dtypes()), expected)
    assert run.client("a").predict(rows.assign(age=None)).shape == (6,)  # a gap that training had nowhere


def test_integer_names_of_columns_and_clients(tmp_path):
    table = pd.DataFrame({0: np.arange(60.0), 1: [1, 2] * 30, 2: [0, 1, 1] * 20, 3: 5})
    federation = Federation.from_table(table, label=2, client=1, leave_out=[3])
    assert [rule["column"] for rule in federation.features] == ["0"]
    run = fedmix.train(federation=federation, out=tmp_path / "run", **QUICK)
    assert [run.client(1).name, run.client(np.int64(2)).name, run.client("1").name] == ["1", "2", "1"]


def test_a_csv_is_read_as_the_data_frame_is(tmp_path):
    table = coded("int64")
    table["part"] = table["age"] / 7
    table.to_csv(tmp_path / "t.csv", index=False)
    federation = Federation.from_table(tmp_path / "t.csv", label="y", client="h", leave_out=["part"])
    assert list(federation.labels) == [0, 1]
    for column in ("part", "age"):
        with pytest.raises(DataError, match="must be classes"):
            Federation.from_table(tmp_path / "t.csv", label=column, client="h")
    columns = Federation.from_table(table.to_dict("list"), label="y", client="h", leave_out="part")
    assert np.allclose(columns.x, federation.x)
    with pytest.raises(DataError, match=r"nope.csv must be a CSV file. It is not there"):
        Federation.from_table(tmp_path / "nope.csv", label="y", client="h")


@pytest.mark.parametrize(
    ("cells", "wrong"),
    [
        (lambda i: f"{i % 40}%", "'u' must be numbers. '0%' .* have other signs"),
        (lambda i: f"${i % 40}", "have other signs in them"),
        (lambda i: f"1\u202f{i % 30:03d}", "have other signs in them"),
        (lambda i: "1,5" if i % 2 else "0.143", "one decimal sign"),
        (lambda i: "1,000" if i % 2 else "990", "one decimal sign. '1,000' can be read in two ways"),
    ],
)
def test_numbers_that_can_be_read_in_two_ways_are_refused(cells, wrong, tmp_path):
    with pytest.raises(DataError, match=wrong):
        csv_federation(tmp_path, rows_of(40, cells, ";"))


def test_the_decimal_sign_of_training_is_that_of_new_rows(tmp_path):
    text = rows_of(40, lambda i: f"1.{i:03d},5", ";").replace("v;y", "v;y")
    (tmp_path / "t.csv").write_text(text.replace(";0;", ";0;"))
    federation = Federation.from_table(tmp_path / "t.csv", label="y", client="v", standardise=False)
    run = fedmix.train(federation=federation, out=tmp_path / "run", **QUICK)
    (tmp_path / "new.csv").write_text("u\n1.500\n2.000\n")
    assert run._encoding.inputs(tmp_path / "new.csv").flatten().tolist() == [1500.0, 2000.0]


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: Federation.from_clients({"a": (X, Y)}, test=10), "shares from 0 to 1"),
        (lambda: Federation.from_clients({"a": (X, Y)}, validation=0.5, test=0.5), "shares from 0 to 1"),
        (lambda: Federation.from_clients({"a": (X, Y)}, standardise=True), "standardise is about columns"),
        (lambda: Federation.from_table(coded("int64"), label="y", client="h", words=["cod"]), "column 'cod'"),
        (lambda: Federation.from_clients({"a": (X, ["a", float("nan")] * 20)}), "20 are missing"),
        (lambda: Federation.from_clients({"a": (RNG.integers(0, 900, (40, 8, 8)), Y)}), "from 0 to 255. Got"),
        (lambda: Federation.from_clients({"a": (np.ma.masked_less(X, 0), Y)}), "no masked values"),
        (lambda: Federation.from_clients({"a": (torch.eye(40).to_sparse(), Y)}), "a dense tensor"),
        (
            lambda: Federation.from_clients(
                {"a": (np.zeros((40, 8, 8), np.uint8), Y), "b": (np.zeros((40, 8, 8), np.float32), Y)}
            ),
            "Some have bytes",
        ),
        (lambda: Federation.from_table(pd.DataFrame([[1, 2, 0]] * 9, columns=["a", "a", "y"]), label="y", client="a"), "twice"),
    ],
)  # fmt: skip
def test_what_would_be_silently_wrong_is_refused(make, wrong):
    with pytest.raises(DataError, match=wrong):
        make()


def test_bytes_in_other_types_are_images_and_large_numbers_are_names():
    images = RNG.integers(0, 256, size=(40, 8, 8))
    as_bytes, as_ints = (Federation.from_clients({"a": (images.astype(kind), Y)}) for kind in ("uint8", "int64"))
    assert torch.equal(as_bytes.inputs(torch.arange(3)), as_ints.inputs(torch.arange(3)))
    assert Federation.from_clients({"a": (X, Y * 90_000)}).labels == [0, 90_000]
    assert Federation.from_clients({"a": (torch.tensor(X, requires_grad=True).bfloat16(), Y)}).x.dtype == torch.float32


def test_unlabelled_points_of_hugging_face_are_refused():
    from datasets import ClassLabel, Features, Value
    from datasets import Dataset as HuggingFace

    kinds = Features({"a": Value("float32"), "b": Value("float32"), "label": ClassLabel(names=["no", "yes"])})
    rows = {"a": X[:, 0], "b": X[:, 1], "label": [-1] * 5 + Y[5:].tolist()}
    data = HuggingFace.from_dict(rows, features=kinds)
    with pytest.raises(DataError, match="5 are missing, or -1"):
        Federation.from_clients([data])
    federation = Federation.from_clients([data.select(range(5, 40))], label="label", leave_out=["a"])
    assert federation.x.shape == (35,)


def test_another_federation_is_no_data_to_fine_tune_on(tmp_path):
    run = fedmix.train(federation=Federation.from_clients({"a": (X, Y)}), out=tmp_path / "run", **QUICK)
    with pytest.raises(DataError, match="must be the run's own"):
        run.client("a").fine_tune(Federation.from_clients({"a": (X, 1 - Y)}))
    with pytest.raises(FedmixError, match="epochs must be a whole number"):
        run.client("a").fine_tune((X, Y), epochs=0)
    with pytest.raises(DataError, match="must have labelled points"):
        run.new_client((X[:0], Y[:0]))


def test_compare_and_sweep_take_own_data(tmp_path):
    federation = Federation.from_clients({"a": (X, Y), "b": (X, Y)})
    found = fedmix.compare(None, ["fedmix", "fedavg"], federation=federation, out=tmp_path / "c", seeds=[0, 1], **QUICK)
    assert [row["algorithm"] for row in found["rows"]] == ["fedmix", "fedavg"]
    swept = fedmix.sweep(
        None, {"training.client_lr": np.array([0.01, 0.3])}, federation=federation, out=tmp_path / "s", algorithm="fedavg",
        engine="serial", rounds=2,
    )  # fmt: skip
    assert len(swept["rows"]) == 2
    with pytest.raises(FedmixError, match="seeds must name each one once"):
        fedmix.compare(None, ["fedavg"], federation=federation, out=tmp_path / "d", seeds=[0, 0])
    with pytest.raises(FedmixError, match="a list of values to compare"):
        fedmix.sweep(None, {"training.client_lr": 0.1}, federation=federation, out=tmp_path / "d")
