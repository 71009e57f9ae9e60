"""Any `nn.Module` classifier as pure functions of its parameters: init, and apply -> (logits, features).

The features h_k(x) of the gate are the input of the output layer, which the user names; a forward hook catches them, so
the module needs no change.
"""

import ast
import copy
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from fedmix.core.tree import Params
from fedmix.errors import ModelError
from fedmix.rng import Stream, stream

Factory = Callable[[], nn.Module]
STACK_PARAMETERS = 250_000  # larger models fill the cores by themselves


class Model:
    """A classifier whose parameters live outside of it. `build` makes a module; each call draws fresh parameters."""

    def __init__(self, build: Factory, output: str, example: Tensor, classes: int, precision: str = "float32") -> None:
        """example: a few inputs [B, ...], to find the sizes and to refuse what cannot be trained, before anything runs.

        precision: of convolutions and products in training; parameters, what they give and predictions are float32.
        """
        self.build = build
        self._bfloat16 = precision == "bfloat16"
        self._example = example
        self._device = example.device
        self.output = output
        self.classes = classes
        with stream(0, "template").torch():  # buffers, if random, are the same in every process
            self.module = _fresh(build)
        self._layers: dict[str, nn.Module] = dict(self.module.named_modules())
        everything = list(self.module.named_parameters(remove_duplicate=False))
        self._tied = len(everything) > len(list(self.module.parameters()))
        self._names = {name for name, _ in self.module.named_parameters()}
        self._refuse_what_cannot_be_averaged()
        self.channels_last = False
        self.channels_last = self._works_with_channels_last(example)
        with torch.no_grad():
            logits, features = self.apply(self._params(self.module), example, training=False)
        if logits.dim() != 2 or logits.shape[1] != classes:
            raise ModelError(
                f"the model must give [batch, {classes}] logits, one for each class. Got {list(logits.shape)} instead; "
                f"set its number of outputs to {classes}."
            )
        self._refuse_buffers_that_change(example)
        self.frozen = {name for name, value in self.module.named_parameters() if not value.requires_grad}
        self.features = int(features.shape[1])
        self.parameters = sum(p.numel() for p in self.module.parameters())

    def init(self, rng: Stream) -> Params:
        """Parameters of a new model, drawn from this stream alone."""
        with rng.torch():
            return self._params(_fresh(self.build))

    def apply(self, params: Mapping[str, Tensor], x: Tensor, training: bool) -> tuple[Tensor, Tensor]:
        """x [B, ...] -> logits [B, classes] and features h(x) [B, H]."""
        if self.module.training != training:
            self.module.train(training)
        caught: list[Tensor] = []
        mixed = training and self._bfloat16
        with (
            _hook(self._layer(self.output), before=lambda _, args: caught.append(args[0])),
            torch.autocast(x.device.type, torch.bfloat16) if mixed else nullcontext(),
        ):
            logits = self._call(params, x)
        if len(caught) != 1:
            raise ModelError(
                f"the output layer {self.output!r} must be used once in a forward pass. It was used {len(caught)} times; "
                "name the layer whose output are the logits."
            )
        features = caught[0].flatten(1)
        return (logits.float(), features.float()) if mixed else (logits, features)

    def apply_all(
        self, experts: Sequence[Mapping[str, Tensor]], x: Tensor, training: bool, where: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same for several experts: logits [K, B, classes], features [K, B, H].

        where: the points that an expert is to learn from [B, K]; the others take no part in its backward pass.
        """
        if where is None or bool(where.all()):
            both = [self.apply(w, x, training) for w in experts]
        else:
            both = [self._apply_where(w, x, training, rows) for w, rows in zip(experts, where.T, strict=True)]
        return torch.stack([logits for logits, _ in both]), torch.stack([h for _, h in both])

    def _apply_where(
        self, params: Mapping[str, Tensor], x: Tensor, training: bool, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Two passes over one mini-batch: with a graph for some of its points, without for the rest."""
        with_graph, without = rows.nonzero().squeeze(1), (~rows).nonzero().squeeze(1)
        parts = []
        for index, graph in ((with_graph, torch.is_grad_enabled()), (without, False)):
            if len(index):
                with torch.set_grad_enabled(graph):
                    parts.append(self.apply(params, x[index], training))
        order = torch.argsort(torch.cat([with_graph, without]))
        return torch.cat([logits for logits, _ in parts])[order], torch.cat([h for _, h in parts])[order]

    @cached_property
    def ungroupable(self) -> str | None:
        """Why several sets of parameters are not applied at once: it would not pay, or would not give the same numbers."""
        if self.parameters > STACK_PARAMETERS:
            return f"a model of {self.parameters:,} parameters fills the cores by itself"
        if any(isinstance(m, _ConvNd) for m in self._layers.values()):
            return "convolutions with stacked weights are slower than one after the other"
        if self._bfloat16:
            return "in bfloat16 rounding would tell a client in a group from one alone"
        alone = self._params(self.module)
        stacked = {name: torch.stack([value, value + 0.1]) for name, value in alone.items()}
        try:
            with torch.no_grad():
                together, _ = self.apply_stacked({}, stacked, self._example)
                apart, _ = self.apply({name: value[1] for name, value in stacked.items()}, self._example, training=True)
        except (RuntimeError, ValueError, ModelError) as error:
            return f"the model cannot be vectorised, as with dropout ({str(error).splitlines()[0][:120]})"
        if not torch.allclose(together[1], apart, rtol=1e-4, atol=1e-5):
            return "vectorised, the model gives other numbers"
        return None

    def apply_stacked(
        self, alike: Mapping[str, Tensor], stacked: Mapping[str, Tensor], x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Training mode, M models at once on the same inputs: parameters [M, ...] and those that are the same for all.

        x [B, ...] -> logits [M, B, classes], features [M, B, H].
        """
        names = list(stacked)

        def of_one(*weights: Tensor) -> tuple[Tensor, Tensor]:
            return self.apply({**alike, **dict(zip(names, weights, strict=True))}, x, training=True)

        logits, features = torch.vmap(of_one)(*stacked.values())
        return logits, features

    def apply_group(
        self, alike: Mapping[str, Tensor], own: Mapping[str, Tensor], stacked: Mapping[str, Tensor], x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Training mode, G clients at once, each with inputs of its own: x [G, B, ...] -> logits [G, M, B, classes], features.

        Parameters that are the same for all clients, their own [G, ...], and those of M experts of each [G, M, ...].
        """
        if not stacked:
            logits, features = self._apply_each(alike, own, x)
            return logits.unsqueeze(1), features.unsqueeze(1)
        G, M = next(iter(stacked.values())).shape[:2]
        models = {name: value.flatten(0, 1) for name, value in stacked.items()}  # [G M, ...]
        models |= {name: value.repeat_interleave(M, dim=0) for name, value in own.items()}
        inputs = x.unsqueeze(1).expand(G, M, *x.shape[1:]).flatten(0, 1)
        logits, features = self._apply_each(alike, models, inputs)
        return logits.view(G, M, *logits.shape[1:]), features.view(G, M, *features.shape[1:])

    def _apply_each(
        self, alike: Mapping[str, Tensor], models: Mapping[str, Tensor], x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Models [M, ...], each on inputs of its own [M, B, ...]."""
        names = list(models)

        def of_one(inputs: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
            return self.apply({**alike, **dict(zip(names, weights, strict=True))}, inputs, training=True)

        logits, features = torch.vmap(of_one)(x, *models.values())
        return logits, features

    def where_of(self, layer: str) -> "Where":
        """What a layer gives."""
        return Where(layer, entering=False)

    def where_after(self, params: Mapping[str, Tensor], x: Tensor, layer: str) -> "Where":
        """What comes of a layer after its activation: what the next layer with parameters is given. A layer that holds others
        ends with an activation of its own, so what it gives is that already."""
        if any(True for _ in self._layer(layer).children()):
            return self.where_of(layer)
        order = self.layers_in_order(params, x)
        following = order[order.index(layer) + 1 :] if layer in order else []
        return Where(following[0], entering=True) if following else self.where_of(layer)

    def value_at(self, params: Mapping[str, Tensor], x: Tensor, place: "Where") -> Tensor:
        """What is at a place of the network for x; what comes after it is not computed."""

        def stop(_: nn.Module, given: Any, out: Any = None) -> None:
            raise _Reached(given[0] if place.entering else out)

        self.module.train(False)
        try:
            with _hook(self._layer(place.layer), **{"before" if place.entering else "after": stop}):
                self._call(params, x)
        except _Reached as reached:
            return reached.value
        raise ModelError(f"layer {place.layer!r} is not used in a forward pass.")

    def apply_from(self, params: Mapping[str, Tensor], x: Tensor, place: "Where", value: Tensor) -> Tensor:
        """Logits [B, classes] where there is `value` at a place of the network in place of what would be there."""
        self.module.train(False)
        put: dict[str, Any] = {"after": lambda *_: value}
        if place.entering:
            put = {"before": lambda _, given: (value, *given[1:])}
        with _hook(self._layer(place.layer), **put):
            return self._call(params, x)

    def layers_in_order(self, params: Mapping[str, Tensor], x: Tensor, among: Sequence[str] = ()) -> list[str]:
        """Layers in the order in which a forward pass leaves them: those named, or all that hold parameters of their own."""
        order: list[str] = []
        handles = []
        for name, module in self._layers.items():
            if name in among if among else next(module.parameters(recurse=False), None) is not None:
                handles.append(module.register_forward_hook(lambda *_, name=name: order.append(name)))
        try:
            self._call(params, x)
        finally:
            for handle in handles:
                handle.remove()
        return list(dict.fromkeys(order))

    def _works_with_channels_last(self, example: Tensor) -> bool:
        """Convolutions and pooling are faster on images with their channels last in memory; a module that depends on how
        its images lie there (it may call `view`) gets them as they are."""
        if example.dim() != 4 or not any(isinstance(layer, nn.Conv2d) for layer in self._layers.values()):
            return False
        params = self._params(self.module)
        self.module.train(False)
        try:
            with torch.no_grad():
                plain = self._call(params, example)
                other = self._call(params, _channels_last(example))
        except RuntimeError:
            return False
        return torch.allclose(plain, other, rtol=1e-3, atol=1e-4)

    def _call(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        if len(params) != len(self._names):  # torch would take the template's own, which are random
            raise ModelError(
                f"a model needs all of its parameters. Missing: {', '.join(sorted(self._names - params.keys()))}."
            )
        if x.device != self._device:  # buffers; parameters come from outside
            self.module.to(x.device)
            self._device = x.device
        if self.channels_last:
            x = _channels_last(x)
        logits: Tensor = functional_call(self.module, dict(params), (x,), tie_weights=self._tied)
        return logits

    def module_with(self, params: Mapping[str, Tensor]) -> nn.Module:
        """An ordinary module with these parameters, for use outside of a federation."""
        wanted = {name for name, _ in self.module.named_parameters()}
        if wanted != params.keys():
            wrong = sorted(wanted ^ params.keys())
            raise ModelError(
                f"a module needs exactly the model's parameters. Missing or unexpected: {', '.join(wrong[:5])}."
            )
        module = copy.deepcopy(self.module)
        module.load_state_dict({name: value.detach().clone() for name, value in params.items()}, strict=False)
        return module.eval()

    @property
    def template(self) -> Params:
        """Some parameters of the right names and shapes; nobody trains them."""
        return self._params(self.module)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self.module.named_parameters()}

    @property
    def buffers(self) -> Params:
        """What a module holds beside parameters; it does not change in training."""
        return {name: value.detach() for name, value in self.module.named_buffers()}

    @cached_property
    def structure(self) -> str:
        """The module in words: its layers with their settings, and what the user's own classes compute."""
        classes = {type(layer) for layer in self._layers.values()}
        own = sorted((c for c in classes if not c.__module__.startswith("torch.")), key=lambda c: c.__qualname__)
        return "\n".join([repr(self.module), *(f"{c.__qualname__}: {_computation(c)}" for c in own)])

    def _params(self, module: nn.Module) -> Params:
        return {name: value.detach().clone() for name, value in module.named_parameters()}

    def _layer(self, name: str) -> nn.Module:
        if not name or name not in self._layers:
            raise ModelError(
                f"the model has no layer {name!r}; its layers are {', '.join(n for n in self._layers if n)}. "
                "Name one of them (setting model.output for the output layer)."
            )
        return self._layers[name]

    def _refuse_what_cannot_be_averaged(self) -> None:
        for name, module in self.module.named_modules():
            if isinstance(module, _BatchNorm):
                raise ModelError(
                    f"layer {name!r} is {type(module).__name__}: its running statistics mix the clients' data and cannot "
                    "be averaged between clients that differ. Use nn.GroupNorm or nn.LayerNorm in its place."
                )
        if not any(True for _ in self.module.parameters()):
            raise ModelError("the model has no parameters to train.")
        self._layer(self.output)

    def _refuse_buffers_that_change(self, example: Tensor) -> None:
        """Running statistics and the like would depend on which clients a worker has seen."""
        before = {name: value.clone() for name, value in self.module.named_buffers()}
        with torch.no_grad(), stream(0, "template").torch():
            self.apply(self._params(self.module), example, training=True)
        for name, value in self.module.named_buffers():
            if not torch.equal(value, before[name]):
                raise ModelError(
                    f"buffer {name!r} changes in a forward pass: it is neither a parameter that is averaged nor constant. "
                    "Use a layer without running statistics (nn.GroupNorm, nn.LayerNorm)."
                )


class Where(NamedTuple):
    """A place of a network: what a layer gives, or what it is given."""

    layer: str
    entering: bool


class _Reached(Exception):
    def __init__(self, value: Tensor) -> None:
        self.value = value


def _computation(kind: type[nn.Module]) -> str:
    """A digest of a class's forward pass as it is written, without comments and names of files; "" if it cannot be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    except (OSError, TypeError, SyntaxError):
        return ""
    return hashlib.blake2b(ast.dump(tree).encode(), digest_size=8).hexdigest()


def _fresh(build: Factory) -> nn.Module:
    module = build()
    if not isinstance(module, nn.Module):
        raise ModelError(f"the model must be an nn.Module, or a function that gives one. Got {type(module).__name__}.")
    return module


def _channels_last(x: Tensor) -> Tensor:
    """Images [B, C, H, W] with their channels last in memory. With one channel both layouts are the same bytes, and torch takes
    such images for the slower one: strides tell it."""
    if x.shape[1] > 1:
        return x.contiguous(memory_format=torch.channels_last)
    return x.contiguous().as_strided(x.shape, (x.shape[2] * x.shape[3], 1, x.shape[3], 1))


@contextmanager
def _hook(layer: nn.Module, before: Any = None, after: Any = None) -> Any:
    handle = layer.register_forward_pre_hook(before) if before else layer.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()
