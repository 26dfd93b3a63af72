"""Implement `echelon run`: parse the command line, run the job, and return the exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from echelon.errors import LaunchError
from echelon.launcher.job.report import EXIT_USAGE
from echelon.launcher.options.options import parse
from echelon.launcher.shortage import is_shortage


def main(argv: Sequence[str]) -> int:
    """Run `echelon run`; return the job's exit code, or 2 if the job cannot be started."""
    _open_standard_streams()
    options = parse(argv, os.environ)
    from echelon.launcher.agent import run  # imported late, so that `--help` is fast

    try:
        code = run(options)
    except LaunchError as err:
        print(f"echelon run: {err}", file=sys.stderr)
        return EXIT_USAGE
    except (OSError, RuntimeError) as err:
        if not is_shortage(err):
            raise
        print(f"echelon run: cannot start: {err}", file=sys.stderr)
        return EXIT_USAGE
    if "grpc" in sys.modules:
        # Everything is closed. gRPC's own teardown can take seconds on a busy machine, and the
        # scheduler waits for this process.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return code


def _open_standard_streams() -> None:
    """Connect closed standard streams to /dev/null, so that no other file gets descriptors 0-2."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)
            assert fd == number, (fd, name)  # open() takes the lowest free number
            setattr(sys, name, os.fdopen(fd, "r" if number == 0 else "w"))
