"""One self-contained HTML page from run directories: numbers, a plotting library and the code that draws, in one file."""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from fedmix.report.page_data import page_data
from fedmix.report.runs import Run


def _asset(name: str) -> str:
    return (files("fedmix.report") / "assets" / name).read_text(encoding="utf-8")


def as_json(value: Any) -> str:
    """JSON that can stand inside a script element: no text in it can end the element."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def html(data: dict[str, Any]) -> str:
    """The page that shows what `page_data` gives."""
    page = _asset("page.html")
    parts = {"CSS": _asset("page.css"), "JS": _asset("page.js"), "DATA": as_json(data), "PLOTLY": _plotly()}
    for name, text in parts.items():
        before, after = page.split(f"@@{name}@@")
        page = before + text + after
    return page


def _plotly() -> str:
    """The plotting library, without anything that would end the script element it stands in."""
    return _asset("plotly-cartesian.min.js").replace("</script", "<\\/script")


def report(runs: Sequence[Run]) -> str:
    """The page of these runs."""
    return html(page_data(runs))
