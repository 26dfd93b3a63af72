"""Determine what a rank is doing while other ranks are waiting for it.

Each test is a small function that takes one rank's evidence and returns a reading (a conclusion
about the rank) or None. The tests run from the most specific to the least specific, and the first
reading is used. A rank that matches no test is assumed to be executing its own code.
"""

from __future__ import annotations

from echelon.analysis.activity import Doing
from echelon.analysis.evidence.model import RankEvidence
from echelon.analysis.evidence.picture import Picture, last_row
from echelon.analysis.evidence.stacks.frames import Frame, short_site
from echelon.analysis.finding import Cause, Confidence
from echelon.analysis.rules.one_rank.device import read_device
from echelon.analysis.rules.one_rank.doing import (
    activity_of,
    read_arrival,
    read_doing,
    worker_lines,
)
from echelon.analysis.rules.one_rank.ending import read_absence, read_ending, read_silence
from echelon.analysis.rules.one_rank.outside import (
    is_seen_outside,
    keeps_waiting,
    outside_lines,
    outside_words,
    sleepers,
)
from echelon.analysis.rules.one_rank.phase import read_compiler, read_span
from echelon.analysis.rules.one_rank.process import (
    read_freezer,
    read_heartbeat,
    read_held_lock,
    read_kernel_wait,
    read_motion,
    read_throttling,
)
from echelon.analysis.rules.one_rank.reading import Reading, Test
from echelon.analysis.rules.one_rank.signals import (
    denied_line,
    innermost_span,
    interrupted_lines,
    missing_stack,
    native_line,
    process_lines,
    users_line,
)
from echelon.analysis.rules.one_rank.starved import read_starvation
from echelon.recorder.format.schema import TRACING


def read_rank(picture: Picture, rank: int) -> Reading:
    """Determine what a rank is doing while other ranks are waiting for it."""
    facts = picture.evidence.ranks.get(rank)
    if facts is None:
        return read_absence(picture, rank)
    for test in _TESTS:
        reading = test(picture, facts)
        if reading is not None:
            return reading
    return _host(picture, facts)


_TESTS: tuple[Test, ...] = (
    read_ending,
    read_freezer,
    read_silence,
    read_motion,
    read_arrival,
    read_device,
    read_span,
    read_compiler,
    read_throttling,
    read_starvation,
    read_heartbeat,
    read_held_lock,
    read_kernel_wait,
    read_doing,
)


def _host(picture: Picture, facts: RankEvidence) -> Reading:
    """Return the default reading, which assumes that the rank is executing its own code."""
    host = facts.host
    frame = users_line(facts)
    span = innermost_span(facts)
    if frame is None and span is not None:
        where = f"inside span '{span.name}' (opened at {short_site(span.site)})"
        words = f"is {where}, outside any operation"
    else:
        words = f"is at {frame}, outside any operation" if frame else "is outside any operation"
    lines = [f"rank {facts.rank}: main thread at {frame}"] if frame else []
    lines += [*_waits_line(facts), *worker_lines(facts)]
    lines += [*process_lines(facts), *native_line(facts), *interrupted_lines(facts)]
    row = last_row(facts)
    if row is not None:
        call = picture.evidence.call(row)
        number = int(row["sequence"] if row["sequence"] >= 0 else row["p2p_sequence"])
        lines.append(f"rank {facts.rank} last called {call.operation} #{number}")
    if not facts.has_ring:
        lines += outside_lines(facts)
    if frame is None and facts.host.alive:
        lines += denied_line(facts)
    if frame is None and span is None and row is None and not facts.has_ring:
        return _unrecorded(picture, facts, lines)
    return Reading(
        cause=Cause.HOST_HANG,
        confidence=Confidence.CERTAIN if frame and host.alive else Confidence.LIKELY,
        words=words,
        frame=frame,
        evidence=tuple(lines) or (f"rank {facts.rank} left nothing except its entries",),
        would_settle=_unsettled(picture, facts, frame),
    )


def _waits_line(facts: RankEvidence) -> tuple[str, ...]:
    """Describe what the rank is waiting for at its current line, if known."""
    activity = activity_of(facts)
    if activity.doing in (Doing.USER, Doing.LIBRARY, Doing.UNKNOWN):
        return ()
    return (f"rank {facts.rank} {activity.doing.value} ({activity.by})",)


def _outside(facts: RankEvidence) -> str:
    words = outside_words(facts)
    return f"{words}, outside any collective," if words else "is outside any collective"


def _unrecorded(picture: Picture, facts: RankEvidence, lines: list[str]) -> Reading:
    """Infer what a rank without a record is doing from its threads' system calls."""
    rank = facts.rank
    stack = missing_stack(facts, f"rank {rank}'s stack")
    if TRACING not in facts.host.not_permitted:
        stack += " (py-spy can read it, if installed and permitted)"
    if rank in keeps_waiting(picture) or (picture.wait_for([rank]) and is_seen_outside(facts)):
        return Reading(
            cause=Cause.HOST_HANG,
            confidence=Confidence.LIKELY,
            words=f"{_outside(facts)} while the others wait in one",
            evidence=tuple(lines),
            would_settle=(stack,),
        )
    if rank in sleepers(picture):
        return Reading(
            cause=Cause.HOST_HANG,
            confidence=Confidence.POSSIBLE,
            words=f"{outside_words(facts)}, while the main threads of the others wait",
            evidence=tuple(lines),
            would_settle=(stack,),
        )
    return Reading(
        cause=Cause.UNKNOWN,
        confidence=Confidence.POSSIBLE,
        words="recorded nothing and showed no stack",
        evidence=tuple(lines) or (f"rank {rank} left nothing",),
        would_settle=(
            f"rank {rank}'s black box: it never opened one",
            stack,
            "torch's flight recorder: its Gloo backend does not write dumps on its own",
        ),
    )


def _unsettled(picture: Picture, facts: RankEvidence, frame: Frame | None) -> tuple[str, ...]:
    rank = facts.rank
    if picture.evidence.foreign and facts.host.alive is None:
        return (
            f"rank {rank}'s main thread's stack (host_hang, or data_starvation, storage_stall)",
            f"rank {rank}'s open store request (store_wait)",
            f"rank {rank}'s process state and heartbeat (frozen_process, gil_hang)",
        )
    if frame is None:
        return (missing_stack(facts, f"rank {rank}'s main thread's stack"),)
    return ()
