"""Measure how a job spends its time: late arrivals, phases and collectives.

A rank's lag at a collective is its delay relative to the first rank to arrive. Measured offsets
relate the clocks of different hosts. Without a valid offset, the lag is derived from the time spent
inside the collective, because the last rank to arrive waits the least.

A collective's own time is measured on the last member to arrive, because the other members' times
include waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.analysis.evidence.matching.lanes import Lanes
from echelon.analysis.evidence.model import DATA_END, Evidence, RankEvidence
from echelon.analysis.evidence.picture import Picture
from echelon.recorder.format.schema import Flag, State

COMMUNICATION = "communication"
_MAX_CALLS = 64
_SLACK_NS = 1_000_000  # between hosts: an error this small is good enough


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """The arrival lags of a group's members at the collectives that all of them completed.

    Attributes:
        members: the global ranks of the members: [num_members].
        columns: the columns of the collectives in the lanes: [num_collectives].
        lag_ns: each member's delay relative to the first to arrive: [num_members, num_collectives].
        own_ns: the time that the last member to arrive spent in the collective: [num_collectives].
        created_ns: the time at which the first member arrived: [num_collectives].
    """

    group: str
    members: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    lag_ns: npt.NDArray[np.int64]
    own_ns: npt.NDArray[np.int64]
    created_ns: npt.NDArray[np.int64]

    @property
    def span_s(self) -> float:
        """The time from the first arrival at any collective to the last arrival, in seconds."""
        if len(self.created_ns) < 2:
            return 0.0
        return float(self.created_ns[-1] + self.lag_ns[:, -1].max() - self.created_ns[0]) / 1e9

    @property
    def last(self) -> npt.NDArray[np.int64]:
        """The index of the member that arrived last at each collective: [num_collectives]."""
        return np.asarray(self.lag_ns.argmax(axis=0), np.int64)

    @property
    def cost_ns(self) -> npt.NDArray[np.int64]:
        """How much later the last member arrived than the second-to-last one: [num_collectives]."""
        if self.lag_ns.shape[0] < 2:
            return np.zeros(self.lag_ns.shape[1], np.int64)
        upper = np.partition(self.lag_ns, -2, axis=0)
        return np.asarray(upper[-1] - upper[-2], np.int64)


def arrivals(lanes: Lanes) -> Arrivals | None:
    """Return each member's lag at each collective that all members of a group completed.

    Return None if there is no such collective or the group has only one member, or if a member
    has no record.
    """
    done = (lanes.state == State.COMPLETED).all(axis=0)
    if len(lanes.members) < 2 or not done.any() or lanes.strangers:
        return None
    created = lanes.column("created_ns", 0)[:, done]
    inside: npt.NDArray[Any] = lanes.column("ended_ns", 0)[:, done] - created
    ended = created + inside
    if clocks_are_common(lanes.evidence, lanes.members.tolist()) and not clocks_contradict(
        lanes, created[:, lanes.proven[done]], ended[:, lanes.proven[done]]
    ):
        first = created.min(axis=0)
        lag = created - first
    else:
        lag = inside.max(axis=0) - inside
        first = created[0]
    return Arrivals(
        group=lanes.name,
        members=lanes.members,
        columns=np.flatnonzero(done).astype(np.int64),
        lag_ns=lag,
        own_ns=np.asarray(np.maximum(inside.min(axis=0), 0), np.int64),
        created_ns=first,
    )


def clocks_are_common(evidence: Evidence, ranks: list[int]) -> bool:
    """Return whether the ranks' timestamps can be compared with each other."""
    if evidence.foreign:
        return True  # wall clocks: nothing better is recorded
    identities = [evidence.ranks[rank].identity for rank in ranks]
    if len({identity.boot_id or identity.host for identity in identities}) <= 1:
        return True
    return all(identity.rank == 0 or identity.clock_error_ns >= 0 for identity in identities)


