"""A federation on this machine alone: for trying out, and for tests. It has TLS and keys as a real one has."""

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
from fedmix.settings.reading import dump_recipe
from fedmix.settings.recipe import SITES, Recipe

SECONDS = 180.0  # in which sites must connect


def free_port() -> int:
    """Find a port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def prepare(folder: Path, sites: int, recipe: Recipe, data_dir: str | None = None) -> list[Path]:
    """Make a new folder for a server and this many sites, each with a part of the recipe's own data.

    data_dir: where the recipe's files are looked for. The folders of the sites are given back.
    """
    if recipe.data.source == SITES:
        raise SettingError(
            "a federation on this machine alone needs a recipe with data of its own. This one asks sites."
        )
    names = [f"site-{i + 1}" for i in range(sites)]
    init(folder, names, f"localhost:{free_port()}", recipe, host="127.0.0.1")
    folders = [folder / "sites" / name for name in names]
    for site in folders:
        _settle_on_this_machine(site, data_dir)
    return folders


def _settle_on_this_machine(site: Path, data_dir: str | None) -> None:
    """Give a site a port that is free here, and say where the recipe's files are."""
    file = site / "site.toml"
    port = read_site(site).runtime_port
    text = file.read_text().replace(f"runtime_port = {port}", f"runtime_port = {free_port()}")
    if data_dir:
        absolute = json.dumps(str(Path(data_dir).resolve()))
        text = text.replace("\n[data]", f"data_dir = {absolute}\n\n[data]")
    file.write_text(text)


def agree(folder: Path, recipe: Recipe) -> None:
    """Put another recipe into a local federation that is there already."""
    text = dump_recipe(recipe).encode()
    for member in (folder / "server", *(folder / "sites").iterdir()):
        write_bytes(member / "recipe.toml", text)


@contextmanager
def up(folder: Path, say: Callable[[str], None]) -> Iterator[dict[str, Running]]:
    """Start the server and the sites of a folder, and wait until all are connected. Gives their processes by name.

    What they print goes to FOLDER/logs.
    """
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    sites = sorted(path.parent for path in (folder / "sites").glob("*/site.toml"))
    if not sites:
        raise RunError(f"{folder} must hold the folders of a server and its sites. It has no sites.")
    with ExitStack() as stack:
        server = serve.server(folder / "server", say, logs / "server.log")
        running = {"server": stack.enter_context(server)}
        for site in sites:
            log = logs / f"{site.name}.log"
            running[site.name] = stack.enter_context(serve.site(site, say, log))
        wait_until_online(folder / "server", len(sites))
        yield running


def wait_until_online(server: Path, count: int, seconds: float = SECONDS) -> None:
    """Wait until this many sites are connected to the server of this folder."""
    until = time.monotonic() + seconds
    while (online := _count_online(server)) < count:
        if time.monotonic() > until:
            raise RunError(f"{count} sites must connect. {online} did within {seconds:g} s; the logs say why.")
        time.sleep(0.2)


def _count_online(server: Path) -> int:
    return sum(node["status"] == "online" for node in serve.nodes(server))
