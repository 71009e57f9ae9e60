"""A recipe: one TOML file of frozen settings, checked at birth. Unknown keys are refused, with the known ones named."""

import importlib
import math
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w

from fedmix.catalogue import CATALOGUE, SECTIONS
from fedmix.core.settings import ClientSettings, PrivacySettings, ServerSettings, require
from fedmix.errors import SettingError, one_of
from fedmix.methods.registry import settings_of_section, shipped_page

SPLITS = ("iid", "hsu", "dirichlet", "shards", "pachinko", "by-writer", "by-client")
NATURAL = ("by-writer", "by-client")  # points belong to somebody already; the two names mean the same
SHIFTS = ("none", "permute-labels", "rotate")
AUGMENTS = ("none", "crop-flip")
SIDES = ("label", "client", "rotation", "group", "column")
SITES = "sites"  # data that is with its owners, each with a machine of their own (experiment.sites)
OWN = "own"  # data or a model that was handed over in Python, which a recipe cannot name

T = TypeVar("T")


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
    finetune_epochs: int = 1  # of the server's weights, before local accuracy is measured
    adapt_steps: int = 100  # at least so many steps of a new client's gate on its labelled points
    share_private: bool = False  # clients hand their private state over for it: global accuracy needs that

    def __post_init__(self) -> None:
        require(self.every >= 1, "evaluation.every", "1 or more", self.every)
        require(self.finetune_epochs >= 1, "evaluation.finetune_epochs", "1 or more", self.finetune_epochs)
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


def folder_of_run(recipe: Recipe, name: str = "") -> str:
    """What a run's folder is called where nobody says; a method of one's own has a colon in its name, which folders may not."""
    method = recipe.algorithm.replace(":", "-")
    return f"{name}{method}-seed{recipe.seed}"


def shipped() -> list[str]:
    return sorted(
        path.name.removesuffix(".toml") for path in files("fedmix.recipes").iterdir() if path.name.endswith(".toml")
    )


def read_recipe(
    name: str, algorithm: str | None = None, changes: Mapping[str, Any] | None = None, scale: str | None = None
) -> Recipe:
    """A shipped recipe by name, or a file or run directory by path, with its exceptions and `changes` (`make_recipe`)."""
    if (Path(name) / "recipe.toml").is_file():
        text = (Path(name) / "recipe.toml").read_text()  # a run directory: its effective settings
    elif name in shipped():
        text = (files("fedmix.recipes") / f"{name}.toml").read_text()
    elif Path(name).is_file():
        importable_from(Path(name).resolve().parent)
        try:
            text = Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise SettingError(f"recipe {name} must be a TOML file. It is not text.") from error
    else:
        raise SettingError(one_of("a recipe", name, shipped()).removesuffix(".") + ", and no file of that name exists.")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"recipe {name} must be valid TOML: {error}.") from error
    table.setdefault("name", Path(name).stem)
    return make_recipe(table, algorithm, changes, scale)


def make_recipe(
    table: dict[str, Any],
    algorithm: str | None = None,
    changes: Mapping[str, Any] | None = None,
    scale: str | None = None,
) -> Recipe:
    """Settings from nested tables. `changes` has dotted keys: {"fedmix.eta": 0.5}.

    A recipe's exceptions are taken in this order, a later one over an earlier: [scales.X] of the scale that is asked for,
    [sides.X] of the side information that is used, [methods.X] of the method; then the changes.
    """
    table = dict(table)  # the caller's stays as it is
    scales, sides, methods = _exceptions(table)
    changes = changes or {}
    if "scale" in changes:
        raise SettingError("scale cannot be set by itself; --scale takes a recipe's smaller settings.")
    chosen = typed(str, algorithm or changes.get("algorithm") or table.get("algorithm", "fedmix"), "algorithm")
    merged = table
    own = table.get("scale", "full")
    if scale not in (None, own):
        if scale not in scales:
            raise SettingError(one_of(f"--scale of {table.get('name', 'this recipe')}", scale, [own, *scales]))
        merged = _merge(merged, scales[scale]) | {"scale": scale, "name": f"{table.get('name', 'unnamed')}-{scale}"}
    side = typed(str, changes.get("data.side") or table.get("data", {}).get("side", DataSettings.side), "data.side")
    merged = _merge(_merge(merged, sides.get(side, {})), methods.get(chosen, {})) | {"algorithm": chosen}
    for key, value in changes.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        merged = _merge(merged, value)
    return settings_from(Recipe, merged)


def _exceptions(table: dict[str, Any]) -> list[dict[str, Any]]:
    """The tables [scales.X], [sides.X] and [methods.X] of a recipe, taken out of it; what is wrong in them is refused
    even where they are not used."""
    if not isinstance(table.get("data", {}), dict):
        raise SettingError(f"data must be a table of settings. Got {table['data']!r} instead.")
    taken: list[dict[str, Any]] = [table.pop(kind, {}) for kind in ("scales", "sides", "methods")]
    for kind, tables, known in zip(("scales", "sides", "methods"), taken, (None, SIDES, CATALOGUE), strict=True):
        if not isinstance(tables, dict) or not all(isinstance(settings, dict) for settings in tables.values()):
            raise SettingError(f"{kind} must be tables [{kind}.X]. Got {tables!r} instead.")
        for name, settings in tables.items():
            own = kind == "methods" and is_method(name)
            if known is not None and name not in known and not own:
                raise SettingError(one_of(f"a table [{kind}.X]", name, known))
            settings_from(Recipe, _merge(table, settings))
    return taken


