"""Ranks that others wait for and that wait for nobody: what are they doing instead?

Each sink of the wait-for graph is refined by its own signals, the most telling first. Every test
below is a small function from one rank's evidence to a reading; the first that answers decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echelon.analysis.evidence import RankEvidence, Span
from echelon.analysis.finding import Cause, Confidence, Finding, rank_list, seconds
from echelon.analysis.picture import Picture, is_inside, last_row
from echelon.analysis.rules.ended import ending_of, exit_words
from echelon.analysis.stacks import Frame, main_thread, short_site, users_frame
from echelon.analysis.waits import Wait
from echelon.recorder.schema import Live

STALE_HEARTBEAT_S = 3.0  # six missed beats: a busy machine delays one or two
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
_ACTIONS = {
    Cause.DATA_STARVATION: "Look at {who}'s data loading{at}: its files, workers and storage.",
    Cause.STORAGE_STALL: "Look at the storage that {who} writes to{at}: space, quota, mount, load.",
    Cause.COMPILE_STALL: "Compile before the first collective, or raise the stall timeout for it.",
    Cause.STORE_WAIT: "Find out which rank was to write the key that {who} waits for{at}.",
    Cause.HOST_HANG: "Look at {who}'s code{at}: what does it wait for there?",
    Cause.GIL_HANG: "Find the C call{at} that holds {who}'s interpreter lock; make it release it.",
    Cause.FROZEN_PROCESS: "Continue {who} (kill -CONT {pid}), or find out who stopped it.",
    Cause.DEAD_PROCESS: "See {who}'s stderr and the machine's log for how its process ended.",
    Cause.SKIPPED_COLLECTIVE: "Give all ranks equally many batches, or let {who} go on to the end.",
    Cause.DEVICE_STUCK: "Look at {who}'s device (its error counters, its log); restart without it.",
    Cause.UNKNOWN: "Take another snapshot a few seconds later.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What one rank was found doing."""

    cause: Cause
    confidence: Confidence
    words: str  # after "rank R "
    frame: Frame | None = None
    evidence: tuple[str, ...] = ()
    would_settle: tuple[str, ...] = ()


# Each test takes the picture and one rank; most look at the rank alone.
_Test = Callable[[Picture, RankEvidence], Reading | None]


def find_stuck(picture: Picture) -> list[Finding]:
    """Report the sinks, those with the same cause together, the earliest wait first."""
    sinks = suspects(picture)
    readings = {rank: read_rank(picture, rank) for rank in sinks}
    by_cause: dict[Cause, list[int]] = {}
    for rank, reading in readings.items():
        by_cause.setdefault(reading.cause, []).append(rank)
    findings = [
        _describe(picture, tuple(ranks), readings[_first(picture, ranks)], _first(picture, ranks))
        for ranks in by_cause.values()
    ]
    began = {f.culprit_ranks: _began(picture, f.culprit_ranks) for f in findings}
    return sorted(findings, key=lambda f: (began[f.culprit_ranks], f.culprit_ranks))


def suspects(picture: Picture) -> tuple[int, ...]:
    """Return the ranks to look at: the sinks, or in a silent stall every rank that runs.

    A rank that is itself inside an operation with all its members waits for the transport; while
    another rank sits in no operation at all, that one comes first. A rank that is inside what its
    peers have completed waits for its own device. Before there is a group, ranks meet at the store:
    those that are there wait for those that are not.
    """
    sinks = picture.graph.sinks
    inside = {rank for wait in picture.graph.waits if not wait.absent for rank in wait.waiting}
    outside = tuple(rank for rank in sinks if rank not in inside)
    if outside:
        return outside
    left = [wait for wait in picture.graph.waits if is_left_behind(picture, wait)]
    behind = {rank for wait in left for rank in wait.waiting}
    if behind:
        return tuple(sorted(behind))
    if picture.graph.waits or picture.evidence.incident.kind != "stall":
        return ()
    running = [
        rank
        for rank, facts in picture.evidence.ranks.items()
        if facts.host.alive is not False and not is_inside(facts)
    ]
    elsewhere = [rank for rank in running if not _is_at_store(picture.evidence.ranks[rank])]
    return tuple(elsewhere or running)


