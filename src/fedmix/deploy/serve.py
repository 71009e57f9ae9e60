"""Start the server or a site from its folder: Flower's processes, with TLS and keys, and the worker beside a SuperNode.

A server is one process, Flower's SuperLink. A site is two: Flower's SuperNode, and the worker that has torch and the data.
"""

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

TURNED_AWAY = re.compile(r"Exit Code: 305 (.*?) For more information")  # what a SuperNode prints that was not let in
START_SECONDS = 120.0  # in which the SuperLink must listen
LET_IN_SECONDS = 120.0  # for which a site tries where the server does not let it in yet
RETRY_SECONDS = 3.0  # between two such attempts
STEADY_SECONDS = 30.0  # a SuperNode that lasts this long was let in
UNKNOWN = ""  # the node of a registered site whose number was not written down
LINK = "fedmix"  # the server's name in Flower's own settings


def environment(folder: Path) -> dict[str, str]:
    """Give the environment in which Flower keeps to this folder, reports to nobody, installs nothing and waits for little."""
    programs = str(Path(sys.executable).parent)
    return {
        "FLWR_HOME": str(folder.resolve() / "flower"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
    }


def superlink_command(folder: Path) -> list[str]:
    """Give the command that starts the server's SuperLink."""
    settings = read_server(folder)
    server = folder.resolve()
    return [
        sys.executable,
        "-m",
        "fedmix.deploy.superlink",
        *("--host", settings.host, "--port", str(settings.port)),
        *("--ssl-ca-certfile", str(server / "ca.crt")),
        *("--ssl-certfile", str(server / "server.crt"), "--ssl-keyfile", str(server / "server.key")),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
        *("--database", str(server / "flower" / "superlink.db")),
    ]


def supernode_command(folder: Path, worker: str) -> list[str]:
    """Give the command that starts a site's SuperNode. worker: the socket of the worker beside it."""
    settings = read_site(folder)
    site = folder.resolve()
    return [
        sys.executable,
        "-m",
        "fedmix.deploy.supernode",
        *("--superlink", settings.server, "--root-certificates", str(site / "ca.crt")),
        *("--auth-supernode-private-key", str(site / "node.key")),
        *("--host", "127.0.0.1", "--port", str(settings.runtime_port)),
        *("--node-config", f'worker="{worker}"'),
    ]


def worker_command(folder: Path, worker: str) -> list[str]:
    """Give the command that starts a site's worker. worker: the socket that it answers at."""
    return [sys.executable, "-m", "fedmix.deploy.worker", str(folder.resolve()), worker]


def commands(folder: Path) -> tuple[dict[str, str], list[list[str]]]:
    """Give the environment and the commands behind `serve`, for people who start them their own way."""
    if _is_server(folder):
        return environment(folder), [superlink_command(folder)]
    return environment(folder), [worker_command(folder, "SOCKET"), supernode_command(folder, "SOCKET")]


@dataclass
class Running:
    """The processes of a server or a site. trouble: why they cannot go on."""

    children: dict[str, Child]
    trouble: str | None = None


def serve(folder: Path, say: Callable[[str], None], wait: float = LET_IN_SECONDS) -> None:
    """Start the server or the site of a folder, until Ctrl-C or SIGTERM. That it cannot go on is an error."""
    flwr()  # says what to install where Flower is missing
    if not _is_server(folder) and not (folder / "site.toml").is_file():
        raise RunError(f"{folder} must be the folder of a server or a site, as `fedmix deploy init` writes them.")
    started = server(folder, say) if _is_server(folder) else site(folder, say, wait=wait)
    with told_to_stop() as stop, started as running:
        while not stop.wait(0.5):
            if running.trouble:
                raise RunError(running.trouble)


def _is_server(folder: Path) -> bool:
    return (folder / "server.toml").is_file()


@contextmanager
def server(folder: Path, say: Callable[[str], None], log: Path | None = None) -> Iterator[Running]:
    """Start the SuperLink, and register the sites' keys at it."""
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

        stack.enter_context(_watching(running, look, say))
        yield running


@contextmanager
def site(
    folder: Path, say: Callable[[str], None], log: Path | None = None, wait: float = LET_IN_SECONDS
) -> Iterator[Running]:
    """Start a site's SuperNode and its worker, and start them again where that helps.

    wait: for how many seconds the SuperNode is started again if the server does not let it in.
    """
    settings = read_site(folder)
    (folder / "flower").mkdir(mode=0o700, exist_ok=True)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="fedmix-"))
        processes = _SiteProcesses(folder, str(Path(scratch) / "worker"), say, log, wait)
        stack.callback(processes.stop)
        stack.enter_context(_watching(processes.running, processes.look, say))
        say(f"site {settings.name} connects to {settings.server}")
        yield processes.running


