"""releases.jsonl: who was asked for a noisy answer, written down before anybody is asked.

What noise guarantees depends on how often a client answered. The lines of metrics.jsonl cannot tell: a round that a crash cut
off is trained again and its line is written anew, but the server has seen two answers. So this file is only ever appended to.
Each line carries a check of itself and of all lines before it, and a checkpoint names the last one that it knew.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAME = "releases.jsonl"
# The check before the first line.
FIRST = ""


class Unknown(Exception):
    """Why it cannot be said how often clients answered."""


class Releases:
    """The file of one run directory, open for appending. `known`: the last check that a checkpoint knew."""

    def __init__(self, folder: Path, known: str = FIRST) -> None:
        self.path = folder / NAME
        self.last = known
        lines = _whole_lines(self.path)
        if lines:
            self.last = _check_of(lines[-1]) or known

    def note(self, t: int, clients: Sequence[int]) -> None:
        """These clients are about to be asked, in round t. On the disk before this returns."""
        line: dict[str, Any] = {"round": t, "clients": list(clients)}
        self.last = line["check"] = _check(self.last, line)
        text = json.dumps(line) + "\n"
        if self._is_cut_off():
            text = "\n" + text
        with open(self.path, "a") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def _is_cut_off(self) -> bool:
        """Whether a crash cut the last line off."""
        written = self.path.read_bytes() if self.path.exists() else b""
        return written != b"" and not written.endswith(b"\n")


def cohorts(folder: Path, known: str) -> list[list[int]]:
    """For every time that a round was trained, its clients. Unknown is raised if the file is not whole."""
    before = FIRST
    checks = {FIRST}
    asked = []
    for text in _whole_lines(folder / NAME):
        try:
            line = json.loads(text)
            claimed = line.pop("check")
            clients = [int(client) for client in line["clients"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Unknown(f"{NAME} is damaged: a line cannot be read ({type(error).__name__})") from error
        if claimed != _check(before, line):
            raise Unknown(f"{NAME} is damaged: a line is not what was written")
        before = claimed
        checks.add(claimed)
        asked.append(clients)
    if known not in checks:
        raise Unknown(f"{NAME} is not whole: lines that a checkpoint knew are missing")
    return asked


def _whole_lines(path: Path) -> list[str]:
    """Lines that were written to their end. If a crash cut a line off, its clients were not asked yet: it does not count."""
    if not path.exists():
        return []
    text = path.read_bytes().decode("utf-8", errors="replace")
    return [line for line in text.split("\n")[:-1] if line]


def _check(before: str, line: dict[str, Any]) -> str:
    text = before + json.dumps(line, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _check_of(text: str) -> str | None:
    try:
        return str(json.loads(text)["check"])
    except (ValueError, KeyError, TypeError):
        return None
