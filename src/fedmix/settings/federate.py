"""A recipe's [data] -> a federation: source, split, shift, parts. It depends on the seed alone, not on method or engine."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmix.data import partition, shift
from fedmix.data.federation import PARTS, Federation
from fedmix.data.partition import Indices
from fedmix.data.sources import DATASETS, Source, load, stand_in
from fedmix.data.user_files import READERS
from fedmix.errors import DataError, SettingError, one_of
from fedmix.rng import Stream, stream
from fedmix.settings.importing import named_object
from fedmix.settings.recipe import NATURAL, OWN, SITES, DataSettings
from fedmix.settings.tables import typed


def build_federation(
    settings: DataSettings, seed: int, data_dir: str | None = None, only_sizes: bool = False
) -> Federation:
    """The federation of a recipe. only_sizes: from a data set's published sizes, where its files are not at hand."""
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
    """Data of `package.module:name`: a function that gives a Federation, or a dict of arrays for each client."""
    for name in ("holdout_clients", "share", "split", "shift", "augment"):
        if getattr(settings, name) != getattr(DataSettings, name):
            raise SettingError(f"data.{name} cannot be used with data of a function: it says itself who holds what.")
    function = named_object(settings.source, "data.source")
    if not callable(function):
        raise SettingError(f"data.source must name a function. {settings.source} is {type(function).__name__}.")
    _bound(function, settings)
    made = function(**settings.args)
    if isinstance(made, Federation):
        return made
    if not isinstance(made, Mapping):
        raise DataError(
            f"{settings.source} must give a Federation or a dict of clients. It gave {type(made).__name__}."
        )
    return Federation.from_clients(
        made, side=settings.side, validation=settings.validation, test=settings.test, seed=seed
    )


def _bound(function: Callable[..., Any], settings: DataSettings) -> None:
    """Refuse arguments that a source does not take, and values of another type than it says."""
    signature = inspect.signature(function)
    try:
        signature.bind(**settings.args)
    except TypeError as error:
        takes = ", ".join(signature.parameters)
        raise SettingError(f"data.args of {settings.source} must be of {takes}: {error}.") from error
    for name, value in settings.args.items():
        kind = signature.parameters[name].annotation if name in signature.parameters else inspect.Parameter.empty
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
    _bound(read, settings)
    made: Source = read(**args)
    return made


@dataclass(frozen=True)
class _Dealt:
    """Who holds what: the points of each client to train, validate and test; the last `held_out` never take part."""

    parts: list[list[Indices]]
    names: list[str]
    held_out: int
    left_out: int = 0


def federate(settings: DataSettings, seed: int, source: Source) -> Federation:
    rng = stream(seed, "data")
    train = _some(np.arange(source.train), settings.share, rng.child("share", "train"))
    test = _some(np.arange(source.train, len(source.y)), settings.share, rng.child("share", "test"))
    dealt = (_natural if settings.split in NATURAL else _drawn)(settings, source, train, test, rng)
    own = [np.sort(np.concatenate([part[s] for part in dealt.parts])) for s in range(len(dealt.names))]
    x, y, groups, angle = source.x, source.y, None, None
    if settings.shift == "permute-labels":
        y, groups = shift.permute_labels(y, own, source.classes, settings.permutations, rng.child("shift"))
    elif settings.shift == "rotate":
        x, angle = shift.rotate(x, own, settings.rotation_concentration, rng.child("shift"))
    taking_part = len(own) - dealt.held_out
    c, categories = _side(settings.side, y, source, own, taking_part, groups, angle)
    if settings.augment != "none" and x.dim() != 4:
        raise SettingError(f"data.augment = {settings.augment!r} needs images [N, C, H, W]. Got {list(x.shape)}.")

    def of_clients(which: slice) -> Federation:
        return Federation(
            x=x,
            y=y,
            c=c,
            parts=dict(zip(PARTS, [part[which] for part in dealt.parts], strict=True)),
            names=dealt.names[which],
            classes=source.classes,
            categories=categories,
            side=settings.side,
            groups=None if groups is None else groups[which],
            mean=source.mean,
            std=source.std,
            augment=settings.augment != "none",
            labels=source.labels,
            features=source.features,
            left_out=dealt.left_out,
        )

    held_out = of_clients(slice(taking_part, None)) if dealt.held_out else None
    return replace(of_clients(slice(taking_part)), held_out=held_out)


def describe_split(federation: Federation) -> dict[str, Any]:
    """Who holds what, as plain numbers: of each client the sizes, labels and side information of its training points."""

    def counts(values: Tensor, index: Indices, kinds: int) -> list[int]:
        found: list[int] = np.bincount(values.numpy()[index], minlength=kinds).tolist()
        return found

    own_side = federation.side not in ("label", "client")
    train = federation.parts["train"]
    labels = np.array([counts(federation.y, index, federation.classes) for index in train], dtype=np.float64)
    shares = labels / labels.sum(axis=1, keepdims=True)
    everybody = labels.sum(axis=0) / labels.sum()
    return {
        "clients": [
            {
                "client": name,
                **{part: federation.size(s, part) for part in PARTS},
                "labels": labels[s].astype(int).tolist(),
                "side": counts(federation.c, train[s], federation.categories) if own_side else None,
                "group": None if federation.groups is None else federation.groups[s],
            }
            for s, name in enumerate(federation.names)
        ],
        "classes": federation.classes,
        "side": federation.side,
        "held_out": 0 if federation.held_out is None else len(federation.held_out),
        "left_out": federation.left_out,
        "distance": float(np.abs(shares - everybody).sum(axis=1).mean() / 2),
    }


