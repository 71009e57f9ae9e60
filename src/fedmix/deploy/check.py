"""What is wrong with a folder before anything is trained: settings, data, keys, certificates, the way to the server."""

import socket
import ssl
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization

from fedmix.data.federation import PARTS
from fedmix.deploy import serve
from fedmix.deploy.acceptance import agreed_recipe
from fedmix.deploy.folder import ServerFolder, SiteFolder, data_of_site, read_server, read_site, split_address
from fedmix.deploy.secrets import days_left
from fedmix.errors import FedmixError, RunError
from fedmix.settings.build import revive
from fedmix.settings.recipe import SITES, Recipe
from fedmix.settings.sites import agreed

Row = dict[str, Any]  # "check": its name; "ok"; "found": what was found, in words


def check(folder: Path) -> list[Row]:
    """Give a row for each thing that was looked at. What depends on something that is wrong is left out."""
    if (folder / "server.toml").is_file():
        return _check_server(folder)
    if (folder / "site.toml").is_file():
        return _check_site(folder)
    raise RunError(
        f"{folder} must be the folder of a server or a site, as `fedmix deploy init` writes them. It is not."
    )


class _Rows:
    """The checks that were made so far, one row for each."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def look(self, name: str, see: Callable[[], Any]) -> Any:
        """Make a check, and give back a value for later checks, or None where something is wrong.

        see: it gives what was found in words, or (what was found, a value for later); it raises if something is wrong.
        """
        try:
            result = see()
        except Exception as error:  # a user's own function may raise anything
            self._add(name, False, _words_of(error))
            return None
        words, value = result if isinstance(result, tuple) else (result, result)
        self._add(name, True, words)
        return value

    def _add(self, name: str, ok: bool, words: str) -> None:
        self.rows.append({"check": name, "ok": ok, "found": words})


def _words_of(error: Exception) -> str:
    if isinstance(error, FedmixError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _check_site(folder: Path) -> list[Row]:
    rows = _Rows()
    settings = rows.look("settings", lambda: _site_settings(folder))
    recipe = rows.look("recipe", lambda: _recipe(folder))
    if settings and recipe:
        rows.look("data", lambda: _data(folder, recipe))
    rows.look("key", lambda: _secret(folder / "node.key", serialization.load_ssh_private_key))
    trusted = rows.look("authority", lambda: _valid(folder / "ca.crt"))
    if settings and trusted:
        rows.look("server", lambda: _reach(settings.server, folder / "ca.crt"))
    return rows.rows


def _check_server(folder: Path) -> list[Row]:
    rows = _Rows()
    settings = rows.look("settings", lambda: _server_settings(folder))
    rows.look("recipe", lambda: _recipe(folder))
    rows.look("authority", lambda: _valid(folder / "ca.crt"))
    rows.look("certificate", lambda: _valid(folder / "server.crt"))
    rows.look("key", lambda: _secret(folder / "server.key", serialization.load_pem_private_key))
    sites = rows.look("sites' keys", lambda: _keys(folder))
    if not settings or not sites:
        return rows.rows
    here = f"127.0.0.1:{settings.port}"
    reached = rows.look("server", lambda: _reach(here, folder / "ca.crt", settings.address))
    if reached:
        rows.look("connected", lambda: _connected(folder, sites))
    return rows.rows


def _site_settings(folder: Path) -> tuple[str, SiteFolder]:
    settings = read_site(folder)
    return f"site {settings.name}", settings


def _server_settings(folder: Path) -> tuple[str, ServerFolder]:
    settings = read_server(folder)
    return settings.address, settings


def _recipe(folder: Path) -> tuple[str, Recipe]:
    """Read the agreed recipe; where the sites' data is described in it, build its model too."""
    recipe = agreed_recipe(folder)
    if recipe.data.source != SITES:
        return f"{recipe.algorithm} on {recipe.data.source}", recipe
    common = agreed(recipe.data)
    shapes = {"input": common.input, "classes": common.count, "clients": common.sites, "categories": common.count}
    revive(recipe, shapes)
    sites = ", ".join(common.sites)
    return f"{recipe.algorithm}, inputs {common.input}, {common.count} classes, sites {sites}", recipe


def _data(folder: Path, recipe: Recipe) -> str:
    """Read the site's data as a run would, and count its points."""
    settings = read_site(folder)
    if recipe.data.source == SITES and settings.name not in agreed(recipe.data).sites:
        raise RunError(f"data.args.sites of the recipe must name this site, {settings.name!r}. It does not.")
    held = data_of_site(folder, settings, recipe)
    points = held.describe(b"check")["points"]
    totals = ", ".join(f"{sum(points[part]):,} {part}" for part in PARTS)
    plural = "s" if len(held.clients) > 1 else ""
    return f"{len(held.clients)} client{plural}; points: {totals}"


def _secret(path: Path, load: Callable[..., Any]) -> str:
    """Look at a private key: it is there, nobody else can read it, and `load` can."""
    if not path.is_file():
        raise RunError(f"{path} is missing; it is in the folder that `fedmix deploy init` made for this machine.")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise RunError(f"{path} must be readable by its owner alone. Others can read it; chmod 600 {path}.")
    try:
        load(path.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise RunError(
            f"{path} must be a private key as `fedmix deploy init` writes it. It is not ({error})."
        ) from error
    return "readable by its owner alone"


def _valid(certificate: Path) -> str:
    """Look at a certificate: it can be read, and is valid today."""
    try:
        days = days_left(certificate)
    except (OSError, ValueError) as error:
        raise RunError(f"{certificate} must be a certificate as `fedmix deploy init` writes it ({error}).") from error
    if days < 0:
        raise RunError(f"{certificate} must be valid today. It is not (expired, or this machine's clock is wrong).")
    return f"valid for {days:,.0f} days"


def _keys(folder: Path) -> tuple[str, list[str]]:
    """Name the sites whose public keys the server has."""
    names = [path.stem for path in sorted((folder / "keys").glob("*.pub"))]
    if not names:
        raise RunError(f"{folder / 'keys'} must hold the public key of each site. It holds none.")
    return ", ".join(names), names


def _reach(address: str, authority: Path, called: str | None = None) -> str:
    """Connect with TLS, and trust the federation's own authority alone.

    called: the address whose host the certificate is for, where it is not `address` itself.
    """
    host, port = split_address(address, "server")
    context = ssl.create_default_context(cafile=str(authority))
    name, _ = split_address(called, "address") if called else (host, port)
    try:
        with (
            socket.create_connection((host, port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname=name) as secure,
        ):
            return f"{address} answers, {secure.version()}, its certificate is of this federation and for {name}"
    except ssl.SSLError as error:
        raise RunError(
            f"{address} must show a certificate of this federation for {name}. It does not ({error})."
        ) from error
    except OSError as error:
        raise RunError(
            f"{address} must be reachable. It is not ({error.strerror or error}); is the server started, is a firewall between?"
        ) from error


def _connected(folder: Path, sites: list[str]) -> str:
    """Ask the server which of its sites are connected; all must be."""
    online = serve.online(folder)
    missing = [name for name in sites if name not in online]
    words = f"{len(sites) - len(missing)} of {len(sites)} sites"
    if missing:
        raise RunError(
            f"{words}; {', '.join(missing)} not yet: start it there, and see what `fedmix deploy check` says."
        )
    return words
