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
from fedmix.deploy.folder import data_of_site, read_site
from fedmix.engines.flower import pack_outcomes, unpack_orders
from fedmix.engines.site import Site
from fedmix.engines.store import SiteStore
from fedmix.errors import ClientError, DataError, FedmixError
from fedmix.running.files import write_bytes, write_json
from fedmix.settings.build import revive
from fedmix.settings.reading import dump_recipe
from fedmix.settings.recipe import Recipe
from fedmix.settings.sites import Holding, OwnClients

RUN = re.compile(r"[0-9a-f]{32}")


def site_key(folder: Path) -> bytes:
    """Give a key with which only this site can make fingerprints of its data."""
    return hashlib.blake2b((folder / "node.key").read_bytes(), digest_size=32).digest()


def run_folder(folder: Path, run: str) -> Path:
    """Say where a site keeps what belongs to a run."""
    if not RUN.fullmatch(run):
        raise ClientError(f"a run must be named by 32 hexadecimal digits. Got {run[:40]!r} instead.")
    return folder / "runs" / run


class Worker:
    """It keeps the data of one recipe and the site of one run, until it is asked for others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = read_site(folder)
        self._held: tuple[str, Holding] | None = None  # with the settings that the data depends on
        self._site: tuple[str, Site] | None = None  # with what it was made from

    def answer(self, kind: str, content: Any) -> Any:
        """Answer what the server asks. kind: "query" asks what this site has; anything else brings orders to its clients."""
        if kind == "query":
            return wire.table(self._describe(content))
        about, orders = unpack_orders(content)
        return pack_outcomes(self._site_of(about).handle(orders))

    def _describe(self, content: Any) -> dict[str, Any]:
        """Say what this site has. A new run asks it, so settings and data are read as they are now."""
        self.settings = read_site(self.folder)
        self._held = self._site = None
        about = json.loads(content["table"]["json"])
        held = self._holding(self._recipe(about))
        return held.describe(site_key(self.folder))

    def _recipe(self, about: Mapping[str, Any]) -> Recipe:
        """Give the accepted recipe that the server means. Nothing of another is used, and no name in it is imported."""
        return accepted_or_refused(self.folder, about["recipe"])

    def _holding(self, recipe: Recipe) -> Holding:
        """Give the data that this site has for a recipe; it is read where it is not in memory."""
        key = repr((recipe.data, recipe.seed))
        if self._held is None or self._held[0] != key:
            self._held = None  # there may be no room for the old data and the new
            self._held = (key, data_of_site(self.folder, self.settings, recipe))
        return self._held[1]

    def _site_of(self, about: Mapping[str, Any]) -> Site:
        """Give the site of a run; it is made where it is not in memory."""
        recipe = self._recipe(about)  # asked every time: an owner may change their mind while a run goes on
        key = json.dumps(about, sort_keys=True)
        if self._site is None or self._site[0] != key:
            self._site = None  # as above
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
        kept = run_folder(self.folder, about["run"])
        kept.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_bytes(kept / "recipe.toml", dump_recipe(recipe).encode())
        write_json(kept / "federation.json", federation)
        clients = OwnClients(held, federation["clients"])
        # The gate leaves this site only where both the recipe and the site's owner allow it.
        share = recipe.evaluation.share_private and self.settings.share_private
        return Site(algorithm, clients, recipe.seed, SiteStore(kept / "clients"), share, keep=True)


def discreet(error: Exception) -> str:
    """Say of an error what the server may know, which is nothing of the data."""
    if isinstance(error, DataError):
        return "its data does not fit the recipe; `fedmix deploy check` there, and its log, say why"
    if isinstance(error, ClientError):
        return str(error)
    return f"it failed ({type(error).__name__}); its log says why"


def serve(folder: Path, path: str) -> None:
    """Answer one message after the other at the socket `path`, until this process ends."""
    worker = Worker(folder)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        os.chmod(path, 0o600)
        listening.listen()
        while True:
            connection, _ = listening.accept()
            # An error of the connection means that whoever asked is gone, and there is nobody to tell.
            with connection, contextlib.suppress(ClientError, OSError):
                kind, content = wire.receive(connection)
                wire.send(connection, "answer", _answer_or_error(worker, kind, content))


def _answer_or_error(worker: Worker, kind: str, content: Any) -> Any:
    """Give the worker's answer, or as text why there is none."""
    try:
        return worker.answer(kind, content)
    except Exception as error:
        # What the error says may quote the data: it goes to this site's log, and not to the server.
        print(f"fedmix: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return f"site {worker.settings.name}: {discreet(error)}"


def _end_with_site() -> None:
    """End this process when its standard input is closed, in whatever it is doing."""
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
