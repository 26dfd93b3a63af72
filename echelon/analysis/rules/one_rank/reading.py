"""What a rank does instead of what the others wait for.

Every test below is a small function from one rank's evidence to a reading. They are asked in the
order of `_TESTS`, the most telling first, and the first that answers decides; a rank that shows
nothing special is in code of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from echelon.analysis.evidence.model import RankEvidence, Span
from echelon.analysis.evidence.picture import Picture, has_moved, last_row
from echelon.analysis.evidence.stacks import Frame, main_thread, short_site
from echelon.analysis.evidence.waits import Wait
from echelon.analysis.finding import Cause, Confidence, rank_list, seconds
from echelon.analysis.rules.endings.ended import ending_of, exit_words
from echelon.analysis.rules.one_rank.outside import (
    is_seen_outside,
    keeps_waiting,
    outside_lines,
    outside_words,
    sleepers,
)
from echelon.analysis.rules.one_rank.signals import (
    PRESSURE,
    STALE_HEARTBEAT_S,
    denied_line,
    heartbeat_age_s,
    heartbeat_lines,
    innermost_span,
    interrupted_lines,
    machine_lines,
    native_heartbeat_age_s,
    native_line,
    process_lines,
    users_line,
)
from echelon.recorder.schema import Live

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
THROTTLED_SHARE = 0.5
# Wait channels, the kernel functions in which a thread sleeps.
_DRIVERS = re.compile(
    r"_?(?:nv|uvm_|amdgpu|amdkfd|kfd_|xe_|i915|drm_|dma_fence|ttm_|habana|hl_|ib_|mlx\d|rdma|uverbs|"
    r"efa_|irdma)"
)
_FILE_SYSTEMS = re.compile(
    r"nfs|rpc_wait|fuse|request_wait_answer|ceph|lustre|^ll_|^cl_|^osc_|ptlrpc|gpfs|mmfs|cxi|beegfs"
    r"|cifs|smb|9p|ext4|jbd2|xfs|btrfs|f2fs|io_schedule|bit_wait_io|folio_wait|wait_on_page|blk_"
    r"|rq_qos|wbt_|balance_dirty|submit_bio|sync_inode|writeback|fsync"
)
_COMPILER = re.compile(
    r"torch[/\\]_dynamo[/\\](?:symbolic_convert|convert_frame|bytecode_transformation)"
    r"|torch[/\\]_inductor[/\\](?:async_compile|cpp_builder|codegen[/\\]|scheduler|graph\.py|lowering)"
    r"|triton[/\\](?:compiler|backends)[/\\]"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What one rank was found doing."""

    cause: Cause
    confidence: Confidence
    words: str  # after "rank R "
    frame: Frame | None = None
    evidence: tuple[str, ...] = ()
    would_settle: tuple[str, ...] = ()
    action: str = ""  # what to do next, if it is not what the cause always asks for


# Each test takes the picture and one rank; most look at the rank alone.
_Test = Callable[[Picture, RankEvidence], Reading | None]


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
        return _closed(picture, facts)
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


def _closed(picture: Picture, facts: RankEvidence) -> Reading | None:
    if not _is_closed(facts):
        return None
    if facts.host.alive is None or facts.rank in picture.graph.wanted:
        return _left_early(facts, "closed its recorder in an orderly way")
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
        action="Look for what {who} still does at exit: destructors of libraries, threads that "
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


def _frozen(_: Picture, facts: RankEvidence) -> Reading | None:
    stopped = facts.host.process_state in ("T", "t")
    if not stopped and not facts.host.frozen:
        return None
    since = heartbeat_age_s(facts)
    how = "stopped (process state T)" if stopped else "frozen with its cgroup"
    words = f"is {how}" + (f", for {seconds(since)}" if since else "")
    return Reading(
        cause=Cause.FROZEN_PROCESS,
        confidence=Confidence.CERTAIN,
        words=words,
        frame=users_line(facts),
        evidence=(
            f"rank {facts.rank}: "
            + ("/proc state T" if stopped else "its cgroup's freezer is on (a paused container?)"),
            *heartbeat_lines(facts),
        ),
        action=""
        if stopped
        else "Thaw {who}'s cgroup (docker unpause), or find out what froze it.",
    )


def _moving(_: Picture, facts: RankEvidence) -> Reading | None:
    """Between the two looks it got on: it is slow, not stuck."""
    if not has_moved(facts):
        return None
    host = facts.host
    frame = users_line(facts)
    at = f"; it stood at {frame} first" if frame else ""
    moved = f"recorded {host.later_recorded} more events within {seconds(host.later_gap_s)}{at}"
    return Reading(
        cause=Cause.STRAGGLER,
        confidence=Confidence.LIKELY,
        words=f"is slow, not stuck: it {moved}",
        frame=frame,
        evidence=(f"rank {facts.rank} {moved}", *process_lines(facts)),
        would_settle=("whether it arrives: a later snapshot",),
    )


