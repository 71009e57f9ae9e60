"""Clients' private states, in memory or on disk. A client that never took part has no entry and costs nothing."""

import os
from pathlib import Path
from typing import Protocol

from safetensors.torch import load_file, save_file

from fedmix.core.types import Private


class Store(Protocol):
    def get(self, client: int, new: Private) -> Private:
        """A client's state; `new`, the common start, for one that never took part."""
        ...

    def put(self, client: int, private: Private) -> None: ...
    def clients(self) -> list[int]:
        """Those that took part."""
        ...

    def take_changed(self) -> list[int]:
        """Clients whose state was put since the last call."""
        ...


class MemoryStore:
    def __init__(self) -> None:
        self._states: dict[int, Private] = {}
        self._changed: set[int] = set()

    def get(self, client: int, new: Private) -> Private:
        return self._states.get(client, new)

    def put(self, client: int, private: Private) -> None:
        self._states[client] = private
        self._changed.add(client)

    def clients(self) -> list[int]:
        return sorted(self._states)

    def take_changed(self) -> list[int]:
        changed, self._changed = sorted(self._changed), set()
        return changed


class DiskStore:
    """One safetensors file a client, so that memory does not grow with the clients that took part."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("*.safetensors*"):  # of a run that ended: its checkpoint, not this, is what counts
            left.unlink()
        self._known: set[int] = set()
        self._changed: set[int] = set()

    def _path(self, client: int) -> Path:
        return self.folder / f"{client}.safetensors"

    def get(self, client: int, new: Private) -> Private:
        return load_file(self._path(client)) if client in self._known else new

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
