"""Decide when to examine ranks before the stall rule's fixed limit has passed.

An early examination is due if all three conditions hold:

- An operation or phase has exceeded its learned limit.
- For at least the duration of that limit, no rank has made progress, computed, printed or sent
  data.
- No rank is in a phase that can take a long time.

Only the stall rule applies while a rank is not initialized or has no ring, or while a node's last
report is too old.

An early examination does not stop any rank. If the job then makes progress on its own, the
examination was a false alarm. After `MAX_CLEARED` false alarms, early examinations are disabled for
the rest of the attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_CLEARED = 2
DISARMED = (
    f"{MAX_CLEARED} early looks were false alarms: from now on, only --stall-timeout applies in "
    "this attempt"
)
_FRESH_S = 4.0  # the least age at which a report is too old
_SLACK_S = 2.0  # a rank's last activity may be slightly later than the start of the late operation


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A node's last report, with timestamps in ns on the coordinator's clock."""

    seen_ns: int
    worked_ns: int  # when one of its ranks last worked
    num_moves: int
    is_excused: bool  # a rank is in a phase that may take its time, has no ring, or is before init
    late_rank: int = -1  # -1: nothing is late
    late_since_ns: int = 0
    limit_s: float = 0.0
    what: str = ""  # in words


@dataclass(frozen=True, slots=True)
class Look:
    """An early examination that has become due."""

    reason: str


class LimitRule:
    """The state that decides when ranks are examined before the stall timeout has passed.

    The caller passes in the current time.

    Args:
        report_s: the longest interval between two reports from a node, in seconds.
    """

    def __init__(self, report_s: float = 0.0) -> None:
        self._fresh_ns = int(1e9 * max(_FRESH_S, 1.5 * report_s + 1.0))
        self._reported: list[int] | None = None
        self._begun_ns = 0
        self.num_cleared = 0

    @property
    def is_reported(self) -> bool:
        """True if an early examination was requested and no progress was detected afterwards."""
        return self._reported is not None

    @property
    def is_disarmed(self) -> bool:
        """True if early examinations are disabled because of too many false alarms."""
        return self.num_cleared >= MAX_CLEARED

    def begin_again(self, now_ns: int) -> None:
        """End the reported stall without counting it as a false alarm.

        Operations that began before `now_ns` are ignored from then on.
        """
        self._reported = None
        self._begun_ns = now_ns

    def look(self, views: Sequence[View | None], now_ns: int) -> Look | None:
        """Return a request for an early examination of the job if one is due, else None.

        Each request is returned only once.

        Args:
            views: the last report of each node that is not lost; None if the node has not reported
                yet.
        """
        known = [view for view in views if view is not None]
        moves = [view.num_moves for view in known]
        if self._reported is not None:
            if len(moves) == len(self._reported) and moves == self._reported:
                return None
            self._reported = None
            self.num_cleared += 1
        if self.is_disarmed or len(known) < len(views):
            return None
        late = self._late(known, now_ns)
        if late is None:
            return None
        self._reported = moves
        age_s = (now_ns - late.late_since_ns) / 1e9
        return Look(
            f"rank {late.late_rank} has waited for {age_s:.1f} s, longer than its history allows: "
            f"{late.what}"
        )

    def _late(self, views: Sequence[View], now_ns: int) -> View | None:
        late = [
            view for view in views if view.late_rank >= 0 and view.late_since_ns >= self._begun_ns
        ]
        if not late or any(view.is_excused for view in views):
            return None
        first = min(late, key=lambda view: view.late_since_ns)
        if any(now_ns - view.seen_ns > self._fresh_ns for view in views):
            return None
        worked_ns = max(view.worked_ns for view in views)
        if now_ns - worked_ns < (first.limit_s - _SLACK_S) * 1e9:
            return None
        return first