def _is_at_store(facts: RankEvidence) -> bool:
    span = innermost_span(facts)
    return span is not None and span.name == "store"


def is_left_behind(picture: Picture, wait: Wait) -> bool:
    """Tell whether the peers have completed what these ranks are inside, and not just now.

    In foreign dumps, which do not say when they were made, a few ranks may simply have been dumped
    earlier: then most peers must be through and wait in a later operation already, or the
    operation must have been given up.
    """
    if wait.absent or not wait.completed:
        return False
    if not picture.evidence.foreign or wait.gave_up:
        return True
    wanted = picture.graph.wanted.issuperset(wait.waiting)
    return wanted and len(wait.completed) > len(wait.waiting)


def read_rank(picture: Picture, rank: int) -> Reading:
    """Refine one sink by its own signals."""
    facts = picture.evidence.ranks.get(rank)
    if facts is None:
        return _missing(picture, rank)
    for test in _TESTS:
        reading = test(picture, facts)
        if reading is not None:
            return reading
    return _host(picture, facts)


# ---- the tests, in order ----


def _ended(picture: Picture, facts: RankEvidence) -> Reading | None:
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
        return _closed(facts)
    if host.exit_code == 0 and _is_closed(facts):
        return _left_early(facts, "ended well (exit code 0)")
    code = "has ended" if host.exit_code is None else f"ended {exit_words(host.exit_code)}"
    return Reading(
        cause=Cause.DEAD_PROCESS,
        confidence=Confidence.CERTAIN if host.exit_code is not None else Confidence.LIKELY,
        words=code,
        evidence=(f"rank {facts.rank} {code}",),
        would_settle=() if host.exit_code is not None else ("its exit status",),
    )


def _closed(facts: RankEvidence) -> Reading | None:
    if facts.host.alive is None and _is_closed(facts):
        return _left_early(facts, "closed its recorder in an orderly way")
    return None


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


def _frozen(_: Picture, facts: RankEvidence) -> Reading | None:
    if facts.host.process_state not in ("T", "t"):
        return None
    since = heartbeat_age_s(facts)
    words = "is stopped (process state T)" + (f", for {seconds(since)}" if since else "")
    return Reading(
        cause=Cause.FROZEN_PROCESS,
        confidence=Confidence.CERTAIN,
        words=words,
        frame=_frame(facts),
        evidence=(f"rank {facts.rank}: /proc state T", *_heartbeat_line(facts)),
    )


def _compiling(_: Picture, facts: RankEvidence) -> Reading | None:
    span = innermost_span(facts)
    if span is not None and span.name == "compile":
        return _span_reading(facts, span)
    return None


def _gil(_: Picture, facts: RankEvidence) -> Reading | None:
    age = heartbeat_age_s(facts)
    if (
        not facts.host.alive
        or age < STALE_HEARTBEAT_S
        or facts.host.process_state in ("T", "t", "D")
    ):
        return None
    busy = facts.host.cpu_share
    lines = [
        f"rank {facts.rank}: its Python heartbeat is {seconds(age)} old while the process runs"
    ]
    if facts.host.process_state:
        lines.append(f"rank {facts.rank}: process state {facts.host.process_state}")
    if busy is not None:
        lines.append(f"rank {facts.rank} uses {busy:.0%} of a core")
    frame = _frame(facts)
    at = f" at {frame}" if frame else ""
    return Reading(
        cause=Cause.GIL_HANG,
        confidence=Confidence.CERTAIN if frame else Confidence.LIKELY,
        words=f"has run no Python for {seconds(age)}: C code{at} holds the interpreter's lock",
        frame=frame,
        evidence=tuple(lines),
        would_settle=() if frame else ("its C-level stack",),
    )


def _in_span(_: Picture, facts: RankEvidence) -> Reading | None:
    span = innermost_span(facts)
    if span is not None and span.name in _SPAN_CAUSES:
        return _span_reading(facts, span)
    return None


def _in_storage(_: Picture, facts: RankEvidence) -> Reading | None:
    if facts.host.process_state != "D":
        return None
    channel = f" in {facts.host.wait_channel}" if facts.host.wait_channel else ""
    return Reading(
        cause=Cause.STORAGE_STALL,
        confidence=Confidence.LIKELY,
        words=f"is in uninterruptible sleep{channel}",
        frame=_frame(facts),
        evidence=(f"rank {facts.rank}: /proc state D{channel}",),
        would_settle=("the io pressure of its machine",),
    )


