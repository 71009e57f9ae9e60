"""After training: `load(RUN)`, a client's predictions with its own gate, experts as state dicts, a client as a module.

A run directory is enough; the data is not needed.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmix import schema
from fedmix.core.mixture import ClientModule
from fedmix.core.tree import Params
from fedmix.data.federation import client_number, normalised
from fedmix.engines.client import from_shared, predict
from fedmix.errors import RunError
from fedmix.methods.page import Page
from fedmix.running.checkpoint import private_states
from fedmix.running.evaluate import for_anyone
from fedmix.running.reopen import reopen
from fedmix.schema import MetricsLine, Summary
from fedmix.settings.build import Given


class TrainedRun:
    """A run directory brought back to life, at its last checkpoint."""

    def __init__(self, path: Path, model: Given, page: Page | None = None) -> None:
        run = reopen(path, model, page)
        self.path = path
        self.recipe = run.recipe
        self.round = run.checkpoint.round
        self.clients: list[str] = run.federation["clients"]
        # What the user calls the classes, where the data says so.
        self.labels: list[str] = run.federation.get("labels", [])
        self._mean, self._std = run.federation["mean"], run.federation["std"]
        self._side = run.federation["side"]
        # None: the label counts never left the sites.
        self._label_counts: list[list[int]] | None = run.federation.get("label_counts")
        self._model, self._algorithm = run.model, run.algorithm
        self._state = run.checkpoint.state
        self._checkpoint = run.checkpoint

    @cached_property
    def _privates(self) -> dict[int, Params]:
        return private_states(self.path, self._checkpoint)

    @property
    def experts(self) -> tuple[Params, ...]:
        """The shared models, each as a state dict for the user's own module."""
        return tuple(map(self._model.plain, self._algorithm.experts(self._state)))

    @cached_property
    def summary(self) -> Summary:
        """summary.json; a run that has not ended has none."""
        summary = schema.read_summary(self.path)
        if summary is None:
            raise RunError(f"{self.path} has no summary: the run is at round {self.round} of {self.recipe.rounds}.")
        return summary

    @property
    def metrics(self) -> list[MetricsLine]:
        """metrics.jsonl: a dict for each round."""
        return schema.read_metrics(self.path)

    def _inputs(self, x: Any) -> Tensor:
        """Arrays as the model takes them: images of bytes are normalised as they were in training."""
        tensor = x if isinstance(x, Tensor) else torch.from_numpy(np.asarray(x))
        return normalised(tensor, self._mean, self._std) if self._mean else tensor.float()

    def log_prob(self, x: Any) -> Tensor:
        """log p(y|x) for somebody who is not one of the clients, from what is shared alone: [N, ...] -> [N, classes].

        That is FedAvg's model, or FedMix's experts pooled, with q(z|y) divided out, where its side information is the label.
        After training.label_counts it is p(y|x) for somebody with the labels of all clients together, or, where their counts
        never left the sites, with equally many of each label.
        """
        shared = from_shared(self._algorithm, self._algorithm.broadcast(self._state, None), self._side)
        if shared is None:
            raise RunError(
                f"{self.path} must be of a method whose shared parts predict by themselves (FedAvg, FedMix with q(z|y)). "
                "Here private parts decide. Take a client's own predictions, run.client(...).predict(x)."
            )
        if self._label_counts is not None:
            shared = for_anyone(self._algorithm, self._label_counts, shared)
        return shared(self._inputs(x)).float()

    def predict(self, x: Any) -> Tensor:
        """The most probable label of each input, for somebody who is not one of the clients: [N, ...] -> [N]."""
        return self.log_prob(x).argmax(dim=1)

    def client(self, client: int | str) -> "TrainedClient":
        """A client by number or by name."""
        return TrainedClient(self, client_number(self.clients, client))


class TrainedClient:
    """One client's predictor: the server's experts with its own private parts."""

    def __init__(self, run: TrainedRun, number: int) -> None:
        self._run = run
        self._message = run._algorithm.broadcast(run._state, number)
        self.took_part = number in run._privates
        self._private = run._privates[number] if self.took_part else self._new(number)

    def _new(self, number: int) -> Params:
        """What a client has before any training: what all clients start from, and its label counts where they are known."""
        algorithm, counts = self._run._algorithm, self._run._label_counts
        private = algorithm.new_client(self._run.recipe.seed, number)
        if not algorithm.counts_labels or counts is None:
            return private
        of_client = torch.tensor(counts[number])
        labels = torch.arange(len(of_client)).repeat_interleave(of_client)
        return algorithm.counted(private, labels)

    def log_prob(self, x: Any) -> Tensor:
        """log p(y|x,s): [N, ...] -> [N, classes]."""
        return predict(self._run._algorithm, self._message, self._private, self._run._inputs(x))

    def predict(self, x: Any) -> Tensor:
        """The most probable label of each input: [N, ...] -> [N]."""
        return self.log_prob(x).argmax(dim=1)

    def expert_weights(self, x: Any) -> Tensor:
        """p(z|x,s): how much each expert that the client holds counts for each input. [N, ...] -> [N, K']"""
        with torch.no_grad():
            return self.module().expert_weights(self._run._inputs(x))

    def module(self) -> ClientModule:
        """The client's whole predictor as one `nn.Module` that gives log p(y|x,s); `torch.export` takes it.

        It takes what the model takes: images of bytes must be normalised before.
        """
        return ClientModule(self._run._algorithm, self._message, self._private).eval()


def load(run: str | Path, model: Given = None, algorithm: Page | None = None) -> TrainedRun:
    """The models of a run directory. `model`, `algorithm`: needed again where they were handed over in Python."""
    return TrainedRun(Path(run), model, algorithm)
