"""A run over the sites: handed to the server, watched, and handed over again if the server was killed on the way."""

import json
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedmix.deploy.serve import LINK, flower
from fedmix.errors import RunError
from fedmix.running.directory import FAILURE, InUse, RunDirectory, read_metrics
from fedmix.running.run import Progress, sent_in
from fedmix.settings.recipe import Recipe, dump_recipe

FREE_SECONDS = 90.0  # for a server that was stopped to let go of a run directory
LOOK_SECONDS = 0.3  # between looks at the run directory
ASK_SECONDS = 10.0  # of silence, before Flower is asked whether the run goes on
TRIES = 3  # without a round in between


def opened(out: Path, recipe: Recipe, resume: bool, overwrite: bool) -> RunDirectory:
    """The run directory, once a server that was stopped, or cut off, has noticed, and let go of it."""
    until = time.monotonic() + FREE_SECONDS
    while True:
        try:
            return RunDirectory.open(out, recipe, resume, overwrite)
        except InUse:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


@contextmanager
def _interrupt_later() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted, and acted on where a run that is being handed over can be stopped."""
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: asked.append(number))
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass
class Submission:
    """folder: the server's. wait: seconds for sites to connect, and for a server that is away to come back."""

    folder: Path
    recipe: Recipe
    out: Path
    data_dir: str | None
    wait: float
    watch: Callable[[Progress], None]
    say: Callable[[str], None]

    def to_its_end(self, resume: bool, overwrite: bool) -> dict[str, Any]:
        """The summary. Ctrl-C stops the run at the server; it can be resumed."""
        opened(self.out, self.recipe, resume, overwrite).close()
        told, tries = self._rounds(), 0
        while True:
            (self.out / FAILURE).unlink(missing_ok=True)
            with _interrupt_later() as interrupted:
                number = self._submit(interrupted)
            try:
                if interrupted():
                    raise KeyboardInterrupt
                summary, told_now = self._follow(number, told)
            except KeyboardInterrupt:
                with _interrupt_later():
                    self._stop(number)
                raise
            if summary is not None:
                return summary
            tries = 0 if told_now > told else tries + 1
            told = told_now
            if tries == TRIES:
                raise RunError(f"{self.out}: the run was lost {TRIES} times without a round in between; see flwr log.")
            self.say(f"the server lost the run after round {told}; it goes on from there")

    def _stop(self, number: str) -> None:
        """Stop the run at the server, and wait until it has let go of its directory."""
        try:
            flower(self.folder, "stop", number, LINK)
            opened(self.out, self.recipe, resume=True, overwrite=False).close()
        except RunError as error:
            self.say(f"the run could not be stopped at the server ({error}); it may go on there")

    def _submit(self, interrupted: Callable[[], bool]) -> str:
        """Hand the run to the server, once it answers."""
        given = {
            "recipe": dump_recipe(self.recipe),
            "out": str(self.out.resolve()),
            "data-dir": self.data_dir or "",
            "wait": float(self.wait),
        }
        until, said = time.monotonic() + self.wait, False
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(tomli_w.dumps(given))
            file.flush()
            while True:
                try:
                    app = str((self.folder / "app").resolve())
                    return str(flower(self.folder, "run", app, LINK, "-c", file.name)["run-id"])
                except RunError as error:
                    if interrupted():
                        raise KeyboardInterrupt from error
                    if time.monotonic() > until:
                        raise RunError(f"{error} Is the server started ({self.folder / 'start.sh'})?") from error
                    if not said:
                        self.say(
                            f"the server does not take the run yet ({str(error)[:200]}); trying for {self.wait:g} s"
                        )
                        said = True
                    time.sleep(2)

    def _follow(self, number: str, told: int) -> tuple[dict[str, Any] | None, int]:
        """The summary, or None if the run is not there any more; and the last round that was told."""
        quiet_since = time.monotonic()
        while True:
            time.sleep(LOOK_SECONDS)
            lines = read_metrics(self.out)
            for i, line in enumerate(lines):
                if line["round"] > told:
                    told, quiet_since = line["round"], time.monotonic()
                    self.watch(Progress(told, self.recipe.rounds, line, sent_in(lines[: i + 1])))
            file = self.out / "summary.json"
            if file.exists() and told == self.recipe.rounds:
                summary: dict[str, Any] = json.loads(file.read_text())
                return summary, told
            if (why := self._failure(number)) is not None:
                raise RunError(why)
            if time.monotonic() > quiet_since + ASK_SECONDS:
                quiet_since = time.monotonic()
                if self._is_over(number) and not file.exists() and self._failure(number) is None:
                    return None, told

    def _failure(self, number: str) -> str | None:
        """Why this very run failed."""
        try:
            found = json.loads((self.out / FAILURE).read_text())
        except (OSError, ValueError):
            return None
        return str(found["error"]) if found.get("flower") == number else None

    def _is_over(self, number: str) -> bool:
        try:
            runs = flower(self.folder, "list", LINK)["runs"]
        except RunError:
            return False  # the server is away; it may come back
        status = next((run["status"] for run in runs if run["run-id"] == number), "finished:lost")
        if status == "finished:stopped":
            raise RunError(f"the run was stopped at the server. Go on with --resume: {self.out}.")
        return str(status).startswith("finished")

    def _rounds(self) -> int:
        return max((line["round"] for line in read_metrics(self.out)), default=0)
