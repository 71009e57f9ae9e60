"""Any `nn.Module` classifier as pure functions of its parameters: init, and apply -> (logits, features).

The features h_k(x) of the gate are the input of the output layer, which the user names; a forward hook catches them, so
the module needs no change.
"""

import ast
import copy
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from fedmix.core.factors import Factors
from fedmix.core.inputs import Input, arguments
from fedmix.core.tree import Params
from fedmix.errors import ModelError
from fedmix.rng import Stream, stream

Factory = Callable[[], nn.Module]
STATISTICS = ("running_mean", "running_var")  # of batch normalisation
STACK_PARAMETERS = 250_000  # larger models fill the cores by themselves


class Model:
    """A classifier whose parameters live outside of it. `build` makes a module; each call draws fresh parameters."""

    def __init__(
        self,
        build: Factory,
        output: str,
        example: Tensor,
        classes: int,
        precision: str = "float32",
        inputs: Sequence[Input] = (),
        known: Mapping[str, Any] | None = None,
        private_norms: bool = False,
    ) -> None:
        """example: a few inputs [B, ...], to find the sizes and to refuse what cannot be trained, before anything runs.

        precision: that of convolutions and products in training; parameters, outputs and predictions are float32.
        inputs: what a row of the example holds, where that is several inputs or a sequence. known: what was found out about
        this model in training (`found_out`), so that nothing is tried: an example of zeros may not be an input at all.
        private_norms: batch normalisation is allowed, and stays with its client, statistics and all.
        """
        self._private_norms = private_norms
        if private_norms:
            build = partial(with_statistics_as_parameters, build)
        self.inputs = tuple(inputs)
        self.as_floats = False  # whole numbers are given to the module as they are, unless it cannot take them
        self.build = build
        self._bfloat16 = precision == "bfloat16"
        self._example = example
        self._device = example.device
        self.output = output
        self.classes = classes
        self.factors: Factors | None = None
        self._stackable: dict[frozenset[str], bool] = {}
        with stream(0, "template").torch():  # buffers, if random, are the same in every process
            self.module = _fresh(build)
        self._layers: dict[str, nn.Module] = dict(self.module.named_modules())
        everything = list(self.module.named_parameters(remove_duplicate=False))
        self._tied = len(everything) > len(list(self.module.parameters()))
        self._names = {name for name, _ in self.module.named_parameters()}
        self._refuse_what_cannot_be_averaged()
        self.channels_last = False  # while it is found out whether the module works with them
        self._known = known
        if known:
            self.as_floats, self.channels_last = known["as_floats"], known["channels_last"]
            self.features = int(known["features"])
        else:
            self.as_floats = self._takes_floats_alone(example)
            self.channels_last = self._works_with_channels_last(example)
            self.features = self._count_features(example)
            self._refuse_buffers_that_change(example)
        norms = [name for name, layer in self._layers.items() if isinstance(layer, _BatchNorm)]
        # What stays with a client because it belongs to its batch normalisation; `statistics` change in a forward pass.
        self.norms = {name for name in self._names if name.rpartition(".")[0] in norms}
        self.statistics = {name for name in self.norms if name.rpartition(".")[2] in STATISTICS}
        unmoved = {name for name, value in self.module.named_parameters() if not value.requires_grad}
        self.frozen = unmoved - self.statistics
        self.parameters = sum(p.numel() for p in self.module.parameters())

    @property
    def found_out(self) -> dict[str, Any]:
        """What was tried with real inputs, for a run directory: it is then loaded without any."""
        stacks = [sorted(names) for names, can in self._stackable.items() if can]
        return {
            "features": self.features,
            "channels_last": self.channels_last,
            "as_floats": self.as_floats,
            "stacks": stacks,
        }

    def _takes_floats_alone(self, example: Tensor) -> bool:
        """Whether whole numbers must be made floats for this module: nn.Linear takes floats, nn.Embedding whole numbers."""
        if example.is_floating_point() or self.inputs:
            return False
        self.module.train(False)
        try:
            with torch.no_grad():
                self._call(self._params(self.module), example)
        except (RuntimeError, IndexError, TypeError):
            return True
        return False

    def with_factors(self, factors: Factors) -> "Model":
        """The same model, whose experts differ in some layers by factors of their weights."""
        for name in factors.layers:
            self._layer(name)
        factors.check(self._layers)
        model = copy.copy(self)
        for found_out in ("ungroupable", "structure"):
            model.__dict__.pop(found_out, None)
        model.factors = factors
        model._stackable = {}
        model._names = {*self._names, *factors.names}
        if not self._known:
            model._refuse_factors_without_effect()
        return model

    def _refuse_factors_without_effect(self) -> None:
        """Refuse layers whose weight is used elsewhere than in their own forward pass: factors would not be seen there."""
        params = self.init(stream(0, "factors"))
        try:
            with torch.no_grad():
                hooked, _ = self.apply(params, self._example, training=False)
                composed = self.module_with(params)(self._example)
        except (IndexError, RuntimeError) as error:
            raise ModelError(f"factors cannot be used with this model: {str(error).splitlines()[0][:120]}.") from error
        if not torch.allclose(hooked, composed, rtol=1e-3, atol=1e-4):
            layers = ", ".join(self.factors.layers) if self.factors else ""
            raise ModelError(
                f"factors of {layers} would not be seen: the model uses a weight of these layers elsewhere than in their own "
                "forward pass (tied weights, attention's output projection). Name other layers."
            )

    def _count_features(self, example: Tensor) -> int:
        """H, the width of the output layer's input, from a forward pass; logits of another shape are refused."""
        try:
            with torch.no_grad():
                logits, features = self.apply(self._params(self.module), example, training=False)
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise ModelError(
                f"the model must take the data's inputs, {self._in_words(example)}. It cannot: "
                f"{(str(error).splitlines() or [type(error).__name__])[0]}."
            ) from error
        if logits.dim() != 2 or logits.shape[1] != self.classes:
            raise ModelError(
                f"the model must give [batch, {self.classes}] logits, one for each class. Got {list(logits.shape)} instead; "
                f"set its number of outputs to {self.classes}."
            )
        return int(features.shape[1])

    def _in_words(self, example: Tensor) -> str:
        """The inputs of a mini-batch in words."""
        if self.inputs:
            return ", ".join(f"{part.name or 'x'} [batch, {str(list(part.shape))[1:-1]}]" for part in self.inputs)
        kind = "float32" if example.is_floating_point() or self.as_floats else "whole numbers"
        return f"[batch, {', '.join(map(str, example.shape[1:]))}] of {kind}"

    def init(self, rng: Stream) -> Params:
        """Parameters of a new model, drawn from this stream alone."""
        with rng.torch():
            params = self._params(_fresh(self.build))
        return params | self._drawn_factors(params, rng)

    def _drawn_factors(self, params: Params, rng: Stream) -> Params:
        return self.factors.draw(params, rng.child("factors")) if self.factors else {}

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
        """`apply` for several experts: logits [K, B, classes], features [K, B, H].

        where: the points that an expert is to learn from [B, K]; the others take no part in its backward pass.
        """
        if where is None or bool(where.all()):
            outputs = [self.apply(w, x, training) for w in experts]
        else:
            outputs = [self._apply_where(w, x, training, rows) for w, rows in zip(experts, where.T, strict=True)]
        logits, features = zip(*outputs, strict=True)
        return torch.stack(logits), torch.stack(features)

    def _apply_where(
        self, params: Mapping[str, Tensor], x: Tensor, training: bool, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Two passes over one mini-batch: one with a graph for some of its points, one without for the rest."""
        with_graph, without = rows.nonzero().squeeze(1), (~rows).nonzero().squeeze(1)
        parts = []
        for index, graph in ((with_graph, torch.is_grad_enabled()), (without, False)):
            if len(index):
                with torch.set_grad_enabled(graph):
                    parts.append(self.apply(params, x[index], training))
        order = torch.argsort(torch.cat([with_graph, without]))
        logits, features = zip(*parts, strict=True)
        return torch.cat(logits)[order], torch.cat(features)[order]

    @cached_property
    def ungroupable(self) -> str | None:
        """Why several models are not applied at once, or None: it would not pay, or would give other numbers."""
        if self.norms:
            return "batch normalisation keeps statistics, which change in a forward pass"
        if self.parameters > STACK_PARAMETERS:
            return f"a model of {self.parameters:,} parameters fills the cores by itself"
        if any(isinstance(layer, _ConvNd) for layer in self._layers.values()):
            return "convolutions with stacked weights are slower than one after the other"
        if self._bfloat16:
            return "in bfloat16 rounding would tell a client in a group from one alone"
        return self._differs_vectorised()

    def _differs_vectorised(self) -> str | None:
        """Two sets of parameters are applied at once, and the second one alone."""
        try:
            same = self._vectorised_is_alone(self._names, training=True)
        except (RuntimeError, ValueError, ModelError) as error:
            return f"the model cannot be vectorised, as with dropout ({str(error).splitlines()[0][:120]})"
        return None if same else "vectorised, the model gives other numbers"

    def _vectorised_is_alone(self, experts: Collection[str], training: bool) -> bool:
        """Whether two models that differ in these parameters give at once what the second one gives alone."""
        template = self.template
        alike = {name: value for name, value in template.items() if name not in experts}
        stacked = {name: torch.stack([value, value + 0.1]) for name, value in template.items() if name in experts}
        second = {name: value[1] for name, value in stacked.items()}
        randomness = "error" if training else "same"
        with torch.no_grad():
            together, _ = self.apply_stacked(alike, stacked, self._example, training, randomness)
            alone, _ = self.apply({**alike, **second}, self._example, training)
        return torch.allclose(together[1], alone, rtol=1e-4, atol=1e-5)

    def stacks(self, experts: Collection[str]) -> bool:
        """Whether experts that differ in these parameters alone are applied at once, what they share being computed once.

        Where whole convolutions are experts' own, one model after the other is quicker.
        """
        key = frozenset(experts)
        if key not in self._stackable:
            self._stackable[key] = self._can_be_stacked(key)
        return self._stackable[key]

    def _can_be_stacked(self, experts: frozenset[str]) -> bool:
        if self.norms:
            return False
        if self._known:
            return sorted(experts) in self._known["stacks"]
        share_nothing = experts >= self._names
        if share_nothing or any(isinstance(self._owner(name), _ConvNd) for name in experts & self._plain):
            return False
        try:
            return self._vectorised_is_alone(experts, training=False)
        except (RuntimeError, ValueError, ModelError):
            return False

    @property
    def _plain(self) -> set[str]:
        """The names of the module's own parameters."""
        return self._names - set(self.factors.names) if self.factors else self._names

    def _owner(self, name: str) -> nn.Module:
        """The layer that a parameter belongs to."""
        return self._layers[name.rpartition(".")[0]]

    def apply_stacked(
        self,
        alike: Mapping[str, Tensor],
        stacked: Mapping[str, Tensor],
        x: Tensor,
        training: bool = True,
        randomness: str = "same",
    ) -> tuple[Tensor, Tensor]:
        """M models at once on the same inputs: x [B, ...] -> logits [M, B, classes], features [M, B, H].

        alike: parameters that are the same for all models. stacked: the others [M, ...]. What depends on the former alone is
        computed once, forward and backward. All models drop the same values out.
        """
        names = list(stacked)

        def of_model(*weights: Tensor) -> tuple[Tensor, Tensor]:
            return self.apply({**alike, **dict(zip(names, weights, strict=True))}, x, training)

        logits, features = torch.vmap(of_model, randomness=randomness)(*stacked.values())
        return logits, features

    def apply_group(
        self, alike: Mapping[str, Tensor], per_client: Params, stacked: Params, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """G clients at once, each on its own inputs, in training mode.

        x [G, B, ...] -> logits [G, M, B, classes], features [G, M, B, H].
        alike: parameters that are the same for all clients. per_client: one for each client [G, ...].
        stacked: those of M experts of each client [G, M, ...]; none: M is 1.
        """
        if not stacked:
            logits, features = self._apply_each(alike, per_client, x)
            return logits.unsqueeze(1), features.unsqueeze(1)
        if per_client:
            return self._apply_group_sharing(alike, per_client, stacked, x)
        G, M = next(iter(stacked.values())).shape[:2]
        models = {name: value.flatten(0, 1) for name, value in stacked.items()}  # [G M, ...]
        inputs = x.unsqueeze(1).expand(G, M, *x.shape[1:]).flatten(0, 1)
        logits, features = self._apply_each(alike, models, inputs)
        return logits.view(G, M, *logits.shape[1:]), features.view(G, M, *features.shape[1:])

    def _apply_group_sharing(
        self, alike: Mapping[str, Tensor], per_client: Params, stacked: Params, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`apply_group` where a client's experts share tensors: what depends on these alone is computed once a client."""
        shared, of_experts = list(per_client), list(stacked)

        def of_client(inputs: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
            for_all = dict(zip(shared, weights[: len(shared)], strict=True))
            experts = dict(zip(of_experts, weights[len(shared) :], strict=True))
            return self.apply_stacked({**alike, **for_all}, experts, inputs, randomness="error")

        logits, features = torch.vmap(of_client)(x, *per_client.values(), *stacked.values())
        return logits, features

    def _apply_each(
        self, alike: Mapping[str, Tensor], models: Mapping[str, Tensor], x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """M models [M, ...] at once, each on its own inputs [M, B, ...]."""
        names = list(models)

        def of_model(inputs: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
            return self.apply({**alike, **dict(zip(names, weights, strict=True))}, inputs, training=True)

        logits, features = torch.vmap(of_model)(x, *models.values())
        return logits, features

    def where_of(self, layer: str) -> "Where":
        """The place where a layer's output is."""
        return Where(layer, entering=False)

    def where_after(self, params: Mapping[str, Tensor], x: Tensor, layer: str) -> "Where":
        """The place after a layer's activation: the input of the next layer with parameters.

        A layer that holds others ends with an activation of its own, so the place is its output.
        """
        if any(True for _ in self._layer(layer).children()):
            return self.where_of(layer)
        order = self.layers_in_order(params, x)
        following = order[order.index(layer) + 1 :] if layer in order else []
        if not following:
            return self.where_of(layer)
        return Where(following[0], entering=True)

    def value_at(self, params: Mapping[str, Tensor], x: Tensor, place: "Where") -> Tensor:
        """The value at a place of the network for x; what comes after that place is not computed."""

        def stop(_: nn.Module, given: Any, out: Any = None) -> None:
            raise _Reached(given[0] if place.entering else out)

        when = "before" if place.entering else "after"
        self.module.train(False)
        try:
            with _hook(self._layer(place.layer), **{when: stop}):
                self._call(params, x)
        except _Reached as reached:
            return reached.value
        raise ModelError(f"layer {place.layer!r} is not used in a forward pass.")

    def apply_from(self, params: Mapping[str, Tensor], x: Tensor, place: "Where", value: Tensor) -> Tensor:
        """Logits [B, classes] with `value` at a place of the network, instead of what would be there."""
        self.module.train(False)
        if place.entering:
            hook = _hook(self._layer(place.layer), before=lambda _, given: (value, *given[1:]))
        else:
            hook = _hook(self._layer(place.layer), after=lambda *_: value)
        with hook:
            return self._call(params, x)

    def layers_in_order(self, params: Mapping[str, Tensor], x: Tensor, among: Sequence[str] = ()) -> list[str]:
        """Layers in the order in which a forward pass leaves them: those of `among`, or all that hold parameters themselves."""
        order: list[str] = []
        handles = []
        watched = among or self._layers_with_parameters()
        for name, layer in self._layers.items():
            if name in watched:
                handles.append(layer.register_forward_hook(lambda *_, name=name: order.append(name)))
        try:
            self._call(params, x)
        finally:
            for handle in handles:
                handle.remove()
        return list(dict.fromkeys(order))

    def _layers_with_parameters(self) -> list[str]:
        """Layers that hold parameters themselves, not only inside of other layers."""
        return [name for name, layer in self._layers.items() if any(True for _ in layer.parameters(recurse=False))]

    def _works_with_channels_last(self, example: Tensor) -> bool:
        """Whether the module gives the same for images with their channels last in memory, which convolve faster.

        A module that depends on how its images lie in memory (it may call `view`) gets them as they are.
        """
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
        # torch would take missing ones from the template, where they are random
        if len(params) != len(self._names):
            raise ModelError(
                f"a model needs all of its parameters. Missing: {', '.join(sorted(self._names - params.keys()))}."
            )
        # buffers move here; parameters come from outside
        if x.device != self._device:
            self.module.to(x.device)
            self._device = x.device
        if self.channels_last:
            x = _channels_last(x)
        args, by_name = self.arguments(x)
        plain = {name: value for name, value in params.items() if name in self._plain} if self.factors else dict(params)
        with self.factors.applied(self._layers, params) if self.factors else nullcontext():
            logits = functional_call(self.module, plain, args, by_name, tie_weights=self._tied)
        return as_logits(logits)

    def arguments(self, x: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """What the module is called with for rows of inputs, by position and by name."""
        if self.inputs:
            return arguments(self.module, x, self.inputs)
        return (x.float() if self.as_floats else x,), {}

    def module_with(self, params: Mapping[str, Tensor]) -> nn.Module:
        """An ordinary module with these parameters, for use outside of a federation."""
        if self._names != params.keys():
            wrong = sorted(self._names ^ params.keys())
            raise ModelError(
                f"a module needs exactly the model's parameters. Missing or unexpected: {', '.join(wrong[:5])}."
            )
        module = copy.deepcopy(self.module)
        plain = self.plain(params)
        module.load_state_dict({name: value.detach().clone() for name, value in plain.items()}, strict=False)
        return module.eval()

    def plain(self, params: Mapping[str, Tensor]) -> Params:
        """These parameters as an ordinary module has them: factors are multiplied into the weights that they belong to."""
        return self.factors.composed(params) if self.factors else dict(params)

    @property
    def template(self) -> Params:
        """Some parameters of the right names and shapes; nobody trains them."""
        params = self._params(self.module)
        return params | self._drawn_factors(params, stream(0, "template"))

    @property
    def names(self) -> list[str]:
        """All parameters, those of the module and the factors that experts have beside them."""
        factors = self.factors.names if self.factors else []
        return [*(name for name, _ in self.module.named_parameters()), *factors]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self.template.items()}

    @property
    def buffers(self) -> Params:
        """What the module holds beside parameters; it does not change in training."""
        return {name: value.detach() for name, value in self.module.named_buffers()}

    @cached_property
    def structure(self) -> str:
        """The module in words: its layers with their settings, and what the user's own classes compute."""
        classes = {type(layer) for layer in self._layers.values()}
        of_user = [kind for kind in classes if not kind.__module__.startswith("torch.")]
        of_user.sort(key=lambda kind: kind.__qualname__)
        computations = [f"{kind.__qualname__}: {_computation(kind)}" for kind in of_user]
        return "\n".join([repr(self.module), *computations])

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
            if isinstance(module, _BatchNorm) and not self._private_norms:
                raise ModelError(
                    f"layer {name!r} is {type(module).__name__}: its running statistics mix the clients' data and cannot "
                    "be averaged between clients that differ. Keep it with each client (model.batchnorm = 'private', FedBN), "
                    "or use nn.GroupNorm or nn.LayerNorm in its place."
                )
        if not any(True for _ in self.module.parameters()):
            raise ModelError("the model has no parameters to train.")
        self._layer(self.output)

    def _refuse_buffers_that_change(self, example: Tensor) -> None:
        """Refuse running statistics and the like: they would depend on which clients a worker has seen."""
        before = {name: value.clone() for name, value in self.module.named_buffers()}
        with torch.no_grad(), stream(0, "template").torch():
            self.apply(self._params(self.module), example, training=True)
        for name, value in self.module.named_buffers():
            if not torch.equal(value, before[name]):
                raise ModelError(
                    f"buffer {name!r} changes in a forward pass: it is neither a parameter that is averaged nor constant. "
                    "Use a layer without running statistics (nn.GroupNorm, nn.LayerNorm)."
                )


def as_logits(outcome: Any) -> Tensor:
    """The logits in what a module gives: a tensor, or the `logits` of an output in the style of Hugging Face."""
    if isinstance(outcome, Tensor):
        return outcome
    logits = outcome.get("logits") if isinstance(outcome, Mapping) else getattr(outcome, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise ModelError(
        f"the model must give a tensor of logits [batch, classes], or an output with `logits`. Got {type(outcome).__name__}."
    )


class Where(NamedTuple):
    """A place of a network: the output of a layer, or (entering) its input."""

    layer: str
    entering: bool


class _Reached(Exception):
    """Ends a forward pass at the place whose value is wanted."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def _computation(kind: type[nn.Module]) -> str:
    """A digest of the source of a class's forward pass, without comments and names of files; "" if it cannot be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    except (OSError, TypeError, SyntaxError):
        return ""
    return hashlib.blake2b(ast.dump(tree).encode(), digest_size=8).hexdigest()


def with_statistics_as_parameters(build: Factory) -> nn.Module:
    """A module whose batch normalisations hold their running statistics as parameters, which no gradient trains.

    Like all parameters they then come from outside: each client has its own.
    """
    module = _fresh(build)
    for name, layer in module.named_modules():
        if not isinstance(layer, _BatchNorm):
            continue
        if layer.running_mean is None or layer.momentum is None:
            raise ModelError(
                f"layer {name!r} must keep running statistics with a momentum (track_running_stats=True) to be private."
            )
        for statistic in STATISTICS:
            value = layer._buffers.pop(statistic)
            assert value is not None
            layer.register_parameter(statistic, nn.Parameter(value, requires_grad=False))
        layer._buffers["num_batches_tracked"] = None  # it counts for a momentum of None alone
    return module


def _fresh(build: Factory) -> nn.Module:
    module = build()
    if not isinstance(module, nn.Module):
        raise ModelError(f"the model must be an nn.Module, or a function that gives one. Got {type(module).__name__}.")
    return module


def _channels_last(x: Tensor) -> Tensor:
    """Images [B, C, H, W] with their channels last in memory."""
    if x.shape[1] > 1:
        return x.contiguous(memory_format=torch.channels_last)
    # With one channel both layouts are the same bytes, and torch would take them for the slower one: strides tell it.
    return x.contiguous().as_strided(x.shape, (x.shape[2] * x.shape[3], 1, x.shape[3], 1))


@contextmanager
def _hook(layer: nn.Module, before: Any = None, after: Any = None) -> Any:
    """A hook on a layer's forward pass, for the length of a block: before it, or after it."""
    handle = layer.register_forward_pre_hook(before) if before else layer.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()
