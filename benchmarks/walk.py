"""How far a reader has to walk: the functions of `fedmix train digits-permutation` in the order in which they are first called.

    python benchmarks/walk.py [-v]

A change of file is a call from one file of the package into another that was not made before: what a reader who follows the
run from its command to its summary has to open next. Calls that come back to where the reader has been count once. The
clients' side runs in worker processes and is not part of it.
"""

import itertools
import sys
import tempfile
from pathlib import Path

import fedmix

ROOT = str(Path(fedmix.__file__).parent)


def walk(arguments):
    """[(file, function, file of its caller)] of every function of the package, when it is first called."""
    from fedmix.cli import main

    seen = set()
    order = []

    def note(frame, event, _):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOT) or code.co_name.startswith("<"):
            return
        if not code.co_flags & 2 or (code.co_filename, code.co_qualname) in seen:  # a class body, or known
            return
        seen.add((code.co_filename, code.co_qualname))
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(ROOT):
            caller = caller.f_back
        order.append((code.co_filename, code.co_qualname, caller.f_code.co_filename if caller else ""))

    sys.setprofile(note)
    try:
        main(arguments)
    except SystemExit:
        pass
    finally:
        sys.setprofile(None)
    return order


def main():
    with tempfile.TemporaryDirectory() as folder:
        order = walk(["train", "digits-permutation", "--out", f"{folder}/run", "--quiet", "--json"])
    files = {file for file, _, _ in order}
    pairs = dict.fromkeys((caller, file) for file, _, caller in order if caller and caller != file)
    consecutive = sum(before[0] != after[0] for before, after in itertools.pairwise(order))
    print(file=sys.stderr)
    print(
        f"{len(files)} files, {len(order)} functions, {len(pairs)} changes of file ({consecutive} in the order of calls)",
        file=sys.stderr,
    )
    if "-v" in sys.argv:
        for caller, file in pairs:
            print(f"{Path(caller).relative_to(ROOT)} -> {Path(file).relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
