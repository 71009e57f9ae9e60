"""The federation that a recipe's [data] describes: source, split, shift, parts.

It depends on the seed alone, not on method or engine.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmix.core.method import VECTORS
from fedmix.data import partition, shift
from fedmix.data.clients import MERGED
from fedmix.data.federation import PARTS, Federation, SideMoments, standardised
from fedmix.data.labels import refuse_one_kind
from fedmix.data.partition import Indices
from fedmix.data.sources import DATASETS, Source, load, stand_in
from fedmix.data.user_files import READERS
from fedmix.errors import DataError, SettingError, one_of
from fedmix.rng import Stream, stream
from fedmix.settings.importing import named_object
from fedmix.settings.recipe import NATURAL, OWN, SITES, DataSettings
from fedmix.settings.tables import typed

# A client's points to train, to validate and to test.
_ThreeParts = tuple[Indices, Indices, Indices]


def build_federation(
    settings: DataSettings, seed: int, data_dir: str | None = None, only_sizes: bool = False
) -> Federation:
    """The federation of a recipe. only_sizes: made up from a data set's published sizes, without its files."""
    if settings.source == OWN:
        raise SettingError(
            "this run's data was handed over in Python; go on there: fedmix.train(federation=..., out=RUN, resume=True)."
        )
    if settings.source == SITES:
        raise SettingError(
            "data.source = 'sites' is data that never leaves its sites; a recipe with it is trained by: fedmix deploy run."
        )
    if ":" in settings.source:
        return _from_function(settings, seed)
    return federate(settings, seed, _source(settings, data_dir, only_sizes))


def _from_function(settings: DataSettings, seed: int) -> Federation:
    """The data of `package.module:name`, a function that gives a Federation, or a dict of arrays for each client."""
    for name in ("holdout_clients", "share", "split", "shift", "augment"):
        if getattr(settings, name) != getattr(DataSettings, name):
            raise SettingError(f"data.{name} cannot be used with data of a function: it says itself who holds what.")
    function = named_object(settings.source, "data.source")
    if not callable(function):
        raise SettingError(f"data.source must name a function. {settings.source} is {type(function).__name__}.")
    _refuse_other_arguments(function, settings)
    data = function(**settings.args)
    if isinstance(data, Federation):
        return data
    if not isinstance(data, Mapping):
        raise DataError(
            f"{settings.source} must give a Federation or a dict of clients. It gave {type(data).__name__}."
        )
    small = "leave-out" if settings.min_size > DataSettings.min_size else "keep"
    return Federation.from_clients(
        data,
        side=settings.side,
        validation=settings.validation,
        test=settings.test,
        min_size=settings.min_size,
        small=settings.small if settings.small != DataSettings.small else small,
        seed=seed,
    )


def _refuse_other_arguments(function: Callable[..., Any], settings: DataSettings) -> None:
    """Refuse arguments that a source does not take, and values of another type than its signature says."""
    signature = inspect.signature(function)
    try:
        signature.bind(**settings.args)
    except TypeError as error:
        takes = ", ".join(signature.parameters)
        raise SettingError(f"data.args of {settings.source} must be of {takes}: {error}.") from error
    # A name that is not in the signature goes into its **kwargs, which say nothing about types.
    annotations = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    for name, value in settings.args.items():
        kind = annotations.get(name)
        if kind in (str, int, bool, float, list[str]):
            typed(kind, value, f"data.args.{name}")


def _source(settings: DataSettings, data_dir: str | None, only_sizes: bool) -> Source:
    name, args = settings.source, settings.args
    if name in READERS:
        read: Any = partial(READERS[name], data_dir)
    elif name == "digits" or name in DATASETS:
        read = partial(stand_in, name) if only_sizes else partial(load, name, data_dir)
    else:
        raise SettingError(one_of("data.source", name, ["digits", *DATASETS, *READERS, SITES, "package.module:name"]))
    _refuse_other_arguments(read, settings)
    source: Source = read(**args)
    if source.labels:
        refuse_one_kind(source.labels)
    return source


