"""Examine ranks twice from outside their processes, and write the results to an incident folder.

No process is stopped, interrupted or changed. Stacks are read by py-spy, and other facts come from
the kernel. Torch's dumps are read if they already exist.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from echelon.analysis.activity import Doing, num_inside, read_activity
from echelon.analysis.evidence.stacks.frames import main_thread
from echelon.errors import DumpFormatError
from echelon.host.facts import TRACING
from echelon.host.identity import pid_inside
from echelon.host.stacks import can_spy
from echelon.launcher.attach.ended import begun, endings, is_exiting, wait_for_exits
from echelon.launcher.attach.loops import Left, find_left, source_of
from echelon.launcher.attach.motion import Wakes, wakes, went_on
from echelon.launcher.attach.ranks import FoundRank, is_watched, started_ticks
from echelon.launcher.incident.harvest import harvest_steps
from echelon.launcher.incident.torch_dumps import MAX_DUMP_BYTES, dump_path
from echelon.launcher.incident.worker import Occasion, Worker
from echelon.launcher.job.rundir import write_json
from echelon.recorder.format.schema import Record
from echelon.recorder.read import read_ring
from echelon.recorder.read.dump import write_dump

GAP_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """The result of examining a job's ranks twice.

    Attributes:
        waiting: the ranks that were inside a collective at the first examination.
        went_on: the waiting ranks that made progress between the two examinations.
        changed: the ranks whose main thread made progress between the two examinations.
        left: the waiting ranks that have left a loop, each paired with a rank still inside it.
        ended: for each rank that ended between the two examinations, how it ended; "" if unknown.
    """

    records: tuple[Record, ...]
    gap_s: float
    waiting: tuple[int, ...] = ()
    went_on: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()
    left: tuple[Left, ...] = ()
    ended: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    is_whole: bool = False  # every rank of the world should be on this machine
    is_watched: bool = False  # by a launcher that ends the job when a rank fails

    @property
    def moves(self) -> bool:
        """True if the two examinations show that the job is making progress."""
        if self.ended:
            return False
        ranks = {record.identity.rank for record in self.records}
        if self.waiting:
            return set(self.waiting) == set(self.went_on)
        return bool(ranks) and ranks == set(self.changed)


def look(
    ranks: Sequence[FoundRank],
    folder: Path,
    *,
    gap_s: float = GAP_S,
    idle: Callable[[float], None] = time.sleep,
) -> Sighting:
    """Examine processes on this machine twice, `gap_s` seconds apart.

    Args:
        folder: an empty folder for the files that are collected.
    """
    first, living = {one.rank: wakes(one.pid) for one in ranks}, begun(ranks)
    began_s = time.monotonic()
    records = _collect(ranks, folder, gap_s, idle)
    elapsed_s = time.monotonic() - began_s
    later = {one.rank: wakes(one.pid) for one in ranks}
    hosts = {record.identity.rank: record.host for record in records}
    exiting = {r for r, one in hosts.items() if is_exiting(one.stacks, one.later_stacks)}
    wait_for_exits([one.pid for one in ranks if one.rank in exiting], idle)
    waiting = tuple(record.identity.rank for record in records if _waits(record))
    return Sighting(
        records=records,
        gap_s=elapsed_s,
        waiting=waiting,
        went_on=tuple(
            record.identity.rank
            for record in records
            if _waits(record) and _went_on(record, first, later, elapsed_s)
        ),
        changed=tuple(r.identity.rank for r in records if _changed(r, first, later)),
        left=_left(ranks, records, waiting),
        ended=endings(ranks, living),
        notes=_notes(ranks, records),
        is_whole=any(one.is_whole_world_here for one in ranks),
        is_watched=any(is_watched(one.pid) for one in ranks),
    )


def _collect(
    ranks: Sequence[FoundRank], folder: Path, gap_s: float, idle: Callable[[float], None]
) -> tuple[Record, ...]:
    occasion = Occasion(
        kind="stall",
        attempt=0,
        world_size=max(one.world_size for one in ranks),
        job_id="",
        oom_kills_before=None,
    )
    workers = [
        Worker(
            rank=one.rank,
            local_rank=one.local_rank,
            folder=ring_folder(one) or folder / str(one.rank),
            logs=folder,
            pid=one.pid,
            may_signal=False,
        )
        for one in ranks
    ]
    steps = harvest_steps(workers, occasion, lambda: False, gap_s)
    while True:
        try:
            wait_s = next(steps)
        except StopIteration as end:
            return tuple(end.value)
        idle(wait_s)


def ring_folder(one: FoundRank) -> Path | None:
    """Return the folder that contains a rank's ring; None if the rank has no ring.

    If the rank runs in a container, the folder is reached through /proc/PID/root.
    """
    folder = Path(one.environ.get("ECHELON_RANK_DIR", ""))
    if not folder.is_absolute():
        return None
    for root in ("/", f"/proc/{one.pid}/root"):
        found = _in_root(root, folder)
        try:
            identity = read_ring(found / "ring").identity
        except (DumpFormatError, OSError):
            continue
        if identity.pid == pid_inside(one.pid):
            return found
    return None


def _in_root(root: str, folder: Path) -> Path:
    """Return a ring's folder as a path below `root`. A symbolic link to the ring is followed."""
    inside = Path(root) / folder.relative_to("/")
    try:
        target = (inside / "ring").readlink()
    except OSError:
        return inside
    return Path(root) / target.parent.relative_to("/") if target.is_absolute() else inside


