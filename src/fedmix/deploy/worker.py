"""A site's worker: torch, model and data stay in memory between rounds. It answers its site's ClientApp over a socket.

    python -m fedmix.deploy.worker FOLDER SOCKET

It ends when its standard input is closed: when the site ends.
"""

import contextlib
import hashlib
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmix.deploy import wire
from fedmix.deploy.acceptance import accepted_or_refused
from fedmix.deploy.folder import own_data, read_site
from fedmix.engines.flower import pack_outcomes, unpack_orders
from fedmix.engines.site import Site
from fedmix.engines.store import SiteStore
from fedmix.errors import ClientError, DataError, FedmixError
from fedmix.running.files import write_bytes, write_json
from fedmix.settings.build import revive
from fedmix.settings.recipe import Recipe, dump_recipe
from fedmix.settings.sites import Holding, OwnClients

RUN = re.compile(r"[0-9a-f]{32}")


def site_key(folder: Path) -> bytes:
    """For fingerprints of data that only this site can make."""
    return hashlib.blake2b((folder / "node.key").read_bytes(), digest_size=32).digest()


def run_folder(folder: Path, run: str) -> Path:
    """Where a site keeps what belongs to a run."""
    if not RUN.fullmatch(run):
        raise ClientError(f"a run must be named by 32 hexadecimal digits. Got {run[:40]!r} instead.")
    return folder / "runs" / run


class Worker:
    """The data of one recipe and the site of one run, as long as they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = read_site(folder)
        self._held: tuple[str, Holding] | None = None
        self._site: tuple[str, Site] | None = None

    def answer(self, kind: str, content: Any) -> Any:
        """query: what this site has. train: a node's orders."""
        if kind == "query":  # of a new run: with the settings and the data as they are now
            self.settings = read_site(self.folder)
            self._held = self._site = None
            about = json.loads(content["table"]["json"])
            return wire.table(self._holding(self._recipe(about)).describe(site_key(self.folder)))
        about, orders = unpack_orders(content)
        return pack_outcomes(self._site_of(about).handle(orders))

    def _recipe(self, about: Mapping[str, Any]) -> Recipe:
        """The accepted recipe that the server means; nothing of another one is used, and no name of it is imported."""
        return accepted_or_refused(self.folder, about["recipe"])

    def _holding(self, recipe: Recipe) -> Holding:
        key = repr((recipe.data, recipe.seed))
        if self._held is None or self._held[0] != key:
            self._held = None
            self._held = (
                key,
                own_data(self.folder, self.settings, recipe),
            )
        return self._held[1]

    def _site_of(self, about: Mapping[str, Any]) -> Site:
        recipe = self._recipe(about)  # asked every time: an owner may change their mind while a run goes on
        key = json.dumps(about, sort_keys=True)
        if self._site is None or self._site[0] != key:
            self._site = None
            self._site = (key, self._make_site(recipe, about))
        return self._site[1]

    def _make_site(self, recipe: Recipe, about: Mapping[str, Any]) -> Site:
        federation = about["federation"]
        held = self._holding(recipe)
        if held.digest(site_key(self.folder)) != about["digest"]:
            raise ClientError(
                f"the data of site {self.settings.name} is not what it was when this run began; put it back, or start a new run"
            )
        _, algorithm = revive(recipe, federation)
        own = run_folder(self.folder, about["run"])
        own.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_bytes(own / "recipe.toml", dump_recipe(recipe).encode())
        write_json(own / "federation.json", federation)
        clients = OwnClients(held, federation["clients"])
        share = recipe.evaluation.share_private and self.settings.share_private
        return Site(algorithm, clients, recipe.seed, SiteStore(own / "clients"), share, keep=True)


def discreet(error: Exception) -> str:
    """What may be said of an error to the server."""
    if isinstance(error, DataError):
        return "its data does not fit the recipe; `fedmix deploy check` there, and its log, say why"
    if isinstance(error, ClientError):
        return str(error)
    return f"it failed ({type(error).__name__}); its log says why"


def serve(folder: Path, path: str) -> None:
    """Answer one message after the other until this process ends."""
    worker = Worker(folder)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        os.chmod(path, 0o600)
        listening.listen()
        while True:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(ClientError, OSError):  # whoever asked is gone: nobody to tell
                kind, content = wire.receive(connection)
                try:
                    answer = worker.answer(kind, content)
                except Exception as error:  # what it says may quote the data: it stays here
                    print(f"fedmix: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                    answer = f"site {worker.settings.name}: {discreet(error)}"
                wire.send(connection, "answer", answer)


def _end_with_site() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    threading.Thread(target=_end_with_site, daemon=True).start()
    try:
        serve(Path(sys.argv[1]), sys.argv[2])
    except FedmixError as error:
        print(f"fedmix: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
