"""The server's side of a deployed run: it learns who is connected and what they have, then trains as everywhere."""

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
from fedmix.running.directory import describe_federation
from fedmix.running.files import write_json
from fedmix.running.run import Stopped, run_over
from fedmix.schema import FAILURE
from fedmix.settings.build import build
from fedmix.settings.reading import dump_recipe, make_recipe
from fedmix.settings.recipe import SITES, Recipe
from fedmix.settings.sites import agreed, known_to_server

POLL_SECONDS = 0.2  # between two questions to Flower
MOST_POINTS = 10**12  # that a client may have; more is a mistake, or worse
FOR_SITES = ("input", "classes", "labels", "features", "categories", "side", "mean", "std")  # keys of federation.json


@dataclass(frozen=True)
class Asked:
    """What a submitted run is to do."""

    recipe: str  # TOML
    out: str  # the run directory
    data_dir: str | None
    wait: float  # seconds in which sites must connect
    number: str = ""  # Flower's number of this run


def serve(grid: Any, asked: Asked) -> None:
    """Train to the end, or write into the run directory why not."""
    out = Path(asked.out)
    try:
        _serve(grid, make_recipe(tomllib.loads(asked.recipe)), asked, out)
    except Stopped:
        raise  # by a signal: the run can go on, and nothing failed
    except FedmixError as error:
        write_json(out / FAILURE, {"flower": asked.number, "error": str(error)})
        raise
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        was_stopped = "401 Unauthorized" in words  # what Flower says to a run that was stopped
        if not was_stopped:
            failure = {"error": f"the server failed ({words})", "traceback": traceback.format_exc()}
            write_json(out / FAILURE, {"flower": asked.number, **failure})
        raise


def _serve(grid: Any, recipe: Recipe, asked: Asked, out: Path) -> None:
    """Learn what the sites have, or read it where the run goes on, and train over them."""
    directory = opened(out, recipe, resume=True, overwrite=False)
    try:
        nodes = Nodes(grid, recipe)
        file = out / "sites.json"
        known = _read_sites(file, nodes, asked) if file.exists() else _ask_sites(nodes, recipe, asked)
        federation = known_to_server(recipe, known["sites"]) if recipe.data.source == SITES else None
        experiment = build(recipe, federation, data_dir=asked.data_dir)
        homes = _homes(experiment.federation, known["sites"])
        write_json(file, known)
        described = describe_federation(experiment.federation)
        briefing = _Briefing(nodes, homes, known, dump_recipe(recipe), described)
        online = list(nodes.online().values())
        deadline = recipe.server.deadline
        engine = FlowerEngine(grid, briefing.about, briefing.reachable, online, deadline, strict=False)
        run_over(experiment, directory, engine)
    finally:
        directory.close()


class Nodes:
    """Sites by the names that their keys were registered under; a node cannot choose its own."""

    def __init__(self, grid: Any, recipe: Recipe) -> None:
        self.grid = grid
        self.recipe = recipe
        self.names: dict[int, str] = {}  # of all nodes that were ever connected

    def online(self) -> dict[str, int]:
        """Give the nodes of the sites that are connected, by the sites' names."""
        nodes = {node.name: node.node_id for node in self.grid.get_nodes() if node.name}
        self.names |= {number: name for name, number in nodes.items()}
        return nodes

    def connected(self, seconds: float, settle: float = 3.0) -> list[str]:
        """Name the sites that are connected once no more are coming, for a recipe that names none.

        seconds: in which the first must come. settle: for how many seconds nothing must have changed.
        """
        sites, since = sorted(self.online()), time.monotonic()
        until = since + seconds
        while not sites or time.monotonic() < since + settle:
            if not sites and time.monotonic() > until:
                raise RunError(f"at least one site must be connected. After {seconds:g} s none is.")
            time.sleep(POLL_SECONDS)
            sites_now = sorted(self.online())
            if sites_now != sites:
                sites, since = sites_now, time.monotonic()
        return sites

    def wait(self, sites: Sequence[str], seconds: float, must: bool = True) -> None:
        """Wait until these sites are connected. must: it is an error if one is not after this many seconds."""
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
        """Ask each site what it has: its clients, their numbers of points, and a digest of the data."""
        self.wait(sites, seconds)
        waiting_for = self._send_questions(sites)
        answers: dict[str, dict[str, Any]] = {}
        until = time.monotonic() + seconds
        while waiting_for and time.monotonic() < until:
            for reply in self.grid.pull_messages(sorted(waiting_for)):
                site = waiting_for.pop(reply.metadata.reply_to_message_id)
                answers[site] = _answer(site, reply)
            time.sleep(POLL_SECONDS)
        if waiting_for:
            silent = ", ".join(waiting_for.values())
            raise RunError(f"every site must say what it has. {silent} did not within {seconds:g} s.")
        return {site: answers[site] for site in sites}

    def _send_questions(self, sites: Sequence[str]) -> dict[str, str]:
        """Send each site the recipe. Gives the site of each message, by the message's name."""
        online = self.online()
        content = wire.table({"recipe": dump_recipe(self.recipe)})
        sent: dict[str, str] = {}
        for site in sites:
            question = parcel(content, online[site], "query", None, "query")
            (message_id,) = self.grid.push_messages([question])
            sent[message_id] = site
        return sent


