"""A run directory: settings, environment, a line of metrics a round, a summary. Never overwritten without being told to."""

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedmix.catalogue import CATALOGUE, SECTIONS, Listed
from fedmix.data.federation import PARTS, Federation
from fedmix.errors import RunError
from fedmix.running.files import write_bytes, write_json
from fedmix.running.releases import NAME as RELEASES
from fedmix.settings.recipe import Recipe, dump_recipe, read_recipe, settings_table

SCHEMA = 2  # of run directories; 1: those without a run.json
NO_METHOD = Listed("", "", "")
FAILURE = "failure.json"  # why a run that was submitted to a server did not end
LOGGED = "logged.json"  # how far the tools of --log have got
TOOL_FOLDERS = ("tensorboard", "wandb")
AFTERWARDS = ("evaluation.json", "new-clients.png", "audit.json", "audit.png")  # of evaluate and audit
FILES = {
    "recipe.toml",
    "run.json",
    "environment.json",
    "federation.json",
    "metrics.jsonl",
    RELEASES,
    "summary.json",
    "checkpoints",
    "clients",
    "lock",
    "report.html",
    "sites.json",
    FAILURE,
    LOGGED,
    *TOOL_FOLDERS,
    *AFTERWARDS,
}


PARTIAL = {f"{name}.part" for name in FILES}  # what a process that was killed may leave


class InUse(RunError):
    """A run directory that another process works on."""


class RunDirectory:
    """Opened for one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: Any = None

    @staticmethod
    def open(path: Path, recipe: Recipe, resume: bool, overwrite: bool) -> "RunDirectory":
        """A new directory, or with `resume` one of the same recipe (more rounds are allowed), or with `overwrite` a new
        one in the place of an old run."""
        run = RunDirectory(path)
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} must be a directory for the run. It is a file; choose another --out.")
        there = path.is_dir() and any(path.iterdir())
        if there and not (path / "recipe.toml").exists() and not set(os.listdir(path)) <= FILES | PARTIAL:
            raise RunError(f"{path} must be a run directory or not exist. It holds other files; choose another --out.")
        there = (path / "recipe.toml").exists()
        if there and not (resume or overwrite):
            raise RunError(
                f"{path} holds a run already. Use --resume to go on with it, --overwrite to replace it, or another --out."
            )
        path.mkdir(parents=True, exist_ok=True)
        run._take_lock()
        try:
            if there and overwrite and not resume:
                run._clear()
            elif there:
                run._check_same(recipe)
        except BaseException:
            run.close()
            raise
        return run

    def _take_lock(self) -> None:
        self._lock = open(self.path / "lock", "w")  # noqa: SIM115 (held while the run goes on)
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise InUse(f"{self.path} is in use by another process. Wait for it, or choose another --out.") from error

    def _clear(self) -> None:
        foreign = sorted(set(os.listdir(self.path)) - FILES - PARTIAL)
        if foreign:
            raise RunError(
                f"{self.path} holds files that are not of a run ({', '.join(foreign[:3])}); nothing was removed."
            )
        for name in sorted(os.listdir(self.path), key="recipe.toml".__eq__):  # last, what says that this is a run
            target = self.path / name
            if target.is_dir():
                shutil.rmtree(target)
            elif name != "lock":
                target.unlink()

    def _check_same(self, recipe: Recipe) -> None:
        before = flat_settings(read_recipe(str(self.path)))
        now = flat_settings(recipe)
        others = {section for section in SECTIONS if section != CATALOGUE.get(recipe.algorithm, NO_METHOD).section}
        differ = [
            key
            for key in dict.fromkeys([*now, *(key for key in before if key.startswith("own."))])
            if now.get(key) != before.get(key)
            and key not in ("rounds", "name", "description")
            and key.split(".")[0] not in others
        ]
        if differ:
            key = differ[0]
            raise RunError(
                f"a run must be resumed with its own settings. {key} was {before.get(key)!r}, now it is {now.get(key)!r}; "
                f"leave it as it was, or choose another --out."
            )
        reached = max(
            (int(p.name.removeprefix("round-")) for p in (self.path / "checkpoints").glob("round-*")), default=0
        )
        if recipe.rounds < reached:
            raise RunError(
                f"the run is at round {reached} already; it cannot end at round {recipe.rounds}. Raise --rounds."
            )
        if now["rounds"] != before["rounds"] and recipe.training.schedule != "constant":
            raise RunError(
                f"rounds was {before['rounds']}, and a rate schedule depends on it. It cannot become {now['rounds']}."
            )

    def describe_recipe(self, recipe: Recipe) -> None:
        """recipe.toml: the effective settings. Written once nothing can be refused any more."""
        write_bytes(self.path / "recipe.toml", dump_recipe(recipe).encode())

    def describe_run(self, title: str, algorithm: str, structure: str, code: str) -> None:
        """run.json: the version of these files, what the method is called, and what model and method are made of.

        code: a digest of a method of the user's own, which must not change while a run goes on; "" of shipped ones.
        """
        before = read_run(self.path).get("code", code) if (self.path / "checkpoints").exists() else code
        if before != code:
            raise RunError(f"a run must be resumed with its own method. The file of {algorithm} has changed since.")
        about = {"schema": SCHEMA, "algorithm": algorithm, "title": title, "model": structure, "code": code}
        write_json(self.path / "run.json", about)

    def describe_environment(self, engine: str, workers: int, device: str, seed: int) -> None:
        """environment.json: versions, machine, and each session's command and source."""
        path = self.path / "environment.json"
        sessions = json.loads(path.read_text())["sessions"] if path.exists() else []
        sessions.append(
            {
                "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "engine": engine,
                "workers": workers,
                "device": device,
                "commit": commit(Path(__file__)),
                "command": [name if (name := Path(sys.argv[0]).name) != "__main__.py" else "fedmix", *sys.argv[1:]],
            }
        )
        packages = {name: version(name) for name in ("fedmix", "torch", "numpy", "safetensors")}
        write_json(
            path,
            {
                "python": platform.python_version(),
                "packages": packages,
                "platform": platform.platform(),
                "cores": os.cpu_count(),
                "seed": seed,
                "sessions": sessions,
            },
        )

    def describe_federation(self, federation: Federation) -> None:
        """federation.json: what a trained model needs to know of the data, so that it can be used without the data."""
        described = describe_federation(federation)
        file = self.path / "federation.json"
        if file.exists() and json.loads(file.read_text())["digest"] != described["digest"]:
            raise RunError(
                f"a run must be resumed with its own data. What was given differs from what {file} describes."
            )
        write_json(file, described)

    def cut_metrics(self, last: int) -> None:
        """Keep the lines of rounds up to `last`: what came after belongs to rounds that will be run again."""
        lines = [line for line in self.metrics() if line["round"] <= last]
        write_bytes(self.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path)

    def append_metrics(self, line: dict[str, Any]) -> dict[str, Any]:
        """The line as it is written: floats with six digits, what float32 is good for, in half the bytes."""
        short: dict[str, Any] = json.loads(
            json.dumps(line, allow_nan=False), parse_float=lambda digits: float(f"{float(digits):.6g}")
        )
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(short) + "\n")
        return short

    def summary(self) -> dict[str, Any] | None:
        """summary.json of a run that ended."""
        file = self.path / "summary.json"
        return json.loads(file.read_text()) if file.exists() else None

    def go_on(self) -> None:
        """A run that goes on has no summary until it ends again, and what was said of it is not true any more."""
        for name in ("summary.json", FAILURE, *AFTERWARDS):
            (self.path / name).unlink(missing_ok=True)

    def finish(self, summary: dict[str, Any]) -> None:
        write_json(self.path / "summary.json", summary)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


