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
from fedmix.running.directory import flat_settings
from fedmix.running.files import write_bytes
from fedmix.settings.recipe import Recipe, dump_recipe, make_recipe, read_recipe

MOST_BYTES = 1 << 18  # of a recipe that a server sends
MOST_REFUSED = 20  # files that are kept


def recipe_digest(recipe: Recipe) -> str:
    """Of the settings that decide: sections of other methods do not, and older versions wrote them all."""
    section = CATALOGUE[recipe.algorithm].section if recipe.algorithm in CATALOGUE else ""
    own = {section: getattr(recipe, section)} if section else {}
    return hashlib.sha256(dump_recipe(replace(recipe, sections=own)).encode()).hexdigest()[:32]


def agreed_recipe(folder: Path) -> Recipe:
    """The recipe that lies in the folder of a server or a site."""
    if not (folder / "recipe.toml").is_file():
        raise RunError(f"{folder} must hold the federation's recipe.toml. It does not.")
    return read_recipe(str(folder / "recipe.toml"))


def accepted_recipes(folder: Path) -> dict[str, Recipe]:
    """What the owner of this site accepted: digest -> recipe."""
    files = [folder / "recipe.toml", *sorted((folder / "accepted").glob("*.toml"))]
    recipes = [read_recipe(str(file)) for file in files if file.is_file()]
    return {recipe_digest(recipe): recipe for recipe in recipes}


def accept(folder: Path, recipe: Recipe) -> Path:
    """From now on this site takes part in runs of this recipe."""
    _refuse_repeatable_noise(recipe)
    return _keep(folder / "accepted", recipe)


def names_in_recipe(recipe: Recipe) -> list[str]:
    """What a recipe has imported at a site: functions of packages or files, by name."""
    flat = flat_settings(recipe).values()
    return sorted({value for value in flat if isinstance(value, str) and ":" in value and " " not in value})


def accepted_or_refused(folder: Path, text: Any) -> Recipe:
    """The accepted recipe that a server means by this text. Anything else is refused, and kept for the owner to read."""
    if not isinstance(text, str) or len(text) > MOST_BYTES:
        raise ClientError("a recipe must be text of a reasonable size. The server's is not.")
    try:
        asked = make_recipe(tomllib.loads(text))
        _refuse_repeatable_noise(asked)
    except (FedmixError, ValueError, TypeError, RecursionError) as error:
        raise ClientError(f"the server's recipe cannot be used here ({str(error)[:300]})") from error
    known = accepted_recipes(folder)
    digest = recipe_digest(asked)
    if digest in known:
        _refuse_what_is_not_installed(known[digest])
        return known[digest]
    file = _keep(folder / "refused", asked)
    for old in sorted((folder / "refused").glob("*.toml"), key=lambda path: path.stat().st_mtime)[:-MOST_REFUSED]:
        old.unlink(missing_ok=True)
    raise ClientError(
        f"its owner has not accepted this recipe ({_difference(known, asked)}). It lies there as "
        f"{file.parent.name}/{file.name}; `fedmix deploy accept` there accepts it"
    )


def _refuse_what_is_not_installed(recipe: Recipe) -> None:
    """A method of somebody's own is code that sees the data: at a site it comes from a package that its owner installed."""
    package = recipe.algorithm.partition(":")[0].partition(".")[0]
    if recipe.algorithm not in CATALOGUE and package not in packages_distributions():
        raise ClientError(
            f"the method {recipe.algorithm!r} must come from a package that the site's owner installed. "
            f"No installed package has {package!r}."
        )


def _refuse_repeatable_noise(recipe: Recipe) -> None:
    if recipe.privacy.noise and recipe.privacy.reproducible:
        raise SettingError(
            "privacy.reproducible must be false where data has owners: noise from the recipe's seed protects nobody."
        )


def _difference(known: dict[str, Recipe], asked: Recipe) -> str:
    """In which settings a recipe differs from the nearest accepted one."""
    now = flat_settings(asked)
    nearest: list[str] | None = None
    for recipe in known.values():
        before = flat_settings(recipe)
        apart = sorted(key for key in now.keys() | before.keys() if now.get(key) != before.get(key))
        if nearest is None or len(apart) < len(nearest):
            nearest = apart
    if nearest is None:
        return "none is accepted"
    more = f" and {len(nearest) - 3} more" if len(nearest) > 3 else ""
    return f"another {', '.join(nearest[:3])}{more}"


def _keep(folder: Path, recipe: Recipe) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / f"{recipe_digest(recipe)}.toml"
    write_bytes(file, dump_recipe(recipe).encode())
    return file