def keep(sighting: Sighting, folder: Path, world_size: int, reason: str) -> None:
    """Write the result of an examination as an incident folder that `fr-analyze` can read.

    Raises:
        OSError: the folder cannot be written.
    """
    for record in sighting.records:
        write_dump(record, folder / f"rank_{record.identity.rank}")
    write_json(
        folder / "incident.json",
        {
            "format": 1,
            "kind": "stall",
            "number": 0,
            "attempt": 0,
            "world_size": world_size,
            "reason": reason,
            "ranks_present": sorted(record.identity.rank for record in sighting.records),
        },
    )


def torch_dump(one: FoundRank) -> bytes:
    """Return the dump that torch has written for a rank's process; b"" if it is not usable.

    A dump is not usable if it is missing, too large, or older than the process.
    """
    path = dump_path(one.environ, one.rank)
    try:
        status = path.stat() if path is not None else None
        if path is None or status is None or status.st_size > MAX_DUMP_BYTES:
            return b""
        return path.read_bytes() if status.st_mtime >= _began_at(one.pid) else b""
    except OSError:
        return b""


def _began_at(pid: int) -> float:
    """Return the wall-clock time at which a process started."""
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - up_s + started_ticks(pid) / os.sysconf("SC_CLK_TCK")


def _waits(record: Record) -> bool:
    host = record.host
    if host.process_state in ("T", "t"):
        return False
    if num_inside(host.threads, host.native_stacks):
        return True
    return read_activity(host.stacks, host.native_stacks).doing is Doing.COLLECTIVE


def _left(
    ranks: Sequence[FoundRank], records: Sequence[Record], waiting: Sequence[int]
) -> tuple[Left, ...]:
    """Return the ranks that have left a loop early; () if not all ranks are waiting."""
    if len(waiting) != len(records):
        return ()
    pids = {one.rank: one.pid for one in ranks}
    mains = {record.identity.rank: main_thread(record.host.stacks) for record in records}
    frames = {rank: main.frames for rank, main in mains.items() if main is not None}
    return find_left(frames, lambda rank, path: source_of(pids[rank], path))


def _went_on(
    record: Record,
    first: dict[int, Wakes | None],
    later: dict[int, Wakes | None],
    elapsed_s: float,
) -> bool:
    """Return whether a rank inside a collective made progress between the two examinations.

    The result is based on the rank's ring. If the ring is not usable, the result is based on how
    often the main thread woke up.
    """
    host, rank = record.host, record.identity.rank
    if record.has_ring and not record.identity.misses_operations and host.later_recorded >= 0:
        return host.later_recorded > 0
    return went_on(first[rank], later[rank], elapsed_s)


def _changed(
    record: Record, first: dict[int, Wakes | None], later: dict[int, Wakes | None]
) -> bool:
    """Return whether a rank's main thread made progress between the two examinations."""
    host, rank = record.host, record.identity.rank
    if not host.alive or host.process_state in ("T", "t", "D"):
        return False
    if host.stacks and host.later_stacks:
        before, after = read_activity(host.stacks), read_activity(host.later_stacks)
        return (before.doing, before.line) != (after.doing, after.line)
    return went_on(first[rank], later[rank], host.later_gap_s or 1.0)


def _notes(ranks: Sequence[FoundRank], records: Sequence[Record]) -> tuple[str, ...]:
    """Return notes on what could not be examined, and why."""
    notes = []
    blind = [record.identity.rank for record in records if not record.host.stacks]
    if blind and not can_spy():
        notes.append("no stacks, because py-spy is not installed (pip install py-spy)")
    elif blind:
        listed = ", ".join(map(str, blind[:8]))
        notes.append(
            f"no stacks of ranks {listed}: py-spy may not trace them (it needs the same user and "
            "ptrace permission: CAP_SYS_PTRACE, or kernel.yama.ptrace_scope 0)"
        )
    if any(one.is_guessed for one in ranks) and len(ranks) > 1:
        notes.append(
            "ranks are numbered in the order of their processes: no environment numbers them"
        )
    denied = {name for record in records for name in record.host.not_permitted} - {TRACING}
    if denied:
        notes.append(f"not permitted to read for some ranks: {', '.join(sorted(denied))}")
    return tuple(notes)
