"""Checkpoints: the server's state, its optimiser, and the private states of clients; each is whole, or is not there at all.

    checkpoints/round-000010/server.safetensors   the method's state
                             manifest.json        digests, the file of every client's state, what the run carries along
    checkpoints/clients/17-000010.safetensors     client 17 as it was after round 10; shared by later checkpoints

Renaming its folder to its final name is the last thing that happens to a checkpoint, so one that has it is whole.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load

from fedmix.core.server import State
from fedmix.core.tree import Params, flatten
from fedmix.engines.store import SiteStore, Store
from fedmix.errors import ClientError, RunError
from fedmix.running.carried import Carried
from fedmix.running.files import digest, write_json, write_tensors

# What reading a damaged checkpoint raises.
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)


@dataclass(frozen=True)
class Checkpoint:
    """A run after a round. clients: private states, by client; none where clients keep them themselves."""

    round: int
    state: State
    clients: dict[int, Params]
    carried: Carried


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        # Where each client's newest state is: client -> [file, digest]. A client that holds nothing has ["", ""].
        self._files: dict[str, list[str]] = {}

    def save(self, state: State, store: Store, carried: Carried) -> None:
        """Save the state after its round, and the clients that changed since the last call. Then forget old ones."""
        name = f"round-{state.round:06d}"
        self._save_clients(state.round, store)
        part = self.folder / f".{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        server = write_tensors(part / "server.safetensors", flatten(state))
        manifest = {"round": state.round, "server": server, "clients": self._files, "carried": carried.table()}
        write_json(part / "manifest.json", manifest)
        target = self.folder / name
        if target.exists():
            # The same round is saved again by a run that was resumed before it.
            shutil.rmtree(target)
        os.replace(part, target)
        self._forget(carried.best_round)

    def _save_clients(self, t: int, store: Store) -> None:
        folder = self.folder / "clients"
        folder.mkdir(parents=True, exist_ok=True)
        for client in store.take_changed():
            private = store.get(client)
            if private:
                file = f"{client}-{t:06d}.safetensors"
                self._files[str(client)] = [file, write_tensors(folder / file, private)]
            else:
                self._files[str(client)] = ["", ""]

    def _forget(self, best: int | None) -> None:
        """Remove all but the last few checkpoints and the best one, client files that none of them names, and left-overs."""
        names = self.names()
        kept = [name for name in names if name in names[-self.keep :] or name == f"round-{best or 0:06d}"]
        for name in names:
            if name not in kept:
                os.replace(self.folder / name, self.folder / f".{name}.old")
        for left in self.folder.glob(".round-*"):
            shutil.rmtree(left)
        self._forget_clients(kept)

    def _forget_clients(self, kept: list[str]) -> None:
        used: set[str] = set()
        for name in kept:
            manifest = json.loads((self.folder / name / "manifest.json").read_text())
            used |= {file for file, _ in manifest["clients"].values()}
        for path in (self.folder / "clients").iterdir():
            if path.name not in used:
                path.unlink()

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("round-*"))

    def rounds(self) -> list[int]:
        """The rounds that have a checkpoint."""
        return [int(name.removeprefix("round-")) for name in self.names()]

    def load(self, round: int, state_from: Callable[[Params], State]) -> Checkpoint:
        """The checkpoint of a round that has one, verified."""
        return self._load(f"round-{round:06d}", state_from)

    def load_last(self, state_from: Callable[[Params], State]) -> Checkpoint | None:
        """The newest checkpoint, verified; None if there is none. A damaged one is refused, and nothing is touched.

        state_from: the server's state from its tensors.
        """
        names = self.names()
        return self._load(names[-1], state_from) if names else None

    def _load(self, name: str, state_from: Callable[[Params], State]) -> Checkpoint:
        folder = self.folder / name
        try:
            manifest = json.loads((folder / "manifest.json").read_text())
            flat = _read(folder / "server.safetensors", manifest["server"])
            clients = self._read_clients(manifest)
            t, carried = int(manifest["round"]), Carried.from_table(manifest["carried"])
        except DAMAGE as error:
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            remedy = self._remedy(name)
            raise RunError(f"checkpoint {folder} must be whole. It is damaged ({reason}); {remedy}.") from error
        try:
            state = state_from(flat)
        except (KeyError, ValueError) as error:
            raise RunError(
                f"checkpoint {folder} is of another model or federation ({error}); go on with the one that it was trained with."
            ) from error
        self._files = manifest["clients"]
        return Checkpoint(t, state, clients, carried)

    def _read_clients(self, manifest: dict[str, Any]) -> dict[int, Params]:
        clients: dict[int, Params] = {}
        for client, (file, known) in manifest["clients"].items():
            clients[int(client)] = _read(self.folder / "clients" / file, known) if file else {}
        return clients

    def _remedy(self, damaged: str) -> str:
        others = [name for name in self.names() if name != damaged]
        if not others:
            return "start again with --overwrite"
        return f"remove {self.folder / damaged} to go on from {others[-1]}"


def private_states(path: Path, checkpoint: Checkpoint) -> dict[int, Params]:
    """The clients' private states of a run at a checkpoint.

    The checkpoint has them, or, where clients were Flower's processes on this machine, files that these processes wrote.
    """
    if checkpoint.carried.engine is None:
        return checkpoint.clients
    store = SiteStore(path / "clients")
    try:
        return {int(s): store.get(int(s), int(t)) or {} for s, t in checkpoint.carried.engine.items()}
    except ClientError as error:
        raise RunError(f"{path}: private states are with the clients, where the run was trained ({error}).") from error


def _read(path: Path, known: str) -> Params:
    """The tensors of a file whose digest is known."""
    data = path.read_bytes()
    if digest(data) != known:
        raise ValueError(f"{path.name} does not match its checksum")
    tensors: Params = load(data)
    return tensors
