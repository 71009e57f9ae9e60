"""FedProx (Li et al., 2018) as a method of one's own: FedAvg, and a pull back to the weights that arrived."""

from dataclasses import dataclass, replace

from fedmix.methods import Page
from fedmix.methods.fedavg import fedavg


@dataclass(frozen=True)
class Settings:
    mu: float = 0.1  # how strong the pull is


def build(setup, settings):
    plain = fedavg(setup)

    def prepare(arrival):
        return {"anchor": arrival.parts.shared}, {}

    def loss(parts, fixed, batch, carry):
        points, _, carry = plain.loss(parts, fixed, batch, carry)
        far = sum((w - fixed["anchor"][name]).square().sum() for name, w in parts.shared.items())
        return points, settings.mu / 2 * far, carry

    return replace(plain, prepare=prepare, loss=loss)


fedprox = Page("FedProx", build, Settings, "Li et al., 2018")
