"""Settings of the methods: frozen, checked at birth."""

from dataclasses import dataclass, field
from typing import Any

from fedmix.core.training import Passes
from fedmix.errors import SettingError, one_of


def require(holds: bool, name: str, must: str, given: Any) -> None:
    if not holds:
        raise SettingError(f"{name} must be {must}. Got {given!r} instead.")


@dataclass(frozen=True)
class ClientSettings:
    """How a client trains: SGD on mini-batches."""

    batch_size: int = 64
    last_batch: str = "even"  # mini-batches of nearly one size; "smaller": full ones, then what is left
    epochs: int = 1
    client_lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: str = "constant"
    precision: str = "float32"  # of a step's convolutions and products, or "bfloat16"; all else is float32
    label_counts: bool = False  # a client adds log(1 + classes x its count of y) to logits, in training and prediction

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, "training.batch_size", "1 or more", self.batch_size)
        if self.last_batch not in ("even", "smaller"):
            raise SettingError(one_of("training.last_batch", self.last_batch, ("even", "smaller")))
        require(self.epochs >= 1, "training.epochs", "1 or more", self.epochs)
        require(self.client_lr > 0, "training.client_lr", "more than 0", self.client_lr)
        require(0 <= self.momentum < 1, "training.momentum", "in [0, 1)", self.momentum)
        require(self.weight_decay >= 0, "training.weight_decay", "0 or more", self.weight_decay)
        schedules = ("constant", "cosine", "linear")
        if self.schedule not in schedules:
            raise SettingError(one_of("training.schedule", self.schedule, schedules))
        if self.precision not in ("float32", "bfloat16"):
            raise SettingError(one_of("training.precision", self.precision, ("float32", "bfloat16")))

    def passes(self, epochs: int | None = None) -> Passes:
        """Over a client's points; `epochs`, if given, instead of the usual number."""
        return Passes(self.batch_size, epochs or self.epochs, even=self.last_batch == "even")


@dataclass(frozen=True)
class ServerSettings:
    """How the server steps along the averaged update: Adam (the paper), SGD, or plain averaging (SGD of rate 1)."""

    optimizer: str = "adam"
    server_lr: float = 0.001
    norm_limit: float = (
        0.0  # a client's update of more than so many times the cohort's median norm is refused; 0: none is
    )
    min_replies: int = 1  # a round with fewer ends the run, which can be resumed
    deadline: float = 0.0  # seconds after which a round goes on without clients that have not answered; 0: none
    aggregation: str = (
        "clients"  # or "linear": the server needs only sums over clients, as secure aggregation gives them
    )

    def __post_init__(self) -> None:
        if self.aggregation not in ("clients", "linear"):
            raise SettingError(one_of("server.aggregation", self.aggregation, ("clients", "linear")))
        if self.optimizer not in ("adam", "sgd", "average"):
            raise SettingError(one_of("server.optimizer", self.optimizer, ("adam", "sgd", "average")))
        require(self.server_lr > 0, "server.server_lr", "more than 0", self.server_lr)
        require(self.norm_limit >= 0, "server.norm_limit", "0 or more", self.norm_limit)
        require(self.min_replies >= 1, "server.min_replies", "1 or more", self.min_replies)
        require(self.deadline >= 0, "server.deadline", "seconds, or 0 for none", self.deadline)


@dataclass(frozen=True)
class PrivacySettings:
    """What a client does to its answer before it leaves: its update clipped, Gaussian noise on all that it sends."""

    clip: float = 0.0  # norm of a client's whole update; 0: not clipped
    noise: float = 0.0  # standard deviation of the noise, as a multiple of how far apart two clients' answers can be
    delta: float = 1e-5  # of the guarantee (epsilon, delta) that is reported
    reproducible: bool = False  # noise from the recipe's seed, for simulations: the server can subtract it

    def __post_init__(self) -> None:
        require(self.clip >= 0, "privacy.clip", "more than 0, or 0 for no clipping", self.clip)
        require(self.noise >= 0, "privacy.noise", "0 or more", self.noise)
        require(0 < self.delta < 1, "privacy.delta", "in (0, 1)", self.delta)
        require(not self.noise or self.clip > 0, "privacy.clip", "more than 0 with privacy.noise", self.clip)


@dataclass(frozen=True)
class FedmixSettings:
    """FedMix's own: K, beta, gamma, eta and what the paper leaves open (docs/decisions.md)."""

    experts: int = 4
    beta: float = 0.8  # temperature of phi: below 1 experts specialise by themselves, above 1 on evidence only
    beta_start: float = (
        0.0  # beta of round 1, from where it goes to `beta` in equal steps; 0: no schedule, as in the paper
    )
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
        require(self.experts >= 1, "fedmix.experts", "1 or more", self.experts)
        require(self.beta > 0, "fedmix.beta", "more than 0", self.beta)
        require(self.beta_start >= 0, "fedmix.beta_start", "more than 0, or 0 for no schedule", self.beta_start)
        require(self.beta_rounds >= 1, "fedmix.beta_rounds", "1 or more", self.beta_rounds)
        require(0 <= self.gamma <= 1, "fedmix.gamma", "in [0, 1]", self.gamma)
        require(0 <= self.eta <= 1, "fedmix.eta", "in [0, 1]", self.eta)
        require(self.phi_lr >= 0, "fedmix.phi_lr", "more than 0, or 0 for server.server_lr", self.phi_lr)
        require(0 <= self.phi_floor < 1 / self.experts, "fedmix.phi_floor", "in [0, 1/experts)", self.phi_floor)
        require(0 <= self.skip_below < 1, "fedmix.skip_below", "in [0, 1)", self.skip_below)
        if self.skip_below:
            must = "false with fedmix.skip_below: else the gate's loss reaches every expert on every point"
            require(not self.gate_through_features, "fedmix.gate_through_features", must, self.gate_through_features)
            require(self.objective == "bound", "fedmix.objective", "'bound' with fedmix.skip_below", self.objective)
        require(self.entropy >= 0, "fedmix.entropy", "0 or more", self.entropy)
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise SettingError(one_of(f"fedmix.{name}", getattr(self, name), known))
        if isinstance(self.prior, str) and self.prior not in ("uniform", "reported"):
            raise SettingError(one_of("fedmix.prior", self.prior, ("uniform", "reported", "a list of shares of c")))
        if self.objective == "direct":
            require(
                self.marginal == "exact",
                "fedmix.marginal",
                "'exact' with fedmix.objective = 'direct', which has no posterior to take it from",
                self.marginal,
            )
            require(self.eta == 0, "fedmix.eta", "0 with fedmix.objective = 'direct'", self.eta)
            must = "false with fedmix.objective = 'direct', which has no posterior"
            require(not self.full_steps, "fedmix.full_steps", must, self.full_steps)


_CHOICES = {
    "objective": ("bound", "direct"),
    "marginal": ("posterior", "exact"),
    "phi": ("global", "private"),
}


@dataclass(frozen=True)
class LocalGlobalSettings:
    """Local/Global: which layers stay with the client (names of modules). None named: the input layer."""

    layers: list[str] = field(default_factory=list)
