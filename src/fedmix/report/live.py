"""The same page while a run goes on: served to this machine alone, with newer numbers as they come."""

import json
import os
import re
import threading
from collections.abc import Callable, Sequence
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
        """Changes with the files."""
        seen = []
        for given in self.paths:
            root = Path(given)
            for folder in [root, *sorted(p for p in root.glob("*") if p.is_dir())]:
                for name in WATCHED:
                    try:
                        found = os.stat(folder / name)
                    except OSError:
                        continue
                    seen.append(f"{found.st_mtime_ns}.{found.st_size}")
        return "-".join(seen) or "nothing"

    def data(self) -> dict[str, Any]:
        """As `numbers.page_data`."""
        with self._lock:
            version = self.version()
            if version != self._version:
                self._data = page_data(read_runs(self.paths)) | {"live": True, "version": version}
                self._version = version
            return self._data

    def last(self) -> dict[str, Any]:
        """What could be read last, where a run directory is being replaced."""
        return self._data


def server(paths: Sequence[str], port: int) -> ThreadingHTTPServer:
    """Listens on this machine alone; port 0: any that is free."""
    live = Live(paths)
    live.data()  # what cannot be read is refused now

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if re.sub(r":\d+$", "", self.headers.get("Host", "")) not in (HERE, "localhost"):
                return self._send(
                    403, "text/plain", b"of this machine alone"
                )  # a name that was rebound to this address
            url = urlsplit(self.path)
            try:
                data = live.data()
            except (FedmixError, OSError) as error:
                if url.path != "/":
                    return self._send(503, "text/plain; charset=utf-8", str(error).encode())
                data = live.last()
            if url.path == "/":
                return self._send(200, "text/html; charset=utf-8", html(data).encode())
            if url.path == "/data.json":
                if parse_qs(url.query).get("known") == [data["version"]]:
                    return self._send(204, "application/json", b"")
                return self._send(200, "application/json", json.dumps(data, allow_nan=False).encode())
            return self._send(404, "text/plain", b"not here")

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass  # nobody reads it

    return ThreadingHTTPServer((HERE, port), Handler)


def watch(paths: Sequence[str], port: int, say: Callable[[str], None]) -> None:
    """Until Ctrl-C."""
    with server(paths, port) as served:
        say(f"http://{HERE}:{served.server_address[1]}/")
        served.serve_forever(poll_interval=0.2)
