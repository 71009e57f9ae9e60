"""The folders of a federation: what `fedmix deploy init` writes, and what is read of it afterwards.

DIR/server     for the machine in the middle: certificates, public keys of the sites, the recipe, runs
DIR/sites/a    for site a's own machine: its key, the authority's certificate, settings, the recipe, private states
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmix.data.files import keep_decoded_in
from fedmix.deploy.secrets import make_certificates, make_node_key, write_new
from fedmix.errors import RunError, SettingError
from fedmix.settings.reading import dump_recipe
from fedmix.settings.recipe import Recipe
from fedmix.settings.sites import PART_OF_RECIPE, Holding, SiteData, holding
from fedmix.settings.tables import settings_from

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
PORT = 8000
HOSTS = ("0.0.0.0", "127.0.0.1")
RUNTIME_PORT = 9094  # where a SuperNode answers its own processes; the first site's, others count on from it


@dataclass(frozen=True)
class ServerFolder:
    """The settings in server.toml."""

    address: str = f"localhost:{PORT}"  # where sites find the server; its certificate is for this name
    host: str = "0.0.0.0"  # the network address that it listens on

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


@dataclass(frozen=True)
class SiteFolder:
    """The settings in site.toml."""

    name: str = ""
    server: str = f"localhost:{PORT}"
    share_private: bool = False  # the gate may leave this site for evaluation, where the recipe asks for it as well
    runtime_port: int = RUNTIME_PORT  # for this machine alone; another one for each site on it
    data_dir: str = ""  # where files are looked for; none: in this folder
    data: SiteData = field(default_factory=SiteData)


def read_server(folder: Path) -> ServerFolder:
    """Read the settings of a server, and check them."""
    settings: ServerFolder = _read(folder, "server.toml", ServerFolder)
    split_address(settings.address, "address")
    if settings.host not in HOSTS:
        raise SettingError(
            f"{folder / 'server.toml'}: host must be 0.0.0.0 (every network of this machine; a firewall chooses among them) "
            f"or 127.0.0.1 (this machine alone). Got {settings.host!r}."
        )
    return settings


def read_site(folder: Path) -> SiteFolder:
    """Read the settings of a site, and check them."""
    settings: SiteFolder = _read(folder, "site.toml", SiteFolder)
    if not NAME.fullmatch(settings.name):
        raise SettingError(f"{folder / 'site.toml'}: name must be the site's name. Got {settings.name!r}.")
    split_address(settings.server, "server")
    if not 0 < settings.runtime_port < 65536:
        raise SettingError(
            f"{folder / 'site.toml'}: runtime_port must be from 1 to 65535. Got {settings.runtime_port}."
        )
    return settings


def data_of_site(folder: Path, settings: SiteFolder, recipe: Recipe) -> Holding:
    """Read a site's data in the form that the recipe asks for.

    Files are looked for in the site's data_dir, or in its folder. Decoded copies stay in the folder, for its owner alone.
    """
    place = folder.resolve() / settings.data_dir
    if settings.data.source == PART_OF_RECIPE:
        return holding(recipe, settings.name, settings.data, str(place))
    cache = folder.resolve() / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    with keep_decoded_in(cache):
        return holding(recipe, settings.name, settings.data, str(place))


def _read(folder: Path, name: str, kind: type) -> Any:
    path = folder / name
    if not path.is_file():
        raise RunError(f"{folder} must hold a {name}. It does not; `fedmix deploy init` makes such a folder.")
    try:
        return settings_from(kind, tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} must be valid TOML: {error}.") from error
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from error


def server_folder(folder: Path) -> Path:
    """Give the server's folder, where `folder` is that folder itself or the one around it."""
    inside = folder / "server"
    return inside if (inside / "server.toml").is_file() else folder


def split_address(address: str, setting: str) -> tuple[str, int]:
    """Split host:port into host and port. setting: what an error calls the address."""
    host, _, port = address.rpartition(":")  # without a colon the host is empty
    is_host = bool(host) and host.isascii()
    if not is_host or not _is_port(port):
        raise SettingError(f"{setting} must be host:port, as in fedmix.example.org:8000. Got {address!r} instead.")
    return host.strip("[]"), int(port)


