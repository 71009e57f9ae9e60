"""A recipe: frozen settings, checked at birth. `reading` makes one from a TOML file."""

import math
from dataclasses import dataclass, field
from typing import Any

from fedmix.catalogue import CATALOGUE, SECTIONS
from fedmix.core.settings import ClientSettings, PrivacySettings, ServerSettings, require
from fedmix.errors import SettingError, one_of
from fedmix.methods.registry import settings_of_section, shipped_page
from fedmix.schema import FINE_TUNED_EVALUATIONS

SPLITS = ("iid", "hsu", "dirichlet", "shards", "pachinko", "by-writer", "by-client")
NATURAL = ("by-writer", "by-client")  # points belong to somebody already; the two names mean the same
SHIFTS = ("none", "permute-labels", "rotate")
AUGMENTS = ("none", "crop-flip")
SIDES = ("label", "client", "rotation", "group", "column")
SITES = "sites"  # data that is with its owners, each with a machine of their own (experiment.sites)
OWN = "own"  # data or a model that was handed over in Python, which a recipe cannot name


@dataclass(frozen=True)
class DataSettings:
    """Where the data comes from and who holds what of it."""

    source: str = "digits"  # a name, "npz", "images" or "csv" with args, `package.module:name`, "sites", or "own"
    clients: int = 20  # that take part; 0: all that the data knows (by-writer, by-client)
    holdout_clients: int = 0  # more of them, that never take part
    share: float = 1.0  # of the source's points, drawn at random
    split: str = "iid"
    concentration: float = 1.0  # of the split's Dirichlet distribution
    fine_concentration: float = 10.0  # of pachinko's fine labels inside a coarse one
    shards_per_client: int = 2
    min_size: int = 5  # of a dirichlet split's clients; owners with fewer points do not take part
    shift: str = "none"
    permutations: int = 4
    rotation_concentration: float = 1.0
    side: str = "label"  # what c is
    validation: float = 0.1  # share of a client's own points; of the training set where the publisher has a test set
    test: float = 0.2  # share of a client's own points; not used where the publisher has a test set
    augment: str = "none"  # "crop-flip": four pixels of padding, a random crop, mirrored or not
    args: dict[str, Any] = field(default_factory=dict)  # of the source: a file, columns, or a function's arguments

    def __post_init__(self) -> None:
        for name, known in (("split", SPLITS), ("shift", SHIFTS), ("side", SIDES), ("augment", AUGMENTS)):
            if getattr(self, name) not in known:
                raise SettingError(one_of(f"data.{name}", getattr(self, name), known))
        for name in ("shards_per_client", "min_size", "permutations"):
            require(getattr(self, name) >= 1, f"data.{name}", "1 or more", getattr(self, name))
        fewest = 0 if self.split in NATURAL else 1
        words = "1 or more, or 0 for all" if self.split in NATURAL else "1 or more"
        require(self.clients >= fewest, "data.clients", words, self.clients)
        require(self.holdout_clients >= 0, "data.holdout_clients", "0 or more", self.holdout_clients)
        for name in ("concentration", "fine_concentration", "rotation_concentration"):
            require(0 < getattr(self, name) < math.inf, f"data.{name}", "more than 0, and finite", getattr(self, name))
        require(0 < self.share <= 1, "data.share", "a share in (0, 1]", self.share)
        for name in ("validation", "test"):
            require(0 <= getattr(self, name) < 1, f"data.{name}", "a share in [0, 1)", getattr(self, name))
        require(
            self.validation + self.test < 1, "data.validation + data.test", "less than 1", self.validation + self.test
        )


@dataclass(frozen=True)
class ModelSettings:
    """The classifier: a name, `package.module:name` (a function or class that gives an nn.Module), or "own"."""

    name: str = "mlp"
    output: str = "out"  # the output layer; the gate looks at its input
    start: str = ""  # weights of a module that was handed over: "given" keeps them, "random" draws new ones
    hidden: list[int] = field(default_factory=list)  # widths; none: the model's own (mlp 64, lenet5 512)
    channels: list[int] = field(default_factory=list)  # none: the model's own (lenet5 32, 64; resnet20 16)
    dropout: list[float] = field(default_factory=list)  # mlp: after each hidden layer; lenet5: after conv2 and fc
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of a model of one's own

    def __post_init__(self) -> None:
        if self.start not in ("", "given", "random"):
            raise SettingError(one_of("model.start", self.start, ("given", "random")))
        for name in ("hidden", "channels"):
            require(
                all(w >= 1 for w in getattr(self, name)), f"model.{name}", "widths of 1 or more", getattr(self, name)
            )
        require(all(0 <= rate < 1 for rate in self.dropout), "model.dropout", "rates in [0, 1)", self.dropout)
        sizes = {"mlp": (None, 0, len(self.hidden) or 1), "lenet5": (1, 2, 2), "resnet20": (0, 1, 0)}.get(self.name)
        for setting, most in zip(("hidden", "channels", "dropout"), sizes or (), strict=False):
            given = getattr(self, setting)
            if most is not None and len(given) not in (0, most):
                must = (
                    f"{most} numbers for {self.name}, or none for its own"
                    if most
                    else f"empty: {self.name} has no such layers"
                )
                require(False, f"model.{setting}", must, given)


