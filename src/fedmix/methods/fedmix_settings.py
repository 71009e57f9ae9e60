"""The settings of FedMix. They check themselves when they are made; the comment behind each is its documentation."""

from dataclasses import dataclass

from fedmix.core.settings import require
from fedmix.errors import SettingError, one_of


@dataclass(frozen=True)
class FedmixSettings:
    """The settings of FedMix: K, beta, gamma, eta and what the paper leaves open (docs/decisions.md)."""

    experts: int = 4
    beta: float = 0.8  # temperature of phi: below 1 experts specialise by themselves, above 1 on evidence only
    beta_start: float = 0.0  # beta in round 1; it goes to `beta` in equal steps. 0: no schedule, as in the paper
    beta_rounds: int = 10  # how many rounds that takes
    gamma: float = 0.99  # dampening of phi on the client
    eta: float = 0.0  # pruning threshold: experts with q(z=k|s) < eta/K are left out; 0 prunes nothing
    objective: str = "bound"  # or "direct": eq:globalObjective, which the paper reports to collapse
    marginal: str = "posterior"  # p(z|s) from phi, or "exact": the mean of the gate over the client's data
    phi: str = "global"  # or "private": each client keeps its own
    phi_lr: float = 0.0  # 0: server.server_lr
    phi_floor: float = 1e-6  # phi is clamped to this before it is renormalised
    entropy: float = 1.0  # coefficient of the marginal entropy on the server
    prior: str | list[float] = "uniform"  # p(c) in it; "reported": clients give their shares of c away
    gate_through_features: bool = True  # the gate's loss reaches the experts through their features
    full_steps: bool = False  # the expert with the largest share of a mini-batch steps as far as one model would
    skip_below: float = 0.0  # no backward pass for an expert on points with q(z=k|c) below this; 0 is exact

    def __post_init__(self) -> None:
        self._check_ranges()
        if self.skip_below:
            self._check_skip_below()
        require(self.entropy >= 0, "fedmix.entropy", "0 or more", self.entropy)
        self._check_choices()
        if self.objective == "direct":
            self._check_direct()

    def _check_ranges(self) -> None:
        require(self.experts >= 1, "fedmix.experts", "1 or more", self.experts)
        require(self.beta > 0, "fedmix.beta", "more than 0", self.beta)
        require(self.beta_start >= 0, "fedmix.beta_start", "more than 0, or 0 for no schedule", self.beta_start)
        require(self.beta_rounds >= 1, "fedmix.beta_rounds", "1 or more", self.beta_rounds)
        require(0 <= self.gamma <= 1, "fedmix.gamma", "in [0, 1]", self.gamma)
        require(0 <= self.eta <= 1, "fedmix.eta", "in [0, 1]", self.eta)
        require(self.phi_lr >= 0, "fedmix.phi_lr", "more than 0, or 0 for server.server_lr", self.phi_lr)
        require(0 <= self.phi_floor < 1 / self.experts, "fedmix.phi_floor", "in [0, 1/experts)", self.phi_floor)
        require(0 <= self.skip_below < 1, "fedmix.skip_below", "in [0, 1)", self.skip_below)

    def _check_skip_below(self) -> None:
        must = "false with fedmix.skip_below: else the gate's loss reaches every expert on every point"
        require(not self.gate_through_features, "fedmix.gate_through_features", must, self.gate_through_features)
        require(self.objective == "bound", "fedmix.objective", "'bound' with fedmix.skip_below", self.objective)

    def _check_choices(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise SettingError(one_of(f"fedmix.{name}", getattr(self, name), known))
        if isinstance(self.prior, str) and self.prior not in ("uniform", "reported"):
            raise SettingError(one_of("fedmix.prior", self.prior, ("uniform", "reported", "a list of shares of c")))

    def _check_direct(self) -> None:
        """The direct objective has no posterior, so whatever needs one must be off."""
        must = "'exact' with fedmix.objective = 'direct', which has no posterior to take it from"
        require(self.marginal == "exact", "fedmix.marginal", must, self.marginal)
        require(self.eta == 0, "fedmix.eta", "0 with fedmix.objective = 'direct'", self.eta)
        must = "false with fedmix.objective = 'direct', which has no posterior"
        require(not self.full_steps, "fedmix.full_steps", must, self.full_steps)


_CHOICES = {
    "objective": ("bound", "direct"),
    "marginal": ("posterior", "exact"),
    "phi": ("global", "private"),
}
