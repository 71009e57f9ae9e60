"""What FedMix's experts share (`fedmix.shared`, `fedmix.rank`): the place of each parameter. To the paper it is future work.

A shared tensor is trained on the bound like an expert's, and averaged with p(s).
"""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from torch import Tensor

from fedmix.core.factors import DOWN, Factors
from fedmix.core.method import Extras
from fedmix.core.model import Model
from fedmix.core.placement import Place
from fedmix.errors import SettingError
from fedmix.methods.fedmix_settings import FedmixSettings


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
            # what an expert's inputs are projected on is the same for all and never trained, so that the mean of products
            # is the product of the mean (docs/decisions.md)
            return "frozen" if name.endswith(f".{DOWN}") else "expert"
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
        raise SettingError("fedmix.shared = 'auto' must be decided by `fedmix train` before the method is built.")
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
