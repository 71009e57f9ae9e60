"""Errors that a user can act on: each says what must hold, what was given and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class FedmixError(Exception):
    """Base of all errors that the command line prints as one line with exit status 2."""


class SettingError(FedmixError):
    """A recipe, flag or argument that cannot be used."""


class DataError(FedmixError):
    """Data that is missing, malformed or cannot be split as asked."""


class DataMissing(DataError):
    """Data files that are not there at all; not: damaged, incomplete."""


class ModelError(FedmixError):
    """A model that cannot be trained in a federation."""


class RunError(FedmixError):
    """A run directory or checkpoint that cannot be used as asked."""


class ClientError(FedmixError):
    """Something went wrong on a client; the message names client, round and step.

    discreet: what may leave the client's machine, where the message may quote its data.
    """

    def __init__(self, message: str, discreet: str | None = None) -> None:
        super().__init__(message)
        self.discreet = discreet or message


class StepError(Exception):
    """Raised inside a client's training; the engine adds client and round and raises ClientError."""


def one_of(what: str, given: object, known: Iterable[str]) -> str:
    """'X must be one of A, B. Got Z instead (did you mean B?).'"""
    names = sorted(known)
    close = get_close_matches(str(given), names, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{what} must be one of {', '.join(names)}. Got {str(given)!r} instead{hint}."
