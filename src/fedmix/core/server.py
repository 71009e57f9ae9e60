"""The server's side of any method, derived from it: what a reply must be, and how replies become a new state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedmix.core import aggregate, divergence, guard, posterior, privacy
from fedmix.core.method import Aggregate, Extras, Method, Setup, weights_and_fields
from fedmix.core.optim import Optimizer, OptState, adam, sgd
from fedmix.core.placement import Layout, Unpacked, wire_name
from fedmix.core.settings import ServerSettings
from fedmix.core.tree import Params
from fedmix.core.types import Diagnosis, Message, Reply


@dataclass(frozen=True)
class State:
    """What the server knows after a round. `once`: what each client is sent one time only, and who has had it."""

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
    if settings.optimizer == "adam":
        return adam(rate, rows=rows)
    return sgd(rate)


@dataclass(frozen=True)
class ServerSide:
    """What the server does with replies, for one method."""

    setup: Setup
    method: Method
    layout: Layout

    @property
    def linear(self) -> bool:
        """Whether the server is to use nothing but sums over clients."""
        return self.setup.server.aggregation == "linear"

    # -- what a reply must be ------------------------------------------------------------------------------------------

    def check(self, sent: Message, back: Message) -> str | None:
        """What is wrong with a reply, as 'field: reason', or None."""
        weights, fields = weights_and_fields(self.method, back.tensors)
        return (
            guard.wrong_numbers(back.numbers)
            or guard.wrong_weights(self._sent_weights(sent), weights)
            or guard.missing(self._needed_weights(weights), weights)
            or guard.missing(self.method.reply, fields)
            or self._wrong_fields(sent, back.numbers["n"], fields)
        )

    def _sent_weights(self, sent: Message) -> Params:
        unpacked = self.layout.unpack(sent.tensors)
        return self.layout.pack(unpacked.shared, unpacked.experts)

    def _needed_weights(self, weights: Params) -> list[str]:
        """All shared tensors, and the whole of every expert of which something came back; of one expert at least."""
        experts = list(self.layout.unpack(weights).experts)
        if self.layout.expert and not experts:
            experts = [0]
        of_experts = [wire_name(k, name) for k in experts for name in self.layout.expert]
        return [*self.layout.shared, *of_experts]

    def _wrong_fields(self, sent: Message, n: float, fields: Params) -> str | None:
        shapes = {name: list(declared.shape) for name, declared in self.method.reply.items()}
        return (
            guard.wrong_shapes(shapes, fields)
            or guard.not_finite(fields)
            or guard.off_simplex(self._distributions(sent, n, fields))
        )

    def _distributions(self, sent: Message, n: float, fields: Params) -> Params:
        """The fields that must be distributions, as the client had them before it made them fit for sums."""
        rows = {name: value for name, value in fields.items() if self.method.reply[name].kind == "simplex"}
        if not self.linear:
            return rows
        for name, value in rows.items():
            base = self.method.reply[name].moved_from
            rows[name] = value / n + (sent.tensors[base] if base else 0)
        return rows

    # -- a step of the server ------------------------------------------------------------------------------------------

    def update(self, state: State, replies: Sequence[Reply]) -> tuple[State, Diagnosis]:
        """The state after a round, from the replies to it."""
        after = replace(state, round=state.round + 1, once=self._delivered(state, replies))
        if not self.layout.shared and not self.layout.expert and not self.method.reply:
            return after, Diagnosis(None)  # nothing is exchanged
        if self.linear:
            return self._from_sums(after, replies)
        return self._from_clients(after, replies)

    def _delivered(self, state: State, replies: Sequence[Reply]) -> Params:
        if not state.once:
            return state.once
        delivered = state.once["delivered"].clone()
        delivered[[reply.client for reply in replies]] = True
        return {**state.once, "delivered": delivered}

    def _from_clients(self, state: State, replies: Sequence[Reply]) -> tuple[State, Diagnosis]:
        """The server sees single clients: weighted means of how far they moved, and how much these moves disagree."""
        before = state
        unpacked = [self.layout.unpack(reply.message.tensors) for reply in replies]
        n_s = torch.tensor([reply.message.numbers["n"] for reply in replies])
        p_s = aggregate.client_weights(n_s)
        fields = self._stacked_fields(unpacked)
        state, layers = self._step_shared(state, [client.shared for client in unpacked], p_s)
        chances = self._chances(before, [reply.client for reply in replies])
        state, returned, per_expert = self._step_experts(state, unpacked, fields, n_s, chances)
        extras = state.extras
        if self.method.individuals is not None:
            extras = self.method.individuals(extras, [reply.client for reply in replies], fields)
        seen = self._aggregate(state, len(replies), p_s, fields)
        extras = self.method.server(extras, seen)
        detail = self._detail(layers, per_expert, returned, self.method.watch(extras, seen, state.round))
        state = replace(state, extras=extras)
        if self.method.restructure is not None:
            clients = [reply.client for reply in replies]
            state, events = self.method.restructure(before, state, clients, unpacked, fields, n_s)
            detail |= {"structure": events} if events else {}
        return state, Diagnosis(self._divergence(layers, per_expert, seen), detail)

    def _stacked_fields(self, clients: Sequence[Unpacked]) -> Params:
        """Each field of the replies with a first dimension for clients [S', ...]."""
        fields = {}
        for name in self.method.reply:
            values = [client.beside[name] for client in clients]
            fields[name] = torch.stack(values)
        return fields

    def _step_shared(
        self, state: State, clients: Sequence[Params], p_s: Tensor
    ) -> tuple[State, dict[str, float] | None]:
        """The new shared weights, and the divergence of each of their tensors."""
        if not self.layout.shared:
            return state, None
        moved = aggregate.deltas(state.shared, clients)
        layers = divergence.expert_divergence(moved, p_s)
        delta = aggregate.mean_delta(state.shared, moved, p_s)
        shared, opt = self._optimizer.update(state.shared, delta, state.opt, 1.0)
        return replace(state, shared=shared, opt=opt), layers

    def _chances(self, sent: State, clients: Sequence[int]) -> Tensor | None:
        """The chance with which each client was sent each expert [S', K]; None: it was not left to chance."""
        if self.method.chances is None:
            return None
        return torch.stack([self.method.chances(sent.extras, s) for s in clients]).to(torch.float64)

    def _expert_weights(self, q_s: Tensor, n_s: Tensor, returned: Tensor, chances: Tensor | None) -> Tensor:
        """What a client's update counts for each expert, p(s|z=k): [S', K].

        Where experts are left out by chance, those that came back stand for those that did not: their mean over what might
        have been left out is what it would be with all of them.
        """
        if chances is None:
            return aggregate.expert_weights(torch.where(returned, q_s, torch.zeros_like(q_s)), n_s)
        return aggregate.expert_weights(q_s, n_s) * returned / chances

    def _step_experts(
        self, state: State, clients: Sequence[Unpacked], fields: Params, n_s: Tensor, chances: Tensor | None
    ) -> tuple[State, Tensor, list[dict[str, float]]]:
        """The new experts, who returned which of them [S', K], and the divergence of each expert's tensors.

        An expert that nobody returned keeps its weights and its optimiser's state.
        """
        returned = self._returned(clients)
        if not self.layout.experts:
            return state, returned, []
        experts, opts, layers = [], [], []
        q_s = fields[self.method.weigh]
        p_sz = self._expert_weights(q_s, n_s, returned, chances)
        for k, (w, opt) in enumerate(zip(state.experts, state.experts_opt, strict=True)):
            moved = aggregate.deltas(w, [client.experts.get(k) for client in clients])
            layers.append(divergence.expert_divergence(moved, p_sz[:, k]))
            if bool(p_sz[:, k].sum() > 0):
                delta = aggregate.mean_delta(w, moved, p_sz[:, k])
                w, opt = self._optimizer.update(w, delta, opt, 1.0)
            experts.append(w)
            opts.append(opt)
        return replace(state, experts=tuple(experts), experts_opt=tuple(opts)), returned, layers

    def _returned(self, clients: Sequence[Unpacked]) -> Tensor:
        """Which client sent which expert back [S', K]."""
        numbers = range(self.layout.experts)
        return torch.tensor([[k in client.experts for k in numbers] for client in clients])

    def _aggregate(self, state: State, clients: int, p_s: Tensor, fields: Params) -> Aggregate:
        sent = self.method.sends(state.extras)
        means, moved, touched = {}, {}, {}
        for name, declared in self.method.reply.items():
            means[name] = _mean(p_s, fields[name])
            if declared.moved_from:
                base = sent[declared.moved_from]
                moved[name] = posterior.mean_move(base, fields[name], p_s)
                touched[name] = posterior.rows_held(base, fields[name])
        return Aggregate(clients, self._use(means), means, moved, touched)

    def _from_sums(self, state: State, replies: Sequence[Reply]) -> tuple[State, Diagnosis]:
        """The same from sums over the cohort: of N_s Delta_s, N_s q(z=k|s) Delta_{k,s}, N_s q(z=k|s), N_s (phi_s - phi)."""
        total = privacy.summed([reply.message.tensors for reply in replies])
        sums = self.layout.unpack(total)
        n: Any = sum(reply.message.numbers["n"] for reply in replies)
        if self.method.weigh:  # the same number: each client's weights of experts sum to one
            n = sums.beside[self.method.weigh].sum()
        if self.layout.shared:
            state = self._shared_from_sums(state, sums.shared, n)
        if self.layout.experts:
            state = self._experts_from_sums(state, sums.experts, sums.beside[self.method.weigh])
        seen = self._aggregate_of_sums(state, sums.beside, n, len(replies))
        extras = self.method.server(state.extras, seen)
        return replace(state, extras=extras), Diagnosis(None, self.method.watch(extras, seen, state.round))

    def _shared_from_sums(self, state: State, sums: Params, n: Any) -> State:
        delta = {name: value / n for name, value in sums.items()}
        shared, opt = self._optimizer.update(state.shared, delta, state.opt, 1.0)
        return replace(state, shared=shared, opt=opt)

    def _experts_from_sums(self, state: State, sums: Mapping[int, Params], weight: Tensor) -> State:
        """weight: sum_s N_s q(z=k|s) [K]. An expert of weight zero keeps its weights and its optimiser's state."""
        experts, opts = [], []
        for k, (w, opt) in enumerate(zip(state.experts, state.experts_opt, strict=True)):
            if weight[k] > 0:
                delta = {name: value / weight[k] for name, value in sums[k].items()}
                w, opt = self._optimizer.update(w, delta, opt, 1.0)
            experts.append(w)
            opts.append(opt)
        return replace(state, experts=tuple(experts), experts_opt=tuple(opts))

    def _aggregate_of_sums(self, state: State, sums: Params, n: Any, clients: int) -> Aggregate:
        sent = self.method.sends(state.extras)
        means, moved, touched = {}, {}, {}
        for name, declared in self.method.reply.items():
            if not declared.moved_from:
                means[name] = sums[name] / n
                continue
            moved[name] = -sums[name] / n
            means[name] = sent[declared.moved_from] - moved[name]
            touched[name] = (sums[name] != 0).any(dim=-1)
        return Aggregate(clients, self._use(means), means, moved, touched)

    def _use(self, means: Params) -> Tensor:
        """p(z) over the cohort [K]; nothing where there are no experts."""
        return means[self.method.weigh] if self.method.weigh else torch.zeros(0)

    # -- metrics -------------------------------------------------------------------------------------------------------

    def _divergence(
        self, shared: dict[str, float] | None, experts: Sequence[dict[str, float]], seen: Aggregate
    ) -> float | None:
        """The divergence of shared tensors, and that of experts, each weighted by how much it is used."""
        of_shared = None if shared is None else sum(shared.values())
        if not experts:
            return of_shared
        divergences = [sum(layers.values()) for layers in experts]
        of_experts: float = sum(p * value for p, value in zip(seen.use.tolist(), divergences, strict=True))
        return of_experts if of_shared is None else of_shared + of_experts

    def _detail(
        self,
        shared: dict[str, float] | None,
        experts: Sequence[dict[str, float]],
        returned: Tensor,
        more: Mapping[str, Any],
    ) -> dict[str, Any]:
        if experts:
            detail = {
                "divergence_experts": [sum(layers.values()) for layers in experts],
                "divergence_layers": [{**(shared or {}), **layers} for layers in experts],
                "experts_returned": returned.sum(dim=0).tolist(),
            }
        elif shared:
            detail = {"divergence_layers": [shared]}
        else:
            detail = {}
        return {**detail, **more}

    @property
    def _optimizer(self) -> Optimizer:
        return server_optimizer(self.setup.server)


def _mean(p_s: Tensor, rows: Tensor) -> Tensor:
    """sum_s p(s) value_s: [S'], [S', ...] -> [...]."""
    return (p_s @ rows.flatten(1).to(p_s.dtype)).view(rows.shape[1:])
