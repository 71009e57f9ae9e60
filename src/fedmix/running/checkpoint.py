"""Checkpoints: server state, optimiser, and the private states of clients that changed; whole or not at all.

    checkpoints/round-000010/server.safetensors   the method's state
                             manifest.json        digests, the file of every client's state, and what the run carries along
    checkpoints/clients/17-000010.safetensors     client 17 as it was after round 10; shared by later checkpoints

A checkpoint exists once its folder has its final name, which is the last thing that happens to it.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load

from fedmix.core.server import State
from fedmix.core.tree import Params, flatten
from fedmix.engines.store import SiteStore, Store
from fedmix.errors import ClientError, RunError
from fedmix.running.carried import Carried
from fedmix.running.files import digest, write_json, write_tensors


@dataclass(frozen=True)
class Checkpoint:
    round: int
    state: State
    clients: dict[int, Params]
    carried: Carried


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self._files: dict[str, list[str]] = {}  # client -> [file, digest]: where its newest state is

    def save(self, state: State, store: Store, carried: Carried) -> None:
        """Save the state after its round, and the clients that changed since the last call. Then forget old ones."""
        name = f"round-{state.round:06d}"
        clients = self.folder / "clients"
        clients.mkdir(parents=True, exist_ok=True)
        for client in store.take_changed():
            private = store.get(client)
            if private:
                file = f"{client}-{state.round:06d}.safetensors"
                self._files[str(client)] = [file, write_tensors(clients / file, private)]
            else:
                self._files[str(client)] = ["", ""]  # took part, and holds nothing
        part = self.folder / f".{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        server = write_tensors(part / "server.safetensors", flatten(state))
        manifest = {"round": state.round, "server": server, "clients": self._files, "carried": carried.table()}
        write_json(part / "manifest.json", manifest)
        target = self.folder / name
        if target.exists():
            shutil.rmtree(target)  # the same round, saved again by a run that was resumed before it
        os.replace(part, target)
        self._forget()

    def _forget(self) -> None:
        """Remove all but the last few checkpoints, client files that none of them names, and what a crash left over."""
        names = self.names()
        for name in names[: -self.keep]:
            old = self.folder / f".{name}.old"
            os.replace(self.folder / name, old)
        for left in self.folder.glob(".round-*"):
            shutil.rmtree(left)
        used = {
            file
            for name in names[-self.keep :]
            for file, _ in json.loads((self.folder / name / "manifest.json").read_text())["clients"].values()
        }
        for path in (self.folder / "clients").iterdir():
            if path.name not in used:
                path.unlink()

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("round-*"))

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
            clients: dict[int, Params] = {}
            for client, (file, known) in manifest["clients"].items():
                clients[int(client)] = _read(self.folder / "clients" / file, known) if file else {}
            t, carried = int(manifest["round"]), Carried.from_table(manifest["carried"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            others = [other for other in self.names() if other != name]
            remedy = f"remove {folder} to go on from {others[-1]}" if others else "start again with --overwrite"
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
            raise RunError(f"checkpoint {folder} must be whole. It is damaged ({reason}); {remedy}.") from error
        try:
            state = state_from(flat)
        except (KeyError, ValueError) as error:
            raise RunError(
                f"checkpoint {folder} is of another model or federation ({error}); go on with the one that it was trained with."
            ) from error
        self._files = manifest["clients"]
        return Checkpoint(t, state, clients, carried)


def private_states(path: Path, checkpoint: Checkpoint) -> dict[int, Params]:
    """The clients' private states of a run at a checkpoint: in it, or in files of their own where clients were processes
    of Flower's on this machine."""
    if checkpoint.carried.engine is None:
        return checkpoint.clients
    store = SiteStore(path / "clients")
    try:
        return {int(s): store.get(int(s), int(t)) or {} for s, t in checkpoint.carried.engine.items()}
    except ClientError as error:
        raise RunError(f"{path}: private states are with the clients, where the run was trained ({error}).") from error


def _read(path: Path, known: str) -> Params:
    data = path.read_bytes()
    if digest(data) != known:
        raise ValueError(f"{path.name} does not match its checksum")
    tensors: Params = load(data)
    return tensors
