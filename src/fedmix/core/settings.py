"""Settings that every method has: how clients train, how the server steps, what protects an answer.

They check themselves when they are made. The comment behind a setting is what the documentation says about it.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedmix.core.training import Passes
from fedmix.errors import SettingError, one_of


def require(holds: bool, name: str, must: str, given: Any) -> None:
    """Refuse a setting that does not hold."""
    if not holds:
        raise SettingError(f"{name} must be {must}. Got {given!r} instead.")


@dataclass(frozen=True)
class ClientSettings:
    """How a client trains: SGD or Adam on mini-batches."""

    optimizer: str = "sgd"  # or "adam", "adamw"; these where a method has no experts, whose steps must follow q
    batch_size: int = 64  # points of a mini-batch
    last_batch: str = "even"  # mini-batches of nearly one size; "smaller": full ones, then what is left
    epochs: int = 1  # how often a client goes over its points in a round
    client_lr: float = 0.05  # the rate of a client's steps
    momentum: float = 0.0  # of a client's SGD; it starts anew in every round
    weight_decay: float = 0.0  # added to gradients, or with adamw taken off weights
    schedule: str = "constant"  # of client_lr over rounds; "cosine" or "linear" fall to zero
    precision: str = "float32"  # of a step's convolutions and products, or "bfloat16"; all else is float32
    class_weights: list[float] | str = "equal"  # a weight of each class, or "balanced": by the client's own counts
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
        if self.optimizer not in ("sgd", "adam", "adamw"):
            raise SettingError(one_of("training.optimizer", self.optimizer, ("sgd", "adam", "adamw")))
        if self.optimizer != "sgd":
            require(not self.momentum, "training.momentum", "0 with Adam, which has moments of its own", self.momentum)
        self._check_class_weights()
        if self.precision not in ("float32", "bfloat16"):
            raise SettingError(one_of("training.precision", self.precision, ("float32", "bfloat16")))

    def _check_class_weights(self) -> None:
        weights = self.class_weights
        if isinstance(weights, str):
            if weights not in ("equal", "balanced"):
                raise SettingError(
                    one_of("training.class_weights", weights, ("equal", "balanced", "a list of numbers"))
                )
            return
        sound = bool(weights) and min(weights) >= 0 and 0 < max(weights) < math.inf
        require(sound, "training.class_weights", "a number of 0 or more for each class, not all 0", weights)

    def weights_of_classes(self, y: Tensor, classes: int) -> Tensor | None:
        """How much a point of each class counts for a client with these labels [classes]; None: all alike."""
        if self.class_weights == "equal":
            return None
        if self.class_weights == "balanced":
            counts = torch.bincount(y, minlength=classes).float()
            present = int((counts > 0).sum())
            return torch.where(counts > 0, len(y) / (max(present, 1) * counts.clamp(min=1)), torch.zeros_like(counts))
        if len(self.class_weights) != classes:
            raise SettingError(f"training.class_weights must have {classes} numbers. Got {len(self.class_weights)}.")
        return torch.tensor(self.class_weights, dtype=torch.float32, device=y.device)

    def passes(self, epochs: int | None = None) -> Passes:
        """How clients go over their points; `epochs`, if given, replaces the usual number."""
        return Passes(self.batch_size, epochs or self.epochs, even=self.last_batch == "even")


@dataclass(frozen=True)
class ServerSettings:
    """How the server steps along the averaged update: Adam (the paper), SGD, or plain averaging (SGD of rate 1)."""

    optimizer: str = "adam"  # the paper's; "sgd", or "average": plain averaging of what clients send
    server_lr: float = 0.001  # the rate of the server's steps; "average" needs none
    norm_limit: float = 0.0  # an update of more than this many times the cohort's median norm is refused; 0: none is
    min_replies: int = 1  # a round with fewer ends the run, which can be resumed
    deadline: float = 0.0  # seconds after which a round goes on without clients that have not answered; 0: none
    aggregation: str = "clients"  # or "linear": the server needs only sums over clients, as in secure aggregation

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
