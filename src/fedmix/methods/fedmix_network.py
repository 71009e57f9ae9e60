"""q(z|c) as a small network of side information that is not categorical (`fedmix.phi = "network"`).

The paper: phi 'can be optimized via gradient descent'. Here a client climbs the bound on each mini-batch,

    E_q[log p(y, z|x, s)] + beta H(q) + entropy H(p(z))

and the server averages the clients' networks. p(z) is how much each expert is used, half by everybody in the last round and
half in this mini-batch: with the former alone it would swing from round to round. On categorical c and without hidden units
the network is a table of logits, and what it climbs to is the closed form of `core.posterior`.
"""

import math

import torch
from torch import Tensor

from fedmix.core.method import Batch, Field
from fedmix.core.tree import Params
from fedmix.methods.fedmix_mixture import Mixture
from fedmix.rng import stream

PREFIX = "network."
SMALLEST = 1e-8


def fresh(mix: Mixture) -> Params:
    """The network before round 1: whatever c is, all experts have the same share."""
    inputs, hidden = mix.setup.categories, mix.settings.phi_hidden
    last = hidden or inputs
    network = {"w2": torch.zeros(last, mix.K), "b2": torch.zeros(mix.K)}
    if hidden:
        with stream(0, "fedmix", "network").torch():
            network["w1"] = torch.randn(inputs, hidden) / math.sqrt(inputs)
        network["b1"] = torch.zeros(hidden)
    return {PREFIX + name: value for name, value in network.items()}


def fields(mix: Mixture) -> dict[str, Field]:
    """What a client returns of the network: all of it."""
    return {name: Field(tuple(value.shape), moved_from=name, kind="numbers") for name, value in fresh(mix).items()}


def of_points(mix: Mixture, network: Params, c: Tensor) -> Tensor:
    """q(z|c) of points: c [B, D], or categories [B] -> [B, K]."""
    return torch.softmax(_logits(mix, network, c), dim=-1)


def _logits(mix: Mixture, network: Params, c: Tensor) -> Tensor:
    value = c if c.is_floating_point() else torch.nn.functional.one_hot(c, mix.setup.categories)
    value = value.to(network[PREFIX + "w2"].dtype)
    if mix.settings.phi_hidden:
        value = torch.tanh(value @ network[PREFIX + "w1"] + network[PREFIX + "b1"])
    return value @ network[PREFIX + "w2"] + network[PREFIX + "b2"]


def step(mix: Mixture, network: Params, joint: Tensor, batch: Batch, beta: float, use: Tensor) -> Params:
    """The network after one step up the bound on a mini-batch: log p(y, z|x, s) [B, K], p(z) of the last round [K]."""
    leaves = {name: value.detach().requires_grad_() for name, value in network.items()}
    with torch.enable_grad():
        log_q = torch.log_softmax(_logits(mix, leaves, batch.c), dim=-1)
        q = log_q.exp()
        points = (q * (joint.detach() - beta * log_q)).sum(dim=-1)
        here = batch.weight @ q
        marginal = ((use + here) / 2).clamp(min=SMALLEST)
        # twice the entropy: half of p(z) is everybody's, which this client does not move
        climbed = (batch.weight * points).sum() - 2 * mix.settings.entropy * (marginal * marginal.log()).sum()
        gradients = torch.autograd.grad(climbed, list(leaves.values()))
    pairs = zip(network.items(), gradients, strict=True)
    return {name: value + mix.settings.phi_step * gradient for (name, value), gradient in pairs}