def _throttled(_: Picture, facts: RankEvidence) -> Reading | None:
    share = facts.host.throttled_share
    if share is None or share < THROTTLED_SHARE or facts.host.process_state == "D":
        return None
    return Reading(
        cause=Cause.STRAGGLER,
        confidence=Confidence.LIKELY,
        words=f"is held back by its cgroup's processor limit {min(1.0, share):.0%} of the time",
        frame=users_line(facts),
        evidence=tuple(process_lines(facts)) + heartbeat_lines(facts),
        action="Raise the processor limit of {who}'s container, or start fewer threads in it.",
    )


def _compiling(_: Picture, facts: RankEvidence) -> Reading | None:
    """Its stack is inside torch's compiler: outside any span, and whatever the heartbeat says."""
    thread = main_thread(facts.host.stacks)
    if thread is None or not any(_COMPILER.search(frame.file) for frame in thread.frames):
        return None
    frame = users_line(facts)
    at = f" (called at {frame})" if frame else ""
    return Reading(
        cause=Cause.COMPILE_STALL,
        confidence=Confidence.LIKELY,
        words=f"compiles{at}",
        frame=frame,
        evidence=(f"rank {facts.rank}: its stack is inside the compiler", *process_lines(facts)),
    )


def _gil(_: Picture, facts: RankEvidence) -> Reading | None:
    age = heartbeat_age_s(facts)
    if (
        not facts.host.alive
        or age < STALE_HEARTBEAT_S
        or facts.host.process_state in ("T", "t", "D")
    ):
        return None
    native = native_heartbeat_age_s(facts)
    if native is not None and native >= STALE_HEARTBEAT_S:
        return None  # no thread of it runs: the process gets no processor
    busy = facts.host.cpu_share
    lines = [
        f"rank {facts.rank}: its Python heartbeat is {seconds(age)} old while the process runs"
    ]
    if native is not None:
        lines.append(f"rank {facts.rank}: its heartbeat outside Python is {seconds(native)} old")
    lines += native_line(facts)
    if facts.host.process_state:
        lines.append(f"rank {facts.rank}: process state {facts.host.process_state}")
    if busy is not None:
        lines.append(f"rank {facts.rank} uses {busy:.0%} of a core")
    frame = users_line(facts)
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


