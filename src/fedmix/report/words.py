"""Numbers and facts of a run as words: sizes, durations, titles, what noise guarantees."""

import unicodedata
from collections.abc import Mapping
from typing import Any

from fedmix.catalogue import TITLES
from fedmix.report.statistics import OverSeeds

GIB = 2**30


def title_of(about: Mapping[str, Any]) -> str:
    """What a method is called: as its run says, or, of older files, as shipped methods are called."""
    name = str(about.get("algorithm"))
    return str(about.get("title") or TITLES.get(name, name))


def printable(value: Any) -> Any:
    """The same without control characters in any text of it: names come from others, and a terminal obeys them."""
    if isinstance(value, str):
        return "".join(_printable(character) for character in value)
    if isinstance(value, Mapping):
        return {printable(key): printable(inner) for key, inner in value.items()}
    return [printable(inner) for inner in value] if isinstance(value, list) else value


def _printable(character: str) -> str:
    allowed = character in "\n\t" or unicodedata.category(character) != "Cc"
    return character if allowed else "\ufffd"


def size(count: float) -> str:
    """Bytes in the unit that suits them."""
    if count < 1024:
        return f"{count:,.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:,.2f} {unit}"
    return f"{count / 1024:,.2f} GiB"


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def percent(value: OverSeeds) -> str:
    """A mean over seeds in per cent, with its deviation where there is one."""
    if value["mean"] is None:
        return "-"
    deviation = value["std"]
    return f"{100 * value['mean']:.1f}" + (f" ± {100 * deviation:.1f}" if deviation is not None else "")


def scaled_down(scale: str) -> str:
    """What every output says of a run that is not its recipe at full size."""
    return f"scaled down (--scale {scale}): fewer clients, points or rounds and a smaller model than the recipe's own"


def how_much(result: Mapping[str, Any], looked_at: int) -> list[str]:
    """What a table of a run says where it is not all of it: a sample of the clients, a smaller recipe."""
    lines = []
    if looked_at < result["clients"]:
        lines.append(f"{looked_at:,} of {result['clients']:,} clients, drawn at random")
    if result["scale"] != "full":
        lines.append(scaled_down(result["scale"]))
    return lines


def noise_words(noise: float | None, protection: Mapping[str, Any]) -> str:
    """What a run's noise guarantees, or why it guarantees nothing. noise: its size; None: older files do not say it."""
    if noise == 0:
        return "no noise, so no guarantee"
    amount = "noise" if noise is None else f"noise {noise:g}"
    if protection["epsilon"] is None:
        return f"{amount}, but no guarantee: {protection.get('why_none') or 'this file does not say why'}"
    return (
        f"{amount}: epsilon {protection['epsilon']:.3g} at delta {protection['delta']:g} for a client that answered "
        f"{protection['rounds_of_a_client']} times (client-level, local; N_s, losses and scores are not covered)"
    )
