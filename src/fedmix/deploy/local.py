"""A federation on this machine alone: for trying out, and for tests. TLS and keys as in a real one."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fedmix.deploy import serve
from fedmix.deploy.folder import init, read_site
from fedmix.deploy.serve import Running
from fedmix.errors import RunError, SettingError
from fedmix.running.files import write_bytes
from fedmix.settings.recipe import SITES, Recipe, dump_recipe

SECONDS = 180.0  # for sites to connect


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def prepare(folder: Path, sites: int, recipe: Recipe, data_dir: str | None = None) -> list[Path]:
    """A new folder for a server and so many sites, each with a part of the recipe's own data."""
    if recipe.data.source == SITES:
        raise SettingError(
            "a federation on this machine alone needs a recipe with data of its own. This one asks sites."
        )
    names = [f"site-{i + 1}" for i in range(sites)]
    init(folder, names, f"localhost:{free_port()}", recipe, host="127.0.0.1")
    for name in names:
        path = folder / "sites" / name / "site.toml"
        before = read_site(path.parent).runtime_port
        text = path.read_text().replace(f"runtime_port = {before}", f"runtime_port = {free_port()}")
        where = f"data_dir = {json.dumps(str(Path(data_dir).resolve()))}\n" if data_dir else ""
        path.write_text(text.replace("\n[data]", f"{where}\n[data]"))
    return [folder / "sites" / name for name in names]


def agree(folder: Path, recipe: Recipe) -> None:
    """Another recipe for a local federation that is there already."""
    for own in (folder / "server", *(folder / "sites").iterdir()):
        write_bytes(own / "recipe.toml", dump_recipe(recipe).encode())


@contextmanager
def up(folder: Path, say: Callable[[str], None]) -> Iterator[dict[str, Running]]:
    """Server and sites of a folder, all connected; logs in FOLDER/logs. Gives their processes by name."""
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    sites = sorted(path.parent for path in (folder / "sites").glob("*/site.toml"))
    if not sites:
        raise RunError(f"{folder} must hold the folders of a server and its sites. It has no sites.")
    with ExitStack() as stack:
        running = {"server": stack.enter_context(serve.server(folder / "server", say, logs / "server.log"))}
        for site in sites:
            running[site.name] = stack.enter_context(serve.site(site, say, logs / f"{site.name}.log"))
        wait_until_online(folder / "server", len(sites))
        yield running


def wait_until_online(server: Path, count: int, seconds: float = SECONDS) -> None:
    until = time.monotonic() + seconds
    while (online := sum(node["status"] == "online" for node in serve.nodes(server))) < count:
        if time.monotonic() > until:
            raise RunError(f"{count} sites must connect. {online} did within {seconds:g} s; the logs say why.")
        time.sleep(0.2)
