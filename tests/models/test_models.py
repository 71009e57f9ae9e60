"""Models: the parameter counts that the paper's communication figures imply, and that each can be an expert."""

import pytest
import torch

from fedmix.core.model import Model
from fedmix.errors import SettingError
from fedmix.models.resnet20 import ResNet20
from fedmix.rng import stream
from fedmix.settings.build import build_model
from fedmix.settings.recipe import ModelSettings


@pytest.mark.parametrize(
    ("settings", "shape", "classes", "parameters"),
    [
        ({"name": "lenet5"}, (3, 32, 32), 10, 878_538),
        ({"name": "lenet5", "channels": [113, 226]}, (3, 32, 32), 10, 3_545_706),
        ({"name": "lenet5"}, (1, 28, 28), 62, 608_702),
        ({"name": "resnet20"}, (3, 32, 32), 100, 275_572),
        ({"name": "mlp", "hidden": [200, 200]}, (1, 28, 28), 10, 784 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10),
    ],
)
def test_parameter_counts(settings, shape, classes, parameters):
    model = build_model(ModelSettings(**settings), torch.zeros(2, *shape), classes)
    assert isinstance(model, Model)
    assert model.parameters == parameters
    assert sum(w.numel() for w in model.init(stream(0)).values()) == parameters


def test_stem_and_first_stage_of_resnet20_are_what_the_papers_local_global_keeps():
    net = ResNet20((3, 32, 32), 100)
    assert sum(p.numel() for part in (net.stem, net.stage1) for p in part.parameters()) == 14_480


@pytest.mark.parametrize("name", ["lenet5", "resnet20"])
def test_features_are_what_the_output_layer_sees(name):
    model = build_model(ModelSettings(name=name), torch.zeros(2, 3, 32, 32), 7)
    params = model.init(stream(0))
    logits, features = model.apply(params, torch.randn(5, 3, 32, 32), training=False)
    assert torch.allclose(logits, features @ params["out.weight"].T + params["out.bias"], atol=1e-5)
    assert model.features == {"lenet5": 512, "resnet20": 64}[name]


def test_dropout_is_where_the_paper_has_it():
    net = build_model(ModelSettings(name="lenet5", dropout=[0.3, 0.1]), torch.zeros(2, 3, 32, 32), 10).module
    assert (net.dropout_conv.p, net.dropout_fc.p) == (0.3, 0.1)


def test_images_that_are_too_small_are_refused():
    with pytest.raises(
        SettingError, match=r"needs images \[channels, height, width\] of 16 pixels or more. Got \[1, 8, 8\]"
    ):
        build_model(ModelSettings(name="lenet5"), torch.zeros(2, 1, 8, 8), 10)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_lie_channels_last_whatever_their_channels(channels):
    """Pooling of the other layout is several times slower; one channel is the same in memory either way."""
    images = torch.randn(6, channels, 28, 28)
    model = build_model(ModelSettings(name="lenet5"), images[:2], 10)
    params = {name: value.detach() for name, value in model.module.named_parameters()}
    seen = []
    with model.module.conv1.register_forward_hook(lambda _, __, out: seen.append(out)):
        logits, _ = model.apply(params, images[2:], training=False)  # a part of a tensor: it starts further on
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert not seen[0].is_contiguous()
    assert torch.allclose(logits, model.module(images[2:]), atol=1e-5)
