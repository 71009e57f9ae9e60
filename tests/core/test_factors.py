"""Experts that differ by factors of a shared weight."""

import pytest
import torch
from torch import nn

from fedmix.core.factors import Factors
from fedmix.core.model import Model
from fedmix.errors import ModelError
from fedmix.rng import stream


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3, stride=2, padding=1)
        self.fc = nn.Linear(5 * 16, 7)
        self.out = nn.Linear(7, 3, bias=False)

    def forward(self, x):
        return self.out(self.fc(self.conv(x).relu().flatten(1)).relu())


X = torch.randn(6, 2, 8, 8, generator=torch.Generator().manual_seed(0))


def model_with(layers, rank):
    return Model(Net, "out", X, 3).with_factors(Factors(tuple(layers), rank))


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_layer_with_factors_is_one_with_the_weight_that_they_make(rank):
    model = model_with(["conv", "fc", "out"], rank)
    params = model.init(stream(1))
    logits, _ = model.apply(params, X, training=False)
    assert torch.allclose(model.module_with(params)(X), logits, atol=1e-5)
    plain = {name: value for name, value in params.items() if name.count(".") == 1}
    without, _ = Model(Net, "out", X, 3).apply(plain, X, training=False)
    assert not torch.allclose(without, logits, atol=1e-4)


@pytest.mark.parametrize("layer", ["conv", "fc"])
def test_factors_of_full_rank_can_make_any_expert(layer):
    """W + U V with V = 1 and U = W_k - W is the expert's whole weight."""
    plain = Model(Net, "out", X, 3)
    whole = plain.init(stream(2))
    columns = whole[f"{layer}.weight"][0].numel()
    model = model_with([layer], columns)
    params = {**model.init(stream(3)), **{name: value for name, value in whole.items() if layer not in name}}
    params[f"{layer}.bias"] = whole[f"{layer}.bias"]
    params[f"{layer}.weight.down"] = torch.eye(columns)
    params[f"{layer}.weight.up"] = (whole[f"{layer}.weight"] - params[f"{layer}.weight"]).flatten(1)
    wanted, _ = plain.apply(whole, X, training=False)
    logits, _ = model.apply(params, X, training=False)
    assert torch.allclose(logits, wanted, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 2])
def test_experts_start_near_the_shared_weight_and_apart_from_each_other(rank):
    model = model_with(["fc"], rank)
    first, second = model.init(stream(0, "a")), model.init(stream(0, "b"))
    second |= {name: first[name] for name in first if name.count(".") == 1}
    weight = first["fc.weight"]
    moved = [model.factors.composed(params)["fc.weight"] - weight for params in (first, second)]
    assert not torch.allclose(moved[0], moved[1])
    for difference in moved:
        assert 0.05 < float(difference.std() / weight.std()) < 0.25


@pytest.mark.parametrize("rank", [0, 2])
def test_experts_with_factors_at_once_are_what_each_is_alone(rank):
    model = model_with(["conv", "fc"], rank)
    experts = [model.init(stream(0, k)) for k in range(3)]
    names = model.factors.names
    alike = {name: value for name, value in experts[0].items() if name not in names}
    stacked = {name: torch.stack([expert[name] for expert in experts]) for name in names}
    assert model.stacks(names)
    logits, features = model.apply_stacked(alike, stacked, X)
    for k, expert in enumerate(experts):
        alone, of_gate = model.apply({**alike, **{name: expert[name] for name in names}}, X, training=True)
        assert torch.allclose(logits[k], alone, atol=1e-5)
        assert torch.allclose(features[k], of_gate, atol=1e-5)


def test_layers_that_cannot_have_factors_are_refused():
    grouped = nn.Sequential()
    grouped.add_module("conv", nn.Conv2d(2, 4, 3, groups=2))
    grouped.add_module("flat", nn.Flatten())
    grouped.add_module("out", nn.Linear(4 * 36, 3))
    model = Model(lambda: grouped, "out", X, 3)
    with pytest.raises(ModelError, match="'conv': a convolution with groups"):
        model.with_factors(Factors(("conv",), 2))
    with pytest.raises(ModelError, match="'flat' must be linear or a convolution"):
        model.with_factors(Factors(("flat",), 2))
