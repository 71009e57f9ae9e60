"""Recipes: unknown keys and bad values are refused by name; what is written is read back the same."""

import copy

import pytest

from fedmix.errors import SettingError
from fedmix.settings.reading import dump_recipe, make_recipe, parse_changes, read_recipe, shipped


@pytest.mark.parametrize("name", shipped())
def test_effective_settings_read_back_the_same(name, tmp_path):
    recipe = read_recipe(name, changes={"fedmix.prior": [0.5, 0.5], "local_global.layers": ["fc1"]})
    (tmp_path / "recipe.toml").write_text(dump_recipe(recipe))
    assert read_recipe(str(tmp_path / "recipe.toml")) == recipe
    assert read_recipe(str(tmp_path)) == recipe


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        (
            {"fedmix.etta": 0.5},
            r"a setting of \[fedmix\] must be one of .*eta.* Got 'etta' instead \(did you mean 'eta'\?\)",
        ),
        ({"tranining.epochs": 1}, r"Got 'tranining' instead \(did you mean 'training'\?\)"),
        ({"fedmix.beta": 0}, "fedmix.beta must be more than 0. Got 0.0 instead"),
        ({"fedmix.experts": 2.5}, "fedmix.experts must be a whole number or text. Got 2.5 instead"),
        ({"fedmix.experts": True}, "fedmix.experts must be a whole number or text. Got True"),
        ({"fedmix.gamma": "high"}, "fedmix.gamma must be a number. Got 'high'"),
        ({"fedmix.gamma": 1.5}, r"fedmix.gamma must be in \[0, 1\]"),
        ({"fedmix.phi": "shared"}, "fedmix.phi must be one of global, network, private"),
        ({"fedmix.objective": "direct"}, "fedmix.marginal must be 'exact' with fedmix.objective = 'direct'"),
        ({"fedmix.prior": "guess"}, "fedmix.prior must be one of"),
        ({"model.hidden": 64}, "model.hidden must be a list. Got 64"),
        ({"model.hidden": ["wide"]}, "model.hidden must be a whole number. Got 'wide'"),
        ({"model.dropout": [1.0]}, r"model.dropout must be rates in \[0, 1\)"),
        (
            {"model.name": "lenet5", "model.channels": [3]},
            "model.channels must be 2 numbers for lenet5, or none for its own",
        ),
        ({"model.channels": [3]}, "model.channels must be empty: mlp has no such layers"),
        ({"algorithm": "fedavrg"}, r"algorithm must be one of .*did you mean 'fedavg'"),
        ({"data.split": "hus"}, "did you mean 'hsu'"),
        ({"data": 3}, "data must be a table of settings. Got 3"),
        ({"rounds": 0}, "rounds must be 1 or more"),
        ({"training.client_lr": -1}, "training.client_lr must be more than 0"),
        ({"training.schedule": "step"}, "training.schedule must be one of constant, cosine, linear"),
        ({"server.optimizer": "lamb"}, "server.optimizer must be one of adam, average, sgd"),
        ({"data.validation": 0.6, "data.test": 0.5}, r"data.validation \+ data.test must be less than 1"),
        ({"checkpoint.clients": "cloud"}, "checkpoint.clients must be one of disk, memory"),
    ],
)
def test_bad_settings_are_refused_by_name(changes, wrong):
    with pytest.raises(SettingError, match=wrong):
        make_recipe({}, changes=changes)


def test_a_recipe_that_is_not_there_or_not_toml(tmp_path):
    with pytest.raises(SettingError, match=r"did you mean 'digits-skew'\?\), and no file of that name exists"):
        read_recipe("digits-skw")
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    with pytest.raises(SettingError, match="must be valid TOML"):
        read_recipe(str(tmp_path / "bad.toml"))


def test_methods_have_exceptions_of_their_own_and_changes_win(tmp_path):
    (tmp_path / "r.toml").write_text(
        "rounds = 7\n[model]\ndropout = [0.3]\n[methods.local-global.model]\ndropout = []\n[methods.fedmix]\nrounds = 9\n"
    )
    path = str(tmp_path / "r.toml")
    assert read_recipe(path).rounds == 9
    assert read_recipe(path, "fedavg").model.dropout == [0.3]
    assert read_recipe(path, "local-global").model.dropout == []
    assert read_recipe(path, "local-global", {"model.dropout": [0.5]}).model.dropout == [0.5]
    assert read_recipe(path).name == "r"
    (tmp_path / "s.toml").write_text("[methods.fedprox]\nrounds = 9\n")
    with pytest.raises(SettingError, match=r"\[methods.X\] must be one of"):
        read_recipe(str(tmp_path / "s.toml"))


def test_changes_on_the_command_line_are_toml_values_or_bare_words():
    changes = parse_changes(
        ["fedmix.eta=0.5", "data.side=label", "model.hidden=[3, 4]", "evaluation.share_private=true", 'name="a b"']
    )
    assert changes == {
        "fedmix.eta": 0.5,
        "data.side": "label",
        "model.hidden": [3, 4],
        "evaluation.share_private": True,
        "name": "a b",
    }
    with pytest.raises(SettingError, match="--set must be key=value"):
        parse_changes(["fedmix.eta"])


def test_exceptions_are_taken_in_order_and_changes_last():
    table = {
        "rounds": 9,
        "data": {"side": "label"},
        "fedmix": {"gamma": 0.1},
        "scales": {"small": {"rounds": 2, "fedmix": {"gamma": 0.2}}},
        "sides": {"client": {"fedmix": {"gamma": 0.3}}},
        "methods": {"fedavg": {"fedmix": {"gamma": 0.4}}},
    }

    def gamma(*args, **changes):
        return make_recipe(copy.deepcopy(table), *args, **changes).fedmix.gamma

    assert gamma() == 0.1
    assert gamma(scale="small") == 0.2
    assert gamma(changes={"data.side": "client"}, scale="small") == 0.3
    assert gamma("fedavg", {"data.side": "client"}, scale="small") == 0.4
    assert gamma("fedavg", {"data.side": "client", "fedmix.gamma": 0.5}, scale="small") == 0.5


@pytest.mark.parametrize(
    ("exceptions", "wrong"),
    [
        ({"sides": {"colour": {}}}, r"a table \[sides.X\] must be one of"),
        ({"scales": {"small": {"round": 3}}}, "round"),
        ({"methods": {"fedavg": {"rounds": 0}}}, "rounds must be 1 or more"),
    ],
)
def test_exceptions_that_are_not_used_are_checked_too(exceptions, wrong):
    with pytest.raises(SettingError, match=wrong):
        make_recipe(exceptions)


def test_the_papers_own_exceptions():
    assert read_recipe("cifar10").model.dropout == [0.3, 0.1]
    assert read_recipe("cifar10", "local-global").model.dropout == []
    assert read_recipe("cifar100", "local-global").local_global.layers == ["stem", "stage1"]
    assert read_recipe("cifar100").fedmix.beta == 1.0
    assert read_recipe("cifar100").data.augment == "crop-flip"
    assert read_recipe("femnist").training.batch_size == read_recipe("cifar100").training.batch_size == 20
    for name in ("rotated-mnist", "rotated-skewed-mnist"):
        assert read_recipe(name).fedmix.gamma == 0.5
        assert read_recipe(name, changes={"data.side": "label"}).fedmix.gamma == 0.99
    permutation = read_recipe("cifar10-permutation")
    assert (permutation.fedmix.gamma, permutation.training.epochs, permutation.data.side) == (0.75, 3, "client")
