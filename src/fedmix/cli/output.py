"""What commands print: results to standard output, everything else to standard error."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedmix.schema import Summary


def complain(message: str) -> int:
    """Say what was wrong, in one line, and give back the status to exit with."""
    print("fedmix: error: " + " ".join(message.split()), file=sys.stderr)
    return 2


def say(message: str) -> None:
    print(f"fedmix: {message}", file=sys.stderr, flush=True)


def say_unless(quiet: bool) -> Callable[[str], None]:
    return (lambda _: None) if quiet else say


def names_in(text: str) -> list[str]:
    """The names that a flag was given, with commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()]


def show(renderable: Any) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 110).print(renderable)


def show_summary(summary: Summary, out: Path, as_json: bool) -> None:
    """The result of one run that has ended."""
    from fedmix.report.tables import summary_table

    if as_json:
        print(json.dumps(summary))
    else:
        show(summary_table(summary))
        print(f"results: {out}")


def picture_of(draw: Callable[[Any, Path], None], what: Any, picture: Path) -> str | None:
    """Draw a picture, and say where it is; None: there is none, as without Matplotlib."""
    try:
        draw(what, picture)
    except ModuleNotFoundError:
        say("no picture: it needs Matplotlib: pip install 'fedmix[plots]'")
        return None
    return str(picture) if picture.exists() else None
