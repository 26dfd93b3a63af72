"""Dispatch the `echelon` command to its subcommands, each of which is defined in its own module."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence

from echelon import __version__

_HELP = """\
usage: echelon COMMAND [...]

  run      launch a job; explain it if it stalls or dies
  status   show what the ranks of a running job do
  report   show how each second of a job's ranks was spent
  doctor   check this machine before a job
  prepare  turn text into token shards
  plot     draw the figures of runs
  plan     find the layouts of a training that fit, and the fastest of them
  witness  let one of a job's two nodes continue if the other is lost
  store    serve a key-value store for torch's and echelon's TCPStore clients

See `echelon COMMAND --help`. `fr-analyze DIR` explains dumps, and `fr-analyze --attach` explains
a running job.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code.

    The code is 2 for invalid usage, and 141 if the reader closes the output pipe.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else "--help"
    if command == "run":  # a job outlives its output
        from echelon.launcher.cli import main as run

        return run(arguments)
    try:
        code = _show(command, arguments)
        sys.stdout.flush()
    except OSError as err:
        if err.errno not in (errno.EPIPE, errno.ENOSPC) or err.filename is not None:
            raise
        # Flushing the rest of the buffer would fail again when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if err.errno == errno.EPIPE:
            return 128 + signal.SIGPIPE
        print(f"echelon {command}: cannot write the output: {err.strerror}", file=sys.stderr)
        return 1
    return code


def _show(command: str, arguments: list[str]) -> int:
    """Run a subcommand other than `run`, and return its exit code."""
    if command == "status":
        from echelon.launcher.status.show import main as status

        return status(arguments)
    if command == "report":
        from echelon.launcher.goodput.command import main as report

        return report(arguments)
    if command == "doctor":
        from echelon.launcher.doctor.doctor import main as doctor

        return doctor(arguments)
    if command == "store":
        from echelon.store.server.cli import main as store

        return store(arguments)
    if command == "prepare":
        from echelon.tokens.prepare import main as prepare

        return prepare(arguments)
    if command == "plot":
        from echelon.train.figures.command import main as plot

        return plot(arguments)
    if command == "plan":
        from echelon.planner.command import main as plan

        return plan(arguments)
    if command == "witness":
        from echelon.launcher.election.witness_command import main as witness

        return witness(arguments)
    if command in ("--version", "-V"):
        print(f"echelon {__version__}")
        return 0
    if command in ("--help", "-h", "help"):
        print(_HELP, end="")
        return 0
    print(
        f"echelon: unknown command {command!r}; use one of run, status, report, doctor, prepare, "
        "plot, plan, witness and store",
        file=sys.stderr,
    )
    return 2


def analyze(argv: Sequence[str] | None = None) -> int:
    """Run `fr-analyze` on a folder, or on a running job if `--attach` or `--pid` is given."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if any(one in ("--attach", "--pid") or one.startswith("--pid=") for one in arguments):
        from echelon.launcher.attach.command import main as attach

        return attach(arguments)
    from echelon.analysis.cli import main as read

    return read(arguments)


if __name__ == "__main__":
    sys.exit(main())
