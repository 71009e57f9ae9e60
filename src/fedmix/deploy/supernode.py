"""Flower's SuperNode with two changes: it asks for messages twice a second where it would wait three seconds, and it takes
no code from the server. By Flower's design a run brings an app along, which every site executes; here the only app that a site
takes is the one that names fedmix's own entry points, as it is installed at the site."""

import io
import time
import tomllib
import zipfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

LONGEST = 0.5  # seconds
ENTRY = "fedmix.apps.client:app"
FILES = {"pyproject.toml", ".info/CONTENT"}  # of an app without code of its own
MOST_BYTES = 1 << 20


def wrong_with_app(content: bytes) -> str | None:
    """Why an app that the server sends is not fedmix's own, or None."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as bundle:
            foreign = sorted(set(bundle.namelist()) - FILES)
            if foreign:
                return f"it brings files along ({foreign[0][:80]!r})"
            if sum(entry.file_size for entry in bundle.infolist()) > MOST_BYTES:
                return "it is larger than such an app can be"
            settings = tomllib.loads(bundle.read("pyproject.toml").decode())
        entry = settings["tool"]["flwr"]["app"]["components"]["clientapp"]
        needs = settings["project"].get("dependencies", [])
    except (zipfile.BadZipFile, KeyError, TypeError, AttributeError, ValueError) as error:
        return f"it cannot be read ({type(error).__name__})"
    if entry != ENTRY:
        return f"its entry point is {str(entry)[:80]!r}"
    return f"it wants packages installed ({str(needs)[:80]})" if needs else None


def main() -> None:
    from flwr.supercore.run import RunNotRunningException
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli import flower_supernode

    pull = loop._pull_and_store_message

    def pull_without_code(*, get_fab: Callable[[str, int], Any], **rest: Any) -> Any:
        def get_own_fab(name: str, run: int) -> Any:
            fab = get_fab(name, run)
            wrong = wrong_with_app(fab.content)
            if wrong:
                print(f"fedmix: refused: the server's app is not fedmix's own: {wrong}", flush=True)
                raise RunNotRunningException  # Flower leaves the message alone, and goes on
            return fab

        return pull(get_fab=get_own_fab, **rest)

    vars(loop)["_pull_and_store_message"] = pull_without_code
    vars(loop)["time"] = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, LONGEST)))
    flower_supernode()


if __name__ == "__main__":
    main()
