"""A run over the sites: it is handed to the server, watched, and handed over again if the server was killed on the way."""

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
from fedmix.running.directory import InUse, RunDirectory
from fedmix.running.run import Progress, sent_in
from fedmix.schema import FAILURE, Summary, read_metrics, read_summary
from fedmix.settings.reading import dump_recipe
from fedmix.settings.recipe import Recipe

FREE_SECONDS = 90.0  # in which a server that was stopped must let go of a run directory
LOOK_SECONDS = 0.3  # between looks at the run directory
ASK_SECONDS = 10.0  # without a new round, before Flower is asked whether the run goes on
TRIES = 3  # how often a run may be lost without a round in between


def opened(out: Path, recipe: Recipe, resume: bool, overwrite: bool) -> RunDirectory:
    """Open the run directory, once a server that was stopped, or cut off, has noticed and let go of it."""
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
    """Note Ctrl-C instead of acting on it; the function that is given says whether it came.

    A run that is being handed over cannot be stopped: its number is not known yet.
    """
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield lambda: bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass
class Submission:
    """A run that is to be trained over the sites of a federation.

    folder: the server's. wait: seconds in which sites must connect, and a server that is away must come back. watch: it is
    called after every round. say: it is told in words what goes on.
    """

    folder: Path
    recipe: Recipe
    out: Path
    data_dir: str | None
    wait: float
    watch: Callable[[Progress], None]
    say: Callable[[str], None]

    def train(self, resume: bool, overwrite: bool) -> Summary:
        """Train to the end, and give the summary. Ctrl-C stops the run at the server; it can be resumed."""
        opened(self.out, self.recipe, resume, overwrite).close()
        last_round, tries = self._last_round(), 0
        while True:
            summary, round_now = self._attempt(last_round)
            if summary is not None:
                return summary
            tries = 0 if round_now > last_round else tries + 1
            last_round = round_now
            if tries == TRIES:
                raise RunError(f"{self.out}: the run was lost {TRIES} times without a round in between; see flwr log.")
            self.say(f"the server lost the run after round {last_round}; it goes on from there")

    def _attempt(self, last_round: int) -> tuple[Summary | None, int]:
        """Hand the run over and follow it, as `_follow` does. Ctrl-C stops it at the server."""
        (self.out / FAILURE).unlink(missing_ok=True)
        with _interrupt_later() as interrupted:
            number = self._submit(interrupted)
        try:
            if interrupted():
                raise KeyboardInterrupt
            return self._follow(number, last_round)
        except KeyboardInterrupt:
            with _interrupt_later():
                self._stop(number)
            raise

    def _stop(self, number: str) -> None:
        """Stop the run at the server, and wait until it has let go of its directory."""
        try:
            flower(self.folder, "stop", number, LINK)
            opened(self.out, self.recipe, resume=True, overwrite=False).close()
        except RunError as error:
            self.say(f"the run could not be stopped at the server ({error}); it may go on there")

    def _submit(self, interrupted: Callable[[], bool]) -> str:
        """Hand the run to the server, once it answers. Gives Flower's number of the run."""
        until = time.monotonic() + self.wait
        said_that_it_waits = False
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(tomli_w.dumps(self._run_config()))
            file.flush()
            while True:
                try:
                    return self._hand_over(file.name)
                except RunError as error:
                    if interrupted():
                        raise KeyboardInterrupt from error
                    if time.monotonic() > until:
                        raise RunError(f"{error} Is the server started ({self.folder / 'start.sh'})?") from error
                    if not said_that_it_waits:
                        why = str(error)[:200]
                        self.say(f"the server does not take the run yet ({why}); trying for {self.wait:g} s")
                        said_that_it_waits = True
                    time.sleep(2)

    def _run_config(self) -> dict[str, Any]:
        """Give what `fedmix.apps.server` reads in Flower's run config."""
        return {
            "recipe": dump_recipe(self.recipe),
            "out": str(self.out.resolve()),
            "data-dir": self.data_dir or "",
            "wait": float(self.wait),
        }

    def _hand_over(self, config: str) -> str:
        app = str((self.folder / "app").resolve())
        answer = flower(self.folder, "run", app, LINK, "-c", config)
        return str(answer["run-id"])

    def _follow(self, number: str, last_round: int) -> tuple[Summary | None, int]:
        """Watch a run, and give its summary, or None if the server lost it; and the last round that was seen."""
        quiet_since = time.monotonic()
        while True:
            time.sleep(LOOK_SECONDS)
            round_now = self._watch_rounds_after(last_round)
            if round_now > last_round:
                last_round, quiet_since = round_now, time.monotonic()
            summary = self._summary_after(last_round)
            if summary is not None:
                return summary, last_round
            self._raise_if_it_failed(number)
            if time.monotonic() > quiet_since + ASK_SECONDS:
                quiet_since = time.monotonic()
                if self._is_lost(number):
                    return None, last_round

    def _watch_rounds_after(self, last_round: int) -> int:
        """Call `watch` for each round that is new, and give the last one."""
        lines = read_metrics(self.out)
        for i, line in enumerate(lines):
            if line["round"] > last_round:
                last_round = line["round"]
                self.watch(Progress(last_round, self.recipe.rounds, line, sent_in(lines[: i + 1])))
        return last_round

    def _summary_after(self, last_round: int) -> Summary | None:
        """Read the summary, if this was the last round of all and the summary is written."""
        return read_summary(self.out) if last_round == self.recipe.rounds else None

    def _raise_if_it_failed(self, number: str) -> None:
        why = self._failure(number)
        if why is not None:
            raise RunError(why)

    def _failure(self, number: str) -> str | None:
        """Say why this very run failed, if it did."""
        try:
            failure = json.loads((self.out / FAILURE).read_text())
        except (OSError, ValueError):
            return None
        is_of_this_run = failure.get("flower") == number
        return str(failure["error"]) if is_of_this_run else None

    def _is_lost(self, number: str) -> bool:
        """Say whether the server has ended the run without a summary and without saying why."""
        if not self._is_over(number):
            return False
        has_summary = (self.out / "summary.json").exists()
        return not has_summary and self._failure(number) is None

    def _is_over(self, number: str) -> bool:
        """Ask Flower whether the run has ended. That somebody stopped it is an error."""
        try:
            runs = flower(self.folder, "list", LINK)["runs"]
        except RunError:
            return False  # the server is away; it may come back
        status = next((run["status"] for run in runs if run["run-id"] == number), "finished:lost")
        if status == "finished:stopped":
            raise RunError(f"the run was stopped at the server. Go on with --resume: {self.out}.")
        return str(status).startswith("finished")

    def _last_round(self) -> int:
        return max((line["round"] for line in read_metrics(self.out)), default=0)
