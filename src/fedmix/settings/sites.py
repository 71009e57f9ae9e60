"""Data that never leaves its owners: what the sites agreed on, what one site has, and what the server knows about it.

A recipe with data.source = "sites" says in [data.args] what the sites' data have in common (`Agreed`). Each site reads its
files, in whatever format it has them, and brings them into that form. The server knows names and numbers of points.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmix.core.types import Examples
from fedmix.data.federation import PARTS, Federation
from fedmix.data.labels import text_of
from fedmix.data.sources import Source
from fedmix.data.user_files import READERS, arrays
from fedmix.errors import DataError, SettingError, one_of
from fedmix.settings.federate import build_federation, federate
from fedmix.settings.importing import named_object
from fedmix.settings.recipe import SITES, DataSettings, Recipe
from fedmix.settings.tables import settings_from

# A site's data.source for trying out: the site holds some of the clients of the recipe's data.
PART_OF_RECIPE = "recipe"
# The arguments of a reader that are paths.
PATHS = ("file", "folder")


@dataclass(frozen=True)
class Agreed:
    """[data.args] of a recipe whose data is with its sites."""

    sites: list[str] = field(default_factory=list)  # the names of the sites that take part
    input: list[int] = field(default_factory=list)  # the shape of one input
    classes: int = 0  # how many classes there are; 0: as many as labels
    labels: list[str] = field(default_factory=list)  # what classes are called in the files; none: 0, 1, 2, ...
    mean: list[float] = field(default_factory=list)  # for images of bytes: of each channel, as shares of 255
    std: list[float] = field(default_factory=list)
    columns: list[dict[str, Any]] = field(default_factory=list)  # how a table's columns become numbers
    kinds: list[str] = field(default_factory=list)  # the values of side information, with data.side = "column"

    def __post_init__(self) -> None:
        if not self.sites or len(set(self.sites)) != len(self.sites):
            raise SettingError(f"data.args.sites must name each site once. Got {self.sites!r}.")
        if not self.input or min(self.input) < 1:
            raise SettingError(f"data.args.input must be the shape of one input, as in [30]. Got {self.input!r}.")
        self._check_labels()
        if len(self.mean) != len(self.std):
            raise SettingError("data.args.mean and data.args.std must be of one length: one for each channel.")

    def _check_labels(self) -> None:
        if self.classes and self.labels and self.classes != len(self.labels):
            raise SettingError(f"data.args.classes must be {len(self.labels)}, one for each of data.args.labels.")
        if self.count < 2:
            raise SettingError("data.args must say what the labels are: classes = 10, or labels = ['no', 'yes'].")

    @property
    def count(self) -> int:
        """How many classes there are."""
        return self.classes or len(self.labels)

    @property
    def names(self) -> list[str]:
        """What the classes are called."""
        return self.labels or [str(i) for i in range(self.count)]


def agreed(settings: DataSettings) -> Agreed:
    """What the sites of a recipe agreed on; settings that only make sense with data in one place are refused."""
    if settings.side not in ("label", "client", "column"):
        raise SettingError(
            f"data.side must be 'label', 'client' or 'column' with data at sites. Got {settings.side!r}."
        )
    if settings.side == "column" and len(settings.args.get("kinds", [])) < 1:
        raise SettingError("data.args.kinds must name the values of side information with data.side = 'column'.")
    for name in ("clients", "holdout_clients", "share", "split", "shift"):
        if getattr(settings, name) != getattr(DataSettings, name):
            raise SettingError(f"data.{name} cannot be used with data at sites: each holds what it holds.")
    return settings_from(Agreed, settings.args, "data.args")


@dataclass(frozen=True)
class SiteData:
    """[data] of a site's settings: where its data is, and in which format."""

    source: str = "npz"  # npz, images, csv, package.module:name; or "recipe"
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Holding:
    """What a site has: some clients of a federation, by name."""

    federation: Federation
    # The client's name in the whole federation, and its number in this one.
    clients: Mapping[str, int]

    def describe(self, key: bytes) -> dict[str, Any]:
        """What the server is told: who is here, how many points they hold, and a fingerprint to know the data again."""
        numbers = self.clients.values()
        points = {part: [self.federation.size(s, part) for s in numbers] for part in PARTS}
        return {"clients": list(self.clients), "points": points, "digest": self.digest(key)}

    def digest(self, key: bytes) -> str:
        """A digest of all points at once, under a key that the site alone has.

        It tells whether data is the same, and nothing else about it.
        """
        what = repr(sorted(self.clients.items())) + self.federation.digest()
        return hashlib.blake2b(what.encode(), key=key[:64], digest_size=16).hexdigest()


def holding(recipe: Recipe, site: str, data: SiteData, data_dir: str | None = None) -> Holding:
    """A site's data, in the form that the recipe asks for; what does not fit is refused, with what to do."""
    if data.source == PART_OF_RECIPE:
        return _part(recipe, data, data_dir)
    if recipe.data.source != SITES:
        raise DataError(
            f"this site holds data of its own, and the recipe trains on {recipe.data.source!r}. It must have data.source = "
            "'sites', or the site source = 'recipe'."
        )
    common = agreed(recipe.data)
    source = _fitted(_read(data, common, data_dir), common, recipe.data.side)
    if source.owner is None:
        source = replace(source, owner=torch.zeros(len(source.y), dtype=torch.int64), owners=[site])
    else:
        source = replace(source, owners=[f"{site}/{owner}" for owner in source.owners])
    settings = replace(recipe.data, source=site, clients=0, split="by-client", args={})
    federation = federate(settings, recipe.seed, source)
    return Holding(federation, {name: s for s, name in enumerate(federation.names)})


