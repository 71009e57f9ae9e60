"""Numbers and facts of a run as words: sizes, durations, titles, what noise guarantees."""

import unicodedata
from collections.abc import Mapping
from typing import Any

from fedmix.catalogue import TITLES
from fedmix.report.statistics import OverSeeds
from fedmix.schema import StructureEvent

GIB = 2**30


def title_of(about: Mapping[str, Any]) -> str:
    """What a method is called: as its run says, or, where an older file does not, as the catalogue says."""
    name = str(about.get("algorithm"))
    return str(about.get("title") or TITLES.get(name, name))


def event_words(event: StructureEvent) -> str:
    """What happened to an expert, in a line."""
    if isinstance(event["into"], list):
        parts = ", ".join(map(str, event["into"]))
        clients = event["clients"] if isinstance(event["clients"], list) else [event["clients"]]
        return f"expert {event['expert']} is split into {parts} with {', '.join(map(str, clients))} clients"
    if event["what"] == "merged":
        return f"expert {event['expert']} is merged into {event['into']}, which serves its clients as well"
    return f"expert {event['expert']} is retired: no client uses it"


def printable(value: Any) -> Any:
    """The same without control characters in any text: names come from others, and a terminal obeys such characters."""
    if isinstance(value, str):
        return "".join(_printable(character) for character in value)
    if isinstance(value, Mapping):
        return {printable(key): printable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [printable(inner) for inner in value]
    return value


def _printable(character: str) -> str:
    allowed = character in "\n\t" or unicodedata.category(character) != "Cc"
    return character if allowed else "\ufffd"


def letter(group: int) -> str:
    """A true group's name: A, B, C and so on."""
    return chr(ord("A") + group % 26)


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
    """Seconds in the unit that suits them."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def percent(value: OverSeeds) -> str:
    """A mean over seeds in per cent, with its deviation where there is one."""
    if value["mean"] is None:
        return "-"
    deviation = value["std"]
    mean = f"{100 * value['mean']:.1f}"
    return mean if deviation is None else f"{mean} ± {100 * deviation:.1f}"


def scaled_down(scale: str) -> str:
    """What every output says of a run that is not its recipe at full size."""
    return f"scaled down (--scale {scale}): fewer clients, points or rounds and a smaller model than the recipe's own"


def how_much(result: Mapping[str, Any], looked_at: int) -> list[str]:
    """What a table says that does not show the whole run: a sample of the clients, or a smaller recipe."""
    lines = []
    if looked_at < result["clients"]:
        lines.append(f"{looked_at:,} of {result['clients']:,} clients, drawn at random")
    if result["scale"] != "full":
        lines.append(scaled_down(result["scale"]))
    return lines


def noise_words(noise: float | None, protection: Mapping[str, Any]) -> str:
    """What a run's noise guarantees, or why it guarantees nothing. noise: its size; None in older files."""
    if noise == 0:
        return "no noise, so no guarantee"
    amount = "noise" if noise is None else f"noise {noise:g}"
    if protection["epsilon"] is None:
        return f"{amount}, but no guarantee: {protection.get('why_none') or 'this file does not say why'}"
    return (
        f"{amount}: epsilon {protection['epsilon']:.3g} at delta {protection['delta']:g} for a client that answered "
        f"{protection['rounds_of_a_client']} times (client-level, local; N_s, losses and scores are not covered)"
    )