def _is_port(text: str) -> bool:
    return text.isdecimal() and 0 < int(text) < 65536


def init(
    folder: Path, sites: Sequence[str], address: str, recipe: Recipe | None = None, host: str = "0.0.0.0"
) -> list[str]:
    """Write everything that a consortium needs, and list the files.

    recipe: a recipe with data of its own, of which each site holds a part; without it each site has its own data, and
    the recipe is one to be filled in.
    """
    _check_names(sites)
    name_of_server, _ = split_address(address, "--address")
    if _holds_something(folder):
        raise RunError(f"{folder} must be empty or not exist: nothing is overwritten. Choose another one.")
    folder.mkdir(parents=True, exist_ok=True)
    text = dump_recipe(recipe) if recipe else _recipe_for(sites)
    server = folder / "server"
    make_certificates(server, [name_of_server])
    _write_server(server, address, host, text)
    for i, name in enumerate(sites):
        site = folder / "sites" / name
        _write_keys(site, server, name)
        _write(site / "site.toml", _settings_of_site(name, address, i, len(sites), recipe))
        _write(site / "recipe.toml", text)
        _write(site / "start.sh", _START.format(what=f"site {name}"), 0o755)
        _write(site / f"fedmix-{name}.service", _UNIT.format(what=f"site {name}", name=name))
    _write(folder / "README.md", _readme_for(sites, address))
    return [str(path) for path in sorted(folder.rglob("*")) if path.is_file()]


def _check_names(sites: Sequence[str]) -> None:
    """Refuse names that cannot be folders. Not every file system tells `a` from `A`, so they must differ in more."""
    all_allowed = all(NAME.fullmatch(name) for name in sites)
    all_different = len({name.lower() for name in sites}) == len(sites)
    if not sites or not all_allowed or not all_different:
        given = ",".join(sites)
        raise SettingError(
            f"--sites must name each site once, in letters, digits, '.', '_' and '-'. Got {given!r} instead."
        )


def _holds_something(folder: Path) -> bool:
    if not folder.exists():
        return False
    return not folder.is_dir() or any(folder.iterdir())


def _recipe_for(sites: Sequence[str]) -> str:
    """Write a recipe for sites that have data of their own."""
    quoted = ", ".join(f'"{name}"' for name in sites)
    return _RECIPE.format(sites=quoted)


def _readme_for(sites: Sequence[str], address: str) -> str:
    listed = "\n".join(f"- sites/{name}" for name in sites)
    return _README.format(address=address, sites=listed)


def _write_server(folder: Path, address: str, host: str, recipe: str) -> None:
    _write(folder / "server.toml", _SERVER.format(address=address, host=host))
    _write(folder / "recipe.toml", recipe)
    _write(folder / "app" / "pyproject.toml", _APP)
    _write(folder / "start.sh", _START.format(what="the server"), 0o755)
    _write(folder / "fedmix-server.service", _UNIT.format(what="server", name="server"))


def _write_keys(site: Path, server: Path, name: str) -> None:
    """Make a site's key. The server gets the public half, the site the certificate by which it knows the server."""
    make_node_key(site / "node.key", site / "node.pub", name)
    site.chmod(0o700)
    write_new(server / "keys" / f"{name}.pub", (site / "node.pub").read_bytes())
    write_new(site / "ca.crt", (server / "ca.crt").read_bytes())


def _settings_of_site(name: str, address: str, number: int, count: int, recipe: Recipe | None) -> str:
    """Write the site.toml of one of `count` sites. recipe: its own data is what the site holds a part of."""
    share = "true" if recipe and recipe.evaluation.share_private else "false"
    settings = _SITE.format(name=name, server=address, share=share, port=RUNTIME_PORT + number)
    if recipe:
        return settings + _PART.format(source=PART_OF_RECIPE, part=number, of=count)
    return settings + _DATA


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    write_new(path, text.encode(), mode)


