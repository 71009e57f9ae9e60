"""Processes that are stopped with everything below them, and that do not outlive whoever started them."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

GRACE = 10.0  # seconds between asking a process to end and ending it


def _end_with_parent() -> None:
    """Of a child, before its program starts: SIGTERM when the parent is gone, however it went (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class Child:
    """A process in a group of its own."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path | None = None, pipe: bool = False
    ) -> None:
        self.name = name
        self._born = time.monotonic()
        self.last: deque[str] = deque(maxlen=40)  # of what it printed
        self.process = subprocess.Popen(
            list(command),
            env={**os.environ, **env},
            stdin=subprocess.PIPE if pipe else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        self._reader = threading.Thread(target=self._read, args=(log,), daemon=True)
        self._reader.start()

    def _read(self, log: Path | None) -> None:
        """What it prints goes to its log, or on to standard error."""
        assert self.process.stdout is not None
        with ExitStack() as stack:
            out = stack.enter_context(open(log, "ab", buffering=0)) if log else sys.stderr.buffer
            for line in self.process.stdout:
                self.last.append(line.decode(errors="replace").rstrip())
                with contextlib.suppress(OSError, ValueError):  # nobody reads it any more; the child must not wait
                    out.write(line)
                    out.flush()

    @property
    def status(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    @property
    def age(self) -> float:
        return time.monotonic() - self._born

    def stop(self) -> None:
        """Ask it and everything below it to end; end what has not after a while. Flower's apps have groups of their own."""
        if self.process.stdin:
            self.process.stdin.close()
        below = _descendants(self.process.pid)
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        until = time.monotonic() + GRACE
        while self._group_lives() and time.monotonic() < until:
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(GRACE)
        if self.process.stdout:
            self.process.stdout.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _group_lives(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return self.process.poll() is None or _others_in(self.process.pid)


def _stat(pid: str) -> list[str]:
    """Of /proc/PID/stat what comes after the name: state, parent, group, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _descendants(pid: int) -> list[int]:
    """Processes below this one (Linux; elsewhere none are seen)."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents.setdefault(int(_stat(entry.name)[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        own = parents.get(todo.pop(), [])
        found += own
        todo += own
    return found


def _others_in(group: int) -> bool:
    """Whether a group still has processes that run; zombies do not count."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = _stat(entry.name)
            if int(fields[2]) == group and fields[0] != "Z":
                return True
    return False
