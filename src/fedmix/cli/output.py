"""What commands print: results to standard output, everything else to standard error."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def complain(message: str) -> int:
    print("fedmix: error: " + " ".join(message.split()), file=sys.stderr)
    return 2


def show(renderable: Any) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 110).print(renderable)


def picture_of(draw: Callable[[Any, Path], None], what: Any, picture: Path) -> str | None:
    """Where the picture is; None without Matplotlib."""
    try:
        draw(what, picture)
    except ModuleNotFoundError:
        print("fedmix: no picture: it needs Matplotlib: pip install 'fedmix[plots]'", file=sys.stderr)
        return None
    return str(picture) if picture.exists() else None
