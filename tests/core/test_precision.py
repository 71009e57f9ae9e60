"""training.precision: convolutions and products of a training step in bfloat16; all else in float32."""

import pytest
import torch

from fedmix.core.model import Model
from fedmix.core.settings import ClientSettings
from fedmix.errors import SettingError
from fedmix.models.lenet5 import LeNet5
from fedmix.models.mlp import mlp
from fedmix.rng import stream


@pytest.fixture
def images():
    return torch.randn(16, 1, 16, 16, generator=torch.Generator().manual_seed(0))


def lenet(images, precision):
    return Model(lambda: LeNet5((1, 16, 16), 10, channels=(8, 16), hidden=(32,)), "out", images[:2], 10, precision)


def step(model, images, training):
    """Logits, features, and the gradient of a loss."""
    params = {name: value.requires_grad_() for name, value in model.init(stream(0, "init")).items()}
    logits, features = model.apply(params, images, training)
    loss = torch.nn.functional.cross_entropy(logits, torch.arange(len(images)) % 10)
    grads = torch.autograd.grad(loss, list(params.values()))
    return logits, features, torch.cat([g.flatten() for g in grads])


def test_a_step_in_bfloat16_is_that_of_float32_but_for_rounding(images):
    full, rounded = (step(lenet(images, p), images, training=True) for p in ("float32", "bfloat16"))
    for a, b in zip(full, rounded, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert not torch.equal(a, b)
        assert torch.linalg.norm(a - b) < 0.05 * torch.linalg.norm(a)  # 8 bits: 0.004 a number; a ReLU that flips: more


def test_predictions_are_in_float32_whatever_training_is_in(images):
    full, rounded = (step(lenet(images, p), images, training=False) for p in ("float32", "bfloat16"))
    assert all(torch.equal(a, b) for a, b in zip(full, rounded, strict=True))


def test_no_groups_in_bfloat16():
    x = torch.zeros(2, 6)
    assert Model(lambda: mlp(6, 3, hidden=[4]), "out", x, 3).ungroupable is None
    assert "bfloat16" in Model(lambda: mlp(6, 3, hidden=[4]), "out", x, 3, "bfloat16").ungroupable


def test_only_precisions_that_there_are():
    with pytest.raises(SettingError, match=r"training.precision must be one of bfloat16, float32"):
        ClientSettings(precision="float16")
