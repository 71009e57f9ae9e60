"""What FedMix's experts share (`fedmix.shared`, `fedmix.rank`): the place of each parameter. To the paper it is future work.

A shared tensor is trained on the bound like an expert's, and averaged with p(s).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import Tensor

from fedmix.core.factors import Factors
from fedmix.core.method import Extras
from fedmix.core.model import Model
from fedmix.core.placement import Place
from fedmix.errors import SettingError
from fedmix.methods.fedmix_settings import FedmixSettings
from fedmix.methods.page import Settle


def with_factors(model: Model, settings: FedmixSettings) -> Model:
    """The model with factors in the layers that settings name. One expert alone needs none."""
    if not settings.factor_layers or settings.slots == 1:
        return model
    layers = _matching(settings.factor_layers, _weighted_layers(model), "fedmix.factor_layers", "layer")
    return model.with_factors(Factors(tuple(layers), settings.rank))


def placement(model: Model, settings: FedmixSettings) -> Callable[[str], Place]:
    """The rule by which FedMix places parameters."""
    shared = set(_shared(model, settings.shared))
    factors = model.factors
    of_factors = set(factors.names) if factors else set()
    weights = {f"{layer}.weight" for layer in factors.layers} if factors else set()

    def place(name: str) -> Place:
        if name in of_factors:
            return "expert"
        return "shared" if name in shared or name in weights else "expert"

    return place


def _shared(model: Model, choice: str | Sequence[str]) -> list[str]:
    """The names of the parameters that all experts share."""
    names = [name for name in model.names if model.factors is None or name not in model.factors.names]
    if choice == "none":
        return []
    if choice == "all-but-output":
        return [name for name in names if not name.startswith(f"{model.output}.")]
    if choice == "auto":
        raise SettingError(
            "fedmix.shared = 'auto' is decided by a short run when `fedmix train` starts; here, and in a deployment, there is "
            "none. Name what experts share; `fedmix plan RECIPE --shared` lists what it costs."
        )
    return _matching([choice] if isinstance(choice, str) else choice, names, "fedmix.shared", "parameter")


def _weighted_layers(model: Model) -> list[str]:
    return [name.removesuffix(".weight") for name in model.names if name.endswith(".weight")]


def _matching(patterns: Sequence[str], names: Iterable[str], setting: str, what: str) -> list[str]:
    """The names that a pattern or the name of a layer around them stands for; a pattern for nothing is refused."""
    names = list(names)
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")]
        if not matched:
            raise SettingError(f"{setting}: no {what} is called {pattern!r}. There are: {', '.join(names)}.")
        chosen |= dict.fromkeys(matched)
    return list(chosen)


def chances(settings: FedmixSettings, extras: Extras, client: int) -> Tensor:
    """The chance that a client is sent each expert [K]: 1 for the one it uses most, less the less it uses one."""
    q_zs: Tensor = extras["q_zs"][client]
    return 1 - settings.expert_dropout * (1 - q_zs / q_zs.max())


# -- chosen before round 1 ---------------------------------------------------------------------------------------------


def is_open(settings: FedmixSettings) -> bool:
    """Whether what experts share is still to be chosen."""
    return settings.shared == "auto"


def decide(settings: FedmixSettings, model: Model, divergence: Mapping[str, float]) -> FedmixSettings:
    """Share all but the layers on which clients disagree most, as many of those as the budget of bytes allows.

    The output layer is always each expert's own: without it the gate would have nothing to choose between.
    """
    sizes = _trained_sizes(model)
    whole = sum(sum(tensors.values()) for tensors in sizes.values())

    def cost(layers: Iterable[str]) -> float:
        """Bytes of a round, in FedAvg rounds."""
        of_experts = sum(sum(sizes[layer].values()) for layer in layers)
        return 1 + (settings.slots - 1) * of_experts / whole

    experts = [layer for layer in sizes if layer == model.output or layer.startswith(f"{model.output}.")]
    if cost(experts) > settings.budget:
        raise SettingError(
            f"fedmix.budget must be {cost(experts):.2f} or more with {settings.slots} experts and this model: their output "
            f"layers alone cost that many FedAvg rounds. Got {settings.budget:g} instead."
        )
    others = [layer for layer in sizes if layer not in experts]
    others.sort(key=lambda layer: _mean_divergence(sizes[layer], divergence), reverse=True)
    for layer in others:
        if cost([*experts, layer]) <= settings.budget:
            experts.append(layer)
    shared = [name for layer, tensors in sizes.items() if layer not in experts for name in tensors]
    return replace(settings, shared=shared or "none")


def _trained_sizes(model: Model) -> dict[str, dict[str, int]]:
    """How many numbers each trained tensor of each layer has."""
    sizes: dict[str, dict[str, int]] = {}
    for name, value in model.template.items():
        if name not in model.frozen:
            layer = name.rpartition(".")[0]
            sizes.setdefault(layer, {})[name] = value.numel()
    return sizes


def _mean_divergence(tensors: Mapping[str, int], divergence: Mapping[str, float]) -> float:
    """The divergence of a layer: that of its tensors, weighted by how many numbers they have."""
    total = sum(tensors.values())
    return sum(count / total * divergence[name] for name, count in tensors.items())


def keep(settings: FedmixSettings, before: FedmixSettings) -> FedmixSettings:
    """What the run that is resumed chose to share."""
    return replace(settings, shared=before.shared)


def words(settings: FedmixSettings) -> str:
    shared = settings.shared if isinstance(settings.shared, str) else ", ".join(settings.shared)
    return f"experts share {'nothing' if shared == 'none' else shared}"


SETTLE = Settle(is_open, decide, keep, words)
