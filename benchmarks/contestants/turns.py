"""How a contestant takes turns: a line in, one round, a line of JSON out. Nothing else is imported here."""

import json
import os
import sys
import time

_out = os.fdopen(os.dup(1), "w")  # frameworks print to standard output; the answers have a channel of their own
os.dup2(2, 1)


def wait() -> None:
    """Until it is this contestant's turn; leaves when there are no more."""
    if not sys.stdin.readline():
        os._exit(0)


def answer(**values: float) -> None:
    _out.write(json.dumps(values) + "\n")
    _out.flush()


class Turns:
    """A round is over with `stop`; what comes between that and `done`, which waits for the next turn, is not timed."""

    def __init__(self) -> None:
        wait()
        self.began = time.perf_counter()

    def stop(self) -> None:
        self.seconds = time.perf_counter() - self.began

    def done(self, **values: float) -> None:
        answer(seconds=self.seconds, **values)
        wait()
        self.began = time.perf_counter()
