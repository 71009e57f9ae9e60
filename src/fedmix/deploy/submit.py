"""A run over the sites: handed to the server, watched, and handed over again if the server was killed on the way."""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedmix.deploy.serve import LINK, flower
from fedmix.errors import RunError
from fedmix.experiment.recipe import Recipe, dump_recipe
from fedmix.experiment.record import FAILURE, RunDirectory, read_metrics
from fedmix.experiment.run import Progress

LOOK_SECONDS = 0.3  # between looks at the run directory
ASK_SECONDS = 10.0  # of silence, before Flower is asked whether the run goes on
TRIES = 3  # without a round in between


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
        RunDirectory.open(self.out, self.recipe, resume, overwrite).close()
        told, tries = self._rounds(), 0
        while True:
            (self.out / FAILURE).unlink(missing_ok=True)
            number = self._submit()
            try:
                summary, told_now = self._follow(number, told)
            except KeyboardInterrupt:
                flower(self.folder, "stop", number, LINK)
                raise
            if summary is not None:
                return summary
            tries = 0 if told_now > told else tries + 1
            told = told_now
            if tries == TRIES:
                raise RunError(f"{self.out}: the run was lost {TRIES} times without a round in between; see flwr log.")
            self.say(f"the server lost the run after round {told}; it goes on from there")

    def _submit(self) -> str:
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
                    if time.monotonic() > until:
                        raise
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
            for line in lines:
                if line["round"] > told:
                    told, quiet_since = line["round"], time.monotonic()
                    self.watch(Progress(told, self.recipe.rounds, line))
            file = self.out / "summary.json"
            if file.exists() and told == self.recipe.rounds:
                summary: dict[str, Any] = json.loads(file.read_text())
                return summary, told
            if (self.out / FAILURE).exists():
                raise RunError(json.loads((self.out / FAILURE).read_text())["error"])
            if time.monotonic() > quiet_since + ASK_SECONDS:
                quiet_since = time.monotonic()
                if self._is_over(number) and not file.exists() and not (self.out / FAILURE).exists():
                    return None, told

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
