"""Accept the torchrun options that have no effect in echelon.

If such an option is given, one line reports that it is ignored, and why.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

_WHY = {
    "rdzv_backend": "there is only one kind of rendezvous",
    "monitor_interval": "the end of a worker is noticed at once",
    "start_method": "each worker is a separate program",
    "event_log_handler": "events are recorded in report.json",
    "logs_specs": "use -r, -t, --log-dir and --log-format",
    "local_addr": "nodes meet at --rdzv-endpoint; use --bind for the address that its host binds",
    "run_path": "each worker is a separate Python process that runs SCRIPT anyway",
}
_HAPPENS_TO_BE_RIGHT = {"rdzv_backend": frozenset({"", "echelon", "static", "c10d"})}
_STARTS = ("spawn", "fork", "forkserver")


def add_ignored(
    group: argparse._ArgumentGroup, default: Callable[[str, str | None], str | None]
) -> None:
    """Add the ignored options that take a value."""
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
    """Return one line for each ignored option that was given."""
    return [
        f"--{name.replace('_', '-')} has no effect: {why}"
        for name, why in _WHY.items()
        if getattr(args, name) and getattr(args, name) not in _HAPPENS_TO_BE_RIGHT.get(name, ())
    ]
