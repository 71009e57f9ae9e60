"""The server's side of a deployed run: who is connected, what they have, then the same rounds as everywhere."""

import json
import time
import tomllib
import traceback
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmix.data.federation import PARTS, Federation
from fedmix.deploy import wire
from fedmix.deploy.submit import opened
from fedmix.engines.flower import FlowerEngine, parcel
from fedmix.errors import DataError, FedmixError, RunError
from fedmix.running.directory import FAILURE, describe_federation
from fedmix.running.files import write_json
from fedmix.running.run import Stopped, run_over
from fedmix.settings.build import build
from fedmix.settings.recipe import SITES, Recipe, dump_recipe, make_recipe
from fedmix.settings.sites import agreed, known_to_server

POLL_SECONDS = 0.2
MOST_POINTS = 10**12  # of a client; more is a mistake, or worse
FOR_SITES = ("input", "classes", "labels", "features", "categories", "side", "mean", "std")  # of federation.json


@dataclass(frozen=True)
class Asked:
    """What a submitted run is to do."""

    recipe: str  # TOML
    out: str
    data_dir: str | None
    wait: float  # seconds for sites to connect
    number: str = ""  # Flower's of this run


def serve(grid: Any, asked: Asked) -> None:
    """Run to the end, or say in the run directory why not."""
    out = Path(asked.out)
    try:
        _serve(grid, make_recipe(tomllib.loads(asked.recipe)), asked, out)
    except Stopped:
        raise  # by a signal: it can go on, and nothing failed
    except FedmixError as error:
        write_json(out / FAILURE, {"flower": asked.number, "error": str(error)})
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        if "401 Unauthorized" not in told:  # what Flower says to a run that was stopped
            failed = {"error": f"the server failed ({told})", "traceback": traceback.format_exc()}
            write_json(out / FAILURE, {"flower": asked.number, **failed})
        raise


def _serve(grid: Any, recipe: Recipe, asked: Asked, out: Path) -> None:
    directory = opened(out, recipe, resume=True, overwrite=False)
    try:
        nodes = Nodes(grid, recipe)
        file = out / "sites.json"
        if file.exists():
            known = json.loads(file.read_text())
            nodes.wait(sorted(known["sites"]), asked.wait, must=False)
        else:
            sites = agreed(recipe.data).sites if recipe.data.source == SITES else nodes.registered(asked.wait)
            known = {"run": uuid.uuid4().hex, "sites": nodes.ask(sites, asked.wait)}
        federation = known_to_server(recipe, known["sites"]) if recipe.data.source == SITES else None
        experiment = build(recipe, federation, data_dir=asked.data_dir)
        homes = _homes(experiment.federation, known["sites"])
        write_json(file, known)
        described = describe_federation(experiment.federation)
        written = dump_recipe(recipe)

        def reachable() -> dict[int, int]:
            online = nodes.online()
            return {client: online[site] for client, site in homes.items() if site in online}

        def about(node: int) -> dict[str, Any]:
            """What a site must know, and nothing of the others."""
            site = nodes.names[node]
            own = {key: described[key] for key in FOR_SITES}
            own["clients"] = [
                name if homes[s] == site else f"client {s}" for s, name in enumerate(described["clients"])
            ]
            return {
                "run": known["run"],
                "recipe": written,
                "federation": own,
                "digest": known["sites"][site]["digest"],
            }

        online = list(nodes.online().values())
        run_over(
            experiment,
            directory,
            FlowerEngine(grid, about, reachable, online, recipe.server.deadline, strict=False),
        )
    finally:
        directory.close()


def _homes(federation: Federation, sites: Mapping[str, Mapping[str, Any]]) -> dict[int, str]:
    """The site of each client, by number. Every client must be somewhere, and at one site only."""
    homes: dict[str, str] = {}
    for site, answer in sites.items():
        for name in answer["clients"]:
            if name in homes:
                raise DataError(f"client {name!r} must be at one site. It is at {homes[name]} and at {site}.")
            homes[name] = site
    nowhere = [name for name in federation.names if name not in homes]
    if nowhere:
        raise DataError(
            f"every client of the recipe must be at a site. {len(nowhere)} are at none, {nowhere[0]!r} among them."
        )
    return {s: homes[name] for s, name in enumerate(federation.names)}


class Nodes:
    """Sites by the names that their keys were registered under; a node cannot choose its own."""

    def __init__(self, grid: Any, recipe: Recipe) -> None:
        self.grid = grid
        self.recipe = recipe
        self.names: dict[int, str] = {}  # of all that were ever connected

    def online(self) -> dict[str, int]:
        """Connected sites -> node id."""
        found = {node.name: node.node_id for node in self.grid.get_nodes() if node.name}
        self.names |= {number: name for name, number in found.items()}
        return found

    def registered(self, seconds: float, settle: float = 3.0) -> list[str]:
        """Of a recipe that names no sites: those that are connected, once no more are coming."""
        found, since = sorted(self.online()), time.monotonic()
        until = since + seconds
        while not found or time.monotonic() < since + settle:
            if not found and time.monotonic() > until:
                raise RunError(f"at least one site must be connected. After {seconds:g} s none is.")
            time.sleep(POLL_SECONDS)
            now = sorted(self.online())
            if now != found:
                found, since = now, time.monotonic()
        return found

    def wait(self, sites: Sequence[str], seconds: float, must: bool = True) -> None:
        until = time.monotonic() + seconds
        while missing := [site for site in sites if site not in self.online()]:
            if time.monotonic() > until:
                if not must:
                    return
                raise RunError(
                    f"every site must be connected before the first round. Missing after {seconds:g} s: {', '.join(missing)}; "
                    "start them there, and see what `fedmix deploy check` says."
                )
            time.sleep(POLL_SECONDS)

    def ask(self, sites: Sequence[str], seconds: float) -> dict[str, dict[str, Any]]:
        """What each site has."""
        self.wait(sites, seconds)
        online = self.online()
        content = wire.table({"recipe": dump_recipe(self.recipe)})
        sent = {}
        for site in sites:
            (message_id,) = self.grid.push_messages([parcel(content, online[site], "query", None, "query")])
            sent[message_id] = site
        answers: dict[str, dict[str, Any]] = {}
        until = time.monotonic() + seconds
        while sent and time.monotonic() < until:
            for reply in self.grid.pull_messages(sorted(sent)):
                site = sent.pop(reply.metadata.reply_to_message_id)
                answers[site] = _answer(site, reply)
            time.sleep(POLL_SECONDS)
        if sent:
            raise RunError(f"every site must say what it has. {', '.join(sent.values())} did not within {seconds:g} s.")
        return {site: answers[site] for site in sites}


def _answer(site: str, reply: Any) -> dict[str, Any]:
    """A site's answer, or why it cannot be used."""
    if reply.has_error():
        raise RunError(f"site {site} failed: {' '.join(str(reply.error.reason).split())[:300]}")
    try:
        answer = json.loads(reply.content["table"]["json"])
        if "error" in answer:
            raise RunError(str(answer["error"]))
        names, points = answer["clients"], answer["points"]
        sound = (
            all(isinstance(name, str) for name in names)
            and isinstance(answer["digest"], str)
            and all(len(points[part]) == len(names) for part in PARTS)
            and all(type(n) is int and 0 <= n < MOST_POINTS for part in PARTS for n in points[part])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"site {site} must say what it has. Its answer cannot be read ({error}).") from error
    if not names or not sound:
        raise RunError(f"site {site} must have clients with points. It says that it has none.")
    return {"clients": names, "points": {part: points[part] for part in PARTS}, "digest": answer["digest"]}
