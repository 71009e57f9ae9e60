"""A client's whole predictor as one ordinary `nn.Module`: experts, gate and all. It can be saved, scripted on, exported."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedmix.core import gate, objective
from fedmix.core.model import Model


class Mixture(nn.Module):
    """log p(y|x,s) = log sum_z p(y|x,z) p(z|x,s): x [B, ...] -> [B, classes]. One expert needs no gate.

    labels: what the client adds to every expert's logits [classes] (training.label_counts).
    """

    def __init__(
        self,
        model: Model,
        experts: Sequence[Mapping[str, Tensor]],
        theta: Mapping[str, Tensor] | None,
        labels: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.experts = nn.ModuleList(model.module_with(w) for w in experts)
        self._output = model.output
        self._held = list(range(len(experts)))
        for name, value in (theta or {}).items():
            self.register_buffer(f"gate_{name}", value.detach().clone())
        self.register_buffer("labels", torch.zeros(model.classes) if labels is None else labels.detach().clone())
        self._caught: list[Tensor] = []
        for expert in self.experts:
            expert.get_submodule(self._output).register_forward_pre_hook(self._catch)

    def _catch(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._caught.append(args[0].flatten(1))

    def _experts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self._caught.clear()
        logits = torch.stack([expert(x) for expert in self.experts])
        features = torch.stack(self._caught)
        self._caught.clear()
        return logits, features

    def _log_gate(self, features: Tensor) -> Tensor:
        if len(self._held) == 1:
            return features.new_zeros(features.shape[1], 1)
        theta = {name: self.get_buffer(f"gate_{name}") for name in ("pi", "A", "b")}
        return gate.log_gate(theta, features, self._held)

    def forward(self, x: Tensor) -> Tensor:
        logits, features = self._experts(x)
        return objective.log_mixture(logits + self.get_buffer("labels"), self._log_gate(features))

    def expert_weights(self, x: Tensor) -> Tensor:
        """p(z|x,s): how much each expert counts for each input. [B, ...] -> [B, K]"""
        return self._log_gate(self._experts(x)[1]).exp()