def parse_changes(items: Iterable[str]) -> dict[str, Any]:
    """['fedmix.eta=0.5', 'data.side=label'] -> {'fedmix.eta': 0.5, 'data.side': 'label'}; values as in TOML, or bare words."""
    changes: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise SettingError(f"--set must be key=value, as in fedmix.eta=0.5. Got {item!r} instead.")
        changes[key.strip()] = _value(text)
    return changes


def parse_grid(items: Iterable[str]) -> dict[str, list[Any]]:
    """['fedmix.eta=0,0.5'] -> {'fedmix.eta': [0, 0.5]}: every value that a setting is to take. Lists keep their brackets."""
    grid: dict[str, list[Any]] = {}
    for key, text in ((item.partition("=")[0].strip(), item.partition("=")[2]) for item in items):
        if not key or not text.strip():
            raise SettingError(f"--set must be key=value,value,..., as in fedmix.eta=0,0.5. Got {key!r} instead.")
        values = [_value(part) for part in re.split(r",(?![^\[]*\])", text) if part.strip()]
        if len(set(map(repr, values))) != len(values):
            raise SettingError(f"--set {key} must name each value once. Got {text!r} instead.")
        grid[key] = values
    return grid


def _value(text: str) -> Any:
    """As in TOML, or a bare word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def dump_recipe(recipe: Recipe) -> str:
    """The effective settings as TOML; reading it again gives the same recipe."""
    return tomli_w.dumps(settings_table(recipe))


def settings_table(settings: Any) -> dict[str, Any]:
    """Settings as nested tables; the sections of a recipe's methods beside its others."""
    table: dict[str, Any] = {}
    for f in fields(settings):
        value = getattr(settings, f.name)
        if isinstance(settings, Recipe) and f.name == "sections":
            table |= {section: settings_table(own) for section, own in value.items()}
        elif not isinstance(settings, Recipe) or f.name != "own" or value:
            table[f.name] = settings_table(value) if is_dataclass(value) else value
    return table


def settings_from(kind: type[T], table: Any, where: str = "") -> T:
    """The settings class `kind` from a table: unknown keys and values of the wrong type are refused by name."""
    if not isinstance(table, dict):
        raise SettingError(f"{where or 'a recipe'} must be a table of settings. Got {table!r} instead.")
    types = get_type_hints(kind)
    sections: dict[str, Any] = {}
    if kind is Recipe:
        types.pop("sections")
        sections = {name: settings_of_section(name) for name in SECTIONS}
    values: dict[str, Any] = {}
    for key, value in table.items():
        label = f"{where}.{key}" if where else key
        if key in sections:
            values.setdefault("sections", {})[key] = settings_from(sections[key], value, label)
        elif key not in types:
            known = [*types, *sections]
            raise SettingError(one_of(f"a setting{f' of [{where}]' if where else ''}", key, known))
        elif is_dataclass(types[key]):
            values[key] = settings_from(types[key], value, label)
        else:
            values[key] = typed(types[key], value, label)
    if kind is Recipe:
        values["sections"] = _with_own_section(values)
    return kind(**values)


def _with_own_section(values: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that a recipe gives, and that of its method, with defaults where it says nothing."""
    sections: dict[str, Any] = dict(values.get("sections", {}))
    listed = CATALOGUE.get(values.get("algorithm", Recipe.algorithm))
    if listed and listed.section:
        sections.setdefault(listed.section, settings_of_section(listed.section)())
    return sections


def typed(kind: Any, value: Any, label: str) -> Any:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise SettingError(one_of(label, value, map(str, get_args(kind))))
        return value
    if isinstance(kind, UnionType) or get_origin(kind) is Union:
        errors = []
        for option in get_args(kind):
            try:
                return typed(option, value, label)
            except SettingError as error:
                errors.append(error)
        raise errors[-1]
    origin = get_origin(kind) or kind
    if origin not in _TYPE_NAMES:
        raise SettingError(f"{label} must be left at its default: a recipe cannot give a value of its type ({origin}).")
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, origin) or (isinstance(value, bool) and origin is not bool):
        raise SettingError(f"{label} must be {_TYPE_NAMES[origin]}. Got {value!r} instead.")
    if origin is list:
        return [typed(get_args(kind)[0], item, label) for item in value]
    return value


_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


_beside: list[str] = []  # folders of recipes: what they name may lie there


def importable_from(folder: Path) -> None:
    """What lies in this folder can be named in recipes; installed packages come first."""
    if str(folder) not in _beside:
        _beside.append(str(folder))


def folders_beside() -> list[str]:
    """Where named objects may lie, for processes that must find them too."""
    return list(_beside)


def named_object(name: str, setting: str) -> Any:
    """The object that `package.module:name` stands for: in an installed package, in the current folder, or beside a recipe."""
    module, _, attribute = name.partition(":")
    try:
        with _found_in([str(Path.cwd()), *_beside]):
            return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(f"{setting} must name something that can be imported. {name!r} cannot: {error}.") from error


@contextmanager
def _found_in(folders: Sequence[str]) -> Iterator[None]:
    """Modules are looked for in these folders too while this lasts; installed packages come first."""
    added = [folder for folder in folders if folder not in sys.path]
    sys.path.extend(added)
    importlib.invalidate_caches()  # a file may be newer than the last look at its folder
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)
