"""Start the server or a site from its folder: Flower's processes, with TLS and keys, and the worker beside a SuperNode."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fedmix.deploy.folder import read_server, read_site
from fedmix.deploy.processes import Child
from fedmix.engines.flower import flwr
from fedmix.errors import RunError

UNKNOWN_KEY = 305 & 0xFF  # what a SuperNode ends with whose key the server does not know, as a shell sees it
START_SECONDS = 120.0
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


def serve(folder: Path, say: Callable[[str], None], log: Path | None = None) -> None:
    """Until Ctrl-C or SIGTERM, or until Flower's process ends by itself, which is an error."""
    flwr()
    is_server = (folder / "server.toml").is_file()
    with told_to_stop() as stop, (server if is_server else site)(folder, say, log) as child:
        while not stop.wait(0.5):
            if child.status is not None:
                raise RunError(_why_it_ended(child, is_server))


@contextmanager
def server(folder: Path, say: Callable[[str], None], log: Path | None = None) -> Iterator[Child]:
    """The SuperLink, with the sites' keys registered."""
    settings = read_server(folder)
    (folder / "flower").mkdir(mode=0o700, exist_ok=True)
    if _listening("127.0.0.1", settings.port):
        raise RunError(f"port {settings.port} must be free. Something listens on it already.")
    link = Child("the SuperLink", superlink_command(folder), environment(folder), log)
    try:
        _wait_for(lambda: _listening("127.0.0.1", settings.port), link)
        for name in register(folder):
            say(f"registered site {name}")
        say(f"the server listens on {settings.host}:{settings.port}")
        yield link
    finally:
        link.stop()


@contextmanager
def site(folder: Path, say: Callable[[str], None], log: Path | None = None) -> Iterator[Child]:
    """The SuperNode and its worker; a worker that dies is started again."""
    settings = read_site(folder)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="fedmix-"))
        (folder / "flower").mkdir(mode=0o700, exist_ok=True)
        path = str(Path(scratch) / "worker")
        env = environment(folder)
        done = threading.Event()

        def start() -> Child:
            return Child("the worker", worker_command(folder, path), env, log, pipe=True)

        worker = [start()]
        stack.callback(lambda: worker[0].stop())
        node = Child("the SuperNode", supernode_command(folder, path), env, log)
        stack.callback(node.stop)

        def look_after() -> None:
            while not done.wait(1.0):
                if worker[0].status is not None:
                    say(f"the worker ended with status {worker[0].status}; it is started again")
                    worker[0] = start()

        keeper = threading.Thread(target=look_after, daemon=True)
        keeper.start()
        stack.callback(keeper.join)
        stack.callback(done.set)
        say(f"site {settings.name} connects to {settings.server}")
        yield node


def register(folder: Path) -> list[str]:
    """Tell the SuperLink about the sites whose public keys are in keys/; those that it did not know."""
    known = {row["name"] for row in nodes(folder)}
    new = [path for path in sorted((folder / "keys").glob("*.pub")) if path.stem not in known]
    for path in new:
        flower(folder, "supernode", "register", str(path.resolve()), LINK, "--name", path.stem)
    return [path.stem for path in new]


def nodes(folder: Path) -> list[dict[str, Any]]:
    """Registered SuperNodes, as Flower lists them."""
    listed: list[dict[str, Any]] = flower(folder, "supernode", "list", LINK, "--format", "json").get("nodes", [])
    return listed


def flower(folder: Path, *args: str, timeout: float = 120.0) -> Any:
    """Flower's own command, against this server; what it prints as JSON."""
    import json

    import tomli_w

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
    done = subprocess.run(
        command, env={**os.environ, **environment(folder)}, capture_output=True, text=True, timeout=timeout
    )
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


def _why_it_ended(child: Child, is_server: bool) -> str:
    if not is_server and child.status == UNKNOWN_KEY:
        return "the server does not know this site's key: its node.pub must be in the server's keys/ folder."
    return f"{child.name} ended with status {child.status}; what it printed says why."


@contextmanager
def told_to_stop() -> Iterator[threading.Event]:
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