def _part(recipe: Recipe, data: SiteData, data_dir: str | None) -> Holding:
    """Part `part` of the recipe's data, whose clients are dealt out to `of` sites in turn."""
    part, of = _which_part(data)
    if recipe.data.source == SITES:
        raise DataError("a site with source = 'recipe' needs a recipe with data of its own; this one asks the sites.")
    whole = build_federation(recipe.data, recipe.seed, data_dir)
    return Holding(whole, {name: s for s, name in enumerate(whole.names) if s % of == part})


def _which_part(data: SiteData) -> tuple[int, int]:
    refusal = DataError("a site with source = 'recipe' must say which part it holds, as in {part = 0, of = 3}.")
    if set(data.args) != {"part", "of"}:
        raise refusal
    part, of = data.args["part"], data.args["of"]
    if not isinstance(part, int) or not isinstance(of, int):
        raise refusal
    if not 0 <= part < of:
        raise refusal
    return part, of


def _read(data: SiteData, common: Agreed, data_dir: str | None) -> Source:
    """A site's data as it is there, before it is brought into the common form."""
    if ":" in data.source:
        return _read_by_function(data)
    if data.source not in READERS:
        raise SettingError(one_of("data.source", data.source, [*READERS, PART_OF_RECIPE, "package.module:name"]))
    if "columns" in data.args:
        raise SettingError("columns must be in the recipe (data.args.columns), the same for every site.")
    return _read_files(data, common, data_dir)


def _read_files(data: SiteData, common: Agreed, data_dir: str | None) -> Source:
    args = {key: _below(data_dir, value) if key in PATHS else value for key, value in data.args.items()}
    if data.source == "csv" and common.columns:
        args["columns"] = common.columns
    try:
        return partial(READERS[data.source], data_dir)(**args)
    except TypeError as error:
        raise SettingError(f"[data] args of {data.source!r}: {error}.") from error


def _read_by_function(data: SiteData) -> Source:
    function = named_object(data.source, "data.source")
    try:
        given = function(**data.args)
    except Exception as error:
        raise DataError(f"{data.source} failed: {type(error).__name__}: {error}.") from error
    if not isinstance(given, Mapping):
        raise DataError(f"{data.source} must give a dict of arrays x and y. It gave {type(given).__name__}.")
    return arrays(data.source, given)


def _below(folder: str | None, name: Any) -> Any:
    """A path of a site's settings: below the site's folder, whatever folder a command is given in."""
    if folder and isinstance(name, str):
        return str(Path(folder) / Path(name).expanduser())
    return name


def _fitted(source: Source, common: Agreed, side: str) -> Source:
    """A site's data in the common form: inputs have the shape that was agreed on, labels and side information its numbers."""
    shape = source.shape
    if shape != common.input:
        raise DataError(f"inputs must have the shape {common.input} (data.args.input). Those here have {shape}.")
    if source.x.dtype == torch.uint8 and not common.mean:
        raise DataError("data.args.mean and std must be given: the images here are bytes, to be normalised alike.")
    column = None
    if side == "column":
        if source.column is None:
            raise DataError("data.side = 'column' needs side information c of each point. There is none here.")
        column = _renumbered(source.column, source.kinds, common.kinds, "side information", "data.args.kinds")
    return replace(
        source,
        y=_renumbered(source.y, list(map(text_of, source.labels)), common.names, "labels", "data.args.labels"),
        classes=common.count,
        labels=common.names,
        mean=tuple(common.mean),
        std=tuple(common.std),
        column=column,
        kinds=common.kinds,
    )


def _renumbered(values: Tensor, here: Sequence[str], everywhere: Sequence[str], what: str, setting: str) -> Tensor:
    """Values that number the names `here`, as numbers of the names `everywhere`."""
    used = np.unique(values.numpy())
    strange = [here[i] for i in used if here[i] not in everywhere]
    if strange:
        raise DataError(f"{what} must be of {', '.join(everywhere)} ({setting}). Here is {strange[0]!r} as well.")
    number_everywhere = np.zeros(len(here), dtype=np.int64)
    number_everywhere[used] = [list(everywhere).index(here[i]) for i in used]
    return torch.from_numpy(number_everywhere[values.numpy()])


def known_to_server(recipe: Recipe, sites: Mapping[str, Mapping[str, Any]]) -> Federation:
    """The federation as the server sees it: what the sites said about themselves, in the recipe's order."""
    common = agreed(recipe.data)
    names = [name for site in common.sites for name in sites[site]["clients"]]
    sizes = {part: [n for site in common.sites for n in sites[site]["points"][part]] for part in PARTS}
    categories = {"label": common.count, "client": len(names), "column": len(common.kinds)}[recipe.data.side]
    return Federation.described(
        names,
        sizes,
        common.input,
        common.count,
        categories=categories,
        side=recipe.data.side,
        mean=tuple(common.mean),
        std=tuple(common.std),
        labels=common.names,
        features=common.columns,
    )


@dataclass(frozen=True)
class OwnClients:
    """A site's clients under their numbers in the whole federation; what an engine takes as `Clients`."""

    held: Holding
    # All clients of the whole federation, in order.
    names: Sequence[str]

    def examples(self, client: int, part: str) -> Examples:
        name = self.names[client]
        if name not in self.held.clients:
            raise DataError(f"client {name!r} is not here")
        examples = self.held.federation.examples(self.held.clients[name], part)
        if self.held.federation.side != "client":
            return examples
        # Here the client has another number than in the whole federation.
        return replace(examples, c=torch.full_like(examples.c, client))

    def unit(self, x: Tensor) -> Tensor:
        return self.held.federation.unit(x)

    def to(self, device: torch.device) -> "OwnClients":
        return replace(self, held=replace(self.held, federation=self.held.federation.to(device)))
