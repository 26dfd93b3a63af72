"""Compare the durations of one rank's current operations and phases with earlier durations.

[Note: phases excuse] A checkpoint, a compilation or an evaluation can take a long time while other
ranks wait. Therefore, no rank is examined before the fixed stall limit while any rank is in a phase
that does not have a learned limit or has not exceeded it. Phases in which operations have been
called, such as a training epoch or a step, are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from echelon.launcher.limits.history import QUANTILE, History
from echelon.recorder.read.tail import Key, News, Open

MAX_KEYS = 128  # per rank; beyond this, only the call sites seen first are watched
_NUM_LONG = 2  # operations beyond the fixed limit that make this normal
_NUM_LONG_SPANS = 1  # one suffices, because a phase is named


@dataclass(frozen=True, slots=True)
class Late:
    """An operation or phase that is taking longer than its history allows."""

    key: Key
    age_s: float
    limit_s: float
    usual_s: float  # the 99.9th percentile
    num: int  # of samples in the history


@dataclass(frozen=True, slots=True)
class Judged:
    """The result of comparing a rank's current operations and phases with the rank's past ones."""

    late: Late | None = None  # the one that has been late for the longest time
    is_excused: bool = False  # whether the rank is in a phase that may take its time
    patience_s: float = 0.0  # how much longer the stall rule should wait; 0: no longer than usual


@dataclass(frozen=True, slots=True)
class Watched:
    """A call site or phase, with its learned limit."""

    key: Key
    limit_s: float | None  # None: only the fixed limit applies
    usual_s: float
    longest_s: float
    num: int


class RankLimits:
    """The limits learned from one rank's past operations and phases.

    Args:
        fixed_s: the stall rule's limit, in seconds.
        may_be_long: a function that returns whether phases with a given name are allowed to take
            longer than `fixed_s` repeatedly.
    """

    def __init__(self, fixed_s: float, may_be_long: Callable[[int], bool]) -> None:
        self._fixed_s = fixed_s
        self._may_be_long = may_be_long
        self._histories: dict[Key, History] = {}

    def learn(self, news: News, now_ns: int) -> None:
        """Add the durations of completed operations and phases to this rank's histories."""
        if news.is_other_ring:
            self._histories.clear()
        for key, lasted_ns in news.ended:
            history = self._histories.get(key)
            if history is None:
                if len(self._histories) >= MAX_KEYS:
                    continue
                num_long = _NUM_LONG_SPANS if key.is_span else _NUM_LONG
                history = self._histories[key] = History(self._fixed_s, num_long)
            history.add(lasted_ns, now_ns)

    def judge(self, news: News, age_s: Callable[[int], float]) -> Judged:
        """Compare this rank's current operations and phases with its past ones.

        Args:
            age_s: a function that returns the age of one of the rank's timestamps, in seconds.
        """
        late: Late | None = None
        is_excused, patience_s = False, 0.0
        for one, is_phase in _open(news):
            history = self._histories.get(one.key)
            age = age_s(one.since_ns)
            limit_s = None if history is None else history.limit_s
            if history is not None and (not is_phase or self._may_be_long(one.key.name)):
                patience_s = max(patience_s, history.patience_s - age)
            if history is not None and limit_s is not None and age > limit_s:
                if late is None or age > late.age_s:
                    usual_s = history.sketch.quantile_s(QUANTILE)
                    late = Late(one.key, age, limit_s, usual_s, history.sketch.num)
            elif is_phase:
                is_excused = True
        return Judged(late, is_excused, patience_s)

    def watched(self) -> Iterator[Watched]:
        """Yield each call site and phase with its learned limit."""
        for key, one in self._histories.items():
            usual_s, num = one.sketch.quantile_s(QUANTILE), one.sketch.num
            yield Watched(key, one.limit_s, usual_s, one.longest_s, num)


def _open(news: News) -> Iterator[tuple[Open, bool]]:
    """Yield each pending operation, and each open phase in which no operation has been called.

    Each is yielded together with a flag that is True for a phase.
    """
    for one in news.pending:
        yield one, False
    for one in news.spans:
        if news.last_call_ns.get(one.thread, 0) < one.since_ns:
            yield one, True
