"""Detect a process that gets no CPU time.

The recorder renews two heartbeats: one in a Python thread, which needs the interpreter lock, and
one in a native thread, which needs only a CPU. If only the Python heartbeat is old, some code holds
the lock. If both heartbeats are old, the process has not been running at all.
"""

from __future__ import annotations

from echelon.analysis.evidence.model import RankEvidence
from echelon.analysis.evidence.picture import Picture
from echelon.analysis.finding import Cause, Confidence, seconds
from echelon.analysis.rules.one_rank.reading import Reading
from echelon.analysis.rules.one_rank.signals import (
    PRESSURE,
    STALE_HEARTBEAT_S,
    heartbeat_age_s,
    native_heartbeat_age_s,
    process_lines,
    users_line,
)
from echelon.recorder.format.schema import Live

_IDLE_SHARE = 0.1  # of a core: a runnable process that gets less waits for a core


def read_starvation(_: Picture, facts: RankEvidence) -> Reading | None:
    """Detect a process that has had no CPU time for several seconds although it is not stopped."""
    host, rank = facts.host, facts.rank
    python_s, native_s = heartbeat_age_s(facts), native_heartbeat_age_s(facts)
    if not host.alive or host.frozen or host.process_state in ("T", "t", "D"):
        return None
    if native_s is None or min(python_s, native_s) < STALE_HEARTBEAT_S or facts.live[Live.CLOSED]:
        return None
    waits = host.process_state == "R" and (host.cpu_share or 0.0) < _IDLE_SHARE
    is_pressed = host.pressure.get("cpu", 0.0) >= PRESSURE
    beats = f"Python's by {seconds(python_s)} and the native one by {seconds(native_s)}"
    return Reading(
        cause=Cause.STRAGGLER,
        confidence=Confidence.LIKELY if waits or is_pressed else Confidence.POSSIBLE,
        words=f"has had no CPU time for {seconds(min(python_s, native_s))}",
        frame=users_line(facts),
        evidence=(f"rank {rank}: both of its heartbeats are old: {beats}", *process_lines(facts)),
        action="Find out what uses {who}'s cores: more busy threads than cores, another job, or "
        "a paused virtual machine.",
        would_settle=() if waits or is_pressed else ("what else ran on its cores",),
    )
