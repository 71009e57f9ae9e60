"""The command line. Results go to standard output, progress to standard error; bad input is one line and status 2."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from fedmix.cli.output import complain
from fedmix.errors import FedmixError


def main(argv: Sequence[str] | None = None) -> NoReturn:
    from fedmix.cli.parser import make_parser

    args = make_parser().parse_args(argv)
    try:
        status = args.command(args)
        sys.stdout.flush()
    except FedmixError as error:
        status = complain(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left: nothing to say to it
        status = 1
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        status = complain(f"{error.strerror or error}{where}. What was written before is still there.")
    except KeyboardInterrupt:
        status = 130
        print("fedmix: stopped", file=sys.stderr)
    sys.exit(status)
