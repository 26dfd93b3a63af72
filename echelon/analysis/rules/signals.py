"""What one rank shows of itself: its innermost span, its line, its heartbeat, its process."""

from __future__ import annotations

from echelon.analysis.evidence import RankEvidence, Span
from echelon.analysis.finding import seconds
from echelon.analysis.picture import last_row
from echelon.analysis.stacks import Frame, main_thread, users_frame
from echelon.recorder.schema import Live

STALE_HEARTBEAT_S = 3.0  # six missed beats: a busy machine delays one or two


def innermost_span(facts: RankEvidence) -> Span | None:
    """Return the innermost open span of the thread that makes the rank's collectives.

    Where that thread has none open, or there was no collective yet, of the thread that opened one
    last.
    """
    if not facts.open_spans:
        return None
    row = last_row(facts)
    if row is not None:
        own = [span for span in facts.open_spans if span.thread == int(row["thread"])]
        if own:
            return max(own, key=lambda span: (span.depth, span.started_ns))
    newest = max(facts.open_spans, key=lambda span: span.started_ns).thread
    own = [span for span in facts.open_spans if span.thread == newest]
    return max(own, key=lambda span: (span.depth, span.started_ns))


def heartbeat_age_s(facts: RankEvidence) -> float:
    """Return how old the Python heartbeat was at the last look, 0 if that is not known."""
    beat = facts.live[Live.HEARTBEAT_MONO_NS] if facts.live else 0
    seen = facts.host.snapshot_mono_ns
    if not beat or not seen or facts.host.later_heartbeat_mono_ns > beat:
        return 0.0  # unknown, or it was only late
    return max(0, seen - beat) / 1e9 + facts.host.later_gap_s


def heartbeat_lines(facts: RankEvidence) -> tuple[str, ...]:
    """Say how old the heartbeat is, if it is old."""
    age = heartbeat_age_s(facts)
    return (f"rank {facts.rank}: its heartbeat is {seconds(age)} old",) if age > 1 else ()


def users_line(facts: RankEvidence) -> Frame | None:
    """Return where the main thread stands in the user's own code, None if no stack is there."""
    thread = main_thread(facts.host.stacks)
    return users_frame(thread.frames) if thread else None


def process_lines(facts: RankEvidence) -> list[str]:
    """Say what the host saw of the process: its state, and whether it is busy."""
    host = facts.host
    lines = []
    if host.process_state:
        channel = f", waiting in {host.wait_channel}" if host.wait_channel else ""
        lines.append(f"rank {facts.rank}: process state {host.process_state}{channel}")
    if host.cpu_share is not None:
        runs = host.process_state == "R" and host.cpu_share > 0.02  # others may have the cores
        kind = "busy" if host.cpu_share > 0.5 or runs else "idle"
        lines.append(f"rank {facts.rank} is {kind}: {host.cpu_share:.0%} of a core")
    return lines