_SERVER = """# The server of this federation.
address = "{address}"   # where sites find it; the certificate is for this name
host = "{host}"   # the network address that it listens on
"""

_SITE = """# This site: its data and its gate stay here.
name = "{name}"
server = "{server}"
share_private = {share}   # true: the gate may leave this site for evaluation, where the recipe asks for it as well
runtime_port = {port}     # of this machine alone; another one for each site on it
"""

_DATA = """
[data]
source = "npz"          # or "csv", "images", or package.module:name for a function that gives arrays
# What each takes is in docs/data.md. A column `client` makes several clients of this site (wards, machines, branches).
args = { file = "data.npz", x = "x", y = "y" }
# csv:    args = { file = "data.csv", label = "diagnosis", client = "ward" }
# images: args = { folder = "scans", size = 64, grey = true }
"""

_PART = """
[data]
source = "{source}"       # a part of the recipe's own data, for trying out
args = {{ part = {part}, of = {of} }}
"""

_RECIPE = """# What this federation trains. The same file lies with the server and every site, so that each can check its data.
name = "federation"
rounds = 20

[data]
source = "sites"        # each site's data stays where it is
side = "label"          # what q(z|c) is about: the label, the client, or a column of side information
validation = 0.1        # shares of each client's points
test = 0.2

[data.args]
sites = [{sites}]
input = [30]            # the shape of one input: [30] for 30 numbers, [1, 28, 28] for images
classes = 2
# labels = ["benign", "malignant"]     where the files have words
# mean = [0.13]                        of images, channel by channel
# std = [0.31]
# columns = [{{ column = "age", mean = 50, std = 10 }}, {{ column = "sex", words = ["f", "m"] }}]     of tables

[model]
name = "mlp"
hidden = [64]

[training]
batch_size = 32
epochs = 1
client_lr = 0.1

[fedmix]
experts = 2

[server]
server_lr = 0.01
deadline = 600          # seconds; a round then goes on without those who have not answered
min_replies = 1
"""

_APP = """# What Flower hands to the machines of a run: two names in fedmix, which is installed on each of them.
[project]
name = "fedmix-federation"
version = "1.0.0"
description = "A federated mixture of experts"
license = "Apache-2.0"
dependencies = []

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.flwr.app]
publisher = "fedmix"

[tool.flwr.app.components]
serverapp = "fedmix.apps.server:app"
clientapp = "fedmix.apps.client:app"

[tool.flwr.app.config]
recipe = ""
out = ""
data-dir = ""
wait = 600.0
"""

_START = """#!/bin/sh
# Starts {what}; Ctrl-C or SIGTERM stops it. The Flower commands behind it: fedmix deploy serve . --show
cd "$(dirname "$0")" && exec fedmix deploy serve .
"""

_UNIT = """# cp to /etc/systemd/system; set the folder, the user and the path of fedmix to your own; systemctl enable --now
[Unit]
Description=fedmix {what}
Wants=network-online.target
After=network-online.target

[Service]
User=fedmix
UMask=0077
WorkingDirectory=/srv/fedmix/{name}
ExecStart=/usr/bin/env fedmix deploy serve .
Restart=always
RestartSec=10

[Install]
WantedBy=multi-user.target
"""

_README = """# A federation of fedmix

1. Copy `server/` to the machine that sites reach as `{address}`, and each folder below to its site's own machine, by a way
   that nobody else reads: it holds that site's private key. Nobody needs the folder of another.
{sites}
2. Install fedmix on each of them: `pip install 'fedmix[flower]'`.
3. Agree on `recipe.toml`; the same file for the server and every site. A site takes part in runs of this recipe, and of others
   that its owner accepts: `fedmix deploy accept . RECIPE`.
4. On each site: set in `site.toml` where its data is, then `fedmix deploy check .`, then `./start.sh`.
5. On the server: `./start.sh`, then in another terminal `fedmix deploy check .` and `fedmix deploy run .`.
6. After it, on a site: `fedmix predict --site . --input new.npz`.

`server/ca.key` signs certificates: keep it off the network. Keys have mode 0600.
"""
