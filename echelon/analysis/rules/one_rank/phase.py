"""Detect a rank that is loading data, accessing a checkpoint, compiling or using the store."""

from __future__ import annotations

from echelon.analysis.activity import Doing
from echelon.analysis.evidence.model import RankEvidence, Span
from echelon.analysis.evidence.picture import Picture
from echelon.analysis.evidence.stacks.frames import Frame, short_site, site_frame
from echelon.analysis.finding import Cause, Confidence, seconds
from echelon.analysis.rules.one_rank.doing import activity_of, named_worker, worker_lines
from echelon.analysis.rules.one_rank.reading import Reading
from echelon.analysis.rules.one_rank.signals import (
    innermost_span,
    process_lines,
    users_line,
)

_SPAN_CAUSES = {
    "data_wait": Cause.DATA_STARVATION,
    "checkpoint": Cause.STORAGE_STALL,
    "compile": Cause.COMPILE_STALL,
    "store": Cause.STORE_WAIT,
}
_SPAN_WORDS = {
    Cause.DATA_STARVATION: "has waited {age} for its next batch{at}",
    Cause.STORAGE_STALL: "has been writing or reading a checkpoint for {age}{at}",
    Cause.COMPILE_STALL: "has been compiling for {age}{at}",
    Cause.STORE_WAIT: "has waited {age} for the store{detail}{at}",
}

_OTHERS_BUILD = (
    "It waits for another process to build a C++ extension. If none does, remove the lock file "
    "below TORCH_EXTENSIONS_DIR (~/.cache/torch_extensions): a killed build leaves it behind."
)


def read_compiler(_: Picture, facts: RankEvidence) -> Reading | None:
    """Detect, from its stack alone, a rank that is running torch's compiler."""
    activity = activity_of(facts)
    if activity.doing is not Doing.COMPILING:
        return None
    frame = users_line(facts)
    at = f" (called at {frame})" if frame else ""
    return Reading(
        cause=Cause.COMPILE_STALL,
        confidence=Confidence.LIKELY,
        words=f"compiles{at}",
        frame=frame,
        evidence=(
            f"rank {facts.rank}: its stack is inside the compiler ({activity.by})",
            *worker_lines(facts),
            *process_lines(facts),
        ),
        action=_OTHERS_BUILD if activity.by.startswith("file_baton.py") else "",
    )


def read_span(_: Picture, facts: RankEvidence) -> Reading | None:
    """Detect a rank that is inside a span whose name reveals what delays the rank."""
    span = innermost_span(facts)
    if span is not None and span.name in _SPAN_CAUSES:
        return _span_reading(facts, span)
    return None


def _span_reading(facts: RankEvidence, span: Span) -> Reading:
    cause = _SPAN_CAUSES[span.name]
    age_s = max(0, facts.seen_ns - span.started_ns) / 1e9 if facts.seen_ns else 0.0
    frame = users_line(facts)
    site = _span_line(span, frame)
    age = seconds(age_s) if age_s else "some time"
    worker = named_worker(facts) if cause is Cause.DATA_STARVATION else None
    if worker is None:
        words = _SPAN_WORDS[cause].format(
            age=age,
            at=f" ({site})" if site else "",
            detail=f", {span.detail!r}" if span.detail else "",
        )
    else:
        words = f"has waited {age} for {worker.words()}"
    lines = [f"rank {facts.rank}: span '{span.name}' is open" + (f" at {site}" if site else "")]
    if span.detail:
        lines.append(f"rank {facts.rank}: {span.detail}")
    if frame is not None:
        lines.append(f"rank {facts.rank}: main thread at {frame}")
    return Reading(
        cause=cause,
        confidence=Confidence.CERTAIN,
        words=words,
        frame=(worker.activity.line if worker is not None else None) or frame,
        evidence=(*lines, *process_lines(facts)),
    )


def _span_line(span: Span, frame: Frame | None) -> str:
    """Return where a span was opened, or the current line of user code if a library opened it."""
    opened = site_frame(span.site)
    if frame is not None and frame.is_users and opened is not None and not opened.is_users:
        return str(frame)
    return short_site(span.site)
