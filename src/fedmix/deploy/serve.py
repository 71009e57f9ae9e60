"""Start the server or a site from its folder: Flower's processes, with TLS and keys, and the worker beside a SuperNode."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedmix.deploy.folder import read_server, read_site
from fedmix.deploy.processes import Child
from fedmix.engines.flower import flwr
from fedmix.errors import RunError
from fedmix.running.files import write_json

TURNED_AWAY = re.compile(r"Exit Code: 305 (.*?) For more information")  # what a SuperNode says then
START_SECONDS = 120.0
LET_IN_SECONDS = 120.0  # for a site that the server does not let in yet
RETRY_SECONDS = 3.0
STEADY_SECONDS = 30.0  # a SuperNode that lasts so long was let in
UNKNOWN = ""  # a registered site whose number was not written down
LINK = "fedmix"  # the server's name in Flower's own settings


def environment(folder: Path) -> dict[str, str]:
    """Flower keeps to this folder, reports to nobody, installs nothing, and does not wait a second where it need not."""
    here = str(Path(sys.executable).parent)
    return {
        "FLWR_HOME": str(folder.resolve() / "flower"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
        "PATH": os.pathsep.join([here, os.environ.get("PATH", os.defpath)]),
    }


def superlink_command(folder: Path) -> list[str]:
    settings = read_server(folder)
    own = folder.resolve()
    return [
        sys.executable,
        "-m",
        "fedmix.deploy.superlink",
        *("--host", settings.host, "--port", str(settings.port)),
        *("--ssl-ca-certfile", str(own / "ca.crt")),
        *("--ssl-certfile", str(own / "server.crt"), "--ssl-keyfile", str(own / "server.key")),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
        *("--database", str(own / "flower" / "superlink.db")),
    ]


def supernode_command(folder: Path, worker: str) -> list[str]:
    settings = read_site(folder)
    own = folder.resolve()
    return [
        sys.executable,
        "-m",
        "fedmix.deploy.supernode",
        *("--superlink", settings.server, "--root-certificates", str(own / "ca.crt")),
        *("--auth-supernode-private-key", str(own / "node.key")),
        *("--host", "127.0.0.1", "--port", str(settings.runtime_port)),
        *("--node-config", f'worker="{worker}"'),
    ]


def worker_command(folder: Path, worker: str) -> list[str]:
    return [sys.executable, "-m", "fedmix.deploy.worker", str(folder.resolve()), worker]


def commands(folder: Path) -> tuple[dict[str, str], list[list[str]]]:
    """What `serve` starts, for people who start it their own way."""
    if (folder / "server.toml").is_file():
        return environment(folder), [superlink_command(folder)]
    return environment(folder), [worker_command(folder, "SOCKET"), supernode_command(folder, "SOCKET")]


@dataclass
class Running:
    """Processes of a server or a site. trouble: why they cannot go on."""

    children: dict[str, Child]
    trouble: str | None = None


def serve(folder: Path, say: Callable[[str], None], wait: float = LET_IN_SECONDS) -> None:
    """Until Ctrl-C or SIGTERM, or until it cannot go on, which is an error."""
    flwr()
    if not any((folder / name).is_file() for name in ("server.toml", "site.toml")):
        raise RunError(f"{folder} must be the folder of a server or a site, as `fedmix deploy init` writes them.")
    started = server(folder, say) if (folder / "server.toml").is_file() else site(folder, say, wait=wait)
    with told_to_stop() as stop, started as running:
        while not stop.wait(0.5):
            if running.trouble:
                raise RunError(running.trouble)


@contextmanager
def server(folder: Path, say: Callable[[str], None], log: Path | None = None) -> Iterator[Running]:
    """The SuperLink, with the sites' keys registered."""
    settings = read_server(folder)
    (folder / "flower").mkdir(mode=0o700, exist_ok=True)
    if _listening("127.0.0.1", settings.port):
        raise RunError(f"port {settings.port} must be free. Something listens on it already.")
    with ExitStack() as stack:
        link = Child("the SuperLink", superlink_command(folder), environment(folder), log)
        stack.callback(link.stop)
        running = Running({"link": link})
        _wait_for(lambda: _listening("127.0.0.1", settings.port), link)
        for words in register(folder):
            say(words)
        say(f"the server listens on {settings.host}:{settings.port}")

        def look() -> None:
            if link.status is not None:
                running.trouble = f"the SuperLink ended with status {link.status}; what it printed says why."

        stack.enter_context(_looking(running, look, say))
        yield running


