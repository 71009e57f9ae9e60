"""A recipe: frozen settings that are checked when they are made. `reading` makes a recipe from a TOML file."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from fedmix.catalogue import CATALOGUE, SECTIONS
from fedmix.core.method import VECTORS
from fedmix.core.settings import ClientSettings, PrivacySettings, ServerSettings, require
from fedmix.errors import SettingError, one_of
from fedmix.methods.registry import settings_of_section, shipped_page
from fedmix.schema import FINE_TUNED_EVALUATIONS

SPLITS = ("iid", "hsu", "dirichlet", "shards", "pachinko", "by-writer", "by-client")
# Splits of data whose points belong to somebody already. The two names mean the same.
NATURAL = ("by-writer", "by-client")
SHIFTS = ("none", "permute-labels", "rotate")
SMALL = ("leave-out", "keep", "merge")
AUGMENTS = ("none", "crop-flip")
SIDES = ("label", "client", "rotation", "group", "column", *VECTORS)
SAMPLINGS = ("uniform", "by-size")
# The source of data that stays with its owners, each on a machine of their own (settings.sites).
SITES = "sites"
# The name of data, a model or a method that was handed over in Python, which a recipe cannot name.
OWN = "own"


@dataclass(frozen=True)
class DataSettings:
    """Where the data comes from and who holds what of it."""

    source: str = "digits"  # a name, "npz", "images" or "csv" with args, `package.module:name`, "sites", or "own"
    clients: int = 20  # how many take part; 0: all that the data knows (by-writer, by-client)
    holdout_clients: int = 0  # how many more there are that never take part
    share: float = 1.0  # the share of the source's points that is used, drawn at random
    split: str = "iid"  # who gets which points; "by-client" keeps owners, docs/data.md has the others
    concentration: float = 1.0  # the concentration of the split's Dirichlet distribution
    fine_concentration: float = 10.0  # pachinko: the concentration of the fine labels inside a coarse one
    shards_per_client: int = 2  # shards: pieces of points sorted by label that a client gets
    min_size: int = 5  # fewest points of a client in a dirichlet split; owners with fewer are small
    small: str = "leave-out"  # owners with few points: "leave-out", "keep" (they may only train), "merge" into one
    shift: str = "none"  # "permute-labels" in groups of clients, or "rotate" images
    permutations: int = 4  # permute-labels: how many groups of clients there are, each with its own permutation
    group_sizes: list[int] = field(default_factory=list)  # how many clients each group has; empty: equally many
    permuted_labels: int = 0  # labels that a permutation moves; the first then moves none. 0: any number of them
    rotation_concentration: float = 1.0  # rotate: concentration of a client's Dirichlet distribution over angles
    side: str = "label"  # what the side information c is
    validation: float = 0.1  # share of a client's own points; of the training set where the publisher has a test set
    test: float = 0.2  # share of a client's own points; not used where the publisher has a test set
    augment: str = "none"  # "crop-flip": four pixels of padding, a random crop, mirrored or not
    args: dict[str, Any] = field(default_factory=dict)  # arguments of the source: a file, columns, ...

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_counts()
        for name in ("concentration", "fine_concentration", "rotation_concentration"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"data.{name}", "more than 0, and finite", value)
        self._check_shares()

    def _check_choices(self) -> None:
        for name, known in (
            ("split", SPLITS),
            ("shift", SHIFTS),
            ("side", SIDES),
            ("augment", AUGMENTS),
            ("small", SMALL),
        ):
            value = getattr(self, name)
            if value not in known:
                raise SettingError(one_of(f"data.{name}", value, known))

    def _check_counts(self) -> None:
        for name in ("shards_per_client", "min_size", "permutations"):
            value = getattr(self, name)
            require(value >= 1, f"data.{name}", "1 or more", value)
        if self.split in NATURAL:
            require(self.clients >= 0, "data.clients", "1 or more, or 0 for all", self.clients)
        else:
            require(self.clients >= 1, "data.clients", "1 or more", self.clients)
        require(self.holdout_clients >= 0, "data.holdout_clients", "0 or more", self.holdout_clients)
        must = "0 for any number, or 2 or more"
        require(
            self.permuted_labels == 0 or self.permuted_labels >= 2, "data.permuted_labels", must, self.permuted_labels
        )
        if self.group_sizes:
            must = f"{self.permutations} numbers of 1 or more (data.permutations)"
            fits = len(self.group_sizes) == self.permutations and min(self.group_sizes) >= 1
            require(fits, "data.group_sizes", must, self.group_sizes)

    def _check_shares(self) -> None:
        require(0 < self.share <= 1, "data.share", "a share in (0, 1]", self.share)
        for name in ("validation", "test"):
            value = getattr(self, name)
            require(0 <= value < 1, f"data.{name}", "a share in [0, 1)", value)
        both = self.validation + self.test
        require(both < 1, "data.validation + data.test", "less than 1", both)


@dataclass(frozen=True)
class ModelSettings:
    """The classifier: a name, `package.module:name` (a function or class that gives an nn.Module), or "own"."""

    name: str = "mlp"  # "mlp", "lenet5", "resnet20", `package.module:name`, or "own" if handed over in Python
    output: str = "out"  # the name of the output layer; the gate looks at its input
    batchnorm: str = "refuse"  # "private": batch normalisation stays with each client, statistics and all (FedBN)
    start: str = ""  # weights of a module that was handed over: "given" keeps them, "random" draws new ones
    hidden: list[int] = field(default_factory=list)  # widths; empty: the model's defaults (mlp 64, lenet5 512)
    channels: list[int] = field(default_factory=list)  # empty: the model's defaults (lenet5 32, 64; resnet20 16)
    dropout: list[float] = field(default_factory=list)  # mlp: after each hidden layer; lenet5: after conv2 and fc
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the user's own model

    def __post_init__(self) -> None:
        if self.batchnorm not in ("refuse", "private"):
            raise SettingError(one_of("model.batchnorm", self.batchnorm, ("refuse", "private")))
        if self.start not in ("", "given", "random"):
            raise SettingError(one_of("model.start", self.start, ("given", "random")))
        for name in ("hidden", "channels"):
            widths = getattr(self, name)
            require(all(width >= 1 for width in widths), f"model.{name}", "widths of 1 or more", widths)
        require(all(0 <= rate < 1 for rate in self.dropout), "model.dropout", "rates in [0, 1)", self.dropout)
        for name, length in self._lengths().items():
            self._check_length(name, length)

    def _lengths(self) -> dict[str, int]:
        """How many numbers each setting of a shipped model holds, unless it is empty. What is left out may have any length."""
        if self.name == "mlp":
            return {"channels": 0, "dropout": len(self.hidden) or 1}
        if self.name == "lenet5":
            return {"hidden": 1, "channels": 2, "dropout": 2}
        if self.name == "resnet20":
            return {"hidden": 0, "channels": 1, "dropout": 0}
        return {}

    def _check_length(self, name: str, length: int) -> None:
        numbers = getattr(self, name)
        must = f"empty: {self.name} has no such layers"
        if length:
            must = f"{length} numbers for {self.name}, or none for its own"
        require(len(numbers) in (0, length), f"model.{name}", must, numbers)


@dataclass(frozen=True)
class EvaluationSettings:
    """What is measured, and when. While training: validation data; at the end: test data."""

    every: int = 5  # rounds between evaluations; the last round is always one
    finetune_epochs: int = 1  # epochs on the client before fine-tuned accuracy is measured
    finetune_evaluations: int = 0  # fine-tuned accuracy: the mean of this many last evaluations; 0: 3 if cheap, else 1
    adapt_steps: int = 100  # a new client's gate takes at least this many steps on its labelled points
    metrics: list[str] = field(default_factory=list)  # functions (y, p) -> number as `package.module:name`
    best_by: str = "server"  # what the best round has most of: a kind of accuracy, or a metric; "-NAME": least of
    patience: int = 0  # a run ends after so many evaluations without a better one; 0: it never does
    share_private: bool = False  # clients hand over their private state, which accuracy without identity needs

    def __post_init__(self) -> None:
        require(self.every >= 1, "evaluation.every", "1 or more", self.every)
        require(self.finetune_epochs >= 1, "evaluation.finetune_epochs", "1 or more", self.finetune_epochs)
        most = FINE_TUNED_EVALUATIONS
        asked = self.finetune_evaluations
        require(0 <= asked <= most, "evaluation.finetune_evaluations", f"a whole number from 0 to {most}", asked)
        require(self.adapt_steps >= 1, "evaluation.adapt_steps", "1 or more", self.adapt_steps)
        require(self.patience >= 0, "evaluation.patience", "0 for none, or 1 or more", self.patience)
        named = all(":" in name for name in self.metrics)
        require(named, "evaluation.metrics", "a list of functions, each as package.module:name", self.metrics)


@dataclass(frozen=True)
class CheckpointSettings:
    """When a run is saved, and how much of it is kept."""

    every: int = 5  # rounds between checkpoints; the last round always has one
    keep: int = 3  # how many checkpoints are kept, the newest ones
    clients: str = "memory"  # where clients' private states live between rounds: "memory" or "disk"

    def __post_init__(self) -> None:
        require(self.every >= 1, "checkpoint.every", "1 or more", self.every)
        require(self.keep >= 1, "checkpoint.keep", "1 or more", self.keep)
        if self.clients not in ("memory", "disk"):
            raise SettingError(one_of("checkpoint.clients", self.clients, ("memory", "disk")))


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the numbers of a run. Engine and workers do not, so they are not here."""

    name: str = "unnamed"  # run folders are named after it
    description: str = ""  # a sentence for `fedmix recipes`
    scale: str = "full"  # "full", or the name of the table [scales.X] whose smaller settings were taken
    algorithm: str = "fedmix"  # a method by name, or `package.module:name` of your own
    rounds: int = 20  # how often the server sends, clients train, and the server averages
    seed: int = 0  # decides the split, first weights, and the order of clients and points
    clients_per_round: int = 0  # how many clients take part in a round; 0: all of them
    sampling: str = "uniform"  # who takes part: "uniform", "by-size" (large clients more often), `package.module:name`
    warm_start: str = ""  # the run directory whose experts this run starts from
    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    training: ClientSettings = field(default_factory=ClientSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    own: dict[str, Any] = field(default_factory=dict)  # settings of the user's own method (algorithm = "module:name")
    sections: dict[str, Any] = field(default_factory=dict)  # settings of shipped methods, each in its own section

    def __post_init__(self) -> None:
        self._check_name()
        if not is_method(self.algorithm):
            raise SettingError(one_of("algorithm", self.algorithm, [*CATALOGUE, "package.module:name"]))
        require(self.rounds >= 1, "rounds", "1 or more", self.rounds)
        require(self.seed >= 0, "seed", "0 or more", self.seed)
        if self.sampling not in SAMPLINGS and ":" not in self.sampling:
            raise SettingError(one_of("sampling", self.sampling, [*SAMPLINGS, "package.module:name"]))
        require(self.clients_per_round >= 0, "clients_per_round", "1 or more, or 0 for all", self.clients_per_round)
        if self.algorithm in CATALOGUE:
            require(not self.own, "own", "empty: it has the settings of a method of one's own", self.own)
            shipped_page(self.algorithm).check(self.method_settings, self.server, self.privacy)

    def _check_name(self) -> None:
        has_slash = bool(set(self.name) & set("/\\"))
        only_dots = not self.name.strip(". ")
        plain = self.name.isprintable() and not has_slash and not only_dots
        require(plain, "name", "printable text without / and \\: folders are named after it", self.name)

    @property
    def method_settings(self) -> Any:
        """The settings of the method that this recipe trains; those of the user's own method are a plain table."""
        if self.algorithm not in CATALOGUE:
            return self.own
        section = CATALOGUE[self.algorithm].section
        if not section:
            return shipped_page(self.algorithm).settings()
        return getattr(self, section)

    def with_method_settings(self, settings: Any) -> "Recipe":
        """The same recipe with other settings of its shipped method."""
        section = CATALOGUE[self.algorithm].section
        return replace(self, sections={**self.sections, section: settings})

    def __getattr__(self, name: str) -> Any:
        """The settings of a shipped method by the name of its section: recipe.fedmix."""
        if name not in SECTIONS:
            raise AttributeError(f"a recipe has no {name!r}")
        # While a recipe is being copied or unpickled it has no fields yet.
        given = self.__dict__.get("sections", {})
        if name in given:
            return given[name]
        return settings_of_section(name)()


def is_method(name: str) -> bool:
    """Whether this names a shipped method, one that can be imported, or one that was handed over in Python."""
    module, colon, attribute = name.partition(":")
    importable = bool(colon) and all(part.isidentifier() for part in [*module.split("."), attribute])
    return name in CATALOGUE or importable or name == OWN