def describe_federation(federation: Federation) -> dict[str, Any]:
    """What a trained model needs to know of the data: what federation.json holds."""
    return {
        "clients": list(federation.names),
        "points": {part: [federation.size(s, part) for s in range(len(federation))] for part in PARTS},
        "input": list(federation.x.shape[1:]),
        "classes": federation.classes,
        "labels": list(federation.labels),
        "features": [dict(column) for column in federation.features],
        "categories": federation.categories,
        "side": federation.side,
        "groups": None if federation.groups is None else list(federation.groups),
        "label_counts": None if federation.elsewhere else federation.label_counts(),
        "held_out": [] if federation.held_out is None else list(federation.held_out.names),
        "left_out": federation.left_out,
        "mean": list(federation.mean),
        "std": list(federation.std),
        "digest": federation.digest(),
    }


def read_run(path: Path) -> dict[str, Any]:
    """run.json of a run directory; of an older one, which has none, what can be said of it."""
    file = path / "run.json"
    if not file.exists():
        return {"schema": 1}
    try:
        about: dict[str, Any] = json.loads(file.read_text())
        schema = int(about["schema"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file} must describe the run. It is damaged ({type(error).__name__}).") from error
    if schema > SCHEMA:
        raise RunError(
            f"{path} must be of a version that this fedmix knows. Its files are of schema {schema}, and this fedmix "
            f"knows up to {SCHEMA}; use a newer fedmix."
        )
    return about


def read_federation(path: Path) -> dict[str, Any]:
    """federation.json of a run directory."""
    file = path / "federation.json"
    try:
        about: dict[str, Any] = json.loads(file.read_text())
        about["digest"], about["clients"], about["classes"], about["categories"], about["input"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file} must describe the run's data. It is damaged ({error}).") from error
    return about


def run_recipe(path: Path) -> Recipe:
    """The recipe of a run directory."""
    for name in ("recipe.toml", "federation.json"):
        if not (path / name).is_file():
            raise RunError(f"{path} must be a run directory. It has no {name}.")
    return read_recipe(str(path))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line that was cut off is left out."""
    file = path / "metrics.jsonl"
    lines = []
    for text in file.read_text().splitlines() if file.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def flat_settings(recipe: Recipe) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings_table(recipe).items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": v for inner, v in value.items()}
        else:
            flat[key] = value
    return flat


def commit(file: Path) -> str | None:
    """The git commit that this file of ours came from, `-dirty` where the checkout was edited; None if it is in no checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=file.parent, capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)  # a .venv inside somebody's repository is not of that repository
        return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None
