"""The server's side of any method, derived from it: what a reply must be, and what is made of all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedmix.core import aggregate, divergence, guard, posterior, privacy
from fedmix.core.method import Aggregate, Extras, Method, Setup
from fedmix.core.optim import Optimizer, OptState, adam, sgd
from fedmix.core.placement import Layout, Unpacked, wire_name
from fedmix.core.settings import ServerSettings
from fedmix.core.tree import Params
from fedmix.core.types import Diagnosis, Message, Reply


@dataclass(frozen=True)
class State:
    """What the server knows after a round. `once`: what clients that never took part are sent, and who was sent it."""

    round: int
    shared: Params
    opt: OptState
    experts: tuple[Params, ...]
    experts_opt: tuple[OptState, ...]
    extras: Extras
    once: Params = field(default_factory=dict)


def server_optimizer(settings: ServerSettings, lr: float | None = None, rows: bool = False) -> Optimizer:
    """The optimiser of generalised FedAvg (Reddi et al., 2020); 'average' is SGD with rate 1, whatever rate was set."""
    if settings.optimizer == "average":
        return sgd(1.0)
    rate = lr or settings.server_lr
    return adam(rate, rows=rows) if settings.optimizer == "adam" else sgd(rate)


@dataclass(frozen=True)
class ServerSide:
    setup: Setup
    method: Method
    layout: Layout

    @property
    def linear(self) -> bool:
        return self.setup.server.aggregation == "linear"

    # -- what a reply must be ------------------------------------------------------------------------------------------

    def check(self, sent: Message, back: Message) -> str | None:
        """What is wrong with a reply, as 'field: reason', or None."""
        fields = {name: value for name, value in back.tensors.items() if name in self.method.reply}
        weights = {name: value for name, value in back.tensors.items() if name not in self.method.reply}
        return (
            guard.wrong_numbers(back.numbers)
            or guard.wrong_weights(self._sent_weights(sent), weights)
            or guard.missing(self._wanted(self.layout.unpack(weights)), weights)
            or guard.missing(self.method.reply, fields)
            or self._wrong_fields(sent, back.numbers["n"], fields)
        )

    def _sent_weights(self, sent: Message) -> Params:
        found = self.layout.unpack(sent.tensors)
        return self.layout.pack(found.shared, found.experts)

    def _wanted(self, found: Unpacked) -> list[str]:
        """All shared tensors, and every expert that is there is there as a whole; at least one is."""
        experts = list(found.experts) or ([0] if self.layout.expert else [])
        return [*self.layout.shared, *(wire_name(k, name) for k in experts for name in self.layout.expert)]

    def _wrong_fields(self, sent: Message, n: float, fields: Params) -> str | None:
        shapes = {name: list(declared.shape) for name, declared in self.method.reply.items()}
        found = guard.wrong_shapes(shapes, fields) or guard.not_finite(fields)
        if found:
            return found
        rows = {name: value for name, value in fields.items() if self.method.reply[name].kind == "simplex"}
        if self.linear:
            for name, value in rows.items():
                base = self.method.reply[name].moved_from
                rows[name] = value / n + (sent.tensors[base] if base else 0)
        return guard.off_simplex(rows)

    # -- what is made of replies ---------------------------------------------------------------------------------------

    def update(self, state: State, replies: Sequence[Reply]) -> tuple[State, Diagnosis]:
        after = replace(state, round=state.round + 1, once=self._delivered(state, replies))
        if not self.layout.shared and not self.layout.expert and not self.method.reply:
            return after, Diagnosis(None)
        return self._from_sums(after, replies) if self.linear else self._from_clients(after, replies)

    def _delivered(self, state: State, replies: Sequence[Reply]) -> Params:
        if not state.once:
            return state.once
        delivered = state.once["delivered"].clone()
        delivered[[reply.client for reply in replies]] = True
        return {**state.once, "delivered": delivered}

    def _from_clients(self, state: State, replies: Sequence[Reply]) -> tuple[State, Diagnosis]:
        """Single clients are seen: weighted means of how far they moved, and how much these moves disagree."""
        found = [self.layout.unpack(reply.message.tensors) for reply in replies]
        n_s = torch.tensor([reply.message.numbers["n"] for reply in replies])
        p_s = aggregate.client_weights(n_s)
        fields = {name: torch.stack([own.beside[name] for own in found]) for name in self.method.reply}
        state, layers = self._step_shared(state, [own.shared for own in found], p_s)
        state, returned, per_expert = self._step_experts(state, found, fields, n_s)
        extras = state.extras
        if self.method.individuals is not None:
            extras = self.method.individuals(extras, [reply.client for reply in replies], fields)
        seen = self._aggregate(state, len(replies), p_s, fields)
        extras = self.method.server(extras, seen)
        detail = self._detail(layers, per_expert, returned, self.method.watch(extras, seen, state.round))
        return replace(state, extras=extras), Diagnosis(self._divergence(layers, per_expert, seen), detail)

    def _step_shared(
        self, state: State, clients: Sequence[Params], p_s: Tensor
    ) -> tuple[State, dict[str, float] | None]:
        if not self.layout.shared:
            return state, None
        moved = aggregate.deltas(state.shared, clients)
        layers = divergence.expert_divergence(moved, p_s)
        delta = aggregate.mean_delta(state.shared, moved, p_s)
        shared, opt = self._optimizer.update(state.shared, delta, state.opt, 1.0)
        return replace(state, shared=shared, opt=opt), layers

    def _step_experts(
        self, state: State, found: Sequence[Unpacked], fields: Params, n_s: Tensor
    ) -> tuple[State, Tensor, list[dict[str, float]]]:
        """Each expert by those who returned it; one that nobody returned keeps its weights and its optimiser's state."""
        experts, opts, layers = [], [], []
        returned = torch.tensor([[k in own.experts for k in range(self.layout.experts)] for own in found])
        if not self.layout.experts:
            return state, returned, []
        q_s = fields[self.method.weigh]
        p_sz = aggregate.expert_weights(torch.where(returned, q_s, torch.zeros_like(q_s)), n_s)
        for k, (w, opt) in enumerate(zip(state.experts, state.experts_opt, strict=True)):
            moved = aggregate.deltas(w, [own.experts.get(k) for own in found])
            layers.append(divergence.expert_divergence(moved, p_sz[:, k]))
            if bool(p_sz[:, k].sum() > 0):
                delta = aggregate.mean_delta(w, moved, p_sz[:, k])
                w, opt = self._optimizer.update(w, delta, opt, 1.0)
            experts.append(w)
            opts.append(opt)
        return replace(state, experts=tuple(experts), experts_opt=tuple(opts)), returned, layers

    def _aggregate(self, state: State, clients: int, p_s: Tensor, fields: Params) -> Aggregate:
        sent = self.method.sends(state.extras)
        means = {name: _mean(p_s, rows) for name, rows in fields.items()}
        moved, touched = {}, {}
        for name, declared in self.method.reply.items():
            if declared.moved_from:
                base = sent[declared.moved_from]
                moved[name] = posterior.mean_move(base, fields[name], p_s)
                touched[name] = posterior.rows_held(base, fields[name])
        use = means[self.method.weigh] if self.method.weigh else torch.zeros(0)
        return Aggregate(clients, use, means, moved, touched)

    def _from_sums(self, state: State, replies: Sequence[Reply]) -> tuple[State, Diagnosis]:
        """The same from sums over the cohort: of N_s Delta_s, N_s q(z=k|s) Delta_{k,s}, N_s q(z=k|s), N_s (phi_s - phi)."""
        total = privacy.summed([reply.message.tensors for reply in replies])
        found = self.layout.unpack(total)
        n: Any = sum(reply.message.numbers["n"] for reply in replies)
        if self.method.weigh:  # the same: each client's weights of experts sum to one
            n = found.beside[self.method.weigh].sum()
        if self.layout.shared:
            delta = {name: value / n for name, value in found.shared.items()}
            shared, opt = self._optimizer.update(state.shared, delta, state.opt, 1.0)
            state = replace(state, shared=shared, opt=opt)
        if self.layout.experts:
            state = self._experts_from_sums(state, found, found.beside[self.method.weigh])
        seen = self._aggregate_of_sums(state, found.beside, n, len(replies))
        extras = self.method.server(state.extras, seen)
        return replace(state, extras=extras), Diagnosis(None, self.method.watch(extras, seen, state.round))

    def _experts_from_sums(self, state: State, found: Unpacked, of_experts: Tensor) -> State:
        updated = []
        for k, (w, opt) in enumerate(zip(state.experts, state.experts_opt, strict=True)):
            if of_experts[k] > 0:
                delta = {name: value / of_experts[k] for name, value in found.experts[k].items()}
                w, opt = self._optimizer.update(w, delta, opt, 1.0)
            updated.append((w, opt))
        experts, opts = zip(*updated, strict=True)
        return replace(state, experts=experts, experts_opt=opts)

    def _aggregate_of_sums(self, state: State, fields: Params, n: Any, clients: int) -> Aggregate:
        sent = self.method.sends(state.extras)
        bases = {name: sent[own.moved_from] for name, own in self.method.reply.items() if own.moved_from}
        moved = {name: -fields[name] / n for name in bases}
        means = {name: bases[name] - moved[name] if name in bases else fields[name] / n for name in self.method.reply}
        touched = {name: (fields[name] != 0).any(dim=-1) for name in bases}
        use = means[self.method.weigh] if self.method.weigh else torch.zeros(0)
        return Aggregate(clients, use, means, moved, touched)

    # -- what a reader of metrics is told ------------------------------------------------------------------------------

    def _divergence(
        self, shared: dict[str, float] | None, experts: Sequence[dict[str, float]], seen: Aggregate
    ) -> float | None:
        """Over shared tensors, and over experts, each as much as it is used."""
        parts = [] if shared is None else [sum(shared.values())]
        if experts:
            parts.append(sum(p * sum(own.values()) for p, own in zip(seen.use.tolist(), experts, strict=True)))
        return sum(parts[1:], parts[0]) if parts else None

    def _detail(
        self,
        shared: dict[str, float] | None,
        experts: Sequence[dict[str, float]],
        returned: Tensor,
        more: Mapping[str, Any],
    ) -> dict[str, Any]:
        if not experts:
            return {**({"divergence_layers": [shared]} if shared else {}), **more}
        layers = [{**(shared or {}), **own} for own in experts]
        return {
            "divergence_experts": [sum(own.values()) for own in experts],
            "divergence_layers": layers,
            "experts_returned": returned.sum(dim=0).tolist(),
            **more,
        }

    @property
    def _optimizer(self) -> Optimizer:
        return server_optimizer(self.setup.server)


def _mean(p_s: Tensor, rows: Tensor) -> Tensor:
    """sum_s p(s) value_s: [S'], [S', ...] -> [...]."""
    return (p_s @ rows.flatten(1).to(p_s.dtype)).view(rows.shape[1:])
