"""From a shipped method's name to its page."""

from importlib import import_module
from typing import Any

from fedmix.catalogue import CATALOGUE, SECTIONS
from fedmix.errors import SettingError, one_of
from fedmix.methods.page import Page


def shipped_page(name: str) -> Page:
    """The page of a method that comes with fedmix. Its module is imported here, so that others are not."""
    if name not in CATALOGUE:
        raise SettingError(one_of("algorithm", name, [*CATALOGUE, "package.module:name"]))
    module, _, attribute = CATALOGUE[name].page.partition(":")
    page: Page = getattr(import_module(module), attribute)
    return page


def settings_of_section(section: str) -> type[Any]:
    """The class of the settings that a recipe's section holds."""
    return shipped_page(SECTIONS[section]).settings