def _silent(picture: Picture, facts: RankEvidence) -> Reading | None:
    """Compare heartbeats where nobody looked from outside: rings read without their host."""
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
    """Return how much older a rank's heartbeat is than the youngest; 0 if it has none."""
    beats = {
        rank: other.live[Live.HEARTBEAT_MONO_NS] + other.offset_ns
        for rank, other in picture.evidence.ranks.items()
        if other.live[Live.HEARTBEAT_MONO_NS]
    }
    if facts.rank not in beats:
        return 0.0
    return (max(beats.values()) - beats[facts.rank]) / 1e9


def _device(picture: Picture, facts: RankEvidence) -> Reading | None:
    wait = next((w for w in picture.graph.waits if facts.rank in w.waiting and w.completed), None)
    if wait is None:
        return None
    return Reading(
        cause=Cause.DEVICE_STUCK,
        confidence=Confidence.LIKELY,
        words=f"is still inside {wait}, which {rank_list(wait.completed)} completed",
        evidence=(
            f"rank {facts.rank}: {wait} of group '{wait.group}' is pending, its peers are through",
        ),
        would_settle=(f"rank {facts.rank}'s device errors and an event query",),
    )


_TESTS: tuple[_Test, ...] = (
    _ended,
    _frozen,
    _silent,
    _device,
    _compiling,
    _gil,
    _in_span,
    _in_storage,
)


def _host(picture: Picture, facts: RankEvidence) -> Reading:
    """Nothing special: the rank is in code of its own."""
    host = facts.host
    frame = _frame(facts)
    span = innermost_span(facts)
    if frame is None and span is not None:
        words = f"is in no operation, inside the span '{span.name}' since {short_site(span.site)}"
    else:
        words = f"stands at {frame}, in no operation" if frame else "is in no operation"
    lines = [f"rank {facts.rank}: main thread at {frame}"] if frame else []
    lines += _doing(facts)
    row = last_row(facts)
    if row is not None:
        call = picture.evidence.call(row)
        number = int(row["sequence"] if row["sequence"] >= 0 else row["p2p_sequence"])
        lines.append(f"rank {facts.rank} last called {call.operation} #{number}")
    return Reading(
        cause=Cause.HOST_HANG,
        confidence=Confidence.CERTAIN if frame and host.alive else Confidence.LIKELY,
        words=words,
        frame=frame,
        evidence=tuple(lines) or (f"rank {facts.rank} left nothing but its entries",),
        would_settle=_unsettled(picture, facts, frame),
    )


def _unsettled(picture: Picture, facts: RankEvidence, frame: Frame | None) -> tuple[str, ...]:
    rank = facts.rank
    if picture.evidence.foreign:
        return (
            f"rank {rank}'s main thread's stack (host_hang, or data_starvation, storage_stall)",
            f"rank {rank}'s open store request (store_wait)",
            f"rank {rank}'s process state and heartbeat (frozen_process, gil_hang)",
        )
    if frame is None:
        return (f"rank {rank}'s main thread's stack",)
    return ()


def _missing(picture: Picture, rank: int) -> Reading:
    unreadable = rank in picture.evidence.unreadable
    left = "its record cannot be read" if unreadable else "it left no record"
    return Reading(
        cause=Cause.DEAD_PROCESS,
        confidence=Confidence.POSSIBLE if unreadable else Confidence.LIKELY,
        words=f"is missing: {left}",
        evidence=(f"rank {rank}: {left}",),
        would_settle=(f"rank {rank}'s exit status, or its record",),
    )


# ---- what the tests look at ----


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


def _heartbeat_line(facts: RankEvidence) -> tuple[str, ...]:
    age = heartbeat_age_s(facts)
    return (f"rank {facts.rank}: its heartbeat is {seconds(age)} old",) if age > 1 else ()


def _frame(facts: RankEvidence) -> Frame | None:
    thread = main_thread(facts.host.stacks)
    return users_frame(thread.frames) if thread else None


