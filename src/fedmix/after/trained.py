"""After training: `load(RUN)`, predictions with a client's own gate, fine-tuning, new clients, results as a table.

A run directory is enough; the data is not needed.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from torch import Tensor

from fedmix import schema
from fedmix.after.predictions import predicted_from_file
from fedmix.after.rows import Encoding
from fedmix.core.mixture import client_module
from fedmix.core.score import confusion, score
from fedmix.core.tree import Params
from fedmix.core.types import Message
from fedmix.data.federation import client_number
from fedmix.engines.client import from_shared, in_chunks, one_thread, predict
from fedmix.errors import DataError, RunError, SettingError, one_of
from fedmix.methods.page import Page
from fedmix.rng import stream
from fedmix.running.checkpoint import private_states
from fedmix.running.evaluate import NOT_SHARED, for_anyone
from fedmix.running.reopen import reopen
from fedmix.schema import MetricsLine, Summary
from fedmix.settings.build import Given

if TYPE_CHECKING:
    from torch import nn

Array = npt.NDArray[Any]
LAST, BEST = "last", "best"
GATES = ("pooled", "averaged", "distilled")  # for somebody without labels


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """A logger says nothing but errors inside this block."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class Predictor:
    """Somebody's predictions: log-probabilities, probabilities, labels as they were given in training."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding

    def _log_prob(self, inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def log_prob(self, rows: Any) -> Tensor:
        """log p(y|x): [N, ...] -> [N, classes].

        rows: arrays; or, where the run was trained on a table, a DataFrame, a dict of columns, a list of dicts or a CSV file.
        """
        return self._log_prob(self._encoding.inputs(rows))

    def predict(self, rows: Any) -> Array:
        """The most probable label of each row, as labels were given in training: [N, ...] -> [N]."""
        return self._encoding.given_back(self.log_prob(rows).argmax(dim=1))

    def predict_proba(self, rows: Any) -> Array:
        """The probability of each label, in the order of `classes`: [N, ...] -> [N, classes]."""
        probabilities: Array = self.log_prob(rows).double().exp().numpy()
        return probabilities

    def score(self, rows: Any, labels: Any) -> dict[str, Any]:
        """How good the predictions are: accuracy, F1, AUC and the others of core.score, and the confusion matrix.

        confusion: how many rows of each label (in the order of `classes`) were predicted as each label.
        """
        log_p, y = self.log_prob(rows), self._encoding.labels(labels)
        if len(y) != len(log_p):
            raise DataError(f"labels must be as many as rows. Got {len(y)} for {len(log_p)}.")
        table = confusion(log_p.argmax(dim=1), y, len(self.classes))
        return {**score(log_p, y), "confusion": table.numpy()}

    def predict_file(self, file: Path, x: str = "x", y: str = "y") -> dict[str, Any]:
        """Labels and probabilities for the rows of a file, and the accuracy where it has labels, as plain numbers."""
        return predicted_from_file(self._encoding, self._log_prob, file, x, y)

    @property
    def classes(self) -> list[Any]:
        """The labels, in the order of `predict_proba`."""
        return self._encoding.classes


class TrainedRun(Predictor):
    """A run directory brought back to life, at its last checkpoint, or at another one that it has.

    Its own predictions are for somebody who is none of the clients: FedAvg's model, or FedMix's experts pooled, which needs
    side information that is the label. `run.client(NAME)` has those of a client.
    """

    def __init__(self, path: Path, model: Given, page: Page | None = None, round: int | str = LAST) -> None:
        run = reopen(path, model, page, round)
        super().__init__(Encoding(run.federation))
        self.path = path
        self.recipe = run.recipe
        self.round = run.checkpoint.round
        self.clients: list[str] = run.federation["clients"]
        # What the user calls the classes, where the data says so.
        self.labels: list[Any] = run.federation.get("labels", [])
        self._side = run.federation["side"]
        self._points: dict[str, list[int]] = run.federation["points"]
        # None: the label counts never left the sites.
        self._label_counts: list[list[int]] | None = run.federation.get("label_counts")
        self._model, self._algorithm = run.model, run.algorithm
        self._state = run.checkpoint.state
        self._checkpoint = run.checkpoint

    def __repr__(self) -> str:
        of = f"round {self.round} of {self.recipe.rounds}"
        return f"TrainedRun({str(self.path)!r}: {self.recipe.algorithm}, {of}, {len(self.clients)} clients)"

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

    def results(self) -> Any:
        """A pandas DataFrame with a row for each client: its points, its accuracies, the experts that it uses."""
        try:
            import pandas as pd
        except ImportError as error:
            raise RunError("a table of results needs pandas; install it with: pip install 'fedmix[pandas]'.") from error
        columns: dict[str, Any] = {f"{part}_points": counts for part, counts in self._points.items()}
        for data, kinds in self.summary["of_clients"].items():
            for kind, values in kinds.items():
                columns[f"{kind}_{data}"] = [values.get(name) for name in self.clients]
        for k, shares in enumerate(zip(*(self.summary.get("q_zs") or []), strict=True)):
            columns[f"expert_{k}"] = shares
        return pd.DataFrame(columns, index=pd.Index(self.clients, name="client"))

    def _log_prob(self, inputs: Tensor) -> Tensor:
        """log p(y|x) for somebody who is not one of the clients, from what is shared alone.

        After training.label_counts it is p(y|x) for somebody with the labels of all clients together, or, where their counts
        never left the sites, with equally many of each label.
        """
        message = self._algorithm.broadcast(self._state, None)
        shared = from_shared(self._algorithm, message, self._side)
        if shared is None:
            raise RunError(
                f"{self.path} must be of a method whose shared parts predict by themselves (FedAvg, FedMix with q(z|y)). "
                "Here private parts decide. Take a client's own predictions, run.client(...).predict(x)."
            )
        if self._label_counts is not None:
            shared = for_anyone(self._algorithm, self._label_counts, shared)
        return shared(inputs).float()

    def client(self, client: int | str) -> "TrainedClient":
        """A client by number or by name."""
        number = client_number(self.clients, client)
        took_part = number in self._privates
        private = self._privates[number] if took_part else self._new(number)
        return TrainedClient(self, number, self._algorithm.broadcast(self._state, number), private, took_part)

    def _new(self, number: int) -> Params:
        """What a client has before any training: what all clients start from, and its label counts where they are known."""
        private = self._algorithm.new_client(self.recipe.seed, number)
        if not self._algorithm.counts_labels or self._label_counts is None:
            return private
        of_client = torch.tensor(self._label_counts[number])
        labels = torch.arange(len(of_client)).repeat_interleave(of_client)
        return self._algorithm.counted(private, labels)

    # -- somebody who never took part ----------------------------------------------------------------------------------

    def new_client(self, data: Any = None, *, inputs: Any = None, gate: str = "", label: str = "") -> Predictor:
        """Take in somebody who never took part.

        data: labelled points, in any form that Federation.from_clients takes. The private parts (FedMix's gate) are trained on
        them, and what is shared stays; `fine_tune` on the result trains everything. label: which column of a table is the
        label.
        inputs: points without labels, where there are none; then one way to gate serves everybody: "pooled" (from what is
        shared alone; side information must be the label), "averaged" over the clients' gates, or "distilled" from them on these
        inputs. The last two use the clients' private states, which evaluation.share_private must allow. gate: which of them;
        "": the first that can be used.
        """
        if data is not None:
            return self._with_labels(data, label)
        if inputs is None and gate not in ("pooled", "averaged"):
            raise SettingError("new_client needs labelled data, or inputs=... without labels.")
        return self._without_labels(inputs, gate)

    def _with_labels(self, data: Any, label: str) -> "TrainedClient":
        algorithm, recipe = self._algorithm, self.recipe
        examples = self._encoding.examples(data, None, label)
        message = algorithm.newcomer(self._state, self._side != "client")
        steps = math.ceil(len(examples) / recipe.training.batch_size)
        epochs = math.ceil(recipe.evaluation.adapt_steps / steps)
        rng = stream(recipe.seed, "new client").child("adapt")
        with one_thread():
            adapted, private = algorithm.adapt(message, algorithm.new_client(recipe.seed), examples, rng, epochs)
        return TrainedClient(self, None, adapted, private, False, examples)

    def _without_labels(self, inputs: Any, gate: str) -> Predictor:
        if gate not in ("", *GATES):
            raise SettingError(one_of("gate", gate, GATES))
        pooled = from_shared(self._algorithm, self._algorithm.broadcast(self._state, None), self._side) is not None
        if gate == "pooled" or (not gate and pooled):
            return self
        if self._algorithm.uses_private and not self.recipe.evaluation.share_private:
            raise RunError(f"a client without labels cannot be taken in from {self.path}: {NOT_SHARED}.")
        if not self._algorithm.predicts_anonymously:
            raise RunError(f"{self.recipe.algorithm} has no predictions without client identity; give labelled data.")
        distilled = gate == "distilled" or (not gate and self._algorithm.distils and inputs is not None)
        return self._distilled(inputs) if distilled else self._averaged()

    def _crowd(self) -> tuple[list[Params], Tensor]:
        """What clients that took part hand over, and log p(s) of each."""
        numbers = sorted(self._privates)
        sizes = torch.tensor([float(self._points["train"][s]) for s in numbers], dtype=torch.float64)
        return [self._algorithm.hand_over(self._privates[s]) for s in numbers], torch.log(sizes / sizes.sum())

    def _averaged(self) -> "Anybody":
        message = self._algorithm.broadcast(self._state, None)
        privates, log_p_s = self._crowd()
        return Anybody(
            self._encoding, lambda x: self._algorithm.predict_anonymous(message, privates, log_p_s, x), self._for_anyone
        )

    def _distilled(self, inputs: Any) -> "Anybody":
        if not self._algorithm.distils:
            raise RunError(f"{self.recipe.algorithm} has no gate to distil; gate='averaged' may do.")
        if inputs is None:
            raise SettingError("a gate is distilled on inputs: give inputs=... of the new client.")
        message = self._algorithm.broadcast(self._state, None)
        with one_thread():
            private = self._algorithm.distil(message, *self._crowd(), self._encoding.inputs(inputs))
        return Anybody(self._encoding, lambda x: self._algorithm.predict(message, private, x), self._for_anyone)

    def _for_anyone(self, log_prob: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        if self._label_counts is None:
            return log_prob
        return for_anyone(self._algorithm, self._label_counts, log_prob)


class Anybody(Predictor):
    """Predictions for somebody without labels: one way to gate for everybody."""

    def __init__(
        self,
        encoding: Encoding,
        log_prob: Callable[[Tensor], Tensor],
        for_anyone: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]],
    ) -> None:
        super().__init__(encoding)
        self._of_inputs = for_anyone(log_prob)

    def _log_prob(self, inputs: Tensor) -> Tensor:
        return in_chunks(self._of_inputs, inputs).float()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.classes)} classes)"


class TrainedClient(Predictor):
    """One client's predictor: the server's experts with its own private parts, or both fine-tuned."""

    def __init__(
        self,
        run: TrainedRun,
        number: int | None,
        message: Message,
        private: Params,
        took_part: bool,
        examples: Any = None,
    ) -> None:
        super().__init__(run._encoding)
        self._run, self._number = run, number
        self._message, self._private = message, private
        self._examples = examples
        self.took_part = took_part

    @property
    def name(self) -> str:
        return "new client" if self._number is None else self._run.clients[self._number]

    def __repr__(self) -> str:
        return f"TrainedClient({self.name!r} of {str(self._run.path)!r})"

    def _log_prob(self, inputs: Tensor) -> Tensor:
        return predict(self._run._algorithm, self._message, self._private, inputs)

    def fine_tune(self, data: Any = None, *, epochs: int | None = None, label: str = "") -> "TrainedClient":
        """The client after everything was trained on its own points: the model of 'fine-tuned accuracy'.

        data: its labelled points, in any form that Federation.from_clients takes, or the Federation of the run, whose training
        points it takes. A new client's own points are known. epochs: evaluation.finetune_epochs of the recipe, unless said.
        """
        run = self._run
        if data is None and self._examples is None:
            raise DataError("fine_tune needs the client's labelled points: fine_tune((x, y)), or the run's Federation.")
        if epochs is not None and (not isinstance(epochs, int) or epochs < 1):
            raise SettingError(f"epochs must be a whole number of 1 or more. Got {epochs!r}.")
        examples = self._examples if data is None else run._encoding.examples(data, self._number, label)
        rng = stream(run.recipe.seed, "round", run.round, "client", self._number or 0).child("finetune")
        passes = epochs or run.recipe.evaluation.finetune_epochs
        with one_thread():
            message, private = run._algorithm.client_update(self._message, self._private, examples, rng, passes)
        return TrainedClient(run, self._number, message, private, self.took_part, examples)

    def expert_weights(self, rows: Any) -> Tensor:
        """p(z|x,s): how much each expert that the client holds counts for each input. [N, ...] -> [N, K']"""
        args, by_name = self._run._model.arguments(self._encoding.inputs(rows))
        with torch.no_grad():
            weights: Tensor = self.module().expert_weights(*args, **by_name)
        return weights

    def module(self) -> Any:
        """The client's whole predictor as one `nn.Module` that gives log p(y|x,s); `torch.export` takes it.

        It takes what the model takes: images of bytes must be normalised before, tables encoded.
        """
        return client_module(self._run._algorithm, self._message, self._private).eval()

    def to_onnx(self, path: str | Path) -> Path:
        """Write the client's whole predictor as an ONNX file with a batch of any size. Needs `fedmix[onnx]`."""
        try:
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise RunError("ONNX needs onnxscript; install it with: pip install 'fedmix[onnx]'.") from error
        if not Path(path).resolve().parent.is_dir():
            raise RunError(f"{Path(path).parent} must be a folder to write {Path(path).name} into. It is not there.")
        module: nn.Module = self.module()
        args, by_name = self._run._model.arguments(self._an_input())
        batch = torch.export.Dim("batch", min=2)
        shapes = {name: {0: batch} for name in by_name}
        dynamic: Any = shapes if by_name else tuple({0: batch} for _ in args)
        with warnings.catch_warnings(), quiet("torch.onnx"):
            warnings.simplefilter("ignore")  # torch warns about itself
            torch.onnx.export(
                module, args, str(path), kwargs=by_name or None, dynamic_shapes=dynamic, dynamo=True, verbose=False
            )
        return Path(path)

    def _an_input(self) -> Tensor:
        """Two inputs of the right form, for a trace: no numbers of anybody's."""
        about = self._encoding._about
        parts = self._run._model.inputs
        if parts:
            return torch.ones(2, *about["input"], dtype=torch.float64)
        kind = torch.int64 if about.get("input_kind") == "integer" else torch.float32
        return torch.zeros(2, *about["input"], dtype=kind)


def load(run: str | Path, model: Given = None, algorithm: Page | None = None, round: int | str = LAST) -> TrainedRun:
    """The models of a run directory. `model`, `algorithm`: needed again where they were handed over in Python.

    round: "last"; "best", the evaluation with the highest accuracy on validation data; or the number of a checkpoint.
    """
    return TrainedRun(Path(run), model, algorithm, round)
