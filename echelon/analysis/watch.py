"""`fr-analyze --watch`: look at a running job again and again, and say what is new.

A job's rings are read while it runs; an incident that its launcher writes takes their place. Each
look reports only what changed, so that a terminal left open tells the story of the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from echelon.analysis.diagnose import analyze
from echelon.analysis.finding import Report
from echelon.errors import DumpFormatError

INTERVAL_S = 2.0
Show = Callable[[Report], None]
Say = Callable[[str], None]


class Watch:
    """Remember what was last seen of a folder, and show what is new at each look."""

    def __init__(self, path: Path, show: Show, say: Say) -> None:
        self.exit_code = 0
        self._path = path
        self._show = show
        self._say = say
        self._last = ""

    def look(self) -> None:
        """Look once. A folder that holds nothing yet is waited for."""
        try:
            report = analyze(self._path)
        except (DumpFormatError, ValueError) as err:
            text = f"waiting: {err}"
            self._news(text, lambda: self._say(text))
            return
        verdict = report.verdict
        self.exit_code = report.exit_code
        if verdict is None:
            ranks = len(report.ranks_present)
            self._news(f"well {ranks}", lambda: self._say(f"{ranks} ranks, nothing is wrong"))
            return
        key = f"{report.origin} {verdict.cause} {verdict.culprit_ranks} {verdict.sequence}"
        self._news(key, lambda: self._show(report))

    def _news(self, key: str, tell: Callable[[], None]) -> None:
        if key != self._last:
            self._last = key
            tell()


def watch(path: Path, show: Show, say: Say, interval_s: float = INTERVAL_S) -> int:
    """Look until the user interrupts; return the exit code of the last look. Blocks."""
    seen = Watch(path, show, say)
    try:
        while True:
            seen.look()
            time.sleep(interval_s)
    except KeyboardInterrupt:
        return seen.exit_code
