"""Which recipes a site takes part in: those that its owner accepted, and no others.

    SITE/recipe.toml        the recipe that the federation agreed on
    SITE/accepted/*.toml    others that the owner accepted: fedmix deploy accept SITE RECIPE
    SITE/refused/*.toml     what a server asked for in vain, for the owner to read

A recipe may name functions that are imported, so nothing of a recipe is used before it is known to be an accepted one. Recipes
are compared by a digest of their effective settings: comments and order do not matter, every setting does.
"""

import hashlib
import tomllib
from dataclasses import replace
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from fedmix.catalogue import CATALOGUE
from fedmix.errors import ClientError, FedmixError, RunError, SettingError
from fedmix.running.files import write_bytes
from fedmix.settings.reading import dump_recipe, flat_settings, make_recipe, read_recipe
from fedmix.settings.recipe import Recipe

MOST_BYTES = 1 << 18  # the longest recipe that a server may send
MOST_REFUSED = 20  # files that are kept of recipes that were refused
MOST_NAMED = 3  # settings that an error names


def recipe_digest(recipe: Recipe) -> str:
    """Give the digest of the settings that decide what is trained.

    The sections of other methods decide nothing. They are left out, because older versions of fedmix wrote them all.
    """
    sections: dict[str, Any] = {}
    if recipe.algorithm in CATALOGUE and CATALOGUE[recipe.algorithm].section:
        section = CATALOGUE[recipe.algorithm].section
        sections[section] = getattr(recipe, section)
    decisive = dump_recipe(replace(recipe, sections=sections))
    return hashlib.sha256(decisive.encode()).hexdigest()[:32]


def agreed_recipe(folder: Path) -> Recipe:
    """Read the recipe that lies in the folder of a server or a site."""
    file = folder / "recipe.toml"
    if not file.is_file():
        raise RunError(f"{folder} must hold the federation's recipe.toml. It does not.")
    return read_recipe(str(file))


def accepted_recipes(folder: Path) -> dict[str, Recipe]:
    """Read the recipes that the owner of this site accepted, by their digests."""
    files = [folder / "recipe.toml", *sorted((folder / "accepted").glob("*.toml"))]
    recipes = [read_recipe(str(file)) for file in files if file.is_file()]
    return {recipe_digest(recipe): recipe for recipe in recipes}


def accept(folder: Path, recipe: Recipe) -> Path:
    """Let this site take part in runs of this recipe from now on. The file that says so is given back."""
    _refuse_repeatable_noise(recipe)
    return _keep(folder / "accepted", recipe)


def names_in_recipe(recipe: Recipe) -> list[str]:
    """List what a recipe has imported at a site: functions of packages or files, by name."""
    return sorted({value for value in flat_settings(recipe).values() if _is_name_to_import(value)})


def _is_name_to_import(value: Any) -> bool:
    return isinstance(value, str) and ":" in value and " " not in value


def accepted_or_refused(folder: Path, text: Any) -> Recipe:
    """Give the accepted recipe that a server means by this text. Any other is refused, and kept for the owner to read."""
    asked = _read_text_of_server(text)
    accepted = accepted_recipes(folder)
    digest = recipe_digest(asked)
    if digest in accepted:
        # The site's own copy is used, not the server's: they are the same in every setting that decides.
        _refuse_what_is_not_installed(accepted[digest])
        return accepted[digest]
    file = _keep_refused(folder / "refused", asked)
    raise ClientError(
        f"its owner has not accepted this recipe ({_difference(accepted, asked)}). It lies there as "
        f"{file.parent.name}/{file.name}; `fedmix deploy accept` there accepts it"
    )


def _read_text_of_server(text: Any) -> Recipe:
    """Read a recipe that came over the network. Nothing that it names is imported."""
    if not isinstance(text, str) or len(text) > MOST_BYTES:
        raise ClientError("a recipe must be text of a reasonable size. The server's is not.")
    try:
        recipe = make_recipe(tomllib.loads(text))
        _refuse_repeatable_noise(recipe)
    except (FedmixError, ValueError, TypeError, RecursionError) as error:
        raise ClientError(f"the server's recipe cannot be used here ({str(error)[:300]})") from error
    return recipe


def _refuse_what_is_not_installed(recipe: Recipe) -> None:
    """Refuse a method of somebody's own that comes from no installed package.

    Such a method is code that sees the data, so the site's owner must have installed it on purpose.
    """
    package = recipe.algorithm.partition(":")[0].partition(".")[0]
    if recipe.algorithm not in CATALOGUE and package not in packages_distributions():
        raise ClientError(
            f"the method {recipe.algorithm!r} must come from a package that the site's owner installed. "
            f"No installed package has {package!r}."
        )


def _refuse_repeatable_noise(recipe: Recipe) -> None:
    """Refuse noise that whoever knows the recipe can compute, and so take off again."""
    if recipe.privacy.noise and recipe.privacy.reproducible:
        raise SettingError(
            "privacy.reproducible must be false where data has owners: noise from the recipe's seed protects nobody."
        )


def _difference(accepted: dict[str, Recipe], asked: Recipe) -> str:
    """Say in which settings a recipe differs from the nearest accepted one."""
    if not accepted:
        return "none is accepted"
    nearest = min((_different_settings(recipe, asked) for recipe in accepted.values()), key=len)
    unnamed = len(nearest) - MOST_NAMED
    more = f" and {unnamed} more" if unnamed > 0 else ""
    return f"another {', '.join(nearest[:MOST_NAMED])}{more}"


def _different_settings(recipe: Recipe, other: Recipe) -> list[str]:
    """List the settings in which two recipes differ, by name."""
    settings, others = flat_settings(recipe), flat_settings(other)
    names = settings.keys() | others.keys()
    return sorted(name for name in names if settings.get(name) != others.get(name))


def _keep_refused(folder: Path, recipe: Recipe) -> Path:
    """Keep a refused recipe, and the newest of those before it: a server must not be able to fill the disk."""
    file = _keep(folder, recipe)
    oldest_first = sorted(folder.glob("*.toml"), key=lambda path: path.stat().st_mtime)
    for old in oldest_first[:-MOST_REFUSED]:
        old.unlink(missing_ok=True)
    return file


def _keep(folder: Path, recipe: Recipe) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / f"{recipe_digest(recipe)}.toml"
    write_bytes(file, dump_recipe(recipe).encode())
    return file
