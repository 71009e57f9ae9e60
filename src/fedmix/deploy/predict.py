"""Predictions at a site: its own gate, the experts that it was sent, nothing of the network."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmix.core.algorithm import Algorithm
from fedmix.core.types import Message, Private
from fedmix.data.federation import normalised
from fedmix.data.formats import npz_arrays
from fedmix.data.user_files import column, rows
from fedmix.deploy.folder import read_site
from fedmix.deploy.worker import run_folder
from fedmix.engines.client import predict
from fedmix.engines.store import SiteStore
from fedmix.errors import DataError, RunError, SettingError
from fedmix.settings.build import revive
from fedmix.settings.recipe import read_recipe


@dataclass(frozen=True)
class SitePredictor:
    """One client of a site, as it was left by a run."""

    client: str
    run: str
    round: int
    labels: list[str]
    about: dict[str, Any]
    algorithm: Algorithm
    message: Message
    private: Private

    def log_prob(self, x: Tensor) -> Tensor:
        """log p(y|x,s): [N, ...] -> [N, classes]."""
        if list(x.shape[1:]) != self.about["input"]:
            raise DataError(f"inputs must have the shape {self.about['input']}. Got {list(x.shape[1:])}.")
        return predict(self.algorithm, self.message, self.private, normalised(x, self.about["mean"], self.about["std"]))


def load_site(folder: Path, client: str | None = None, run: str | None = None) -> SitePredictor:
    """The newest run of a site, or the named one; client: needed where a site has several."""
    settings = read_site(folder)
    runs = sorted((folder / "runs").glob("*/federation.json"), key=lambda path: path.stat().st_mtime)
    if run:
        runs = [path for path in [run_folder(folder, run) / "federation.json"] if path.is_file()]
    if not runs:
        raise RunError(f"site {settings.name} must have taken part in {'run ' + run if run else 'a run'}. It has not.")
    own = runs[-1].parent
    about = json.loads(runs[-1].read_text())
    recipe = read_recipe(str(own))
    names: list[str] = about["clients"]
    here = [names[int(path.parent.name)] for path in (own / "clients").glob("*/received.safetensors")]
    if client is None and len(here) == 1:
        client = here[0]
    if client is None or client not in here:
        given = "Got none" if client is None else f"Got {client!r}"
        raise SettingError(f"--client must be one of this site's: {', '.join(sorted(here)) or 'none yet'}. {given}.")
    _, algorithm = revive(recipe, about)
    message, private, t = SiteStore(own / "clients").kept(names.index(client))
    labels = about["labels"] or [str(i) for i in range(about["classes"])]
    return SitePredictor(client, own.name, t, labels, about, algorithm, message, private)


def read_inputs(path: Path, about: dict[str, Any], x: str = "x", y: str = "y") -> tuple[Tensor, np.ndarray | None]:
    """Inputs [N, ...] of an .npz or .csv, and labels as text where the file has them."""
    if not path.is_file():
        raise DataError(f"--input must be a file. {path} is not there.")
    if path.suffix == ".csv":
        if not about["features"]:
            raise DataError("a CSV needs a model that was trained on columns (data.args.columns). This one was not.")
        return rows(path, about["features"]), column(path, y)
    found = npz_arrays(path, [x, y])
    if x not in found:
        raise DataError(f"{path} must hold an array {x!r}. It has none.")
    values = found[x]
    if values.dtype.kind not in "biuf" or not values.size:
        raise DataError(f"{path}: inputs must be numbers. Got {values.dtype} of shape {list(values.shape)}.")
    if values.dtype == np.uint8 and about["mean"] and values.ndim == len(about["input"]) and about["input"][0] == 1:
        values = values[:, None]
    elif values.dtype == np.uint8 and about["mean"] and list(np.moveaxis(values, -1, 1).shape[1:]) == about["input"]:
        values = np.moveaxis(values, -1, 1)
    elif values.dtype != np.uint8 or not about["mean"]:
        values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise DataError(f"{path}: inputs must be finite. They hold NaN or infinity.")
    labels = found.get(y)
    if labels is not None and (labels.ndim != 1 or len(labels) != len(values)):
        raise DataError(f"{path}: {y!r} must have one value for each of the {len(values)} inputs.")
    return torch.from_numpy(np.ascontiguousarray(values)), labels


def predict_site(
    folder: Path, file: Path, client: str | None = None, run: str | None = None, x: str = "x", y: str = "y"
) -> dict[str, Any]:
    """Labels and probabilities of new inputs; accuracy too where the file has labels."""
    site = load_site(folder, client, run)
    inputs, truth = read_inputs(file, site.about, x, y)
    log_p = site.log_prob(inputs)
    best = log_p.argmax(dim=1)
    names = [site.labels[i] for i in best.tolist()]
    found = {
        "client": site.client,
        "run": site.run,
        "round": site.round,
        "labels": site.labels,
        "predictions": names,
        "probabilities": [[round(p, 6) for p in row] for row in log_p.exp().tolist()],
    }
    if truth is not None:
        truth = np.array(
            [str(int(v)) if isinstance(v, (float, np.floating)) and v == int(v) else str(v) for v in truth]
        )
        strange = sorted(set(truth) - set(site.labels))
        if strange:
            raise DataError(f"{file}: labels must be of {', '.join(site.labels)}. Here is {strange[0]!r} as well.")
        found["accuracy"] = float(np.mean(np.array(names) == truth))
    return found
