"""Flower's SuperNode with two changes: it asks for messages twice a second, not every three seconds, and it takes no code from
the server.

By Flower's design a run brings an app along, which every site executes. Here the only app that a site takes is the one that
names fedmix's own entry points, as fedmix is installed at the site.
"""

import io
import time
import tomllib
import zipfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

LONGEST = 0.5  # seconds that the SuperNode sleeps at a time
ENTRY = "fedmix.apps.client:app"
FILES = {"pyproject.toml", ".info/CONTENT"}  # what an app consists of that has no code
MOST_BYTES = 1 << 20  # unpacked


def wrong_with_app(content: bytes) -> str | None:
    """Say why an app that the server sends is not fedmix's own, or give None if it is."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as bundle:
            wrong = _wrong_with_files(bundle)
            if wrong:
                return wrong
            settings = tomllib.loads(bundle.read("pyproject.toml").decode())
        entry = settings["tool"]["flwr"]["app"]["components"]["clientapp"]
        needs = settings["project"].get("dependencies", [])
    except (zipfile.BadZipFile, KeyError, TypeError, AttributeError, ValueError) as error:
        return f"it cannot be read ({type(error).__name__})"
    if entry != ENTRY:
        return f"its entry point is {str(entry)[:80]!r}"
    if needs:
        return f"it wants packages installed ({str(needs)[:80]})"
    return None


def _wrong_with_files(bundle: zipfile.ZipFile) -> str | None:
    """Say why the files of an app cannot be those of one without code. Nothing is unpacked for it."""
    foreign = sorted(set(bundle.namelist()) - FILES)
    if foreign:
        return f"it brings files along ({foreign[0][:80]!r})"
    if sum(file.file_size for file in bundle.infolist()) > MOST_BYTES:
        return "it is larger than such an app can be"
    return None


def main() -> None:
    """Start Flower's SuperNode with both changes; the arguments of the command line are Flower's."""
    from flwr.supercore.run import RunNotRunningException
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli import flower_supernode

    pull = loop._pull_and_store_message

    def pull_without_code(*, get_fab: Callable[[str, int], Any], **rest: Any) -> Any:
        def get_checked_fab(name: str, run: int) -> Any:
            fab = get_fab(name, run)
            wrong = wrong_with_app(fab.content)
            if wrong:
                print(f"fedmix: refused: the server's app is not fedmix's own: {wrong}", flush=True)
                raise RunNotRunningException  # then Flower leaves the message alone, and goes on
            return fab

        return pull(get_fab=get_checked_fab, **rest)

    vars(loop)["_pull_and_store_message"] = pull_without_code
    vars(loop)["time"] = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, LONGEST)))
    flower_supernode()


if __name__ == "__main__":
    main()
