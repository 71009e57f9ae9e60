"""A run directory, opened for writing: one process at a time writes it, and overwrites it only when asked to."""

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

from fedmix import schema
from fedmix.catalogue import CATALOGUE, SECTIONS
from fedmix.data.federation import PARTS, Federation
from fedmix.errors import RunError
from fedmix.running.files import write_bytes, write_json
from fedmix.schema import EnvironmentFile, FederationFile, MetricsLine, RunFile, Session, Summary
from fedmix.settings.reading import dump_recipe, flat_settings, read_recipe
from fedmix.settings.recipe import Recipe

# What a process that was killed may leave.
PARTIAL = {f"{name}.part" for name in schema.FILES}
# What an input is made of, by the type of the tensor that holds it.
INPUT_KINDS = {"torch.uint8": "bytes", "torch.int64": "integer"}
# Settings that a resumed run may change.
FREE_TO_CHANGE = ("rounds", "name", "description")


class InUse(RunError):
    """A run directory in which another process works."""


class RunDirectory:
    """The directory of a run. One process at a time has it open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: Any = None

    @staticmethod
    def refuse_taken(path: Path, resume: bool, overwrite: bool) -> None:
        """Refuse a folder that is no run's, or one that holds a run, unless that is to go on or to be replaced."""
        _refuse_what_is_no_run(path)
        if (path / schema.RECIPE).exists() and not (resume or overwrite):
            raise RunError(
                f"{path} holds a run already. Use --resume to go on with it, --overwrite to replace it, or another --out."
            )

    @staticmethod
    def open(path: Path, recipe: Recipe, resume: bool, overwrite: bool) -> "RunDirectory":
        """A new directory, one of the same recipe (resume), or a new one in the place of an old run (overwrite).

        A run that is resumed may have more rounds than before.
        """
        RunDirectory.refuse_taken(path, resume, overwrite)
        holds_run = (path / schema.RECIPE).exists()
        path.mkdir(parents=True, exist_ok=True)
        run = RunDirectory(path)
        run._take_lock()
        try:
            if holds_run:
                run._reuse(recipe, resume)
        except BaseException:
            run.close()
            raise
        return run

    def _reuse(self, recipe: Recipe, resume: bool) -> None:
        """Go on with the run that is here, or make room for a new one."""
        if resume:
            self._refuse_other_settings(recipe)
        else:
            self._clear()

    def _take_lock(self) -> None:
        # The file stays open while the run goes on: closing it gives the lock up.
        self._lock = open(self.path / schema.LOCK, "w")  # noqa: SIM115
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise InUse(f"{self.path} is in use by another process. Wait for it, or choose another --out.") from error

    def _clear(self) -> None:
        foreign = sorted(set(os.listdir(self.path)) - schema.FILES - PARTIAL)
        if foreign:
            raise RunError(
                f"{self.path} holds files that are not of a run ({', '.join(foreign[:3])}); nothing was removed."
            )
        # The recipe goes last: it says that this is a run, so a removal that was cut off can be repeated.
        for name in sorted(os.listdir(self.path), key=schema.RECIPE.__eq__):
            target = self.path / name
            if target.is_dir():
                shutil.rmtree(target)
            elif name != schema.LOCK:
                target.unlink()

    def _refuse_other_settings(self, recipe: Recipe) -> None:
        before, now = flat_settings(read_recipe(str(self.path))), flat_settings(recipe)
        differ = [key for key in _settings_that_decide(recipe, before, now) if now.get(key) != before.get(key)]
        if differ:
            key = differ[0]
            raise RunError(
                f"a run must be resumed with its own settings. {key} was {before.get(key)!r}, now it is {now.get(key)!r}; "
                f"leave it as it was, or choose another --out."
            )
        self._refuse_other_rounds(recipe, before["rounds"])

    def _refuse_other_rounds(self, recipe: Recipe, before: int) -> None:
        """A run may be made longer, but not shorter than it is already, and not where its rates depend on its length."""
        reached = self._last_checkpoint()
        if recipe.rounds < reached:
            raise RunError(
                f"the run is at round {reached} already; it cannot end at round {recipe.rounds}. Raise --rounds."
            )
        if recipe.rounds != before and recipe.training.schedule != "constant":
            raise RunError(f"rounds was {before}, and a rate schedule depends on it. It cannot become {recipe.rounds}.")

    def _last_checkpoint(self) -> int:
        """The round of the newest checkpoint; 0: there is none."""
        names = [path.name for path in (self.path / schema.CHECKPOINTS).glob("round-*")]
        return max((int(name.removeprefix("round-")) for name in names), default=0)

    # -- what a run is -------------------------------------------------------------------------------------------------

    def describe_recipe(self, recipe: Recipe) -> None:
        """recipe.toml: the effective settings. It is written once nothing can be refused any more."""
        write_bytes(self.path / schema.RECIPE, dump_recipe(recipe).encode())

    def describe_run(
        self, title: str, algorithm: str, structure: str, code: str, found_out: dict[str, Any] | None = None
    ) -> None:
        """run.json. code: a digest of the user's own method, which must not change while a run goes on; "": a shipped one.

        found_out: what was tried with the model and real inputs, so that loading the run tries nothing.
        """
        if (self.path / schema.CHECKPOINTS).exists() and schema.read_run(self.path).get("code", code) != code:
            raise RunError(f"a run must be resumed with its own method. The file of {algorithm} has changed since.")
        about: RunFile = {
            "schema": schema.VERSION,
            "algorithm": algorithm,
            "title": title,
            "model": structure,
            "code": code,
        }
        if found_out is not None:
            about["found_out"] = found_out
        write_json(self.path / schema.RUN, about)

    def describe_environment(self, engine: str, workers: int, device: str, seed: int) -> None:
        """environment.json: one more session of this run."""
        path = self.path / schema.ENVIRONMENT
        sessions: list[Session] = json.loads(path.read_text())["sessions"] if path.exists() else []
        program = Path(sys.argv[0]).name
        session: Session = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "engine": engine,
            "workers": workers,
            "device": device,
            "commit": commit(Path(__file__)),
            "command": ["fedmix" if program == "__main__.py" else program, *sys.argv[1:]],
        }
        environment: EnvironmentFile = {
            "python": platform.python_version(),
            "packages": {name: version(name) for name in ("fedmix", "torch", "numpy", "safetensors")},
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "seed": seed,
            "sessions": [*sessions, session],
        }
        write_json(path, environment)

    def describe_federation(self, federation: Federation) -> None:
        """federation.json."""
        described = describe_federation(federation)
        file = self.path / schema.FEDERATION
        if file.exists() and schema.read_federation(self.path)["digest"] != described["digest"]:
            raise RunError(
                f"a run must be resumed with its own data. What was given differs from what {file} describes."
            )
        write_json(file, described)

    # -- how the run goes ----------------------------------------------------------------------------------------------

    def cut_metrics(self, last: int) -> None:
        """Keep the lines of rounds up to `last`: later lines belong to rounds that will be trained again."""
        lines = [line for line in self.metrics() if line["round"] <= last]
        write_bytes(self.path / schema.METRICS, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def metrics(self) -> list[MetricsLine]:
        return schema.read_metrics(self.path)

    def append_metrics(self, line: MetricsLine) -> MetricsLine:
        """Write a line, and give it back as it is written: floats have six digits, which is what float32 is good for."""
        whole = json.dumps(line, allow_nan=False)
        short: MetricsLine = json.loads(whole, parse_float=lambda digits: float(f"{float(digits):.6g}"))
        with open(self.path / schema.METRICS, "a") as file:
            file.write(json.dumps(short) + "\n")
        return short

    def summary(self) -> Summary | None:
        """summary.json of a run that ended."""
        return schema.read_summary(self.path)

    def go_on(self) -> None:
        """Remove what is not true of a run that goes on: its summary, and what evaluate and audit found out."""
        for name in (schema.SUMMARY, schema.FAILURE, *schema.AFTERWARDS):
            (self.path / name).unlink(missing_ok=True)

    def finish(self, summary: Summary) -> None:
        write_json(self.path / schema.SUMMARY, summary)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


def _refuse_what_is_no_run(path: Path) -> None:
    """Only a folder that is empty, or holds nothing but files of a run, can become a run directory."""
    if not path.exists():
        return
    if not path.is_dir():
        raise RunError(f"{path} must be a directory for the run. It is a file; choose another --out.")
    if not (path / schema.RECIPE).exists() and not set(os.listdir(path)) <= schema.FILES | PARTIAL:
        raise RunError(f"{path} must be a run directory or not exist. It holds other files; choose another --out.")


def _settings_that_decide(recipe: Recipe, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Settings that must be the same where a run goes on: all but those of methods that it does not train."""
    other_sections = _sections_of_other_methods(recipe)
    of_own_method = [key for key in before if key.startswith("own.")]
    keys = dict.fromkeys([*now, *of_own_method])
    return [key for key in keys if key not in FREE_TO_CHANGE and key.split(".")[0] not in other_sections]


def _sections_of_other_methods(recipe: Recipe) -> set[str]:
    listed = CATALOGUE.get(recipe.algorithm)
    section = listed.section if listed else ""
    return set(SECTIONS) - {section}


def describe_federation(federation: Federation) -> FederationFile:
    """What federation.json holds."""
    clients = range(len(federation))
    return {
        "clients": list(federation.names),
        "points": {part: [federation.size(s, part) for s in clients] for part in PARTS},
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
        "kinds": list(federation.kinds),
        "side_moments": [list(values) for values in federation.side_moments],
        "roles": dict(federation.roles),
        "input_kind": INPUT_KINDS.get(str(federation.x.dtype), "float"),
        "input_parts": [part.table() for part in federation.input_parts],
        "digest": federation.digest(),
    }


def run_recipe(path: Path) -> Recipe:
    """The recipe of a run directory."""
    if not path.exists():
        raise RunError(f"{path} must be a run directory. It is not there.")
    for name in (schema.RECIPE, schema.FEDERATION):
        if not (path / name).is_file():
            raise RunError(f"{path} must be a run directory. It has no {name}.")
    return read_recipe(str(path))


def commit(file: Path) -> str | None:
    """The git commit that a file of fedmix came from, with `-dirty` if the checkout was edited; None: it is in no checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=file.parent, capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        # A .venv inside somebody's repository does not belong to that repository.
        git("ls-files", "--error-unmatch", file.name)
        return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None
