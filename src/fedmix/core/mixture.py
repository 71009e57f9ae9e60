"""A client's whole predictor as one ordinary `nn.Module`: experts, gate and all. It can be saved and exported."""

import torch
from torch import Tensor, nn

from fedmix.core.algorithm import Algorithm
from fedmix.core.method import LABELS
from fedmix.core.model import as_logits
from fedmix.core.types import Message, Private


class ClientModule(nn.Module):
    """log p(y|x,s) of one client, by whatever method: x [B, ...] -> [B, classes].

    The models that the method's prediction needs are ordinary modules, what it keeps beside them are buffers.
    """

    def __init__(self, algorithm: Algorithm, message: Message, private: Private) -> None:
        super().__init__()
        model, method = algorithm.setup.model, algorithm.method
        parts = algorithm.client.parts(message, private)
        self.experts = nn.ModuleList(model.module_with(w) for w in method.models(parts))
        self._combine, self._gates = method.combine, method.gates
        self._held = parts.held
        self._beside = {}
        known = algorithm.client.up_to_date(message, private)
        for i, (name, value) in enumerate(algorithm.client.beside(known).items()):
            buffer = f"own_{i}"
            self._beside[name] = buffer
            self.register_buffer(buffer, value.detach().clone())
        labels = private.get(LABELS, torch.zeros(model.classes))
        self.register_buffer("labels", labels.detach().clone())
        self._caught: list[Tensor] = []
        for expert in self.experts:
            expert.get_submodule(model.output).register_forward_pre_hook(self._catch)

    def _catch(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._caught.append(args[0].flatten(1))

    def _outputs(self, *inputs: Tensor, **by_name: Tensor) -> tuple[Tensor, Tensor]:
        self._caught.clear()
        logits = torch.stack([as_logits(expert(*inputs, **by_name)) for expert in self.experts])
        features = torch.stack(self._caught)
        self._caught.clear()
        return logits + self.get_buffer("labels"), features

    def _private(self) -> dict[str, Tensor]:
        """What the method keeps at the client beside weights."""
        return {name: self.get_buffer(buffer) for name, buffer in self._beside.items()}

    def forward(self, x: Tensor) -> Tensor:
        logits, features = self._outputs(x)
        return self._combine(logits, features, self._private(), self._held)

    def expert_weights(self, *inputs: Tensor, **by_name: Tensor) -> Tensor:
        """p(z|x,s): how much each expert that the client holds counts for each input. [B, ...] -> [B, K']"""
        _, features = self._outputs(*inputs, **by_name)
        if self._gates is None:
            return features.new_ones(features.shape[1], 1)
        return self._gates(features, self._private(), self._held)


class ClientModuleOfSeveralInputs(ClientModule):
    """The same for a model with several inputs, or with sequences: it is called as the user's own module is."""

    def forward(self, *inputs: Tensor, **by_name: Tensor) -> Tensor:
        logits, features = self._outputs(*inputs, **by_name)
        return self._combine(logits, features, self._private(), self._held)


def client_module(algorithm: Algorithm, message: Message, private: Private) -> ClientModule:
    """A client's whole predictor as a module."""
    kind = ClientModuleOfSeveralInputs if algorithm.setup.model.inputs else ClientModule
    return kind(algorithm, message, private)
