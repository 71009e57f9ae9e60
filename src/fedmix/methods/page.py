"""What a method's file holds: its title, its settings, and how it is built."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedmix.core.method import Method, Setup
from fedmix.core.model import Model
from fedmix.core.settings import PrivacySettings, ServerSettings


@dataclass(frozen=True)
class NoSettings:
    """A method without settings of its own."""


def nothing_to_check(settings: Any, server: ServerSettings, protection: PrivacySettings) -> None:
    """Every combination of settings is fine."""


def no_recommendation(side: str, server: ServerSettings, protection: PrivacySettings) -> dict[str, Any]:
    """The defaults are what is recommended."""
    return {}


def model_as_it_is(model: Model, settings: Any) -> Model:
    """The method needs nothing of the model beside its parameters."""
    return model


@dataclass(frozen=True)
class Settle:
    """Settings that a short run of FedAvg decides before round 1.

    wanted: (settings) -> whether something is to be decided.
    decide: (settings, model, divergence of each parameter between clients) -> settings in which it is decided.
    keep: (settings, those of the run that is resumed) -> settings with what that run decided.
    words: (settings) -> what was decided, in a sentence.
    """

    wanted: Callable[[Any], bool]
    decide: Callable[[Any, Model, Mapping[str, float]], Any]
    keep: Callable[[Any, Any], Any]
    words: Callable[[Any], str]


@dataclass(frozen=True)
class Page:
    """A method, as recipes name it.

    title: what tables and reports call it.
    build: (setup, settings) -> the method.
    settings: a frozen dataclass of what a recipe may set, with defaults.
    paper: where it comes from.
    check: (settings, server, protection) -> None: it refuses settings that do not go together before anything is built.
    model: (model, settings) -> the model with what the method adds to it, such as factors of its weights.
    settle: for settings that are to be chosen before round 1; None: there are none.
    recommended: (kind of side information, server, protection) -> settings for somebody's own data who gives none; they may
    differ from the defaults, which are the paper's.
    """

    title: str
    build: Callable[[Setup, Any], Method]
    settings: type = NoSettings
    paper: str = ""
    check: Callable[[Any, ServerSettings, PrivacySettings], None] = nothing_to_check
    model: Callable[[Model, Any], Model] = model_as_it_is
    settle: "Settle | None" = None
    recommended: Callable[[str, ServerSettings, PrivacySettings], dict[str, Any]] = no_recommendation
