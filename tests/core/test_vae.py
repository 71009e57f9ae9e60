"""The clients' densities p(x|s) against integrals and models whose answer is known."""

import math

import numpy as np
import torch
from scipy import integrate, stats

from fedmix.core.vae import LATENT, VAE, importance_bound, log_densities, train_vae
from fedmix.rng import stream

D = 3


def silent(model):
    """Every weight zero: q(z|x) is the prior, and x does not depend on z."""
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    return model


def constant(p):
    """A client whose inputs are independent coins with these chances."""
    model = silent(VAE(len(p)))
    with torch.no_grad():
        model.decoder[4].bias.copy_(torch.logit(torch.tensor(p)))
    return model


def log_coins(x, p):
    return float(sum(math.log(q if bit else 1 - q) for bit, q in zip(x, p, strict=True)))


def test_a_model_that_ignores_its_latent_has_an_exact_bound():
    x, p = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), [0.8, 0.3, 0.6]
    noise = torch.randn(4, 2, LATENT)
    wanted = torch.tensor([log_coins(row, p) for row in x.tolist()])
    assert torch.allclose(importance_bound(constant(p), x, noise), wanted, atol=1e-5)
    assert torch.allclose(constant(p).bound(x, noise[0]), wanted, atol=1e-5)


def test_with_many_samples_the_bound_is_the_integral():
    """log p(x) = log of the integral over z_1 of p(x|z_1) N(z_1): one latent that matters, q(z|x) not the prior."""
    model = silent(VAE(D))
    with torch.no_grad():  # logits = a * relu(z_1) + b, through both hidden layers
        model.decoder[0].weight[0, 0] = 1.0
        model.decoder[2].weight[0, 0] = 1.0
        model.decoder[4].weight[:, 0] = torch.tensor([2.0, -1.0, 0.5])
        model.decoder[4].bias.copy_(torch.tensor([-0.5, 0.2, 0.1]))
        model.encoder[4].bias[0] = 0.4  # mean of q(z_1|x)
        model.encoder[4].bias[LATENT] = 2 * math.log(1.3)  # and its deviation
    x = [1.0, 0.0, 1.0]

    def joint(z):
        logits = np.array([2.0, -1.0, 0.5]) * max(z, 0.0) + np.array([-0.5, 0.2, 0.1])
        p = 1 / (1 + np.exp(-logits))
        return np.prod([q if bit else 1 - q for bit, q in zip(x, p, strict=True)]) * stats.norm.pdf(z)

    wanted = math.log(integrate.quad(joint, -8, 8, points=[0])[0])
    noise = torch.randn(20_000, 1, LATENT, generator=torch.Generator().manual_seed(0))
    got = float(importance_bound(model, torch.tensor([x]), noise).detach())
    assert abs(got - wanted) < 0.01
    single = model.bound(torch.tensor([x]).expand(20_000, D), noise[:, 0])  # one sample at a time: a looser bound
    assert float(single.detach().mean()) < wanted - 0.01


def test_whose_input_it_is_follows_from_bayes():
    chances, p_s = [[0.9, 0.9, 0.1], [0.1, 0.2, 0.7]], [0.25, 0.75]
    clients = [dict(constant(p).state_dict()) for p in chances]
    x = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 1.0]])
    got = torch.softmax(log_densities(clients, x, stream(0)) + torch.tensor(p_s).log(), dim=1)
    for row, posterior in zip(x.tolist(), got.tolist(), strict=True):
        joint = [q * math.exp(log_coins(row, p)) for q, p in zip(p_s, chances, strict=True)]
        assert np.allclose(posterior, np.array(joint) / sum(joint), atol=1e-5)


def test_training_learns_the_clients_inputs_and_stops_by_itself():
    rng = np.random.default_rng(0)
    kinds = np.array([[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]])

    def some(n):
        bits = kinds[rng.integers(0, 2, n)]
        return torch.tensor(np.where(rng.random(bits.shape) < 0.05, 1 - bits, bits), dtype=torch.float32)

    weights, epochs = train_vae(some(100), some(30), stream(1))
    again, _ = train_vae(some(0).new_zeros(4, 6), some(0), stream(1))  # no validation points: judged by its own
    assert set(again) == set(weights)
    assert 3 < epochs < 200
    own = some(50)
    flips = [[(row != kind).sum() for kind in kinds] for row in own.numpy()]
    # coins that know nothing: -6 log 2 = -4.2
    true = [math.log(sum(0.5 * 0.05**n * 0.95 ** (6 - n) for n in both)) for both in flips]
    density = log_densities([weights], own, stream(2))[:, 0].numpy()
    assert abs(density.mean() - np.mean(true)) < 1.0  # a bound of a model of 100 points
    assert np.corrcoef(density, true)[0, 1] > 0.9


def test_the_same_seed_trains_the_same_density():
    x = torch.rand(20, 5, generator=torch.Generator().manual_seed(0)).round()
    one, other = (train_vae(x, x[:5], stream(3))[0] for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
