"""FedAvg and its relatives: what is local, and what is averaged without client identity."""

import pytest
import torch
from conftest import small_experiment, train_serially
from torch import nn

from fedmix.core.types import Reply
from fedmix.errors import ModelError, SettingError
from fedmix.rng import stream


def test_local_parts():
    assert set(small_experiment("fedavg").algorithm.new_client(0)) == set()
    assert set(small_experiment("biased-fedavg").algorithm.new_client(0)) == {"out.bias"}
    assert set(small_experiment("local-global").algorithm.new_client(0)) == {"fc1.weight", "fc1.bias"}
    named = small_experiment("local-global", **{"local_global.layers": ["out"]})
    assert set(named.algorithm.new_client(0)) == {"out.weight", "out.bias"}
    assert set(small_experiment("independent").algorithm.new_client(0)) == {
        "fc1.weight",
        "fc1.bias",
        "out.weight",
        "out.bias",
    }


def test_plain_averaging_gives_the_weighted_mean_of_the_clients():
    experiment = small_experiment("fedavg", **{"server.optimizer": "average"})
    algorithm = experiment.algorithm
    state = algorithm.init(0)
    replies = []
    for s in range(4):
        data = experiment.federation.examples(s, "train")
        replies.append(
            Reply(s, algorithm.client_update(algorithm.broadcast(state, s), {}, data, stream(0, s), None)[0])
        )
    after, _ = algorithm.server_update(state, replies)
    sizes = [experiment.federation.size(s) for s in range(4)]
    for name, value in after.shared.items():
        mean = sum(n / sum(sizes) * reply.message.tensors[name] for n, reply in zip(sizes, replies, strict=True))
        assert torch.allclose(value, mean, atol=1e-6)


def test_a_single_client_step_is_torchs_sgd():
    experiment = small_experiment(
        "fedavg", **{"training.batch_size": 1000, "training.momentum": 0.9, "training.epochs": 3}
    )
    algorithm = experiment.algorithm
    message = algorithm.broadcast(algorithm.init(0), 0)
    data = experiment.federation.examples(0, "train")
    reply, _ = algorithm.client_update(message, {}, data, stream(0), None)
    module = experiment.model.module_with(message.tensors).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(data.x), data.y).backward()
        optimizer.step()
    for name, value in module.named_parameters():
        assert torch.allclose(reply.tensors[name], value.detach(), atol=1e-6)


@pytest.mark.parametrize("average", ["after", "before"])
def test_local_global_without_identity_averages_representations(average):
    """After the activation, as the shared layers see them, or before it."""
    experiment = small_experiment("local-global", **{"local_global.average": average})
    steps, privates = train_serially(experiment)
    x = experiment.federation.x[:5]
    shared = steps[-1].state.shared
    p = [0.1, 0.2, 0.3, 0.4]
    each = [nn.functional.linear(x, privates[s]["fc1.weight"], privates[s]["fc1.bias"]) for s in range(4)]
    if average == "after":
        hidden = sum(w * torch.relu(own) for w, own in zip(p, each, strict=True))
    else:
        hidden = torch.relu(sum(w * own for w, own in zip(p, each, strict=True)))
    logits = nn.functional.linear(hidden, shared["out.weight"], shared["out.bias"])
    message = experiment.algorithm.broadcast(steps[-1].state, None)
    got = experiment.algorithm.predict_anonymous(message, list(privates.values()), torch.tensor(p).log(), x)
    assert torch.allclose(got, torch.log_softmax(logits, dim=1), atol=1e-5)


def test_biased_fedavg_without_identity_averages_biases():
    experiment = small_experiment("biased-fedavg")
    steps, privates = train_serially(experiment)
    x, p = experiment.federation.x[:5], torch.tensor([0.1, 0.2, 0.3, 0.4])
    bias = sum(float(w) * privates[s]["out.bias"] for s, w in enumerate(p))
    message = experiment.algorithm.broadcast(steps[-1].state, None)
    got = experiment.algorithm.predict_anonymous(message, list(privates.values()), p.log(), x)
    assert torch.allclose(got, experiment.algorithm.predict(message, {"out.bias": bias}, x), atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "average"])
def test_every_server_optimiser_learns(optimizer):
    rate = 0.02 if optimizer == "adam" else 1.0
    steps, _ = train_serially(
        small_experiment("fedavg", rounds=8, **{"server.optimizer": optimizer, "server.server_lr": rate})
    )
    assert steps[-1].loss < 0.8 * steps[0].loss


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.out = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False)

    def forward(self, x):
        return self.out(self.norm(self.body(x)))


class Plain(Normed):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)


def test_batch_norm_is_refused_with_what_to_use_instead():
    with pytest.raises(ModelError, match=r"'norm' is BatchNorm1d.*GroupNorm"):
        small_experiment("fedavg", model=Normed, **{"model.output": "out"})


def test_models_that_cannot_be_used_are_refused_by_what_is_wrong():
    with pytest.raises(ModelError, match="no layer 'head'; its layers are body, norm, out"):
        small_experiment("fedavg", model=Plain, **{"model.output": "head"})
    with pytest.raises(ModelError, match="output layer with a bias"):
        small_experiment("biased-fedavg", model=Plain, **{"model.output": "out"})
    with pytest.raises(SettingError, match="must name layers of the model"):
        small_experiment("local-global", **{"local_global.layers": ["conv7"]})
    with pytest.raises(SettingError, match="independent"):
        small_experiment("local-global", **{"local_global.layers": ["fc1", "out"]})
    with pytest.raises(ModelError, match=r"\[batch, 3\] logits"):
        small_experiment("fedavg", model=lambda: nn.Sequential(nn.Linear(2, 7)), **{"model.output": "0"})