def _some(points: Indices, share: float, rng: Stream) -> Indices:
    return points if share == 1 else np.sort(points[rng.permutation(len(points))[: round(share * len(points))]])


def _natural(settings: DataSettings, source: Source, train: Indices, test: Indices, rng: Stream) -> _Dealt:
    """Every owner keeps its points, divided within the owner where the publisher has no test points of the same owner.

    Owners of the publisher's test points alone never take part: they are held out.
    """
    if source.owner is None:
        raise DataError(
            f"data.split = {settings.split!r} needs data that knows whose each point is; {settings.source} does not. Use "
            "another split, or a source with clients."
        )
    owner, count = source.owner.numpy(), len(source.owners)
    to_train, to_test = ([pool[index] for index in partition.by_owner(owner[pool], count)] for pool in (train, test))
    least = max(settings.min_size, 1 + (settings.validation > 0) + (settings.test > 0))
    trained = set(owner[: source.train].tolist())  # whatever share of the points is taken
    known = [s for s in range(count) if s in trained and len(to_train[s]) >= least]
    new = [s for s in range(count) if s not in trained and len(to_test[s]) >= least]
    if not known:
        raise DataError(f"at least one client must have {least} points or more (data.min_size). None has.")
    if settings.clients + settings.holdout_clients > len(known) - (settings.clients == 0):
        raise DataError(
            f"data.clients + data.holdout_clients must be at most {len(known)}, which is how many {settings.source} has, and "
            f"leave somebody to train. Got {settings.clients} + {settings.holdout_clients}."
        )
    order = [known[i] for i in rng.child("clients").permutation(len(known))]
    apart = order[: settings.holdout_clients]
    rest = order[settings.holdout_clients :]
    taking_part = sorted(rest[: settings.clients] if settings.clients else rest)
    held_out = sorted([*apart, *new])

    def divided(s: int) -> tuple[Indices, Indices, Indices]:
        parts = rng.child("parts", s)
        if len(to_train[s]) and len(to_test[s]):
            some, validation, _ = partition.three_parts(to_train[s], settings.validation, 0.0, parts, source.owners[s])
            return some, validation, to_test[s]
        points = to_train[s] if len(to_train[s]) else to_test[s]
        return partition.three_parts(points, settings.validation, settings.test, parts, source.owners[s])

    clients = [*taking_part, *held_out]
    each = [divided(s) for s in clients]
    return _Dealt(
        parts=[[three[i] for three in each] for i in range(3)],
        names=[source.owners[s] for s in clients],
        held_out=len(held_out),
        left_out=sum(len(to_train[s]) + len(to_test[s]) > 0 for s in range(count)) - len(known) - len(new),
    )


def _drawn(settings: DataSettings, source: Source, train: Indices, test: Indices, rng: Stream) -> _Dealt:
    """Points are dealt out; a client's train, validation and test points all have its own distribution.

    Without a test set of the publisher's, a client's points are divided; with one, the training set is split, and each
    client's validation and test points are drawn like its training labels.
    """
    labels = source.y.numpy()
    total = settings.clients + settings.holdout_clients
    if not len(test):
        own = [train[index] for index in _split(settings, source, train, total, rng.child("split"))]
        each = [
            partition.three_parts(index, settings.validation, settings.test, rng.child("parts", s), s)
            for s, index in enumerate(own)
        ]
        parts = [[three[i] for three in each] for i in range(3)]
    else:
        order = train[rng.child("validation").permutation(len(train))]
        aside = round(settings.validation * len(train))
        pool = np.sort(order[aside:])
        trains = [pool[index] for index in _split(settings, source, pool, total, rng.child("split"))]
        validations = partition.like_training(labels, np.sort(order[:aside]), trains, rng.child("validation", "deal"))
        parts = [trains, validations, partition.like_training(labels, test, trains, rng.child("test"))]
    apart = set(rng.child("holdout").permutation(total)[: settings.holdout_clients].tolist())
    clients = sorted(range(total), key=lambda s: (s in apart, s))
    return _Dealt([[part[s] for s in clients] for part in parts], [str(s) for s in clients], settings.holdout_clients)


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


def _side(
    side: str,
    y: Tensor,
    source: Source,
    own: list[Indices],
    taking_part: int,
    groups: list[int] | None,
    angle: Tensor | None,
) -> tuple[Tensor, int]:
    """The column c of side information, and how many values it has. A client that never takes part has none in side =
    "client": its number is beyond them."""
    if side == "label":
        return y, source.classes
    if side == "rotation" and angle is not None:
        return angle, shift.ANGLES
    if side == "column" and source.column is not None:
        return source.column, int(source.column.max()) + 1
    of_client = list(range(len(own))) if side == "client" else groups if side == "group" else None
    if of_client is None:
        raise DataError(
            f"data.side = {side!r} is not there in this data; use 'label' or 'client', or add the shift that makes it."
        )
    c = torch.zeros_like(y)
    for s, index in enumerate(own):
        c[torch.from_numpy(index)] = of_client[s]
    return c, taking_part if side == "client" else max(of_client) + 1