@dataclass(frozen=True)
class _Dealt:
    """Who holds what. The clients that never take part come last.

    parts: the points of each client to train, to validate and to test, [3][clients]. held_out: how many clients never take
    part. left_out: how many owners of points have too few to be clients. note: who they are, in words.
    """

    parts: list[list[Indices]]
    names: list[str]
    held_out: int
    left_out: int = 0
    note: str = ""

    @property
    def taking_part(self) -> int:
        return len(self.names) - self.held_out

    @property
    def points(self) -> list[Indices]:
        """All points of each client."""
        of_clients = zip(*self.parts, strict=True)
        return [np.sort(np.concatenate(three)) for three in of_clients]


@dataclass(frozen=True)
class _Shifted:
    """A source's points after the shift. groups: one for each client. angle: one for each point."""

    x: Tensor
    y: Tensor
    groups: list[int] | None = None
    angle: Tensor | None = None


def federate(settings: DataSettings, seed: int, source: Source) -> Federation:
    """The points of a source, dealt out to clients and shifted as the settings say."""
    rng = stream(seed, "data")
    train = _some(np.arange(source.train), settings.share, rng.child("share", "train"))
    test = _some(np.arange(source.train, len(source.y)), settings.share, rng.child("share", "test"))
    deal = _natural if settings.split in NATURAL else _drawn
    dealt = deal(settings, source, train, test, rng)
    points = dealt.points
    if dealt.taking_part:
        source = source.with_statistics_of(np.concatenate(dealt.parts[0][: dealt.taking_part]))
    shifted = _shifted(settings, source, points, rng.child("shift"))
    c, categories = _side(settings.side, source, shifted, points, dealt.taking_part)
    side_moments: SideMoments = ((), ())
    if settings.side == "vector":
        c, side_moments = standardised(c, dealt.parts[0][: dealt.taking_part])
    if settings.augment != "none" and shifted.x.dim() != 4:
        shape = list(shifted.x.shape)
        raise SettingError(f"data.augment = {settings.augment!r} needs images [N, C, H, W]. Got {shape}.")

    def of_clients(which: slice) -> Federation:
        return Federation(
            x=shifted.x,
            y=shifted.y,
            c=c,
            parts=dict(zip(PARTS, [part[which] for part in dealt.parts], strict=True)),
            names=dealt.names[which],
            classes=source.classes,
            categories=categories,
            side=settings.side,
            groups=None if shifted.groups is None else shifted.groups[which],
            mean=source.mean,
            std=source.std,
            augment=settings.augment != "none",
            labels=source.labels,
            features=source.features,
            note="; ".join(filter(None, (source.note, dealt.note))),
            left_out=dealt.left_out,
            kinds=source.kinds if settings.side == "column" else (),
            side_moments=side_moments,
            roles=source.roles,
        )

    held_out = of_clients(slice(dealt.taking_part, None)) if dealt.held_out else None
    return replace(of_clients(slice(dealt.taking_part)), held_out=held_out)


def _shifted(settings: DataSettings, source: Source, points: list[Indices], rng: Stream) -> _Shifted:
    if settings.shift == "permute-labels":
        tables = shift.label_tables(source.classes, settings.permutations, settings.permuted_labels, rng)
        groups = shift.deal_groups(len(points), settings.permutations, settings.group_sizes, rng)
        y = shift.permute_labels(source.y, points, tables, groups)
        return _Shifted(source.x, y, groups=groups)
    if settings.shift == "rotate":
        x, angle = shift.rotate(source.x, points, settings.rotation_concentration, rng)
        return _Shifted(x, source.y, angle=angle)
    return _Shifted(source.x, source.y)


