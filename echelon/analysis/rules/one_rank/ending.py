"""Detect a rank that has ended, closed its recorder, left no record, or has a stale heartbeat."""

from __future__ import annotations

from echelon.analysis.evidence.model import RankEvidence
from echelon.analysis.evidence.picture import Picture
from echelon.analysis.finding import Cause, Confidence, seconds
from echelon.analysis.rules.endings.ended import ending_of, exit_words
from echelon.analysis.rules.one_rank.reading import Reading
from echelon.analysis.rules.one_rank.signals import (
    STALE_HEARTBEAT_S,
    heartbeat_age_s,
    process_lines,
)
from echelon.recorder.format.schema import Live


def read_ending(picture: Picture, facts: RankEvidence) -> Reading | None:
    """Detect a rank that raised an exception, died, exited early, or closed its recorder."""
    host = facts.host
    ending = ending_of(picture, facts)
    if ending is not None:
        return Reading(
            cause=ending.cause,
            confidence=Confidence.CERTAIN,
            words=ending.words.removeprefix(f"rank {facts.rank} "),
            frame=ending.frame,
            evidence=ending.evidence,
        )
    if host.exit_code is None and host.alive is not False:
        return _closed(picture, facts)
    if host.stopped_by_agent and not _is_closed(facts):
        return None  # it ran until then: the other tests find out what it did
    if host.exit_code == 0 and _is_closed(facts):
        return _left_early(facts, "exited successfully (exit code 0)")
    code = "has ended" if host.exit_code is None else f"ended {exit_words(host.exit_code)}"
    return Reading(
        cause=Cause.DEAD_PROCESS,
        confidence=Confidence.CERTAIN if host.exit_code is not None else Confidence.LIKELY,
        words=code,
        evidence=(f"rank {facts.rank} {code}",),
        would_settle=() if host.exit_code is not None else ("its exit status",),
    )


def _closed(picture: Picture, facts: RankEvidence) -> Reading | None:
    if not _is_closed(facts):
        return None
    if facts.host.alive is None or facts.rank in picture.graph.wanted:
        return _left_early(facts, "closed its recorder cleanly")
    since = heartbeat_age_s(facts)
    return Reading(
        cause=Cause.HOST_HANG,
        confidence=Confidence.LIKELY,
        words=f"ended its program {seconds(since)} ago, but its process has not exited",
        evidence=(
            f"rank {facts.rank} closed its recorder as the interpreter exited",
            *process_lines(facts),
        ),
        would_settle=("its C-level stack",),
        action="Look for what {who} is still doing at exit: destructors of libraries, threads that "
        "are not daemons, a process group that was not destroyed.",
    )


def _left_early(facts: RankEvidence, how: str) -> Reading:
    return Reading(
        cause=Cause.SKIPPED_COLLECTIVE,
        confidence=Confidence.LIKELY,
        words=f"{how} while others still call collectives: it made fewer of them",
        evidence=(f"rank {facts.rank} {how}",),
        would_settle=("how many batches each rank had",),
    )


def _is_closed(facts: RankEvidence) -> bool:
    return bool(len(facts.live) > Live.CLOSED and facts.live[Live.CLOSED])


def read_silence(picture: Picture, facts: RankEvidence) -> Reading | None:
    """Detect a stale heartbeat in a ring that was read without access to the rank's process."""
    if facts.host.alive is not None or picture.evidence.foreign or not facts.has_ring:
        return None
    behind_s = _behind_s(picture, facts)
    if behind_s < STALE_HEARTBEAT_S:
        return None
    rank = facts.rank
    return Reading(
        cause=Cause.DEAD_PROCESS,
        confidence=Confidence.POSSIBLE,
        words=f"has shown no sign of life for {seconds(behind_s)} longer than the others",
        evidence=(f"rank {rank}: its heartbeat is {seconds(behind_s)} behind the others'",),
        would_settle=(f"rank {rank}'s process and its state (frozen_process, gil_hang)",),
    )


def _behind_s(picture: Picture, facts: RankEvidence) -> float:
    """Return how many seconds a rank's heartbeat lags behind the newest heartbeat."""
    if not facts.live[Live.HEARTBEAT_MONO_NS]:
        return 0.0
    return (picture.remembered("youngest", _youngest_ns) - _beat_ns(facts)) / 1e9


def _beat_ns(facts: RankEvidence) -> int:
    return facts.live[Live.HEARTBEAT_MONO_NS] + facts.offset_ns


def _youngest_ns(picture: Picture) -> int:
    ranks = picture.evidence.ranks.values()
    return max((_beat_ns(f) for f in ranks if f.live[Live.HEARTBEAT_MONO_NS]), default=0)


def read_loss(picture: Picture, rank: int) -> Reading:
    """Return a `Reading` for a rank on a lost or silent node, with the launcher's explanation."""
    why = picture.evidence.incident.absent.get(rank, "its node is lost")
    return Reading(
        cause=Cause.DEAD_PROCESS,
        confidence=Confidence.LIKELY,
        words=f"is missing: {why}",
        evidence=(f"rank {rank}: {why}",),
        would_settle=(f"the record that rank {rank}'s own node kept",),
        action="Check the machine of {who} and its link; if its launcher is still running, its "
        "run directory there has its own dump/latest.",
    )


def read_absence(picture: Picture, rank: int) -> Reading:
    """Return a `Reading` for a rank that left no readable record.

    Without an incident, the confidence is low, because the record might have been lost while files
    were being copied.
    """
    if picture.evidence.incident.absent.get(rank):
        return read_loss(picture, rank)
    unreadable = rank in picture.evidence.unreadable
    is_watched = bool(picture.evidence.incident.kind)
    left = "its record cannot be read" if unreadable else "it left no record"
    return Reading(
        cause=Cause.DEAD_PROCESS,
        confidence=Confidence.LIKELY if is_watched and not unreadable else Confidence.POSSIBLE,
        words=f"is missing: {left}",
        evidence=(f"rank {rank}: {left}",),
        would_settle=(
            f"rank {rank}'s exit status, or its record, which might only be missing here",
        ),
    )