def _doing(facts: RankEvidence) -> list[str]:
    host = facts.host
    lines = []
    if host.process_state:
        channel = f", waiting in {host.wait_channel}" if host.wait_channel else ""
        lines.append(f"rank {facts.rank}: process state {host.process_state}{channel}")
    if host.cpu_share is not None:
        kind = "busy" if host.cpu_share > 0.5 else "idle"
        lines.append(f"rank {facts.rank} is {kind}: {host.cpu_share:.0%} of a core")
    return lines


def _span_reading(facts: RankEvidence, span: Span) -> Reading:
    cause = _SPAN_CAUSES[span.name]
    age_s = max(0, facts.seen_ns - span.started_ns) / 1e9 if facts.seen_ns else 0.0
    site = short_site(span.site)
    frame = _frame(facts)
    words = _SPAN_WORDS[cause].format(
        age=seconds(age_s) if age_s else "some time",
        at=f" ({site})" if site else "",
        detail=f", {span.detail!r}" if span.detail else "",
    )
    lines = [f"rank {facts.rank}: span '{span.name}' is open" + (f" at {site}" if site else "")]
    if span.detail:
        lines.append(f"rank {facts.rank}: {span.detail}")
    if frame is not None:
        lines.append(f"rank {facts.rank}: main thread at {frame}")
    return Reading(
        cause=cause,
        confidence=Confidence.CERTAIN,
        words=words,
        frame=frame,
        evidence=(*lines, *_doing(facts)),
    )


# ---- words ----


def _first(picture: Picture, ranks: Sequence[int]) -> int:
    return min(ranks, key=lambda rank: (_began(picture, (rank,)), rank))


def _began(picture: Picture, ranks: Sequence[int]) -> int:
    wait = picture.wait_for(ranks)
    return wait.since_ns if wait is not None else 1 << 62


def _describe(picture: Picture, ranks: tuple[int, ...], reading: Reading, shown: int) -> Finding:
    wait = picture.wait_for(ranks)
    who = rank_list(ranks)
    summary = f"rank {shown} {reading.words}"
    if len(ranks) > 1:
        rest = [rank for rank in ranks if rank != shown]
        summary += f" (and so {'does' if len(rest) == 1 else 'do'} {rank_list(rest)})"
    lines = list(reading.evidence)
    for other in [rank for rank in ranks if rank != shown][:4]:
        lines += read_rank(picture, other).evidence[:1]
    fallout = picture.fallout(ranks)
    if wait is not None:
        summary += f"; {waiting_words(picture, ranks, wait)}"
        lines.append(wait_line(wait))
    facts = picture.evidence.ranks.get(shown)
    action = _ACTIONS[reading.cause].format(
        who=who,
        at=f" at {reading.frame}" if reading.frame else "",
        pid=facts.identity.pid if facts else 0,
    )
    settles = reading.would_settle
    if picture.evidence.foreign and len(ranks) > 1:
        settles += (f"which of {who} waits for another in a send or receive: Gloo records neither",)
    return Finding(
        cause=reading.cause,
        culprit_ranks=ranks,
        confidence=reading.confidence,
        group=wait.group if wait else None,
        operation=wait.operation if wait else None,
        sequence=wait.sequence if wait else None,
        summary=summary,
        evidence=tuple(lines),
        fallout_ranks=fallout,
        would_settle=settles,
        next_action=action,
    )


def waiting_words(picture: Picture, ranks: Sequence[int], wait: Wait) -> str:
    """Say how many ranks wait for `ranks`, where, and for how long."""
    waiting = picture.graph.fallout(ranks)
    one = len(waiting) == 1
    number = f"rank {waiting[0]}" if one else f"{len(waiting)} ranks"
    whom = "it" if len(ranks) == 1 else "them"
    age_s = picture.waited_s(wait)
    if age_s >= 0.001:
        return f"{number} {'has' if one else 'have'} waited {seconds(age_s)} for {whom} in {wait}"
    return f"{number} {'waits' if one else 'wait'} for {whom} in {wait}"


def wait_line(wait: Wait) -> str:
    """Say who is inside an operation and who has not come."""
    return (
        f"{rank_list(wait.waiting)} inside {wait} of group '{wait.group}', "
        f"{rank_list(wait.absent)} not"
    )
