"""Learn limits for this node's ranks, and summarize the ranks' activity for the coordinator.

A rank's ring shows whether the rank is active. If the ring has not changed for a while, `Activity`
looks for other signs: processor time, output and network traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from echelon.launcher.incident.worker import Worker
from echelon.launcher.limits.rank import Judged, Late, RankLimits
from echelon.launcher.node.activity import Activity
from echelon.recorder.read import LiveRing
from echelon.recorder.read.tail import Key, Tail
from echelon.recorder.stall.watchdog import Sight

_QUIET_S = 2.0  # how long a ring must be quiet before its process is examined
_QUIET_INSIDE_S = 0.5  # how long a process must be inactive before its connections are examined
_WAITS = frozenset({"data_wait", "store", "pipeline"})  # phases that end when other processes act


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A summary of a node's ranks that have rings. Times are in ms; -1 means no value."""

    worked_ms: int = -1  # since one of them last worked
    is_excused: bool = True  # whether a rank is in a phase that may take its time, or before init
    patience_ms: int = -1  # how much longer the stall rule should wait
    late_rank: int = -1
    late_ms: int = -1
    limit_ms: int = -1
    what: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A call site or phase, with its limit as shown to the user."""

    name: str
    site: str
    is_span: bool
    limit_s: float | None
    usual_s: float
    longest_s: float
    num: int


@dataclass(slots=True)
class _Rank:
    limits: RankLimits
    ring: LiveRing
    tail: Tail = field(default_factory=Tail)
    activity: Activity | None = None
    worked_ns: int = 0
    judged: Judged = field(default_factory=Judged)


class NodeLimits:
    """The durations of operations and phases on this node's ranks during one attempt.

    Args:
        store_port: the port of the store. Traffic on connections to the store does not count as
            activity.
        fixed_s: the stall rule's limit, in seconds.
        num_printed: a function that returns how many bytes a rank has printed.
    """

    def __init__(self, store_port: int, fixed_s: float, num_printed: Callable[[int], int]) -> None:
        self._store_port = store_port
        self._fixed_s = fixed_s
        self._num_printed = num_printed
        self._ranks: dict[int, _Rank] = {}

    def forget(self, rank: int) -> None:
        """Discard the history of a lost rank before the rank's process is replaced."""
        self._ranks.pop(rank, None)

    def see(
        self,
        worker: Worker,
        ring: LiveRing,
        sight: Sight,
        now_ns: int,
        age_s: Callable[[int], float],
    ) -> None:
        """Update the limits and the activity of one rank from its ring.

        Args:
            age_s: a function that returns the age of a timestamp in seconds. The age excludes time
                during which this process was not running.
        """
        rank = self._ranks.get(worker.rank)
        if rank is None:
            rank = self._ranks[worker.rank] = _Rank(self._limits_of(ring), ring)
        rank.ring = ring
        news = rank.tail.read(ring)
        rank.limits.learn(news, now_ns)
        rank.judged = rank.limits.judge(news, age_s)
        rank.worked_ns = max(rank.worked_ns, sight.progress_mono_ns)
        if age_s(sight.progress_mono_ns) < _QUIET_S:
            rank.activity = None
            return
        if rank.activity is None:
            rank.activity = Activity(
                worker.pid, self._store_port, _QUIET_INSIDE_S, now_ns, looks_inside=False
            )
            rank.activity.rest(
                self._num_printed(worker.rank), now_ns
            )  # earlier output does not count
        rank.activity.look(self._num_printed(worker.rank), now_ns)
        if rank.activity.num_signs:
            rank.worked_ns = max(rank.worked_ns, rank.activity.last_mono_ns)

    def sum_up(self, sights: list[Sight], age_s: Callable[[int], float]) -> Summary:
        """Return a summary of the ranks that `see` has just examined."""
        seen = {s.rank: self._ranks[s.rank] for s in sights if s.rank in self._ranks}
        if not seen:
            return Summary()
        judged = {number: rank.judged for number, rank in seen.items()}
        patience_s = max(one.patience_s for one in judged.values())
        summary = Summary(
            worked_ms=max(0, int(1e3 * min(age_s(rank.worked_ns) for rank in seen.values()))),
            is_excused=any(one.is_excused for one in judged.values())
            or not all(sight.initialized for sight in sights),
            patience_ms=int(1e3 * patience_s) if patience_s > 0 else -1,
        )
        late = {number: one.late for number, one in judged.items() if one.late is not None}
        return self._with_late(summary, late) if late else summary

    def rest(self, now_ns: int) -> None:
        """Ignore all rank activity that the collection of an incident has caused."""
        for number, rank in self._ranks.items():
            if rank.activity is not None:
                rank.activity.rest(self._num_printed(number), now_ns)

    def rows(self) -> list[Row]:
        """Return a row for each call site and phase on this node, the most frequent first."""
        rows: dict[tuple[str, str, bool], Row] = {}
        for row in self._all_rows():
            key = row.name, row.site, row.is_span
            known = rows.get(key)
            rows[key] = row if known is None else joined(known, row)
        return sorted(rows.values(), key=lambda row: -row.num)

    def _all_rows(self) -> Iterator[Row]:
        for rank in self._ranks.values():
            for one in rank.limits.watched():
                name, site = _words(rank.ring, one.key)
                yield Row(
                    name=name, site=site, is_span=one.key.is_span, limit_s=one.limit_s,
                    usual_s=one.usual_s, longest_s=one.longest_s, num=one.num,
                )  # fmt: skip

    def _limits_of(self, ring: LiveRing) -> RankLimits:
        return RankLimits(self._fixed_s, lambda name: ring.text(name) not in _WAITS)

    def _with_late(self, summary: Summary, late: dict[int, Late]) -> Summary:
        number = max(late, key=lambda rank: late[rank].age_s)
        one = late[number]
        name, site = _words(self._ranks[number].ring, one.key)
        where = f"phase '{name}'" if one.key.is_span else f"group '{name}'"
        what = (
            f"{site or '?'} in {where}: limit {one.limit_s:.3g} s, 99.9 % of {one.num} took at "
            f"most {one.usual_s:.3g} s"
        )
        return replace(
            summary,
            late_rank=number,
            late_ms=int(1e3 * one.age_s),
            limit_ms=int(1e3 * one.limit_s),
            what=what,
        )


def _words(ring: LiveRing, key: Key) -> tuple[str, str]:
    name = ring.text(key.name).partition("\n")[0] if key.name else ""
    return name, ring.text(key.site) if key.site else ""


def joined(one: Row, other: Row) -> Row:
    """Merge the rows of two ranks.

    If both rows have a limit, the merged row has the higher limit. Otherwise, it has no limit.
    """
    has_limits = one.limit_s is not None and other.limit_s is not None
    return Row(
        name=one.name, site=one.site, is_span=one.is_span,
        limit_s=max(one.limit_s or 0.0, other.limit_s or 0.0) if has_limits else None,
        usual_s=max(one.usual_s, other.usual_s),
        longest_s=max(one.longest_s, other.longest_s),
        num=one.num + other.num,
    )  # fmt: skip