def _in_kernel(_: Picture, facts: RankEvidence) -> Reading | None:
    """State D is a wait inside the kernel: the channel tells file systems from drivers."""
    if facts.host.process_state != "D":
        return None
    channel, rank = facts.host.wait_channel, facts.rank
    where = f" in {channel}" if channel else ""
    line = f"rank {rank}: /proc state D{where}"
    if _DRIVERS.match(channel):
        return Reading(
            cause=Cause.DEVICE_STUCK,
            confidence=Confidence.LIKELY,
            words=f"waits in a device's driver and cannot be interrupted ({channel})",
            frame=users_line(facts),
            evidence=(line, *machine_lines(facts)),
            would_settle=(f"the log of rank {rank}'s machine (dmesg)",),
        )
    pressed = facts.host.pressure.get("io", 0.0) >= PRESSURE
    in_files = bool(_FILE_SYSTEMS.search(channel))
    sure = Confidence.CERTAIN if in_files else Confidence.LIKELY if pressed else Confidence.POSSIBLE
    return Reading(
        cause=Cause.STORAGE_STALL,
        confidence=sure,
        words=f"is in uninterruptible sleep{where}",
        frame=users_line(facts),
        evidence=(line, *machine_lines(facts)),
        would_settle=() if in_files or pressed else (f"what {channel or 'it'} waits for",),
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
    if not facts.live[Live.HEARTBEAT_MONO_NS]:
        return 0.0
    return (picture.remembered("youngest", _youngest_ns) - _beat_ns(facts)) / 1e9


def _beat_ns(facts: RankEvidence) -> int:
    return facts.live[Live.HEARTBEAT_MONO_NS] + facts.offset_ns


def _youngest_ns(picture: Picture) -> int:
    ranks = picture.evidence.ranks.values()
    return max((_beat_ns(f) for f in ranks if f.live[Live.HEARTBEAT_MONO_NS]), default=0)


def _device(picture: Picture, facts: RankEvidence) -> Reading | None:
    rank = facts.rank
    mine = [wait for wait in picture.graph.waits if rank in wait.waiting]
    wait = next((wait for wait in mine if wait.completed and not wait.absent), None)
    if wait is not None:
        return Reading(
            cause=Cause.DEVICE_STUCK,
            confidence=Confidence.LIKELY,
            words=f"is still inside {wait}, which {rank_list(wait.completed)} completed",
            evidence=(
                f"rank {rank}: {wait} of group '{wait.group}' is pending, its peers are through",
            ),
            would_settle=(f"rank {rank}'s device errors and an event query",),
        )
    wait = next((wait for wait in mine if rank in never_started(picture, wait)), None)
    if wait is None:
        return None
    started = rank_list([other for other in wait.waiting if other not in wait.created])
    return Reading(
        cause=Cause.DEVICE_STUCK,
        confidence=Confidence.LIKELY,
        words=f"has called {wait}, and its device never started it; {started} did",
        evidence=(f"rank {rank}: {wait} of group '{wait.group}' is scheduled, not started",),
        would_settle=(f"rank {rank}'s device errors and an event query",),
    )


def never_started(picture: Picture, wait: Wait) -> tuple[int, ...]:
    """Return the few ranks whose device has not begun what the others' devices are inside.

    Only the head of a stream counts: what is queued behind another operation has its reason there.
    """
    if wait.absent or wait.completed or wait.is_p2p or 2 * len(wait.created) >= len(wait.waiting):
        return ()
    return tuple(r for r in wait.created if picture.heads.get(r, (0, -1))[1] == wait.sequence)


_TESTS: tuple[_Test, ...] = (
    _ended,
    _frozen,
    _silent,
    _moving,
    _device,
    _in_span,
    _compiling,
    _throttled,
    _gil,
    _in_kernel,
)


def _host(picture: Picture, facts: RankEvidence) -> Reading:
    """Nothing special: the rank is in code of its own."""
    host = facts.host
    frame = users_line(facts)
    span = innermost_span(facts)
    if frame is None and span is not None:
        words = f"is in no operation, inside the span '{span.name}' since {short_site(span.site)}"
    else:
        words = f"stands at {frame}, in no operation" if frame else "is in no operation"
    lines = [f"rank {facts.rank}: main thread at {frame}"] if frame else []
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
        evidence=tuple(lines) or (f"rank {facts.rank} left nothing but its entries",),
        would_settle=_unsettled(picture, facts, frame),
    )


def _unrecorded(picture: Picture, facts: RankEvidence, lines: list[str]) -> Reading:
    """No ring, no stack: what is left is what the kernel shows of its threads."""
    rank = facts.rank
    stack = f"rank {rank}'s stack (py-spy reads it, where it is installed and may)"
    if rank in keeps_waiting(picture) or (picture.wait_for([rank]) and is_seen_outside(facts)):
        return Reading(
            cause=Cause.HOST_HANG,
            confidence=Confidence.LIKELY,
            words=f"{outside_words(facts) or 'is'}, in no collective, while the others wait in one",
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
            "torch's flight recorder: its Gloo backend writes no dump of itself",
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
        return (f"rank {rank}'s main thread's stack",)
    return ()


def read_loss(picture: Picture, rank: int) -> Reading:
    """Say what the launcher knows of a rank whose node is lost, or did not answer."""
    why = picture.evidence.incident.absent.get(rank, "its node is lost")
    return Reading(
        cause=Cause.DEAD_PROCESS,
        confidence=Confidence.LIKELY,
        words=f"is missing: {why}",
        evidence=(f"rank {rank}: {why}",),
        would_settle=(f"the record that rank {rank}'s own node kept",),
        action="Look at the machine of {who} and its link; if its launcher lives, its run "
        "directory there has a dump/latest of its own.",
    )


def _missing(picture: Picture, rank: int) -> Reading:
    if picture.evidence.incident.absent.get(rank):
        return read_loss(picture, rank)
    unreadable = rank in picture.evidence.unreadable
    left = "its record cannot be read" if unreadable else "it left no record"
    return Reading(
        cause=Cause.DEAD_PROCESS,
        confidence=Confidence.POSSIBLE if unreadable else Confidence.LIKELY,
        words=f"is missing: {left}",
        evidence=(f"rank {rank}: {left}",),
        would_settle=(f"rank {rank}'s exit status, or its record",),
    )


def _span_reading(facts: RankEvidence, span: Span) -> Reading:
    cause = _SPAN_CAUSES[span.name]
    age_s = max(0, facts.seen_ns - span.started_ns) / 1e9 if facts.seen_ns else 0.0
    site = short_site(span.site)
    frame = users_line(facts)
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
        evidence=(*lines, *process_lines(facts)),
    )