def clocks_contradict(
    lanes: Lanes, created_ns: npt.NDArray[np.int64], ended_ns: npt.NDArray[np.int64]
) -> bool:
    """Return whether the records prove that a host's clock changed after its offset was measured.

    No member can leave a collective before the last member has entered it, so timestamps that
    contradict this order are wrong.

    Args:
        created_ns: the arrival times at collectives that end only once all members have entered:
            [num_members, num_columns].
        ended_ns: the end times of the same collectives: [num_members, num_columns].
    """
    identities = [lanes.evidence.ranks[rank].identity for rank in lanes.members.tolist()]
    is_one_host = len({identity.boot_id or identity.host for identity in identities}) <= 1
    if is_one_host or lanes.evidence.foreign or not created_ns.shape[1]:
        return False
    error_ns = 2 * max(identity.clock_error_ns for identity in identities)
    gap_ns = created_ns.max(axis=0) - ended_ns.min(axis=0)
    return bool(gap_ns.max() > error_ns + _SLACK_NS)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTime:
    """A breakdown of one rank's time.

    `phases_s` maps each span name, and `communication`, to its total time.
    """

    rank: int
    window_s: float
    phases_s: Mapping[str, float]
    mean_lag_s: float
    last_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTime:
    """The count, duration and bandwidth of one kind of collective."""

    group: str
    call: str
    count: int
    total_s: float  # the last member's time, summed
    bytes_per_s: float  # of the input on one rank; 0 if not known


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """A breakdown of a job's time by rank and by collective."""

    ranks: tuple[RankTime, ...]
    calls: tuple[CallTime, ...]

    @property
    def slowest(self) -> tuple[RankTime, ...]:
        """The ranks in descending order of mean lag."""
        return tuple(sorted(self.ranks, key=lambda rank: (-rank.mean_lag_s, rank.rank)))


def timing_of(picture: Picture) -> Timing:
    """Measure lags, phases and collectives from the recorded rows."""
    size = picture.evidence.world_size
    lag_ns, counts, last = np.zeros(size), np.zeros(size), np.zeros(size)
    calls: dict[tuple[str, int], list[float]] = {}
    for lanes in picture.lanes:
        found = arrivals(lanes)
        if found is None:
            continue
        lag_ns[found.members] += found.lag_ns.sum(axis=1)
        counts[found.members] += found.lag_ns.shape[1]
        last[found.members] += np.bincount(found.last, minlength=len(found.members))
        _add_calls(calls, lanes, found)
    counts = np.maximum(counts, 1)
    ranks = [
        _rank_time(picture.evidence, facts, float(lag_ns[rank] / counts[rank]) / 1e9,
                   float(last[rank] / counts[rank]))
        for rank, facts in picture.evidence.ranks.items()
    ]  # fmt: skip
    shown = [
        _call_time(picture.evidence, group, call, sums) for (group, call), sums in calls.items()
    ]
    shown = sorted((call for call in shown if call.total_s > 0), key=lambda call: -call.total_s)
    return Timing(ranks=tuple(ranks), calls=tuple(shown[:_MAX_CALLS]))


def _add_calls(calls: dict[tuple[str, int], list[float]], lanes: Lanes, found: Arrivals) -> None:
    """Add one group's calls to the totals of each kind of call: count, nanoseconds and bytes."""
    numbers = lanes.column("call")[0, found.columns]
    sizes = lanes.column("num_bytes", 0)[0, found.columns]
    for number in np.unique(numbers).tolist():
        mine = numbers == number
        sums = calls.setdefault((lanes.name, number), [0.0, 0.0, 0.0])
        sums[0] += float(mine.sum())
        sums[1] += float(found.own_ns[mine].sum())
        sums[2] += float(sizes[mine].sum())


def _call_time(evidence: Evidence, group: str, call: int, sums: list[float]) -> CallTime:
    count, nanoseconds, num_bytes = sums
    return CallTime(
        group=group,
        call=str(evidence.tables.calls[call]),
        count=int(count),
        total_s=nanoseconds / 1e9,
        bytes_per_s=num_bytes / nanoseconds * 1e9 if nanoseconds and num_bytes else 0.0,
    )


def _rank_time(
    evidence: Evidence, facts: RankEvidence, mean_lag_s: float, last_share: float
) -> RankTime:
    rows, spans = facts.rows, facts.spans
    done = rows["ended_ns"] > 0
    waited = done & ((rows["flags"] & Flag.ASYNC) == 0)
    phases = {COMMUNICATION: float((rows["ended_ns"] - rows["created_ns"])[waited].sum()) / 1e9}
    for name in np.unique(spans["name"]).tolist():
        mine = spans["name"] == name
        length = float((spans["ended_ns"] - spans["started_ns"])[mine].sum()) / 1e9
        if evidence.tables.texts[name] != DATA_END:  # a mark without a length
            phases[evidence.tables.texts[name]] = length
    firsts, lasts = (rows["created_ns"], spans["started_ns"]), (rows["ended_ns"], spans["ended_ns"])
    begins = [int(column.min()) for column in firsts if len(column)]
    ends = [int(column.max()) for column in lasts if len(column)]
    window_s = max(0, max(ends, default=0) - min(begins, default=0)) / 1e9
    return RankTime(
        rank=facts.rank,
        window_s=window_s,
        phases_s=phases,
        mean_lag_s=mean_lag_s,
        last_share=last_share,
    )
