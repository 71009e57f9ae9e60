"""The settings of FedMix. They check themselves when they are made; the comment behind each is its documentation."""

from dataclasses import dataclass, field
from typing import Any

from fedmix.core.method import VECTORS
from fedmix.core.settings import PrivacySettings, ServerSettings, require
from fedmix.errors import SettingError, one_of


@dataclass(frozen=True)
class FedmixSettings:
    """The settings of FedMix: K, beta, gamma, eta and what the paper leaves open (docs/decisions.md)."""

    experts: int | str = 4  # K, or "auto": begin with one, split and merge as clients need them, up to max_experts
    max_experts: int = 8  # with experts = "auto"
    repair: bool = (
        False  # with a number of experts: merge, retire and split them as with "auto" where that serves better
    )
    evidence: str = "batch"  # phi comes from the mini-batch, as in the paper; "arriving": from experts as they arrive
    evidence_points: int = 128  # points of a client that evidence is drawn from in a round, with "arriving"; 0: all
    evidence_pool: float = 64.0  # points that everybody's evidence counts as, where c is not the client
    evidence_temperature: float = 0.15  # of "arriving", in units of the spread of clients' evidence in the last round
    shared: str | list[str] = "none"  # what experts share: "none", "all-but-output", "auto", or names of parameters
    budget: float = 1.2  # with shared = "auto": the bytes that a round may send, in FedAvg rounds
    factor_layers: list[str] = field(default_factory=list)  # layers whose weight is shared but for experts' factors
    rank: int = 8  # of the factors in factor_layers; 0: factors of rows and columns
    expert_dropout: float = 0.0  # the largest chance that an expert is not sent to a client: for one that it never uses
    beta: float = 0.8  # temperature of phi: below 1 experts specialise by themselves, above 1 on evidence only
    beta_start: float = 0.0  # beta in round 1; it goes to `beta` in equal steps. 0: no schedule, as in the paper
    beta_rounds: int = 10  # how many rounds that takes
    gamma: float = 0.99  # dampening of phi on the client
    eta: float = 0.0  # pruning threshold: experts with q(z=k|s) < eta/K are left out; 0 prunes nothing
    objective: str = "bound"  # or "direct": eq:globalObjective, which the paper reports to collapse
    marginal: str = "posterior"  # p(z|s) from phi, or "exact": the mean of the gate over the client's data
    phi: str = "global"  # "private": each client keeps its own; "network": q(z|c) is a network of c, for vectors
    phi_hidden: int = 16  # hidden units of that network; 0: none
    phi_step: float = 0.5  # how far a client moves that network on a mini-batch
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
        if self.grows:
            self._check_auto()
        if self.objective == "direct":
            self._check_direct()
        if self.phi == "network":
            self._check_network()

    @property
    def grows(self) -> bool:
        """Whether there may be more or fewer experts from round to round."""
        return self.experts == "auto" or self.repair

    @property
    def slots(self) -> int:
        """K, or how many experts there may be at most."""
        return self.max_experts if isinstance(self.experts, str) else self.experts

    def _check_ranges(self) -> None:
        known = self.experts == "auto" if isinstance(self.experts, str) else self.experts >= 1
        require(known, "fedmix.experts", "1 or more, or 'auto'", self.experts)
        require(self.max_experts >= 1, "fedmix.max_experts", "1 or more", self.max_experts)
        require(self.evidence_points >= 0, "fedmix.evidence_points", "1 or more, or 0 for all", self.evidence_points)
        require(self.evidence_pool >= 0, "fedmix.evidence_pool", "0 or more", self.evidence_pool)
        must = "more than 0"
        require(self.evidence_temperature > 0, "fedmix.evidence_temperature", must, self.evidence_temperature)
        require(self.beta > 0, "fedmix.beta", "more than 0", self.beta)
        require(self.beta_start >= 0, "fedmix.beta_start", "more than 0, or 0 for no schedule", self.beta_start)
        require(self.beta_rounds >= 1, "fedmix.beta_rounds", "1 or more", self.beta_rounds)
        require(0 <= self.gamma <= 1, "fedmix.gamma", "in [0, 1]", self.gamma)
        require(0 <= self.eta <= 1, "fedmix.eta", "in [0, 1]", self.eta)
        require(self.phi_hidden >= 0, "fedmix.phi_hidden", "0 or more", self.phi_hidden)
        require(self.phi_step > 0, "fedmix.phi_step", "more than 0", self.phi_step)
        require(self.phi_lr >= 0, "fedmix.phi_lr", "more than 0, or 0 for server.server_lr", self.phi_lr)
        require(0 <= self.phi_floor < 1 / self.slots, "fedmix.phi_floor", "in [0, 1/experts)", self.phi_floor)
        require(0 <= self.skip_below < 1, "fedmix.skip_below", "in [0, 1)", self.skip_below)
        require(self.budget >= 1, "fedmix.budget", "1 FedAvg round or more", self.budget)
        require(self.rank >= 0, "fedmix.rank", "1 or more, or 0 for factors of rows and columns", self.rank)
        require(0 <= self.expert_dropout < 1, "fedmix.expert_dropout", "in [0, 1)", self.expert_dropout)
        must = "named, not 'auto', with fedmix.factor_layers: the budget is about whole layers"
        require(self.shared != "auto" or not self.factor_layers, "fedmix.shared", must, self.shared)
        must = "0 with fedmix.expert_dropout: both leave experts out"
        require(not self.expert_dropout or not self.eta, "fedmix.eta", must, self.eta)

    def _check_skip_below(self) -> None:
        must = "false with fedmix.skip_below: else the gate's loss reaches every expert on every point"
        require(not self.gate_through_features, "fedmix.gate_through_features", must, self.gate_through_features)
        require(self.objective == "bound", "fedmix.objective", "'bound' with fedmix.skip_below", self.objective)
        must = "'none', without fedmix.factor_layers, with fedmix.skip_below: what is shared learns from every point"
        require(self.shared == "none" and not self.factor_layers, "fedmix.shared", must, self.shared)

    def _check_choices(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise SettingError(one_of(f"fedmix.{name}", getattr(self, name), known))
        if isinstance(self.prior, str) and self.prior not in ("uniform", "reported"):
            raise SettingError(one_of("fedmix.prior", self.prior, ("uniform", "reported", "a list of shares of c")))

    def _check_auto(self) -> None:
        """Experts are split by evidence from experts as they arrive, and all clients are sent all of them."""
        with_it = "with fedmix.experts = 'auto' or fedmix.repair"
        require(self.evidence == "arriving", "fedmix.evidence", f"'arriving' {with_it}", self.evidence)
        require(self.eta == 0, "fedmix.eta", f"0 {with_it}", self.eta)
        must = f"0 {with_it}: how well each expert fits a client must be known"
        require(self.expert_dropout == 0, "fedmix.expert_dropout", must, self.expert_dropout)
        require(self.phi == "global", "fedmix.phi", f"'global' {with_it}", self.phi)
        require(self.marginal == "posterior", "fedmix.marginal", f"'posterior' {with_it}", self.marginal)
        must = "false with fedmix.experts = 'auto', which begins with one expert"
        require(self.experts != "auto" or not self.repair, "fedmix.repair", must, self.repair)

    def _check_direct(self) -> None:
        """The direct objective has no posterior, so whatever needs one must be off."""
        must = "'exact' with fedmix.objective = 'direct', which has no posterior to take it from"
        require(self.marginal == "exact", "fedmix.marginal", must, self.marginal)
        require(self.eta == 0, "fedmix.eta", "0 with fedmix.objective = 'direct'", self.eta)
        must = "'batch' with fedmix.objective = 'direct', which draws no posterior"
        require(self.evidence == "batch", "fedmix.evidence", must, self.evidence)
        must = "false with fedmix.objective = 'direct', which has no posterior"
        require(not self.full_steps, "fedmix.full_steps", must, self.full_steps)

    def _check_network(self) -> None:
        """A network of c has no rows that could be pruned, pooled or weighed by shares of c."""
        with_it = "with fedmix.phi = 'network'"
        require(self.evidence == "batch", "fedmix.evidence", f"'batch' {with_it}", self.evidence)
        require(self.eta == 0, "fedmix.eta", f"0 {with_it}", self.eta)
        require(self.skip_below == 0, "fedmix.skip_below", f"0 {with_it}", self.skip_below)
        require(self.objective == "bound", "fedmix.objective", f"'bound' {with_it}", self.objective)
        require(self.marginal == "posterior", "fedmix.marginal", f"'posterior' {with_it}", self.marginal)
        require(self.prior == "uniform", "fedmix.prior", f"'uniform' {with_it}", self.prior)
        require(self.expert_dropout == 0, "fedmix.expert_dropout", f"0 {with_it}", self.expert_dropout)


_CHOICES = {
    "objective": ("bound", "direct"),
    "evidence": ("batch", "arriving"),
    "marginal": ("posterior", "exact"),
    "phi": ("global", "private", "network"),
}


def recommended(side: str, server: ServerSettings, protection: PrivacySettings) -> dict[str, Any]:
    """The form of FedMix for somebody's own data, by what was measured (docs/sharing.md, 'A recommended form').

    Experts share all but the output layer. Where c is the client, their number is found out, unless single clients may not be
    seen; elsewhere experts step as far as one model would, and phi moves fast enough for a short run.
    """
    sharing = {"shared": "all-but-output"}
    if side in VECTORS:
        return sharing | {"phi": "network", "beta": 0.3}
    if side != "client":
        return sharing | {"full_steps": True, "gamma": 0.9}
    if server.aggregation == "linear" or protection.noise:
        return sharing
    return sharing | {"experts": "auto", "evidence": "arriving"}