def describe_split(federation: Federation) -> dict[str, Any]:
    """Who holds what, as plain numbers: the sizes of each client, and the labels and side information of its training points.

    distance: the mean total variation between a client's label shares and everybody's.
    """
    train = federation.parts["train"]
    counts = [_counts(federation.y, index, federation.classes) for index in train]
    labels = np.array(counts, dtype=np.float64)
    shares = labels / labels.sum(axis=1, keepdims=True)
    everybody = labels.sum(axis=0) / labels.sum()
    return {
        "clients": [_describe_client(federation, s, counts[s]) for s in range(len(federation))],
        "classes": federation.classes,
        "side": federation.side,
        "held_out": 0 if federation.held_out is None else len(federation.held_out),
        "left_out": federation.left_out,
        "distance": float(np.abs(shares - everybody).sum(axis=1).mean() / 2),
    }


def _describe_client(federation: Federation, s: int, labels: list[int]) -> dict[str, Any]:
    sizes = {part: federation.size(s, part) for part in PARTS}
    side = None
    if federation.side not in ("label", "client", *VECTORS):
        side = _counts(federation.c, federation.parts["train"][s], federation.categories)
    group = None if federation.groups is None else federation.groups[s]
    return {"client": federation.names[s], **sizes, "labels": labels, "side": side, "group": group}


def _counts(values: Tensor, index: Indices, kinds: int) -> list[int]:
    """How often each of the values 0, 1, ..., kinds - 1 occurs among these points."""
    counts: list[int] = np.bincount(values.numpy()[index], minlength=kinds).tolist()
    return counts


def _some(points: Indices, share: float, rng: Stream) -> Indices:
    if share == 1:
        return points
    order = rng.permutation(len(points))
    return np.sort(points[order[: round(share * len(points))]])


# -- data whose points have owners -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Owned:
    """The points of each owner in the publisher's training set and in its test set, and which owners have enough of them.

    known: owners of training points. new: owners of test points alone.
    """

    to_train: list[Indices]
    to_test: list[Indices]
    known: list[int]
    new: list[int]

    @property
    def left_out(self) -> int:
        """How many owners have some points, but too few."""
        pairs = zip(self.to_train, self.to_test, strict=True)
        with_points = sum(len(to_train) + len(to_test) > 0 for to_train, to_test in pairs)
        return with_points - len(self.known) - len(self.new)


def _natural(settings: DataSettings, source: Source, train: Indices, test: Indices, rng: Stream) -> _Dealt:
    """Every owner keeps its points, divided within the owner where the publisher has no test points of the same owner.

    Owners of the publisher's test points alone never take part: they are held out.
    """
    if source.owner is None:
        raise DataError(
            f"data.split = {settings.split!r} needs data that knows whose each point is; {settings.source} does not. Use "
            "another split, or a source with clients."
        )
    # A client must have a point for each part that is not empty.
    least = max(settings.min_size, 1 + (settings.validation > 0) + (settings.test > 0))
    merged = ""
    if settings.small == "keep":
        least = 1
    elif settings.small == "merge":
        source, merged = _with_small_owners_merged(source, train, least)
    assert source.owner is not None
    owned = _points_of_owners(source, source.owner.numpy(), train, test, least)
    _refuse_too_few_owners(settings, len(owned.known), least)
    order = [owned.known[i] for i in rng.child("clients").permutation(len(owned.known))]
    apart, rest = order[: settings.holdout_clients], order[settings.holdout_clients :]
    taking_part = sorted(rest[: settings.clients] if settings.clients else rest)
    held_out = sorted([*apart, *owned.new])
    clients = [*taking_part, *held_out]
    names = [source.owners[s] for s in clients]
    parts = [_divided(settings, source, owned, s, rng.child("parts", s)) for s in clients]
    note = "; ".join(filter(None, (merged, _note_on_left_out(source, owned, least))))
    return _Dealt(_by_part(parts), names, len(held_out), owned.left_out, note)


def _with_small_owners_merged(source: Source, train: Indices, least: int) -> tuple[Source, str]:
    """The same data, in which owners with too few points are one owner; and who they are, in words."""
    assert source.owner is not None
    owner = source.owner.numpy().copy()
    counts = np.bincount(owner[train], minlength=len(source.owners))
    small = np.flatnonzero((counts > 0) & (counts < least))
    if len(small) < 2:
        return source, ""
    owner[np.isin(owner, small)] = len(source.owners)
    note = (
        f"{_listed([source.owners[int(s)] for s in small])} with fewer than {least} points are one client, {MERGED!r}"
    )
    return replace(source, owner=torch.from_numpy(owner), owners=[*source.owners, MERGED]), note


