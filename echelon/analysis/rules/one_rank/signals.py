"""Read the state of a single rank: its span, source line, heartbeat and process."""

from __future__ import annotations

import itertools
import re
import signal

from echelon.analysis.evidence.model import RankEvidence, Span
from echelon.analysis.evidence.picture import last_row
from echelon.analysis.evidence.stacks.frames import Frame, main_thread, users_frame
from echelon.analysis.finding import seconds
from echelon.recorder.format.schema import SIGNAL, TRACING, Live

PRESSURE = 0.3  # of the time that tasks waited for a resource: above this it is reported
_NUM_FRAMES = 5
_OWN_FRAME = re.compile(r"recorder/_native\.|^(__restore_rt|raise|gsignal|pthread_kill|abort)\b")
STALE_HEARTBEAT_S = 3.0  # six missed beats: a busy machine delays one or two


def innermost_span(facts: RankEvidence) -> Span | None:
    """Return the innermost open span of the thread that calls the rank's collectives.

    If that thread has no open span, the thread that most recently opened one is used instead.
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
    """Return the age of the Python heartbeat in seconds.

    The result is 0 if the age is unknown or if the heartbeat is still being renewed.
    """
    beat = facts.live[Live.HEARTBEAT_MONO_NS] if facts.live else 0
    seen = facts.host.snapshot_mono_ns
    if not beat or not seen or facts.host.later_heartbeat_mono_ns > beat:
        return 0.0  # unknown, or merely late
    return max(0, seen - beat) / 1e9 + facts.host.later_gap_s


def heartbeat_lines(facts: RankEvidence) -> tuple[str, ...]:
    """Return a line with the heartbeat's age, or () if the heartbeat is recent."""
    age = heartbeat_age_s(facts)
    return (f"rank {facts.rank}: its heartbeat is {seconds(age)} old",) if age > 1 else ()


def users_line(facts: RankEvidence) -> Frame | None:
    """Return the main thread's innermost frame of user code; None if no stack was captured."""
    thread = main_thread(facts.host.stacks)
    return users_frame(thread.frames) if thread else None


def process_lines(facts: RankEvidence) -> list[str]:
    """Describe the state of a rank's process as observed on its host."""
    host = facts.host
    lines = []
    if host.process_state:
        channel = f", waiting in {host.wait_channel}" if host.wait_channel else ""
        lines.append(f"rank {facts.rank}: process state {host.process_state}{channel}")
    if host.cpu_share is not None:
        kind = "busy" if is_busy(facts) else "idle"  # others may have the cores
        lines.append(f"rank {facts.rank} is {kind}: {host.cpu_share:.0%} of a core")
    return lines + machine_lines(facts)


def native_heartbeat_age_s(facts: RankEvidence) -> float | None:
    """Return the age of the lock-free heartbeat in seconds, or None if unknown."""
    beat = facts.live[Live.NATIVE_HEARTBEAT_MONO_NS] if facts.live else 0
    seen = facts.host.snapshot_mono_ns
    return max(0, seen - beat) / 1e9 if beat and seen else None


def interrupted_lines(facts: RankEvidence) -> tuple[str, ...]:
    """Warn if capturing the stacks might have interrupted a system call."""
    if facts.host.stacks_from != SIGNAL:
        return ()
    text = (
        "was sent a signal to dump its stacks, which interrupts some system calls "
        "(py-spy sends none)"
    )
    return (f"rank {facts.rank} {text}",)


def native_line(facts: RankEvidence) -> tuple[str, ...]:
    """Return one line that lists the main thread's innermost C frames; () if there are none."""
    lines = facts.host.native_stacks.splitlines()
    frames = [line.strip() for line in itertools.takewhile(lambda one: one[:1] == " ", lines[1:])]
    if not frames:
        return ()
    return (f"rank {facts.rank}, in C: " + " < ".join(frames[:_NUM_FRAMES]),)


def fault_lines(facts: RankEvidence) -> list[str]:
    """Describe what the rank itself recorded about the signal that ended it."""
    fault = facts.fault
    if fault is None or facts.host.exit_code != -fault.signal:
        return []
    try:
        name = signal.Signals(fault.signal).name
    except ValueError:
        name = f"signal {fault.signal}"
    where = f" at address {fault.address:#x}" if fault.address else ""
    frames = [frame for frame in fault.frames if not _OWN_FRAME.search(frame)]
    stack = ": " + " < ".join(frames[:_NUM_FRAMES]) if frames else ""
    return [f"rank {facts.rank}: {name}{where} in thread {fault.thread}{stack}"]


def is_busy(facts: RankEvidence) -> bool:
    """Return whether a process is using the CPU."""
    share = facts.host.cpu_share
    return share is not None and (share > 0.5 or (facts.host.process_state == "R" and share > 0.02))


def machine_lines(facts: RankEvidence) -> list[str]:
    """Describe what slows a rank's process down: its cgroup's limits or a lack of resources."""
    host = facts.host
    lines = []
    if host.throttled_share is not None and host.throttled_share > 0.1:
        lines.append(
            f"rank {facts.rank}: its cgroup's processor limit held it back for "
            f"{min(1.0, host.throttled_share):.0%} of the time"
        )
    used, limit = host.memory_bytes, host.memory_limit_bytes
    if used and limit and used >= 0.95 * limit:
        lines.append(
            f"rank {facts.rank}: its memory is at the limit ({used / 2**20:,.0f} of "
            f"{limit / 2**20:,.0f} MiB)"
        )
    for what, share in sorted(host.pressure.items()):
        if share >= PRESSURE:
            lines.append(f"rank {facts.rank}'s machine is short of {what}: pressure {share:.0%}")
    return lines


def denied_line(facts: RankEvidence) -> tuple[str, ...]:
    """List the data about a rank that the launcher did not have permission to read."""
    denied = [name for name in facts.host.not_permitted if name != TRACING]  # see missing_stack
    if not denied:
        return ()
    return (f"rank {facts.rank}'s {', '.join(denied)}: not permitted to read",)


def missing_stack(facts: RankEvidence, whose: str) -> str:
    """Name a stack that would settle a verdict, and explain how to obtain permission to read it.

    Args:
        whose: the stack and its owner, such as "rank 3's main thread's stack".
    """
    if TRACING not in facts.host.not_permitted:
        return whose
    return (
        f"{whose}: no permission to trace it (container: --cap-add SYS_PTRACE; another "
        "user's process: run as that user; otherwise sysctl kernel.yama.ptrace_scope=0)"
    )
