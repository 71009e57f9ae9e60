"""The same page while a run goes on: served to this machine alone, with newer numbers as they come."""

import json
import os
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedmix.errors import FedmixError
from fedmix.report.page import html
from fedmix.report.page_data import page_data
from fedmix.report.runs import read_runs

WATCHED = ("recipe.toml", "metrics.jsonl", "summary.json", "evaluation.json", "audit.json", "federation.json")
HERE = "127.0.0.1"


class Live:
    """Numbers of run directories, read again when a file of theirs has changed."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        self._lock = threading.Lock()
        self._version = ""
        self._data: dict[str, Any] = {}

    def version(self) -> str:
        """A text that changes with the files."""
        stamps = [stamp for path in self.paths for stamp in _stamps(Path(path))]
        return "-".join(stamps) or "nothing"

    def data(self) -> dict[str, Any]:
        """What `page_data` gives, and a version to ask for changes by."""
        with self._lock:
            version = self.version()
            if version != self._version:
                self._data = page_data(read_runs(self.paths)) | {"live": True, "version": version}
                self._version = version
            return self._data

    def last(self) -> dict[str, Any]:
        """What could be read last, for when a run directory is being replaced."""
        return self._data


def _stamps(root: Path) -> list[str]:
    """A stamp of each file that is watched, in a run directory or in those below it."""
    below = sorted(path for path in root.glob("*") if path.is_dir())
    stamps = [_stamp(folder / name) for folder in (root, *below) for name in WATCHED]
    return list(filter(None, stamps))


def _stamp(file: Path) -> str:
    """When the file was changed and how large it is; nothing where there is no file."""
    try:
        status = os.stat(file)
    except OSError:
        return ""
    return f"{status.st_mtime_ns}.{status.st_size}"


def server(paths: Sequence[str], port: int) -> ThreadingHTTPServer:
    """A server that listens on this machine alone; port 0: any that is free."""
    live = Live(paths)
    # what cannot be read is refused now
    live.data()
    return ThreadingHTTPServer((HERE, port), partial(_Handler, live))


class _Handler(BaseHTTPRequestHandler):
    """Answers with the page at / and with its numbers at /data.json."""

    def __init__(self, live: Live, *args: Any, **named: Any) -> None:
        # first, since the base class answers the request while it is made
        self.live = live
        super().__init__(*args, **named)

    def do_GET(self) -> None:
        host = re.sub(r":\d+$", "", self.headers.get("Host", ""))
        if host not in (HERE, "localhost"):
            # a name that was rebound to this address
            return self._send(403, "text/plain", b"of this machine alone")
        url = urlsplit(self.path)
        try:
            data = self.live.data()
        except (FedmixError, OSError) as error:
            if url.path != "/":
                return self._send(503, "text/plain; charset=utf-8", str(error).encode())
            data = self.live.last()
        if url.path == "/":
            return self._send(200, "text/html; charset=utf-8", html(data).encode())
        if url.path == "/data.json":
            return self._send_numbers(data, parse_qs(url.query).get("known"))
        return self._send(404, "text/plain", b"not here")

    def _send_numbers(self, data: dict[str, Any], known: list[str] | None) -> None:
        """The numbers, unless the page has this version of them already."""
        if known == [data["version"]]:
            return self._send(204, "application/json", b"")
        return self._send(200, "application/json", json.dumps(data, allow_nan=False).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: nobody reads it."""


def watch(paths: Sequence[str], port: int, say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C."""
    with server(paths, port) as served:
        say(f"http://{HERE}:{served.server_address[1]}/")
        served.serve_forever(poll_interval=0.2)