@contextmanager
def site(
    folder: Path, say: Callable[[str], None], log: Path | None = None, wait: float = LET_IN_SECONDS
) -> Iterator[Running]:
    """The SuperNode and its worker. A worker that dies is started again; so is a SuperNode that the server does not let in
    yet: for a minute after a crash it still counts on the one before."""
    settings = read_site(folder)
    (folder / "flower").mkdir(mode=0o700, exist_ok=True)
    with ExitStack() as stack:
        path = str(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedmix-"))) / "worker")
        env = environment(folder)

        def worker() -> Child:
            return Child("the worker", worker_command(folder, path), env, log, pipe=True)

        def node() -> Child:
            return Child("the SuperNode", supernode_command(folder, path), env, log)

        running = Running({"worker": worker(), "node": node()})

        def stop() -> None:
            for name in ("node", "worker"):
                running.children[name].stop()

        stack.callback(stop)
        refused_since: float | None = None

        def look() -> None:
            nonlocal refused_since
            old = running.children["worker"]
            if old.status is not None:
                say(f"the worker ended with status {old.status}; it is started again")
                old.stop()
                running.children["worker"] = worker()
            old = running.children["node"]
            if old.status is None:
                refused_since = None if old.age > STEADY_SECONDS else refused_since
                return
            told = TURNED_AWAY.search(" ".join(line.strip() for line in old.last))
            first = refused_since is None
            refused_since = refused_since or time.monotonic()
            if told and time.monotonic() < refused_since + wait:
                if first:
                    say(f"the server does not let this site in yet; trying for {wait:g} s")
                old.stop()
                time.sleep(RETRY_SECONDS)
                running.children["node"] = node()
            else:
                running.trouble = _why_it_ended(old, told)

        stack.enter_context(_looking(running, look, say))
        say(f"site {settings.name} connects to {settings.server}")
        yield running


def _why_it_ended(node: Child, told: re.Match[str] | None) -> str:
    if told:
        return (
            f"the server does not know this site's key ({told[1]}). Its node.pub must be in the server's keys/ folder, under "
            "the site's name, when the server starts."
        )
    return f"the SuperNode ended with status {node.status}; what it printed says why."


@contextmanager
def _looking(running: Running, look: Callable[[], None], say: Callable[[str], None]) -> Iterator[None]:
    """Call it every second or so, in the background."""
    done = threading.Event()

    def go_on() -> None:
        while not done.wait(0.5):
            try:
                look()
            except Exception as error:  # a settings file that was spoilt meanwhile, say
                running.trouble = str(error)
            if running.trouble:
                say(running.trouble)
                return

    keeper = threading.Thread(target=go_on, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        done.set()
        keeper.join()


def register(folder: Path) -> list[str]:
    """Who may take part: the public keys in keys/, under the sites' names. What changed is told to the SuperLink, and given
    back in words."""
    file = folder / "flower" / "registered.json"
    listed = {row["node-id"] for row in nodes(folder)}
    before = json.loads(file.read_text()) if file.exists() else {}
    known = {name: row for name, row in before.items() if row["node"] in (*listed, UNKNOWN)}
    keys = {path.stem: path.read_text() for path in sorted((folder / "keys").glob("*.pub"))}
    done = []
    for name in [name for name, row in known.items() if keys.get(name) != row["key"]]:
        if (number := known.pop(name)["node"]) != UNKNOWN:
            flower(folder, "supernode", "unregister", number, LINK)
        done.append(f"site {name} is not registered any more")
    for name in [name for name in keys if name not in known]:
        path = str((folder / "keys" / f"{name}.pub").resolve())
        try:
            number = str(flower(folder, "supernode", "register", path, LINK, "--name", name)["node-id"])
        except RunError as error:
            if "already in use" not in str(error):
                raise
            number = UNKNOWN  # the server died between registering and writing it down
        known[name] = {"node": number, "key": keys[name]}
        write_json(file, known)
        done.append(f"registered site {name}")
    write_json(file, known)
    return done


def online(folder: Path) -> list[str]:
    """Names of the sites that are connected, as far as they are known."""
    file = folder / "flower" / "registered.json"
    names = {row["node"]: name for name, row in json.loads(file.read_text()).items()} if file.exists() else {}
    return [names.get(str(row["node-id"]), "?") for row in nodes(folder) if row["status"] == "online"]


def nodes(folder: Path) -> list[dict[str, Any]]:
    """Registered SuperNodes, as Flower lists them."""
    listed: list[dict[str, Any]] = flower(folder, "supernode", "list", LINK, "--format", "json").get("nodes", [])
    return listed


def flower(folder: Path, *args: str, timeout: float = 120.0) -> Any:
    """Flower's own command, against this server; what it prints as JSON."""
    settings = read_server(folder)
    own = folder.resolve()
    address = {"address": f"127.0.0.1:{settings.port}", "root-certificates": str(own / "ca.crt")}
    home = own / "flower"
    home.mkdir(mode=0o700, exist_ok=True)
    text = tomli_w.dumps({"superlink": {"default": LINK, LINK: address}})
    if not (home / "config.toml").exists() or (home / "config.toml").read_text() != text:
        (home / "config.toml").write_text(text)
    command = ["flwr", *args]
    if "--format" not in args and args[0] != "stop":
        command += ["--format", "json"]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **environment(folder)},
            capture_output=True,
            text=True,
            timeout=timeout,
            start_new_session=True,  # Ctrl-C is for whoever asks, not for this
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"flwr {' '.join(args[:2])} did not answer within {timeout:g} s.") from error
    found = done.stdout[done.stdout.find("{") :] if "{" in done.stdout else ""
    try:
        answer = json.loads(found)
    except ValueError:
        answer = {}
    if done.returncode or answer.get("success") is False:
        words = answer.get("error-message") or f"{done.stderr}\n{done.stdout}"
        raise RunError(f"flwr {' '.join(args[:2])} failed: {' '.join(str(words).split())[-400:]}")
    return answer


def _listening(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


def _wait_for(ready: Callable[[], bool], child: Child) -> None:
    until = time.monotonic() + START_SECONDS
    while not ready():
        if child.status is not None:
            raise RunError(f"{child.name} ended with status {child.status} before it was ready; its log says why.")
        if time.monotonic() > until:
            raise RunError(f"{child.name} was not ready within {START_SECONDS:g} s.")
        time.sleep(0.1)


@contextmanager
def told_to_stop() -> Iterator[threading.Event]:
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
