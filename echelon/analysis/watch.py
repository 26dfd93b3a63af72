"""Implement `fr-analyze --watch`, which observes a running job and reports changes.

The rings are read while the job is running. If the launcher writes an incident, the incident is
shown until every rank has new records or a later attempt begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from echelon.analysis.diagnose import report_of
from echelon.analysis.evidence.model import Evidence, RankEvidence
from echelon.analysis.evidence.picture import take_picture
from echelon.analysis.finding import Report
from echelon.analysis.sources.load import find, find_rings, load, load_place
from echelon.errors import DumpFormatError
from echelon.recorder.format.schema import Live

INTERVAL_S = 2.0
Show = Callable[[Report], None]
Say = Callable[[str], None]


class Watch:
    """An observer that reports the state of a folder only when that state changes."""

    def __init__(self, path: Path, show: Show, say: Say) -> None:
        self.exit_code = 0
        self._path = path
        self._show = show
        self._say = say
        self._last = ""

    def look(self) -> None:
        """Read the folder once, and report its state if it has changed."""
        try:
            report = report_of(take_picture(current(self._path)))
        except (DumpFormatError, ValueError) as err:
            text = f"waiting: {err}"
            self._news(text, lambda: self._say(text))
            return
        verdict = report.verdict
        self.exit_code = report.exit_code
        if verdict is None:
            ranks = len(report.ranks_present)
            said = "nothing points to a fault" if report.undecided else "nothing is wrong"
            text = f"{ranks} ranks, {said} ({report.origin})"
            self._news(text, lambda: self._say(text))
            return
        key = f"{report.origin} {verdict.cause} {verdict.culprit_ranks} {verdict.sequence}"
        self._news(key, lambda: self._show(report))

    def _news(self, key: str, tell: Callable[[], None]) -> None:
        if key != self._last:
            self._last = key
            tell()


def current(path: Path) -> Evidence:
    """Read the current state of a job: its newest incident, or its rings if they are newer.

    Raises:
        DumpFormatError: nothing at the path can be read.
        ValueError: the path does not exist or has no content in a known format.
    """
    place = find(path)
    rings = find_rings(path) if place is not None and place.incident.kind else None
    if place is None or rings is None:
        return load(path)
    if rings.incident.attempt > place.incident.attempt:
        return load_place(rings)
    evidence = load_place(place)
    if place.incident.kind != "stall":
        return evidence
    live = load_place(rings)
    return live if has_progressed(evidence, live) else evidence


def has_progressed(evidence: Evidence, live: Evidence) -> bool:
    """Return whether every rank has recorded something since the snapshot was taken."""
    return bool(evidence.ranks) and all(
        rank in live.ranks and _recorded(live.ranks[rank]) > _recorded(facts)
        for rank, facts in evidence.ranks.items()
    )


def _recorded(facts: RankEvidence) -> int:
    return sum(facts.live[word] for word in (Live.NUM_OPERATIONS, Live.NUM_SPANS, Live.STEP))


def watch(path: Path, show: Show, say: Say, interval_s: float = INTERVAL_S) -> int:
    """Observe a path until interrupted, and return the exit code of the last report."""
    seen = Watch(path, show, say)
    try:
        while True:
            seen.look()
            time.sleep(interval_s)
    except KeyboardInterrupt:
        return seen.exit_code
