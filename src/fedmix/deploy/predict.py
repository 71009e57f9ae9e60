"""Predictions at a site: they need its own gate and the experts that it was sent, and no network."""

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
from fedmix.data.labels import text_of
from fedmix.data.tables import encode_rows, read_csv
from fedmix.deploy.folder import read_site
from fedmix.deploy.worker import run_folder
from fedmix.engines.client import predict
from fedmix.engines.store import SiteStore
from fedmix.errors import DataError, RunError, SettingError
from fedmix.settings.build import revive
from fedmix.settings.reading import read_recipe


@dataclass(frozen=True)
class SitePredictor:
    """A client of a site, as a run left it."""

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
        shape = list(x.shape[1:])
        if shape != self.about["input"]:
            raise DataError(f"inputs must have the shape {self.about['input']}. Got {shape}.")
        inputs = normalised(x, self.about["mean"], self.about["std"])
        return predict(self.algorithm, self.message, self.private, inputs)


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
    labels = [text_of(label) for label in about["labels"]] or [str(i) for i in range(about["classes"])]
    return SitePredictor(chosen, kept.name, t, labels, about, algorithm, message, private)


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


def read_inputs(path: Path, about: dict[str, Any], x: str = "x", y: str = "y") -> tuple[Tensor, np.ndarray | None]:
    """Read inputs [N, ...] from an .npz or .csv, and labels where the file has them. x, y: what it calls them."""
    if not path.is_file():
        raise DataError(f"--input must be a file. {path} is not there.")
    if path.suffix == ".csv":
        return _read_csv(path, about, y)
    return _read_npz(path, about, x, y)


def _read_csv(path: Path, about: dict[str, Any], y: str) -> tuple[Tensor, np.ndarray | None]:
    if not about["features"]:
        raise DataError("a CSV needs a model that was trained on columns (data.args.columns). This one was not.")
    cells = read_csv(path)
    inputs = torch.from_numpy(encode_rows(cells, about["features"]))
    return inputs, np.array(cells.columns[y]) if y in cells.columns else None


def _read_npz(path: Path, about: dict[str, Any], x: str, y: str) -> tuple[Tensor, np.ndarray | None]:
    arrays = npz_arrays(path, [x, y])
    if x not in arrays:
        raise DataError(f"{path} must hold an array {x!r}. It has none.")
    values = arrays[x]
    _check_numbers(path, values)
    values = _arrange_inputs(values, about)
    if not np.isfinite(values).all():
        raise DataError(f"{path}: inputs must be finite. They hold NaN or infinity.")
    labels = arrays.get(y)
    if labels is not None and labels.shape != (len(values),):
        raise DataError(f"{path}: {y!r} must have one value for each of the {len(values)} inputs.")
    return torch.from_numpy(np.ascontiguousarray(values)), labels


def _check_numbers(path: Path, values: np.ndarray) -> None:
    are_numbers = values.dtype.kind in "biuf"  # booleans, whole numbers with and without a sign, floats
    if not are_numbers or not values.size:
        raise DataError(f"{path}: inputs must be numbers. Got {values.dtype} of shape {list(values.shape)}.")


def _arrange_inputs(values: np.ndarray, about: dict[str, Any]) -> np.ndarray:
    """Bring images of bytes into the order [N, channels, height, width]; all other inputs become float32.

    Images stay bytes, since `normalised` makes numbers of them. Those that fit in no order are left as they are:
    `log_prob` says which shape they should have.
    """
    are_images_of_bytes = values.dtype == np.uint8 and about["mean"]
    if not are_images_of_bytes:
        return values.astype(np.float32)
    shape: list[int] = about["input"]
    if values.ndim == len(shape) and shape[0] == 1:  # grey images without an axis for their one channel
        return values[:, None]
    channels_first = np.moveaxis(values, -1, 1)
    if list(channels_first.shape[1:]) == shape:
        return channels_first
    return values


def predict_site(
    folder: Path, file: Path, client: str | None = None, run: str | None = None, x: str = "x", y: str = "y"
) -> dict[str, Any]:
    """Predict labels and probabilities for new inputs, and give the accuracy where the file has labels."""
    site = load_site(folder, client, run)
    inputs, truth = read_inputs(file, site.about, x, y)
    log_p = site.log_prob(inputs)
    predictions = [site.labels[i] for i in log_p.argmax(dim=1).tolist()]
    probabilities = [[round(p, 6) for p in row] for row in log_p.exp().tolist()]
    result = {
        "client": site.client,
        "run": site.run,
        "round": site.round,
        "labels": site.labels,
        "predictions": predictions,
        "probabilities": probabilities,
    }
    if truth is not None:
        labels = np.array([text_of(value) for value in truth.tolist()])
        _check_labels(file, labels, site.labels)
        result["accuracy"] = float(np.mean(np.array(predictions) == labels))
    return result


def _check_labels(file: Path, labels: np.ndarray, known: list[str]) -> None:
    strange = sorted(set(labels) - set(known))
    if strange:
        raise DataError(f"{file}: labels must be of {', '.join(known)}. Here is {strange[0]!r} as well.")
