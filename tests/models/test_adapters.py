"""A frozen, pretrained backbone with adapters as experts."""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small_experiment, small_federation, train_serially
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fedmix
from fedmix.core.tree import nbytes
from fedmix.data.federation import Federation
from fedmix.errors import ModelError
from fedmix.rng import stream

ROOT = Path(__file__).parents[2]


class Backbone(nn.Module):
    """A trunk that is frozen, and an output layer."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.trunk = nn.Linear(2, 256)
        self.narrow = nn.Linear(256, 8)
        self.out = nn.Linear(8, 3)
        for layer in (self.trunk, self.narrow):
            for weight in layer.parameters():
                weight.data = torch.randn(weight.shape, generator=generator) / 4
                weight.requires_grad_(False)

    def forward(self, x):
        return self.out(self.narrow(self.trunk(x).relu()).relu())


def counted(changes, algorithm="fedmix"):
    experiment = small_experiment(algorithm, model=Backbone, **changes)
    method = experiment.algorithm
    message = method.broadcast(method.init(0), 0)
    with FlopCounterMode(display=False) as counter:
        method.client_update(message, method.new_client(0), experiment.federation.examples(0, "train"), stream(0), 1)
    return counter.get_total_flops(), message, experiment


def test_a_frozen_backbone_is_computed_once_for_all_experts_and_never_sent():
    plain, _, _ = counted({}, "fedavg")
    mixed, message, experiment = counted({"fedmix.experts": 4})
    assert mixed < 1.5 * plain  # four times would be four forward passes
    assert experiment.model.stacks(["out.weight", "out.bias"])
    weights = {name: value for name, value in message.tensors.items() if name.startswith("expert.")}
    assert nbytes(weights) == 4 * 4 * (8 * 3 + 3)


def test_factors_beside_a_frozen_weight_are_adapters():
    """W is frozen, W + U_k V_k is an expert's: only its factors and the output layer are trained and sent."""
    experiment = small_experiment(model=Backbone, **{"fedmix.factor_layers": ["narrow"], "fedmix.rank": 2})
    layout = experiment.algorithm.layout
    assert set(layout.expert) == {"out.weight", "out.bias", "narrow.weight.up", "narrow.weight.down"}
    assert not layout.shared
    steps, _ = train_serially(experiment)
    assert steps[-1].loss < steps[0].loss


def test_a_run_without_factors_is_a_warm_start_for_one_with_them(tmp_path):
    federation = small_federation()
    first = fedmix.train(federation=federation, algorithm="fedavg", rounds=3, out=tmp_path / "a", model={"hidden": [8]})
    settings = {"experts": 2, "factor_layers": ["fc1"], "rank": 2}
    run = fedmix.train(
        federation=federation,
        rounds=1,
        out=tmp_path / "b",
        fedmix=settings,
        model={"hidden": [8]},
        warm_start=str(tmp_path / "a"),
        server={"server_lr": 1e-9},
        training={"client_lr": 1e-9},
    )
    weights = first.experts[0]
    for expert in run.experts:
        assert expert.keys() == weights.keys()  # as an ordinary module has them
        assert torch.allclose(expert["fc1.bias"], weights["fc1.bias"], atol=0.2)
        moved = (expert["fc1.weight"] - weights["fc1.weight"]).std() / weights["fc1.weight"].std()
        assert 0 < float(moved) < 0.5


# -- Hugging Face --------------------------------------------------------------------------------------------------------


def small_transformer():
    """A randomly initialised model of transformers with adapters of peft."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft", reason="the extra peft is not installed")
        from transformers import BertConfig, BertForSequenceClassification

        from fedmix.models.huggingface import SequenceClassifier

        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        config = BertConfig(vocab_size=30, max_position_embeddings=12, num_labels=3, **sizes)
        config._attn_implementation = "eager"
        adapters = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
        return SequenceClassifier(peft.get_peft_model(BertForSequenceClassification(config), adapters))


def sentences(clients=3, points=30):
    """Numbers of tokens, some of them padding; the label is which of three words is in the sentence."""
    rng = np.random.default_rng(0)
    sites = {}
    for s in range(clients):
        x = rng.integers(4, 30, size=(points, 8))
        y = rng.integers(0, 3, size=points)
        x[np.arange(points), rng.integers(0, 4, points)] = y + 1
        x[:, 6:] = 0
        sites[f"site-{s}"] = {"x": x, "y": y}
    return Federation.from_clients(sites)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:the experts start from the same weights")
def test_adapters_of_peft_are_experts_and_the_rest_is_frozen(tmp_path):
    model, federation = small_transformer(), sentences()
    settings = {"fedmix": {"experts": 2}, "training": {"client_lr": 0.3, "batch_size": 10}, "rounds": 4}
    settings["server"] = {"optimizer": "average"}
    output = model.output_layer("classifier")
    run = fedmix.train(
        federation=federation, model=model, output=output, out=tmp_path / "r", engine="serial", **settings
    )
    layout = run._algorithm.layout
    assert all("lora_" in name or "modules_to_save" in name for name in layout.expert)
    assert not layout.shared
    assert len(layout.frozen) > len(layout.expert)
    trained = sum(value.numel() for value in model.parameters() if value.requires_grad)
    sent = run.metrics[0]["bytes_down"] / 3
    assert sent == pytest.approx(2 * 4 * trained, rel=0.02)
    losses = [line["loss"] for line in run.metrics]
    assert losses[-1] < losses[0]
    again = fedmix.load(tmp_path / "r", model=small_transformer())
    x = federation.x[:4]
    assert torch.allclose(again.client(1).log_prob(x), run.client(1).log_prob(x), atol=1e-6)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_layer_that_is_not_there_is_named():
    model = small_transformer()
    with pytest.raises(ModelError, match="the model must have a layer 'head'"):
        model.output_layer("head")


def test_the_example_of_a_backbone_with_adapters_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    import adapters

    rows = adapters.main("digits-skew", rounds=4, layer="fc1", out=str(tmp_path))
    assert rows.keys() == {"adapters as experts", "everything, FedAvg"}
    assert "MiB sent" in capsys.readouterr().out
    sys.modules.pop("adapters")
