"""Where each tensor of a model lives, and what follows from it.

shared    one for all clients: sent, trained, averaged with p(s)
expert    K of them: those that a client uses are sent, trained, averaged with p(s|z=k)
private   one on each client: trained there, never sent
frozen    the same everywhere, never trained; named by a digest, sent only where a client cannot have it
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fedmix.core.tree import Params
from fedmix.errors import ModelError

Place = Literal["shared", "expert", "private", "frozen"]
PLACES: tuple[str, ...] = get_args(Place)


class Unpacked(NamedTuple):
    """The tensors of a message: weights by their place, and what a method sends beside them."""

    shared: Params
    experts: dict[int, Params]
    beside: Params


@dataclass(frozen=True)
class Layout:
    """The place of every parameter of a model, and how many experts there are (0: no parameter is an expert's)."""

    places: Mapping[str, Place]
    experts: int

    @cached_property
    def shared(self) -> list[str]:
        return self._at("shared")

    @cached_property
    def expert(self) -> list[str]:
        return self._at("expert")

    @cached_property
    def private(self) -> list[str]:
        return self._at("private")

    @cached_property
    def frozen(self) -> list[str]:
        return self._at("frozen")

    def _at(self, place: Place) -> list[str]:
        return [name for name, where in self.places.items() if where == place]

    def pick(self, params: Mapping[str, Tensor], place: Place) -> Params:
        """The parameters of a model that live at this place."""
        return {name: params[name] for name in self._at(place)}

    def pack(self, shared: Mapping[str, Tensor], experts: Mapping[int, Mapping[str, Tensor]]) -> Params:
        """Weights as they cross the wire: shared tensors by their names, those of experts as expert.K.NAME."""
        tensors = {name: shared[name] for name in self.shared}
        for k, weights in experts.items():
            tensors |= {wire_name(k, name): weights[name] for name in self.expert}
        return tensors

    @cached_property
    def _on_the_wire(self) -> dict[str, tuple[int, str]]:
        """Name on the wire -> (expert, name in the model); expert -1: shared."""
        names = {name: (-1, name) for name in self.shared}
        for k in range(self.experts):
            names |= {wire_name(k, name): (k, name) for name in self.expert}
        return names

    def unpack(self, tensors: Mapping[str, Tensor]) -> Unpacked:
        """The weights in a message, and whatever else is in it; an expert may be there in part."""
        unpacked = Unpacked({}, {}, {})
        for name, value in tensors.items():
            k, inside = self._on_the_wire.get(name, (None, name))
            if k is None:
                unpacked.beside[name] = value
            elif k < 0:
                unpacked.shared[inside] = value
            else:
                unpacked.experts.setdefault(k, {})[inside] = value
        return unpacked._replace(experts=dict(sorted(unpacked.experts.items())))

    def refuse_equal_names(self, beside: Sequence[str]) -> None:
        """A name on the wire must tell what its tensor is, so no two tensors may have the same."""
        of_experts = [wire_name(k, name) for k in range(self.experts) for name in self.expert]
        count = Counter([*self.shared, *of_experts, *beside])
        twice = sorted(name for name, times in count.items() if times > 1)
        if twice:
            raise ModelError(f"a parameter of the model must not be called {twice[0]!r} with this method; rename it.")


def wire_name(k: int, name: str) -> str:
    """What an expert's tensor is called in a message."""
    return f"expert.{k}.{name}"


def lay_out(
    names: Sequence[str], frozen: Sequence[str], place: Callable[[str], Place], experts: int, method: str
) -> Layout:
    """Place every parameter by the method's rule; those that the user froze stay frozen whatever the rule says."""
    places: dict[str, Place] = {}
    for name in names:
        where = "frozen" if name in frozen else place(name)
        if where not in PLACES:
            raise ModelError(f"{method}: place({name!r}) must be one of {', '.join(PLACES)}. Got {where!r}.")
        places[name] = where
    if "expert" not in places.values():
        return Layout(places, 0)
    if experts < 1:
        raise ModelError(f"{method}: it places parameters as 'expert', so its number of experts must be 1 or more.")
    return Layout(places, experts)


def digest_of(tensors: Mapping[str, Tensor]) -> int:
    """48 bits that name these tensors by their names, types, shapes and values: a number, which messages can carry."""
    digest = hashlib.blake2b(digest_size=6)
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {list(value.shape)};".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "big")