class _SiteProcesses:
    """A site's SuperNode and its worker, from their start on.

    A worker that ends is started again. So is a SuperNode that the server does not let in yet: for a minute after a crash
    the server still counts on the SuperNode before it.
    """

    def __init__(
        self, folder: Path, worker_socket: str, say: Callable[[str], None], log: Path | None, wait: float
    ) -> None:
        self.folder = folder
        self.worker_socket = worker_socket
        self.say = say
        self.log = log
        self.wait = wait
        self._environment = environment(folder)
        self._refused_since: float | None = None
        self.running = Running({"worker": self._start_worker(), "node": self._start_node()})

    def stop(self) -> None:
        """Stop both, the SuperNode first, which needs the worker."""
        for name in ("node", "worker"):
            self.running.children[name].stop()

    def look(self) -> None:
        """See whether both processes still run, and do what can be done if not."""
        self._look_at_worker()
        self._look_at_node()

    def _start_worker(self) -> Child:
        command = worker_command(self.folder, self.worker_socket)
        return Child("the worker", command, self._environment, self.log, pipe=True)

    def _start_node(self) -> Child:
        command = supernode_command(self.folder, self.worker_socket)
        return Child("the SuperNode", command, self._environment, self.log)

    def _look_at_worker(self) -> None:
        worker = self.running.children["worker"]
        if worker.status is None:
            return
        self.say(f"the worker ended with status {worker.status}; it is started again")
        worker.stop()
        self.running.children["worker"] = self._start_worker()

    def _look_at_node(self) -> None:
        node = self.running.children["node"]
        if node.status is not None:
            self._start_node_again_or_give_up(node)
        elif node.age > STEADY_SECONDS:
            self._refused_since = None

    def _start_node_again_or_give_up(self, node: Child) -> None:
        """Start a SuperNode again that the server turned away, until `wait` is over. Any other end of it is trouble."""
        refusal = TURNED_AWAY.search(" ".join(line.strip() for line in node.last))
        is_first = self._refused_since is None
        self._refused_since = self._refused_since or time.monotonic()
        if not refusal or time.monotonic() >= self._refused_since + self.wait:
            self.running.trouble = _why_it_ended(node, refusal)
            return
        if is_first:
            self.say(f"the server does not let this site in yet; trying for {self.wait:g} s")
        node.stop()
        time.sleep(RETRY_SECONDS)
        self.running.children["node"] = self._start_node()


def _why_it_ended(node: Child, refusal: re.Match[str] | None) -> str:
    if refusal:
        return (
            f"the server does not know this site's key ({refusal[1]}). Its node.pub must be in the server's keys/ folder, "
            "under the site's name, when the server starts."
        )
    return f"the SuperNode ended with status {node.status}; what it printed says why."


@contextmanager
def _watching(running: Running, look: Callable[[], None], say: Callable[[str], None]) -> Iterator[None]:
    """Call `look` every half second in the background, until there is trouble."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            try:
                look()
            except Exception as error:  # a settings file that was spoilt meanwhile, say
                running.trouble = str(error)
            if running.trouble:
                say(running.trouble)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def register(folder: Path) -> list[str]:
    """Register the sites whose public keys are in keys/ at the SuperLink, and take away those that are there no more.

    What changed is given back in words.
    """
    file = _registry(folder)
    known = _still_registered(folder)
    keys = _public_keys(folder)
    gone = [name for name, row in known.items() if keys.get(name) != row["key"]]
    changes = []
    for name in gone:
        _unregister_site(folder, known.pop(name)["node"])
        changes.append(f"site {name} is not registered any more")
    for name, key in keys.items():
        if name in known:
            continue
        known[name] = {"node": _register_site(folder, name), "key": key}
        write_json(file, known)  # after each of them: the server may die before the next
        changes.append(f"registered site {name}")
    write_json(file, known)
    return changes


def _public_keys(folder: Path) -> dict[str, str]:
    """Read the sites' public keys, by the sites' names."""
    return {path.stem: path.read_text() for path in sorted((folder / "keys").glob("*.pub"))}


def _registry(folder: Path) -> Path:
    """Say where the server writes down which node of Flower's is which site, and with which key."""
    return folder / "flower" / "registered.json"