def _answer(site: str, reply: Any) -> dict[str, Any]:
    """Read a site's answer, or raise why it cannot be used."""
    if reply.has_error():
        reason = " ".join(str(reply.error.reason).split())
        raise RunError(f"site {site} failed: {reason[:300]}")
    try:
        answer = json.loads(reply.content["table"]["json"])
        if "error" in answer:
            raise RunError(str(answer["error"]))
        is_sound = _is_sound(answer)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"site {site} must say what it has. Its answer cannot be read ({error}).") from error
    if not is_sound:
        raise RunError(f"site {site} must have clients with points. It says that it has none.")
    points = {part: answer["points"][part] for part in PARTS}
    return {"clients": answer["clients"], "points": points, "digest": answer["digest"]}


def _is_sound(answer: Any) -> bool:
    """Say whether an answer names clients and counts their points. It raises where the answer has another form."""
    names, points = answer["clients"], answer["points"]
    if not all(isinstance(name, str) for name in names):
        return False
    if not isinstance(answer["digest"], str):
        return False
    return _are_counts(points, len(names)) and len(names) > 0


def _are_counts(points: Any, clients: int) -> bool:
    """Say whether every part of the data has a number of points for this many clients."""
    if not all(len(points[part]) == clients for part in PARTS):
        return False
    return all(_is_count(count) for part in PARTS for count in points[part])


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST_POINTS  # True and False are no counts


def _read_sites(file: Path, nodes: Nodes, asked: Asked) -> dict[str, Any]:
    """Read what a run that goes on knows of its sites. Those that do not come back are absent from its rounds."""
    known: dict[str, Any] = json.loads(file.read_text())
    nodes.wait(sorted(known["sites"]), asked.wait, must=False)
    return known


def _ask_sites(nodes: Nodes, recipe: Recipe, asked: Asked) -> dict[str, Any]:
    """Ask the sites of a new run what they have. The run gets the name under which they keep what belongs to it."""
    sites = agreed(recipe.data).sites if recipe.data.source == SITES else nodes.connected(asked.wait)
    return {"run": uuid.uuid4().hex, "sites": nodes.ask(sites, asked.wait)}


@dataclass(frozen=True)
class _Briefing:
    """What goes with every message to a site, and which clients can be reached."""

    nodes: Nodes
    homes: Mapping[int, str]  # the site of each client
    known: Mapping[str, Any]  # sites.json
    recipe: str  # TOML
    federation: Mapping[str, Any]  # federation.json

    def reachable(self) -> dict[int, int]:
        """Give the node of each client whose site is connected now."""
        online = self.nodes.online()
        return {client: online[site] for client, site in self.homes.items() if site in online}

    def about(self, node: int) -> dict[str, Any]:
        """Give what the site behind a node must know, and nothing about the others."""
        site = self.nodes.names[node]
        federation = {key: self.federation[key] for key in FOR_SITES}
        federation["clients"] = self._client_names(site)
        return {
            "run": self.known["run"],
            "recipe": self.recipe,
            "federation": federation,
            "digest": self.known["sites"][site]["digest"],
        }

    def _client_names(self, site: str) -> list[str]:
        """Name all clients as one site may know them: its own by name, those of others by number."""
        names: list[str] = self.federation["clients"]
        return [name if self.homes[s] == site else f"client {s}" for s, name in enumerate(names)]


def _homes(federation: Federation, sites: Mapping[str, Mapping[str, Any]]) -> dict[int, str]:
    """Find the site of each client, by number. Every client must be somewhere, and at one site only."""
    homes = _homes_by_name(sites)
    nowhere = [name for name in federation.names if name not in homes]
    if nowhere:
        raise DataError(
            f"every client of the recipe must be at a site. {len(nowhere)} are at none, {nowhere[0]!r} among them."
        )
    return {s: homes[name] for s, name in enumerate(federation.names)}


def _homes_by_name(sites: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    homes: dict[str, str] = {}
    for site, answer in sites.items():
        for name in answer["clients"]:
            if name in homes:
                raise DataError(f"client {name!r} must be at one site. It is at {homes[name]} and at {site}.")
            homes[name] = site
    return homes
