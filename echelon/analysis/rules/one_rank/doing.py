"""Detect a rank whose stack shows what it is waiting for: data, a checkpoint or the store.

Programs that do not import echelon open no spans, so the stack is the only evidence. If the rank is
waiting for a child process, usually a data-loader worker, the report includes the line that the
child is executing.
"""

from __future__ import annotations

from echelon.analysis.activity import Activity, Doing, WorkerState, read_activity, read_worker
from echelon.analysis.activity.worker import Role
from echelon.analysis.evidence.model import RankEvidence
from echelon.analysis.evidence.picture import Picture
from echelon.analysis.finding import Cause, Confidence, seconds
from echelon.analysis.rules.one_rank.reading import Reading
from echelon.analysis.rules.one_rank.signals import native_line, process_lines

_CAUSES = {
    Doing.LOADING: Cause.DATA_STARVATION,
    Doing.CHECKPOINT: Cause.STORAGE_STALL,
    Doing.STORE: Cause.STORE_WAIT,
    Doing.MEETING: Cause.STORE_WAIT,
}
_MAX_SHOWN = 4


def activity_of(facts: RankEvidence) -> Activity:
    """Return what a rank's main thread was doing in the first snapshot."""
    return read_activity(facts.host.stacks, facts.host.native_stacks)


def workers_of(facts: RankEvidence) -> list[WorkerState]:
    """Return the child processes of a rank, the most suspicious first."""
    states = [read_worker(child) for child in facts.host.children]
    return sorted(states, key=lambda one: -one.trouble)


def worker_lines(facts: RankEvidence) -> list[str]:
    """Describe what the child processes of a rank are doing."""
    states = workers_of(facts)
    lines = [f"rank {facts.rank}: {one.words()}" for one in states if one.trouble][:_MAX_SHOWN]
    idle = [one for one in states if one.is_idle]
    if idle:
        words = "worker waits" if len(idle) == 1 else "workers wait"
        lines.append(f"rank {facts.rank}: {len(idle)} {words} for work")
    return lines


def read_arrival(_: Picture, facts: RankEvidence) -> Reading | None:
    """Detect a rank that entered a collective between the two snapshots."""
    host = facts.host
    if facts.has_ring or not host.later_stacks:
        return None
    first, later = activity_of(facts), read_activity(host.later_stacks)
    if first.doing is Doing.COLLECTIVE or later.doing is not Doing.COLLECTIVE:
        return None
    at = f"; it was at {first.line} before" if first.line else ""
    return Reading(
        cause=Cause.STRAGGLER,
        confidence=Confidence.LIKELY,
        words=f"is slow, not stuck: {seconds(host.later_gap_s)} later it is in a collective{at}",
        frame=first.line,
        evidence=(f"rank {facts.rank}: {later.by} in the second snapshot", *process_lines(facts)),
        would_settle=("whether the others continue: a later snapshot",),
    )


def read_doing(_: Picture, facts: RankEvidence) -> Reading | None:
    """Detect a rank whose stack shows why it is waiting."""
    activity = activity_of(facts)
    cause = _CAUSES.get(activity.doing)
    if cause is None or not facts.host.alive:
        return None
    lines = [f"rank {facts.rank}: its stack is in {activity.by}"]
    worker = named_worker(facts) if cause is Cause.DATA_STARVATION else None
    frame = activity.line
    if worker is not None:
        words = f"waits for {worker.words()}"
        frame = worker.activity.line or frame
        if activity.line:
            lines.append(f"rank {facts.rank}: main thread at {activity.line}")
    else:
        words = _words(activity)
        lines += worker_lines(facts)
    return Reading(
        cause=cause,
        confidence=Confidence.CERTAIN if _is_same_later(facts, activity) else Confidence.LIKELY,
        words=words,
        frame=frame,
        evidence=(*lines, *process_lines(facts), *native_line(facts)),
    )


def named_worker(facts: RankEvidence) -> WorkerState | None:
    """Return the data-loader worker that a rank is waiting for, or None if unknown."""
    states = [
        one
        for one in workers_of(facts)
        if one.trouble and (one.role is Role.LOADER or one.child.state in ("Z", "X"))
    ]
    return states[0] if states else None


def _words(activity: Activity) -> str:
    at = f" at {activity.line}" if activity.line else ""
    if activity.doing is Doing.LOADING and activity.is_nested:
        return f"is loading its next batch itself{at}"
    called = f" (called{at})" if at else ""
    return f"{activity.doing.value}{called}"


def _is_same_later(facts: RankEvidence, activity: Activity) -> bool:
    """Return whether both snapshots show the same activity."""
    if not facts.host.later_stacks:
        return False
    later = read_activity(facts.host.later_stacks)
    return later.doing is activity.doing and later.line == activity.line
