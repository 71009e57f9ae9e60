"""FedMix for one model and federation: its settings, and what follows from them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedmix.core import posterior
from fedmix.core.method import VECTORS, Setup
from fedmix.core.optim import Optimizer
from fedmix.core.placement import Place
from fedmix.core.server import server_optimizer
from fedmix.errors import SettingError
from fedmix.methods import fedmix_sharing
from fedmix.methods.fedmix_settings import FedmixSettings


@dataclass(frozen=True)
class Mixture:
    """FedMix for one model and federation: its settings, and what follows from them."""

    setup: Setup
    settings: FedmixSettings

    @property
    def K(self) -> int:
        """The number of experts, or of slots for them where it is found out."""
        return self.settings.slots

    @property
    def arriving(self) -> bool:
        """Whether phi is drawn from the experts as they arrive, once a round, and not from mini-batches."""
        return self.settings.evidence == "arriving"

    @property
    def network(self) -> bool:
        """Whether q(z|c) is a network, and no table."""
        return self.settings.phi == "network"

    @property
    def grows(self) -> bool:
        return self.settings.grows

    @property
    def pools(self) -> bool:
        """Whether clients add everybody's evidence to their own: where c tells points apart, and not clients.

        With a number of experts that is found out, whether clients differ is the question: each judges by its own points.
        """
        return self.arriving and self.shares_phi and self.setup.side != "client" and not self.grows

    @property
    def shares_phi(self) -> bool:
        """Whether the server keeps phi and sends it."""
        return self.settings.phi == "global" and self.settings.objective == "bound"

    @cached_property
    def prior(self) -> Tensor:
        """p(c) in the marginal entropy [C]: uniform, or the shares that the recipe gives."""
        self._refuse_vectors_in_a_table()
        prior, categories = self.settings.prior, self.setup.categories
        if isinstance(prior, str):
            return torch.full((categories,), 1.0 / categories)
        if len(prior) != categories or min(prior) < 0 or sum(prior) <= 0:
            raise SettingError(f"fedmix.prior must be {categories} shares of c, none negative. Got {prior} instead.")
        return torch.tensor(prior) / sum(prior)

    def _refuse_vectors_in_a_table(self) -> None:
        if self.setup.side in VECTORS and not self.network:
            raise SettingError(
                f"fedmix.phi must be 'network' with data.side = {self.setup.side!r}: a table has a row for each value of c, "
                f"and these are vectors. Got {self.settings.phi!r} instead."
            )

    @cached_property
    def phi_optimizer(self) -> Optimizer:
        return server_optimizer(self.setup.server, self.settings.phi_lr, rows=True)

    @cached_property
    def place(self) -> Callable[[str], Place]:
        """Where each parameter lives."""
        return fedmix_sharing.placement(self.setup.model, self.settings)

    @cached_property
    def _places(self) -> set[Place]:
        model = self.setup.model
        return {self.place(name) for name in model.names if name not in model.frozen}

    @property
    def shares(self) -> bool:
        """Whether experts have something in common that is trained."""
        return "shared" in self._places

    @property
    def shares_everything(self) -> bool:
        return "expert" not in self._places

    def uniform(self) -> Tensor:
        return posterior.uniform(self.setup.categories, self.K)
