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
from fedmix.settings.recipe import Recipe, dump_recipe, settings_from
from fedmix.settings.sites import PART_OF_RECIPE, Holding, SiteData, holding

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
PORT = 8000
HOSTS = ("0.0.0.0", "127.0.0.1")
RUNTIME_PORT = 9094  # of a SuperNode, for its own processes


@dataclass(frozen=True)
class ServerFolder:
    """server.toml"""

    address: str = f"localhost:{PORT}"  # where sites find the server; its certificate is for this name
    host: str = "0.0.0.0"  # the network address that it listens on

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


@dataclass(frozen=True)
class SiteFolder:
    """site.toml"""

    name: str = ""
    server: str = f"localhost:{PORT}"
    share_private: bool = False  # the gate may leave this site for evaluation, where the recipe asks for it as well
    runtime_port: int = RUNTIME_PORT  # of this machine alone; another one for each site on it
    data_dir: str = ""  # where files are looked for; none: in this folder
    data: SiteData = field(default_factory=SiteData)


def read_server(folder: Path) -> ServerFolder:
    settings: ServerFolder = _read(folder, "server.toml", ServerFolder)
    split_address(settings.address, "address")
    if settings.host not in HOSTS:
        raise SettingError(
            f"{folder / 'server.toml'}: host must be 0.0.0.0 (every network of this machine; a firewall chooses among them) "
            f"or 127.0.0.1 (this machine alone). Got {settings.host!r}."
        )
    return settings


def read_site(folder: Path) -> SiteFolder:
    settings: SiteFolder = _read(folder, "site.toml", SiteFolder)
    if not NAME.fullmatch(settings.name):
        raise SettingError(f"{folder / 'site.toml'}: name must be the site's name. Got {settings.name!r}.")
    split_address(settings.server, "server")
    if not 0 < settings.runtime_port < 65536:
        raise SettingError(
            f"{folder / 'site.toml'}: runtime_port must be from 1 to 65535. Got {settings.runtime_port}."
        )
    return settings


def own_data(folder: Path, settings: SiteFolder, recipe: Recipe) -> Holding:
    """A site's data. Files are looked for in its data_dir, or its folder; decoded copies stay there, for its owner alone."""
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
    """The server's folder, given itself or the one around it."""
    return folder / "server" if (folder / "server" / "server.toml").is_file() else folder


def split_address(address: str, setting: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not host.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingError(f"{setting} must be host:port, as in fedmix.example.org:8000. Got {address!r} instead.")
    return host.strip("[]"), int(port)


def init(
    folder: Path, sites: Sequence[str], address: str, recipe: Recipe | None = None, host: str = "0.0.0.0"
) -> list[str]:
    """Everything that a consortium needs. recipe: one with data of its own, of which each site holds a part."""
    wrong = [name for name in sites if not NAME.fullmatch(name)]
    if not sites or wrong or len({name.lower() for name in sites}) != len(sites):
        given = ",".join(sites)
        raise SettingError(
            "--sites must name each site once, in letters, digits, '.', '_' and '-'. Got " + f"{given!r} instead."
        )
    where, _ = split_address(address, "--address")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} must be empty or not exist: nothing is overwritten. Choose another one.")
    folder.mkdir(parents=True, exist_ok=True)
    server = folder / "server"
    text = dump_recipe(recipe) if recipe else _RECIPE.format(sites=", ".join(f'"{name}"' for name in sites))
    make_certificates(server, [where])
    authority = (server / "ca.crt").read_bytes()
    _write(server / "server.toml", _SERVER.format(address=address, host=host))
    _write(server / "recipe.toml", text)
    _write(server / "app" / "pyproject.toml", _APP)
    _write(server / "start.sh", _START.format(what="the server"), 0o755)
    _write(server / "fedmix-server.service", _UNIT.format(what="server", name="server"))
    for i, name in enumerate(sites):
        own = folder / "sites" / name
        make_node_key(own / "node.key", own / "node.pub", name)
        own.chmod(0o700)
        write_new(server / "keys" / f"{name}.pub", (own / "node.pub").read_bytes())
        write_new(own / "ca.crt", authority)
        part = _PART.format(source=PART_OF_RECIPE, part=i, of=len(sites))
        share = "true" if recipe and recipe.evaluation.share_private else "false"
        settings = _SITE.format(name=name, server=address, share=share, port=RUNTIME_PORT + i)
        _write(own / "site.toml", settings + (part if recipe else _DATA))
        _write(own / "recipe.toml", text)
        _write(own / "start.sh", _START.format(what=f"site {name}"), 0o755)
        _write(own / f"fedmix-{name}.service", _UNIT.format(what=f"site {name}", name=name))
    _write(folder / "README.md", _README.format(address=address, sites="\n".join(f"- sites/{s}" for s in sites)))
    return [str(path) for path in sorted(folder.rglob("*")) if path.is_file()]


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
