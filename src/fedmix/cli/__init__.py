"""The command line. Results go to standard output, progress to standard error. Bad input gives one line and status 2."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from fedmix.cli.output import complain
from fedmix.errors import FedmixError


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command, and exit with its status."""
    from fedmix.cli.parser import make_parser

    args = make_parser().parse_args(argv)
    try:
        status = args.command(args)
        sys.stdout.flush()
    except FedmixError as error:
        status = complain(str(error))
    except BrokenPipeError:
        # The reader left. What Python still has to write when it exits must go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except OSError as error:
        status = complain(f"{_words_on(error)}. What was written before is still there.")
    except KeyboardInterrupt:
        status = 130
        print("fedmix: stopped", file=sys.stderr)
    sys.exit(status)


def _words_on(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}"