def _note_on_left_out(source: Source, owned: _Owned, least: int) -> str:
    """Who does not take part, in words; "": nobody is left out."""
    if not owned.left_out:
        return ""
    taken = {*owned.known, *owned.new}
    pairs = zip(owned.to_train, owned.to_test, strict=True)
    names = [source.owners[s] for s, (a, b) in enumerate(pairs) if s not in taken and len(a) + len(b)]
    return f"{_listed(names)} with fewer than {least} points left out (data.small, data.min_size)"


def _listed(names: Sequence[str]) -> str:
    few = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names):,} client{'s' if len(names) > 1 else ''} ({few})"


def _points_of_owners(
    source: Source, owner: npt.NDArray[np.int64], train: Indices, test: Indices, least: int
) -> _Owned:
    count = len(source.owners)
    to_train = [train[index] for index in partition.by_owner(owner[train], count)]
    to_test = [test[index] for index in partition.by_owner(owner[test], count)]
    # All of the publisher's training points count here, whatever share of them is taken.
    with_training_points = set(owner[: source.train].tolist())
    without = set(range(count)) - with_training_points
    known = _with_enough(with_training_points, to_train, least)
    new = _with_enough(without, to_test, least)
    return _Owned(to_train, to_test, known, new)


def _with_enough(owners: Iterable[int], points: Sequence[Indices], least: int) -> list[int]:
    return [s for s in sorted(owners) if len(points[s]) >= least]


def _refuse_too_few_owners(settings: DataSettings, known: int, least: int) -> None:
    if not known:
        raise DataError(f"at least one client must have {least} points or more (data.min_size). None has.")
    # data.clients = 0 takes all that are not held out, of whom there must be one at least.
    most = known - (settings.clients == 0)
    if settings.clients + settings.holdout_clients > most:
        raise DataError(
            f"data.clients + data.holdout_clients must be at most {known}, which is how many {settings.source} has, and "
            f"leave somebody to train. Got {settings.clients} + {settings.holdout_clients}."
        )


def _divided(settings: DataSettings, source: Source, owned: _Owned, s: int, rng: Stream) -> _ThreeParts:
    """An owner's points to train, to validate and to test."""
    to_train, to_test, name = owned.to_train[s], owned.to_test[s], source.owners[s]
    if len(to_train) and len(to_test):
        some, validation, _ = partition.three_parts(to_train, settings.validation, 0.0, rng, name)
        return some, validation, to_test
    points = to_train if len(to_train) else to_test
    if settings.small == "keep" and not partition.can_be_divided(len(points), settings.validation, settings.test):
        return points, np.arange(0), np.arange(0)
    return partition.three_parts(points, settings.validation, settings.test, rng, name)


def _by_part(of_clients: Sequence[_ThreeParts]) -> list[list[Indices]]:
    """[clients][3] -> [3][clients]."""
    return [[three[i] for three in of_clients] for i in range(3)]


# -- data whose points are dealt out -----------------------------------------------------------------------------------


def _drawn(settings: DataSettings, source: Source, train: Indices, test: Indices, rng: Stream) -> _Dealt:
    """Points are dealt out; a client's train, validation and test points all have its own distribution.

    Without a test set of the publisher's, a client's points are divided; with one, the training set is split, and each
    client's validation and test points are drawn like its training labels.
    """
    total = settings.clients + settings.holdout_clients
    if len(test):
        parts = _drawn_like_training(settings, source, train, test, total, rng)
    else:
        parts = _drawn_and_divided(settings, source, train, total, rng)
    apart = set(rng.child("holdout").permutation(total)[: settings.holdout_clients].tolist())
    clients = sorted(range(total), key=lambda s: (s in apart, s))
    names = [str(s) for s in clients]
    return _Dealt([[part[s] for s in clients] for part in parts], names, settings.holdout_clients)


