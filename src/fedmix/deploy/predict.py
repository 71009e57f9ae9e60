"""Predictions at a site: they need its own gate and the experts that it was sent, and no network."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedmix.after.predictions import predicted_from_file
from fedmix.after.rows import Encoding
from fedmix.core.algorithm import Algorithm
from fedmix.core.types import Message, Private
from fedmix.deploy.folder import read_site
from fedmix.deploy.worker import run_folder
from fedmix.engines.client import predict
from fedmix.engines.store import SiteStore
from fedmix.errors import RunError, SettingError
from fedmix.settings.build import revive
from fedmix.settings.reading import read_recipe


@dataclass(frozen=True)
class SitePredictor:
    """A client of a site, as a run left it."""

    client: str
    run: str
    round: int
    encoding: Encoding
    algorithm: Algorithm
    message: Message
    private: Private

    def log_prob(self, x: Tensor) -> Tensor:
        """log p(y|x,s) from inputs as the model takes them: [N, ...] -> [N, classes]."""
        return predict(self.algorithm, self.message, self.private, x)


def load_site(folder: Path, client: str | None = None, run: str | None = None) -> SitePredictor:
    """Load a client of a site, as the newest run left it, or the named one. client: needed where a site has several."""
    settings = read_site(folder)
    kept = _find_run(folder, settings.name, run)
    about = json.loads((kept / "federation.json").read_text())
    recipe = read_recipe(str(kept))
    names: list[str] = about["clients"]
    chosen = _choose_client(client, _clients_in(kept, names))
    _, algorithm = revive(recipe, about)
    message, private, t = SiteStore(kept / "clients").kept(names.index(chosen))
    return SitePredictor(chosen, kept.name, t, Encoding(about), algorithm, message, private)


def _find_run(folder: Path, site: str, run: str | None) -> Path:
    """Find where a site keeps the named run, or the newest one where none is named."""
    if run:
        files = [run_folder(folder, run) / "federation.json"]
    else:
        files = sorted((folder / "runs").glob("*/federation.json"), key=lambda path: path.stat().st_mtime)
    if not files or not files[-1].is_file():
        wanted = f"run {run}" if run else "a run"
        raise RunError(f"site {site} must have taken part in {wanted}. It has not.")
    return files[-1].parent


def _clients_in(kept: Path, names: list[str]) -> list[str]:
    """Name the clients of this site that a run has sent experts to."""
    received = (kept / "clients").glob("*/received.safetensors")
    return [names[int(path.parent.name)] for path in received]


def _choose_client(client: str | None, here: list[str]) -> str:
    """Take the client that is asked for, or the only one there is."""
    if client is None and len(here) == 1:
        return here[0]
    if client in here:
        return client
    known = ", ".join(sorted(here)) or "none yet"
    given = "none" if client is None else repr(client)
    raise SettingError(f"--client must be one of this site's: {known}. Got {given}.")


def predict_site(
    folder: Path, file: Path, client: str | None = None, run: str | None = None, x: str = "x", y: str = "y"
) -> dict[str, Any]:
    """Predict labels and probabilities for new inputs, and give the accuracy where the file has labels."""
    site = load_site(folder, client, run)
    about = {"client": site.client, "run": site.run, "round": site.round}
    return {**about, **predicted_from_file(site.encoding, site.log_prob, file, x, y)}
