"""Processes that are stopped with everything that they started, and that do not outlive whoever started them."""

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
    """Have this process sent SIGTERM when its parent is gone, however it went (Linux).

    It is called in the child, before its program starts.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class Child:
    """A process in a group of its own."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path | None = None, pipe: bool = False
    ) -> None:
        self.name = name
        self._born = time.monotonic()
        self.last: deque[str] = deque(maxlen=40)  # the last lines that it printed
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
        """Pass on what the process prints to its log, or to standard error."""
        assert self.process.stdout is not None
        with ExitStack() as stack:
            out = stack.enter_context(open(log, "ab", buffering=0)) if log else sys.stderr.buffer
            for line in self.process.stdout:
                self.last.append(line.decode(errors="replace").rstrip())
                # Where nobody reads it any more the line is dropped: the child must not wait.
                with contextlib.suppress(OSError, ValueError):
                    out.write(line)
                    out.flush()

    @property
    def status(self) -> int | None:
        """The exit status of the process, or None while it runs."""
        return self.process.poll()

    @property
    def age(self) -> float:
        """For how many seconds the process has existed."""
        return time.monotonic() - self._born

    def stop(self) -> None:
        """Ask the process and everything that it started to end, and kill what has not ended after a while."""
        if self.process.stdin:
            self.process.stdin.close()
        # Flower's apps have groups of their own, so signals to this group do not reach them.
        descendants = _descendants(self.process.pid)
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        self._wait_for_group()
        self._signal(signal.SIGKILL)
        for pid in descendants:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(GRACE)
        if self.process.stdout:
            self.process.stdout.close()

    def _wait_for_group(self) -> None:
        until = time.monotonic() + GRACE
        while self._group_lives() and time.monotonic() < until:
            time.sleep(0.05)

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
    """Read what comes after the name in /proc/PID/stat: state, parent, group, ..."""
    _, _, after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return after_name.split()


def _descendants(pid: int) -> list[int]:
    """List the processes that this one started, and those that they started (Linux; elsewhere none are seen)."""
    children_of: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(_stat(entry.name)[1])
            children_of.setdefault(parent, []).append(int(entry.name))
    descendants: list[int] = []
    todo = [pid]
    while todo:
        children = children_of.get(todo.pop(), [])
        descendants += children
        todo += children
    return descendants


def _others_in(group: int) -> bool:
    """Say whether a group still has processes that run; zombies do not count."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, _, group_of_process = _stat(entry.name)[:3]
            if int(group_of_process) == group and state != "Z":
                return True
    return False