def _drawn_and_divided(
    settings: DataSettings, source: Source, pool: Indices, clients: int, rng: Stream
) -> list[list[Indices]]:
    points = [pool[index] for index in _split(settings, source, pool, clients, rng.child("split"))]
    parts = [
        partition.three_parts(index, settings.validation, settings.test, rng.child("parts", s), s)
        for s, index in enumerate(points)
    ]
    return _by_part(parts)


def _drawn_like_training(
    settings: DataSettings, source: Source, train: Indices, test: Indices, clients: int, rng: Stream
) -> list[list[Indices]]:
    labels = source.y.numpy()
    order = train[rng.child("validation").permutation(len(train))]
    aside = round(settings.validation * len(train))
    validation, pool = np.sort(order[:aside]), np.sort(order[aside:])
    trains = [pool[index] for index in _split(settings, source, pool, clients, rng.child("split"))]
    validations = partition.like_training(labels, validation, trains, rng.child("validation", "deal"))
    tests = partition.like_training(labels, test, trains, rng.child("test"))
    return [trains, validations, tests]


def _split(settings: DataSettings, source: Source, pool: Indices, clients: int, rng: Stream) -> list[Indices]:
    """Positions in `pool` for each client."""
    labels = source.y.numpy()[pool]
    match settings.split:
        case "iid":
            return partition.iid(labels, clients, rng)
        case "hsu":
            return partition.hsu(labels, clients, settings.concentration, rng)
        case "dirichlet":
            return partition.dirichlet(labels, clients, settings.concentration, settings.min_size, rng)
        case "pachinko":
            if source.coarse is None:
                raise DataError(
                    f"data.split = 'pachinko' needs coarse labels above the fine ones; {settings.source} has none."
                )
            coarse = source.coarse.numpy()[pool]
            return partition.pachinko(labels, coarse, clients, settings.concentration, settings.fine_concentration, rng)
        case _:
            return partition.shards(labels, clients, settings.shards_per_client, rng)


# -- side information --------------------------------------------------------------------------------------------------


def _side(side: str, source: Source, shifted: _Shifted, points: list[Indices], taking_part: int) -> tuple[Tensor, int]:
    """The column c of side information, and how many values it has."""
    of_points = _side_of_points(side, source, shifted)
    if of_points is not None:
        return of_points
    if side == "client":
        # A client that never takes part has no value of its own here: its number is beyond them.
        return _same_for_client(list(range(len(points))), points, shifted.y), taking_part
    if side == "group" and shifted.groups is not None:
        return _same_for_client(shifted.groups, points, shifted.y), max(shifted.groups) + 1
    if side in ("vector", "column") and (source.column is not None or source.vector is not None):
        must = "a list of columns, or c [N, D]," if side == "vector" else "one column, or c [N],"
        raise DataError(f"data.side = {side!r} needs {must} as side information. This data has it in the other form.")
    raise DataError(
        f"data.side = {side!r} is not there in this data; use 'label' or 'client', or add the shift that makes it."
    )


def _side_of_points(side: str, source: Source, shifted: _Shifted) -> tuple[Tensor, int] | None:
    """Side information that may differ between the points of a client; None: it is none of that kind."""
    if side == "label":
        return shifted.y, source.classes
    if side == "rotation" and shifted.angle is not None:
        return shifted.angle, shift.ANGLES
    if side == "angle" and shifted.angle is not None:
        turned = 2 * math.pi * shifted.angle / shift.ANGLES
        return torch.stack([turned.sin(), turned.cos()], dim=1), 2
    if side == "column" and source.column is not None:
        return source.column, int(source.column.max()) + 1
    if side == "vector" and source.vector is not None:
        return source.vector, source.vector.shape[1]
    return None


def _same_for_client(values: Sequence[int], points: list[Indices], like: Tensor) -> Tensor:
    """The value of each client at each of its points; points that nobody holds have 0."""
    c = torch.zeros_like(like)
    for value, index in zip(values, points, strict=True):
        c[torch.from_numpy(index)] = value
    return c
