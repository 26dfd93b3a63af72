"""Detect a process that is stopped, throttled, unable to run Python, or asleep in the kernel."""

from __future__ import annotations

import re

from echelon.analysis.activity import Doing
from echelon.analysis.evidence.model import RankEvidence
from echelon.analysis.evidence.picture import Picture, has_moved
from echelon.analysis.evidence.stacks.frames import main_thread, users_frame
from echelon.analysis.finding import Cause, Confidence, seconds
from echelon.analysis.rules.one_rank.doing import activity_of
from echelon.analysis.rules.one_rank.reading import Reading
from echelon.analysis.rules.one_rank.signals import (
    PRESSURE,
    STALE_HEARTBEAT_S,
    heartbeat_age_s,
    heartbeat_lines,
    machine_lines,
    native_heartbeat_age_s,
    native_line,
    process_lines,
    users_line,
)

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


def read_freezer(_: Picture, facts: RankEvidence) -> Reading | None:
    """Detect a process that was stopped by a signal or is in a frozen cgroup."""
    stopped = facts.host.process_state in ("T", "t")
    if not stopped and not facts.host.frozen:
        return None
    since = heartbeat_age_s(facts)
    how = "stopped (process state T)" if stopped else "frozen with its cgroup"
    frame = users_line(facts)
    words = f"is {how}" + (f", for {seconds(since)}" if since else "")
    return Reading(
        cause=Cause.FROZEN_PROCESS,
        confidence=Confidence.CERTAIN,
        words=words + (f", at {frame}" if frame else ""),
        frame=frame,
        evidence=(
            f"rank {facts.rank}: "
            + ("/proc state T" if stopped else "its cgroup's freezer is on (a paused container?)"),
            *heartbeat_lines(facts),
        ),
        action=""
        if stopped
        else "Thaw {who}'s cgroup (docker unpause), or find out what froze it.",
    )


def read_motion(_: Picture, facts: RankEvidence) -> Reading | None:
    """Detect a rank that made progress between the two snapshots."""
    if not has_moved(facts):
        return None
    host = facts.host
    frame = users_line(facts)
    at = f"; it was at {frame} before" if frame else ""
    moved = f"recorded {host.later_recorded} more events within {seconds(host.later_gap_s)}{at}"
    return Reading(
        cause=Cause.STRAGGLER,
        confidence=Confidence.LIKELY,
        words=f"is slow, not stuck: it {moved}",
        frame=frame,
        evidence=(f"rank {facts.rank} {moved}", *process_lines(facts)),
        would_settle=("whether it arrives: a later snapshot",),
    )


def read_throttling(_: Picture, facts: RankEvidence) -> Reading | None:
    """Detect a rank that is throttled by its cgroup's CPU limit at least half of the time."""
    share = facts.host.throttled_share
    if share is None or share < THROTTLED_SHARE or facts.host.process_state == "D":
        return None
    return Reading(
        cause=Cause.STRAGGLER,
        confidence=Confidence.LIKELY,
        words=f"is throttled by its cgroup's CPU limit {min(1.0, share):.0%} of the time",
        frame=users_line(facts),
        evidence=tuple(process_lines(facts)) + heartbeat_lines(facts),
        action="Raise the CPU limit of {who}'s container, or start fewer threads in it.",
    )


def read_heartbeat(_: Picture, facts: RankEvidence) -> Reading | None:
    """Detect a process in which C code has been holding the interpreter lock."""
    age = heartbeat_age_s(facts)
    if (
        not facts.host.alive
        or age < STALE_HEARTBEAT_S
        or facts.host.process_state in ("T", "t", "D")
    ):
        return None
    native = native_heartbeat_age_s(facts)
    if native is not None and native >= STALE_HEARTBEAT_S:
        return None  # none of its threads runs: the process gets no processor time
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


def read_held_lock(_: Picture, facts: RankEvidence) -> Reading | None:
    """Detect C code that holds the interpreter lock while waiting in the kernel."""
    host = facts.host
    first, later = main_thread(host.stacks), main_thread(host.later_stacks)
    if first is None or later is None or not (first.holds_lock and later.holds_lock):
        return None
    if host.process_state != "S" or first.frames != later.frames:
        return None  # a thread that runs Python holds the lock too
    activity = activity_of(facts)
    if activity.doing in (Doing.CHECKPOINT, Doing.STORE) and not activity.is_nested:
        return None  # torch opens a checkpoint's file without releasing the lock
    frame = users_frame(first.frames)
    at = f" at {frame}" if frame else ""
    return Reading(
        cause=Cause.GIL_HANG,
        confidence=Confidence.CERTAIN,
        words=f"waits in C code{at} that holds the interpreter's lock",
        frame=frame,
        evidence=(
            f"rank {facts.rank}: its main thread holds the lock and waits in the kernel, twice",
            *process_lines(facts),
            *native_line(facts),
        ),
    )


def read_kernel_wait(_: Picture, facts: RankEvidence) -> Reading | None:
    """Detect a process in uninterruptible sleep in the kernel (state D)."""
    if facts.host.process_state != "D":
        return None
    channel, rank = facts.host.wait_channel, facts.rank
    where = f" in {channel}" if channel else ""
    line = f"rank {rank}: /proc state D{where}"
    if _DRIVERS.match(channel):
        return Reading(
            cause=Cause.DEVICE_STUCK,
            confidence=Confidence.LIKELY,
            words=f"waits in a device driver and cannot be interrupted ({channel})",
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
