"""A client's own density p(x|s): the paper's small variational autoencoder (sec:NewShardInf, 'Using a Generative Model').

Encoder D-512-256-(32+32), decoder 32-256-512-D, ReLU, Bernoulli likelihood of pixels in [0, 1], a standard normal prior.
"""

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmix.core.tree import Params
from fedmix.rng import Stream

LATENT = 32
HIDDEN = (512, 256)
BATCH = 10
PATIENCE = 3  # epochs without a better bound on validation data
MOST_EPOCHS = 200
SAMPLES = 50  # of the importance-weighted bound


class VAE(nn.Module):
    """x [B, D] in [0, 1]; latent z [.., B, 32]."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        first, second = HIDDEN
        self.encoder = nn.Sequential(
            nn.Linear(inputs, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, 2 * LATENT)
        )
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, second), nn.ReLU(), nn.Linear(second, first), nn.ReLU(), nn.Linear(first, inputs)
        )

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of q(z|x): [B, D] -> [B, 32], [B, 32]."""
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        return mean, torch.exp(0.5 * log_variance)

    def log_likelihood(self, x: Tensor, z: Tensor) -> Tensor:
        """log p(x|z): [B, D], [.., B, 32] -> [.., B]."""
        logits = self.decoder(z)  # log p(x_d) = x_d l_d - softplus(l_d)
        return torch.einsum("...bd,bd->...b", logits, x) - F.softplus(logits).sum(dim=-1)

    def bound(self, x: Tensor, noise: Tensor) -> Tensor:
        """E_q[log p(x|z)] - KL(q(z|x) || p(z)) from one sample: [B, D], noise [B, 32] -> [B]."""
        mean, std = self.posterior(x)
        divergence = 0.5 * (mean.square() + std.square() - 1 - 2 * torch.log(std)).sum(dim=1)
        return self.log_likelihood(x, mean + std * noise) - divergence


def importance_bound(model: VAE, x: Tensor, noise: Tensor) -> Tensor:
    """log 1/L sum_l p(x, z_l) / q(z_l|x) with z_l ~ q(z|x), in log space: [B, D], noise [L, B, 32] -> [B].

    A lower bound of log p(x) that is exact as L grows (Burda et al., 2016).
    """
    mean, std = model.posterior(x)
    log_prior_minus_q = (0.5 * (noise.square() - (mean + std * noise).square()) + torch.log(std)).sum(dim=2)
    weights = model.log_likelihood(x, mean + std * noise) + log_prior_minus_q
    return torch.logsumexp(weights, dim=0) - math.log(len(noise))


def train_vae(x: Tensor, validation: Tensor, rng: Stream) -> tuple[Params, int]:
    """A client's VAE, and how many epochs it took: Adam, B = 10; the best epoch by the bound on validation data counts.

    x [N, D]; a client without validation points is judged by its training points.
    """
    judged = validation if len(validation) else x
    with rng.torch():
        model = VAE(x.shape[1]).to(x.device)
        noise = torch.randn(len(judged), LATENT, device=x.device)  # the same in every epoch, so that epochs compare
        optimizer = torch.optim.Adam(model.parameters(), fused=x.device.type == "cpu")
        best, best_state = -math.inf, copy.deepcopy(model.state_dict())
        since, epoch = 0, 0  # since: epochs after the best one
        while since < PATIENCE and epoch < MOST_EPOCHS:
            epoch += 1
            order = torch.from_numpy(rng.permutation(len(x))).to(x.device)
            for index in torch.split(order, BATCH):
                loss = -model.bound(x[index], torch.randn(len(index), LATENT, device=x.device)).mean()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            with torch.no_grad():
                reached = float(model.bound(judged, noise).mean())
            since += 1
            if reached > best:
                best, best_state, since = reached, copy.deepcopy(model.state_dict()), 0
    return dict(best_state), epoch


def log_densities(clients: list[Params], x: Tensor, rng: Stream) -> Tensor:
    """log p(x|s) of every client's VAE by the importance-weighted bound: x [B, D] -> [B, S].

    Every client gets the same noise, so that they differ by their weights alone.
    """
    with rng.torch():
        noise = torch.randn(SAMPLES, len(x), LATENT, device=x.device)
    model = VAE(x.shape[1]).to(x.device)
    columns = []
    with torch.no_grad():
        for weights in clients:
            model.load_state_dict(weights)
            columns.append(importance_bound(model, x, noise))
    return torch.stack(columns, dim=1)
