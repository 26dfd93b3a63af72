"""Options of torchrun that are accepted and change nothing here, and why.

Each one that is given is reported in one line; a job is never refused for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

_WHY = {
    "rdzv_backend": "there is one way to meet",
    "monitor_interval": "the end of a worker is noticed at once",
    "start_method": "each worker is a program of its own",
    "event_log_handler": "what happened is in report.json",
    "logs_specs": "-r, -t, --log-dir and --log-format say where logs go",
    "local_addr": "nodes meet at --rdzv-endpoint; --bind says what its host binds",
    "run_path": "each worker is a Python of its own that runs SCRIPT, as without it",
}
_HAPPENS_TO_BE_RIGHT = {"rdzv_backend": frozenset({"", "echelon", "static", "c10d"})}
_STARTS = ("spawn", "fork", "forkserver")


def add_ignored(
    group: argparse._ArgumentGroup, default: Callable[[str, str | None], str | None]
) -> None:
    """Add the options that take a value."""
    for name in _WHY:
        if name != "run_path":
            group.add_argument(
                "--" + name.replace("_", "-"),
                default=default(name, ""),
                choices=("", *_STARTS) if name == "start_method" else None,
                metavar="X",
                help=f"no effect: {_WHY[name]}",
            )


def notes_on_ignored(args: argparse.Namespace) -> list[str]:
    """Return a line for each such option that was given."""
    return [
        f"--{name.replace('_', '-')} has no effect: {why}"
        for name, why in _WHY.items()
        if getattr(args, name) and getattr(args, name) not in _HAPPENS_TO_BE_RIGHT.get(name, ())
    ]
