"""FedMix that finds out how many experts it needs: it begins with one, splits it where clients' updates fall apart, lets one go
where another does as well, and retires those that nobody uses (`fedmix.experts = "auto"`; core.structure has the rules).

There are as many slots as experts are allowed; those of experts that are not there are neither sent nor trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedmix.core import structure
from fedmix.core.method import Extras
from fedmix.core.optim import OptState
from fedmix.core.placement import Unpacked
from fedmix.core.server import State
from fedmix.core.tree import Params

REMEMBERED = 16  # rounds that a client's last update counts, where only some clients take part in a round
SEEN = 0.8  # the share of clients that must have met an expert before it is said that nobody uses it
AGE = 2  # rounds that an expert is left alone after it was born


def begin(extras: Extras, clients: int, slots: int, first: int) -> Extras:
    """What the server keeps to change the number of experts. first: how many there are at first, which everybody uses alike."""
    there = (torch.arange(slots) < first).to(extras["phi"].dtype)
    return extras | {
        "phi": (there / first).expand_as(extras["phi"]).clone(),
        "q_zs": (there / first).expand(clients, slots).clone(),
        "alive": there.to(torch.int64),
        "born": torch.zeros(slots, dtype=torch.int64),
        "parent": torch.arange(slots),
        "directions": torch.zeros(clients, structure.SKETCH),
        # the expert that a client's direction is of; -1: it has none yet, or that expert is not what it was
        "directed": torch.full((clients,), -1),
        "last_seen": torch.full((clients,), -REMEMBERED),
        "fits": torch.zeros(clients, slots),
    }


def alive(extras: Extras) -> list[int]:
    """The experts that there are."""
    numbers: list[int] = extras["alive"].nonzero().flatten().tolist()
    return numbers


def migrate(private: Params, sent: Params) -> Params:
    """A client's private state, with the gate of every expert that was born since the client last took part.

    Such an expert begins with the gate of the one that it was split from.
    """
    if "born" not in sent or "known" not in private:
        # a client's own answer, or a gate that was made at the server: they know what there is
        return private
    known = int(private["known"])
    born, parent = sent["born"], sent["parent"]
    new = [k for k in range(len(born)) if int(born[k]) >= known and int(parent[k]) != k]
    gate = {name: value.clone() for name, value in private.items() if name.startswith("gate.")}
    for k in sorted(new, key=lambda slot: int(born[slot])):
        for value in gate.values():
            value[..., k] = value[..., int(parent[k])]
    return {**private, **gate}


@dataclass
class Growth:
    """One round's changes. before: the state that clients were sent; clients, replies, points: who sent what, and N_s."""

    before: State
    state: State
    clients: Sequence[int]
    replies: Sequence[Unpacked]
    points: Tensor
    classes: int
    events: list[dict[str, Any]]

    @property
    def extras(self) -> Extras:
        return self.state.extras

    def run(self, fields: Params) -> tuple[State, list[dict[str, Any]]]:
        self._note_replies(fields)
        for k in alive(self.extras):
            self._let_go(k)
        for k in alive(self.extras):
            self._split(k)
        if any(event["what"] == "split" for event in self.events):
            self._move_shared()
        return self.state, self.events

    def _change(self, **extras: Tensor) -> None:
        self.state = replace(self.state, extras=self.extras | extras)

    def _note_replies(self, fields: Params) -> None:
        """The direction of each client's update of its main expert, and how well each expert fits the client."""
        rows = list(self.clients)
        main = fields["q_zs"].argmax(dim=1)
        directions, fits = self.extras["directions"].clone(), self.extras["fits"].clone()
        directed, last_seen = self.extras["directed"].clone(), self.extras["last_seen"].clone()
        for i, client in enumerate(rows):
            k = int(main[i])
            sent = self.before.experts[k]
            update = {name: sent[name] - weight for name, weight in self.replies[i].experts[k].items()}
            directions[client] = structure.direction(update)
        fits[rows] = fields["fit"].to(fits.dtype)
        directed[rows] = main
        last_seen[rows] = self.state.round
        self._change(directions=directions, fits=fits, directed=directed, last_seen=last_seen)

    def _users(self, k: int) -> Tensor:
        """Clients whose main expert is k, of those that took part lately [S]."""
        lately = self.extras["last_seen"] > self.state.round - REMEMBERED
        users: Tensor = lately & (self.extras["q_zs"].argmax(dim=1) == k)
        return users

    def _known_fits(self) -> Tensor:
        """Which clients have been sent each expert since it is what it is [S, K]."""
        known: Tensor = self.extras["last_seen"][:, None] > self.extras["born"][None, :]
        return known

    def _is_young(self, k: int) -> bool:
        return self.state.round - int(self.extras["born"][k]) < AGE

    # -- one expert less -----------------------------------------------------------------------------------------------

    def _let_go(self, k: int) -> None:
        """Retire an expert that nobody uses; merge one whose clients another expert would serve as well."""
        others = [other for other in alive(self.extras) if other != k]
        if not others or self._is_young(k):
            return
        users = self._users(k)
        if bool(users.any()):
            heir = structure.stand_in(self.extras["fits"], self._known_fits(), k, others, users, self.classes)
            what = "merged"
        elif float(self._known_fits()[:, k].float().mean()) < SEEN:
            return  # most clients have not been asked yet
        else:
            heir = others[int(self.extras["fits"][:, others].mean(dim=0).argmax())]
            what = "retired"
        if heir is not None:
            self._remove(k, heir)
            self.events.append({"what": what, "expert": k, "into": heir, "clients": int(users.sum())})

    def _remove(self, k: int, heir: int) -> None:
        alive_now, directed = self.extras["alive"].clone(), self.extras["directed"].clone()
        alive_now[k] = 0
        directed[directed == k] = -1
        phi, q_zs = (_inherited(self.extras[name], k, heir) for name in ("phi", "q_zs"))
        self._change(alive=alive_now, directed=directed, phi=phi, q_zs=q_zs)

    # -- more experts --------------------------------------------------------------------------------------------------

    def _split(self, k: int) -> None:
        """Split an expert where the updates of its clients fall apart and one of the parts is badly served."""
        free = [slot for slot, there in enumerate(self.extras["alive"].tolist()) if not there]
        if not free or self._is_young(k):
            return
        users = (self._users(k) & (self.extras["directed"] == k)).nonzero().flatten()
        labels = structure.clusters(self.extras["directions"][users], len(free) + 1)
        if labels is None or not structure.is_unserved(-self.extras["fits"][users, k], labels, self.classes):
            return
        slots = [k, *free[: int(labels.max())]]
        members = [users[labels == label].tolist() for label in range(len(slots))]
        for slot, cluster in zip(slots, members, strict=True):
            self._give_birth(slot, k, cluster)
        self.events.append(
            {"what": "split", "expert": k, "into": slots, "clients": [len(cluster) for cluster in members]}
        )

    def _move_shared(self) -> None:
        """What experts share goes with their children: to the mean of what all clients of the round sent."""
        if not self.before.shared:
            return
        shared = _weighted_mean(self.before.shared, [reply.shared for reply in self.replies], self.points)
        self.state = replace(self.state, shared=shared, opt=_without_momentum(self.before.opt))

    def _give_birth(self, slot: int, parent: int, cluster: list[int]) -> None:
        """An expert for these clients: its parent as it was sent, moved by the mean of their updates."""
        experts, opts = list(self.state.experts), list(self.state.experts_opt)
        experts[slot] = self._mean_of(parent, cluster)
        opts[slot] = _without_momentum(self.before.experts_opt[parent])
        self.state = replace(self.state, experts=tuple(experts), experts_opt=tuple(opts))
        extras = {name: self.extras[name].clone() for name in ("alive", "born", "parent", "directed", "q_zs", "phi")}
        extras["alive"][slot] = 1
        extras["born"][slot] = self.state.round
        extras["parent"][slot] = parent
        extras["directed"][cluster] = -1
        if slot != parent:
            q_zs = extras["q_zs"]
            q_zs[cluster] = _inherited(q_zs[cluster], parent, slot)
            extras["phi"] = self._phi_after(extras["phi"], cluster, parent, slot)
        self._change(**extras)

    def _phi_after(self, phi: Tensor, cluster: list[int], parent: int, slot: int) -> Tensor:
        """Where c is the client, the rows of the cluster go over to the child; elsewhere the next replies tell."""
        if len(phi) != len(self.extras["q_zs"]):
            return phi
        phi[cluster] = _inherited(phi[cluster], parent, slot)
        return phi

    def _mean_of(self, parent: int, cluster: list[int]) -> Params:
        place = {client: i for i, client in enumerate(self.clients)}
        here = [place[client] for client in cluster if client in place]
        sent = self.before.experts[parent]
        if not here:
            return _copy(sent)
        return _weighted_mean(sent, [self.replies[i].experts[parent] for i in here], self.points[here])


def _weighted_mean(like: Params, copies: Sequence[Params], points: Tensor) -> Params:
    """The mean of clients' copies of some tensors, weighted by their points."""
    weights = (points / points.sum()).tolist()
    pairs = list(zip(weights, copies, strict=True))
    return {name: sum(weight * copy[name] for weight, copy in pairs).to(like[name].dtype) for name in like}


def _without_momentum(opt: OptState) -> OptState:
    """Adam's memory of how steep the loss is stays; where it was going is not where children go."""
    return {part: _zeros(values) if part == "mean" else _copy(values) for part, values in opt.items()}


def _inherited(rows: Tensor, k: int, heir: int) -> Tensor:
    """Distributions over experts with the share of expert k given to its heir: [..., K]."""
    rows = rows.clone()
    rows[..., heir] = rows[..., heir] + rows[..., k]
    rows[..., k] = 0.0
    return rows


def _copy(values: Params) -> Params:
    """Tensors of an expert's own: a checkpoint takes none that two experts share."""
    return {name: value.clone() for name, value in values.items()}


def _zeros(values: Params) -> Params:
    return {name: torch.zeros_like(value) for name, value in values.items()}