def _read_registry(folder: Path) -> dict[str, dict[str, str]]:
    file = _registry(folder)
    rows: dict[str, dict[str, str]] = json.loads(file.read_text()) if file.exists() else {}
    return rows


def _still_registered(folder: Path) -> dict[str, dict[str, str]]:
    """Read the registry without the nodes that the SuperLink does not list any more."""
    listed = {row["node-id"] for row in nodes(folder)}
    rows = _read_registry(folder)
    return {name: row for name, row in rows.items() if row["node"] == UNKNOWN or row["node"] in listed}


def _unregister_site(folder: Path, node: str) -> None:
    if node != UNKNOWN:
        flower(folder, "supernode", "unregister", node, LINK)


def _register_site(folder: Path, name: str) -> str:
    """Register a site's public key under its name. Flower's number of the node is given back."""
    key = str((folder / "keys" / f"{name}.pub").resolve())
    try:
        answer = flower(folder, "supernode", "register", key, LINK, "--name", name)
    except RunError as error:
        if "already in use" not in str(error):
            raise
        return UNKNOWN  # the server died between registering the key and writing it down
    return str(answer["node-id"])


def online(folder: Path) -> list[str]:
    """Name the sites that are connected; "?" is one whose number was not written down."""
    names = {row["node"]: name for name, row in _read_registry(folder).items()}
    return [names.get(str(row["node-id"]), "?") for row in nodes(folder) if row["status"] == "online"]


def nodes(folder: Path) -> list[dict[str, Any]]:
    """List the registered SuperNodes, as Flower does."""
    answer = flower(folder, "supernode", "list", LINK)
    listed: list[dict[str, Any]] = answer.get("nodes", [])
    return listed


def flower(folder: Path, *args: str, timeout: float = 120.0) -> Any:
    """Run Flower's own command against this server, and give back what it prints as JSON."""
    _write_flower_settings(folder)
    name = f"flwr {' '.join(args[:2])}"  # for errors
    command = ["flwr", *args]
    if args[0] != "stop":
        command += ["--format", "json"]
    try:
        done = _run_in_new_session(command, environment(folder), timeout)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{name} did not answer within {timeout:g} s.") from error
    answer = _json_in(done.stdout)
    if done.returncode or answer.get("success") is False:
        words = answer.get("error-message") or f"{done.stderr}\n{done.stdout}"
        raise RunError(f"{name} failed: {' '.join(str(words).split())[-400:]}")
    return answer


def _run_in_new_session(command: list[str], env: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a command in a session of its own, so that Ctrl-C reaches whoever asks, and not the command."""
    return subprocess.run(
        command,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=timeout,
        start_new_session=True,
    )


def _write_flower_settings(folder: Path) -> None:
    """Tell Flower's command where this server is, and which authority it trusts."""
    settings = read_server(folder)
    server = folder.resolve()
    connection = {"address": f"127.0.0.1:{settings.port}", "root-certificates": str(server / "ca.crt")}
    text = tomli_w.dumps({"superlink": {"default": LINK, LINK: connection}})
    file = server / "flower" / "config.toml"
    file.parent.mkdir(mode=0o700, exist_ok=True)
    if not file.exists() or file.read_text() != text:
        file.write_text(text)


def _json_in(printed: str) -> Any:
    """Read the JSON that a command printed after other words; {} if it printed none."""
    _, brace, rest = printed.partition("{")
    try:
        return json.loads(brace + rest)
    except ValueError:
        return {}


def _listening(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


def _wait_for(ready: Callable[[], bool], child: Child) -> None:
    """Wait until a process that was just started is ready."""
    until = time.monotonic() + START_SECONDS
    while not ready():
        if child.status is not None:
            raise RunError(f"{child.name} ended with status {child.status} before it was ready; its log says why.")
        if time.monotonic() > until:
            raise RunError(f"{child.name} was not ready within {START_SECONDS:g} s.")
        time.sleep(0.1)


@contextmanager
def told_to_stop() -> Iterator[threading.Event]:
    """Give an event that Ctrl-C and SIGTERM set, in place of what they do otherwise."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
