"""Clients' private states, in memory or on disk. A client that never took part has no entry and costs nothing."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file

from fedmix.core.tree import subtree
from fedmix.core.types import Message, Private
from fedmix.errors import ClientError


class Store(Protocol):
    """Where an engine finds clients' private states."""

    def get(self, client: int) -> Private | None:
        """A client's state; None if it never took part."""
        ...

    def many(self, clients: Sequence[int]) -> list[Private]:
        """The states of clients that took part."""
        ...

    def put(self, client: int, private: Private) -> None:
        """Keep a client's new state."""
        ...

    def clients(self) -> list[int]:
        """The clients that took part."""
        ...

    def take_changed(self) -> list[int]:
        """Clients whose state was put since the last call."""
        ...


class StatesHere:
    """For engines whose store holds the clients' states: a checkpoint has them, there is nothing else to remember."""

    def memory(self) -> dict[str, Any]:
        return {}

    def remember(self, memory: Mapping[str, Any]) -> None:
        pass

    def accept(self, t: int, clients: Sequence[int]) -> None:
        pass


class MemoryStore:
    """Private states in memory."""

    def __init__(self) -> None:
        self._states: dict[int, Private] = {}
        self._changed: set[int] = set()

    def get(self, client: int) -> Private | None:
        return self._states.get(client)

    def many(self, clients: Sequence[int]) -> list[Private]:
        return [self._states[client] for client in clients]

    def put(self, client: int, private: Private) -> None:
        self._states[client] = private
        self._changed.add(client)

    def clients(self) -> list[int]:
        return sorted(self._states)

    def take_changed(self) -> list[int]:
        changed, self._changed = sorted(self._changed), set()
        return changed


class DiskStore:
    """Private states on disk, a safetensors file for each client, so that memory does not grow with their number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # Files of a run that ended: its checkpoint counts, not these.
        for leftover in folder.glob("*.safetensors*"):
            leftover.unlink()
        self._known: set[int] = set()
        self._changed: set[int] = set()

    def _path(self, client: int) -> Path:
        return self.folder / f"{client}.safetensors"

    def get(self, client: int) -> Private | None:
        return load_file(self._path(client)) if client in self._known else None

    def many(self, clients: Sequence[int]) -> list[Private]:
        return [self.get(client) or {} for client in clients]

    def put(self, client: int, private: Private) -> None:
        part = self._path(client).with_suffix(".part")
        save_file({name: value.contiguous() for name, value in private.items()}, part)
        os.replace(part, self._path(client))
        self._known.add(client)
        self._changed.add(client)

    def clients(self) -> list[int]:
        return sorted(self._known)

    def take_changed(self) -> list[int]:
        changed, self._changed = sorted(self._changed), set()
        return changed


class SiteStore:
    """Private states on a client's own disk, readable by its owner alone.

    A folder for each client holds the states after the rounds that may still count. The server names the round, so that the
    two never disagree, whichever of them crashed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, client: int, t: int) -> Path:
        return self.folder / str(client) / f"{t:06d}.safetensors"

    def get(self, client: int, t: int) -> Private | None:
        """The state after round t; None for t = 0, when the client has not taken part yet."""
        if t == 0:
            return None
        path = self._path(client, t)
        if not path.is_file():
            raise ClientError(f"client {client} has no private state of round {t} in {path.parent}")
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise ClientError(f"client {client}: {path} is damaged ({error})") from error

    def put(self, client: int, t: int, private: Private, before: int) -> None:
        """Keep the state after round t, and that after round `before`, from which t may have to be done again."""
        path = self._path(client, t)
        _write_private(path, private)
        wanted = (path, self._path(client, before), self._received(client), self._answers(client))
        for file in path.parent.iterdir():
            if file not in wanted:
                file.unlink(missing_ok=True)

    def _received(self, client: int) -> Path:
        return self.folder / str(client) / "received.safetensors"

    def _answers(self, client: int) -> Path:
        return self.folder / str(client) / "answers.json"

    def answered(self, client: int, t: int) -> int:
        """How often a client gave a noisy answer in round t, by this site's own count."""
        file = self._answers(client)
        if not file.exists():
            return 0
        try:
            return int(json.loads(file.read_text()).get(str(t), 0))
        except (ValueError, AttributeError) as error:
            raise ClientError(f"client {client}: {file} is damaged; it counts answers that noise protects") from error

    def note_answer(self, client: int, t: int, count: int) -> None:
        """Write the number of noisy answers down, before the answer is given."""
        file = self._answers(client)
        known = json.loads(file.read_text()) if file.exists() else {}
        write_whole(file, json.dumps(known | {str(t): count}).encode())

    def keep(self, client: int, message: Message, private: Private, t: int) -> None:
        """Keep what the client was sent, with the private state that goes with it, for predictions after training."""
        tensors = {f"sent.{name}": value for name, value in message.tensors.items()}
        tensors |= {f"own.{name}": value for name, value in private.items()}
        about = {"round": str(t), "numbers": json.dumps(dict(message.numbers))}
        _write_private(self._received(client), tensors, about)

    def kept(self, client: int) -> tuple[Message, Private, int]:
        """What `keep` kept: message, private state, and the round whose weights they are."""
        path = self._received(client)
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError) as error:
            raise ClientError(
                f"client {client} must have been sent a model. {path} cannot be read ({error})."
            ) from error
        message = Message(subtree(tensors, "sent"), json.loads(about["numbers"]))
        return message, subtree(tensors, "own"), int(about["round"])


def _write_private(path: Path, tensors: Private, about: dict[str, str] | None = None) -> None:
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    write_whole(path, save(contiguous, about))


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, readable by its owner alone."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_suffix(".part")
    with open(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
