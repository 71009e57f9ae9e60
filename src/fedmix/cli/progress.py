"""How a run is watched: a bar on a terminal, plain lines elsewhere. Everything goes to standard error."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fedmix.report.words import event_words, printable, size
from fedmix.schema import LeftOut, MetricsLine


class _Totals:
    """What is remembered from round to round: the last accuracy, in words, and the troubles of the last round."""

    def __init__(self) -> None:
        self.accuracy = ""
        self.troubles: list[str] = []

    def take(self, line: MetricsLine) -> list[str]:
        """Add a round, and give back what is worth a line of its own: what has newly gone wrong, experts that came or went."""
        if "accuracy" in line:
            validation = line["accuracy"]["validation"]
            as_sent, server = validation["as_sent"]["mean"], validation["server"]["mean"]
            self.accuracy = f"as sent {_percent(as_sent)} server {_percent(server)}"
        kinds = [trouble.split(":")[0] for trouble in self.troubles]
        self.troubles = line.get("warnings", [])
        new = [trouble for trouble in self.troubles if trouble.split(":")[0] not in kinds]
        return [event_words(event) for event in line.get("structure", [])] + new + _left_out(line)


def _left_out(line: MetricsLine) -> list[str]:
    """Clients that a round went on without, and why."""
    absent = [f"client {_called(row)} is absent: {row['reason']}" for row in line.get("absent", [])]
    refused = [f"client {_called(row)} is refused: {row['field']}: {row['reason']}" for row in line.get("refused", [])]
    left_out = absent + refused
    more = [f"and {len(left_out) - 3} more"] if len(left_out) > 3 else []
    return [f"round {line['round']}: {printable(words)}" for words in left_out[:3] + more]


def _called(row: LeftOut) -> str:
    return row.get("name") or str(row["client"])


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


@contextmanager
def progress(title: str, quiet: bool) -> Iterator[Callable[[Any], None]]:
    """A function to call after each round."""
    totals = _Totals()
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        yield from _bar(title, totals)
    else:
        yield lambda step: _line(title, totals, step)


@contextmanager
def stages(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A function to call as work goes from stage to stage: (what is being done, how much of it is done, of how much)."""
    seen: dict[str, int] = {}
    if quiet or not sys.stderr.isatty():

        def say(name: str, done: int, total: int) -> None:
            tenth = 10 * done // max(total, 1)
            if tenth > seen.get(name, -1) and not quiet:
                seen[name] = tenth
                how_much = f" {done:,} of {total:,}" if total > 1 else ""
                print(f"{name} ...{how_much}", file=sys.stderr, flush=True)

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task("starting", total=None)

    def show(name: str, done: int, total: int) -> None:
        if not bar.live.is_started:
            bar.start()
        bar.update(task, description=name, completed=done, total=total)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


@contextmanager
def downloads(quiet: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """A function to call as a download goes on: (the file's name, its bytes so far, all of its bytes if they are known)."""
    if quiet or not sys.stderr.isatty():
        seen: set[str] = set()

        def say(name: str, done: int, total: int | None) -> None:
            if name not in seen and not quiet:
                seen.add(name)
                print(f"{name}: downloading {size(total) if total else ''}".rstrip(), file=sys.stderr, flush=True)

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    tasks: dict[str, Any] = {}
    with Progress(*columns, console=Console(stderr=True)) as bar:

        def show(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done, total=total)

        yield show


def _line(title: str, totals: _Totals, step: Any) -> None:
    for trouble in totals.take(step.metrics):
        print(f"{title}  round {step.done}/{step.total}  {trouble}", file=sys.stderr, flush=True)
    if "accuracy" in step.metrics or step.done == 1:
        facts = f"loss {step.metrics['loss']:.4f}  {totals.accuracy or 'not evaluated yet'}  sent {size(step.sent)}"
        print(f"{title}  round {step.done}/{step.total}  {facts}", file=sys.stderr, flush=True)


def _bar(title: str, totals: _Totals) -> Iterator[Callable[[Any], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(title, total=None, facts="starting")

    def show(step: Any) -> None:
        if not bar.live.is_started:
            # The bar has a thread, so it is started after the workers were forked.
            bar.start()
        for trouble in totals.take(step.metrics):
            bar.console.print(f"{title}  round {step.done}/{step.total}  {trouble}", style="yellow", markup=False)
        # The line must fit into 80 columns, the time that is left included.
        facts = f"loss {step.metrics['loss']:.2f} {totals.accuracy} {size(step.sent)}"
        bar.update(task, completed=step.done, total=step.total, facts=facts)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()
