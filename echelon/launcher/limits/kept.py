"""Save a node's learned limits in `limits.json`, next to the ring of the node's first rank."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from echelon.launcher.job.rundir import write_json
from echelon.launcher.limits.node import Row, joined

MAX_ROWS = 64
_MAX_BYTES = 1 << 20
_NAME = "limits.json"
_NUM_SHOWN = 8


class LimitsFile:
    """A background writer of a node's learned limits, with one row per call site or phase.

    A separate thread writes the rows, because the disk might hang. Failed writes are ignored.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def put(self, folder: Path, rows: Sequence[Row]) -> None:
        """Start `write_limits` on a thread, unless the previous write is still in progress."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(
            target=write_limits, args=(folder, rows), name="echelon-limits", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # the machine allows no more threads
            self._thread.start()


def write_limits(folder: Path, rows: Sequence[Row]) -> None:
    """Write the time limits of the most frequent calls and phases to a folder; ignore errors."""
    with contextlib.suppress(OSError):
        write_json(folder / _NAME, {"format": 1, "rows": [asdict(row) for row in rows[:MAX_ROWS]]})


def read_limits(folders: Iterable[Path]) -> list[Row]:
    """Read and merge the learned limits in the given rank folders; skip unreadable files."""
    rows: dict[tuple[str, str, bool], Row] = {}
    for folder in folders:
        path = folder / _NAME
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            if path.stat().st_size > _MAX_BYTES:
                continue
            for values in json.loads(path.read_text())["rows"]:
                row = Row(**values)
                key = row.name, row.site, row.is_span
                rows[key] = joined(rows[key], row) if key in rows else row
    return sorted(rows.values(), key=lambda row: -row.num)


def as_lines(rows: Sequence[Row]) -> list[str]:
    """Return a line for each of the first 8 rows with limits, and one line for all other rows."""
    watched = [row for row in rows if row.limit_s is not None]
    lines = [
        f"watched at {row.limit_s:.3g} s: {row.site or '?'} in "
        f"{'phase' if row.is_span else 'group'} '{row.name}' (99.9 % of {row.num} took at most "
        f"{row.usual_s:.3g} s, the longest {row.longest_s:.3g} s)"
        for row in watched[:_NUM_SHOWN]
    ]
    rest = len(rows) - len(lines)
    if rest:
        lines.append(f"watched at --stall-timeout alone: {rest} other call sites and phases")
    return lines