@dataclass(frozen=True)
class EvaluationSettings:
    """What is measured, and when. While training: validation data; at the end: test data."""

    every: int = 5  # rounds between evaluations; the last round is always one
    finetune_epochs: int = 1  # epochs on the client before fine-tuned accuracy is measured
    finetune_evaluations: int = (
        0  # fine-tuned accuracy is a mean over this many last evaluations; 0: 3 if cheap, else 1
    )
    adapt_steps: int = 100  # at least so many steps of a new client's gate on its labelled points
    share_private: bool = False  # clients hand their private state over, which accuracy without identity needs

    def __post_init__(self) -> None:
        require(self.every >= 1, "evaluation.every", "1 or more", self.every)
        require(self.finetune_epochs >= 1, "evaluation.finetune_epochs", "1 or more", self.finetune_epochs)
        most = FINE_TUNED_EVALUATIONS
        asked = self.finetune_evaluations
        require(0 <= asked <= most, "evaluation.finetune_evaluations", f"a whole number from 0 to {most}", asked)
        require(self.adapt_steps >= 1, "evaluation.adapt_steps", "1 or more", self.adapt_steps)


@dataclass(frozen=True)
class CheckpointSettings:
    every: int = 5
    keep: int = 3
    clients: str = "memory"  # where clients' private states live between rounds: "memory" or "disk"

    def __post_init__(self) -> None:
        require(self.every >= 1, "checkpoint.every", "1 or more", self.every)
        require(self.keep >= 1, "checkpoint.keep", "1 or more", self.keep)
        if self.clients not in ("memory", "disk"):
            raise SettingError(one_of("checkpoint.clients", self.clients, ("memory", "disk")))


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the numbers of a run. Engine and workers do not, so they are not here."""

    name: str = "unnamed"
    description: str = ""
    scale: str = "full"  # or the name of a table [scales.X] whose smaller settings were taken
    algorithm: str = "fedmix"
    rounds: int = 20
    seed: int = 0
    clients_per_round: int = 0  # 0: all of them
    warm_start: str = ""  # a run directory whose experts to start from
    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    training: ClientSettings = field(default_factory=ClientSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    own: dict[str, Any] = field(default_factory=dict)  # settings of a method of one's own (algorithm = "module:name")
    sections: dict[str, Any] = field(default_factory=dict)  # settings of shipped methods, each in its own section

    def __post_init__(self) -> None:
        plain = self.name.isprintable() and not set(self.name) & set("/\\") and self.name.strip(". ")
        require(bool(plain), "name", "printable text without / and \\: folders are named after it", self.name)
        if not is_method(self.algorithm):
            raise SettingError(one_of("algorithm", self.algorithm, [*CATALOGUE, "package.module:name"]))
        require(self.rounds >= 1, "rounds", "1 or more", self.rounds)
        require(self.seed >= 0, "seed", "0 or more", self.seed)
        require(self.clients_per_round >= 0, "clients_per_round", "1 or more, or 0 for all", self.clients_per_round)
        if self.algorithm in CATALOGUE:
            require(not self.own, "own", "empty: it has the settings of a method of one's own", self.own)
            shipped_page(self.algorithm).check(self.method_settings, self.server, self.privacy)

    @property
    def method_settings(self) -> Any:
        """Of the method that this recipe trains; a method of the user's own has a table of them."""
        if self.algorithm not in CATALOGUE:
            return self.own
        section = CATALOGUE[self.algorithm].section
        return getattr(self, section) if section else shipped_page(self.algorithm).settings()

    def __getattr__(self, name: str) -> Any:
        """Settings of a shipped method by the name of its section: recipe.fedmix."""
        if name not in SECTIONS:
            raise AttributeError(f"a recipe has no {name!r}")
        given = self.__dict__.get("sections", {})
        return given[name] if name in given else settings_of_section(name)()


def is_method(name: str) -> bool:
    """A shipped method, one that can be imported, or one that was handed over in Python."""
    module, colon, attribute = name.partition(":")
    importable = bool(colon) and all(part.isidentifier() for part in [*module.split("."), attribute])
    return name in CATALOGUE or importable or name == OWN
