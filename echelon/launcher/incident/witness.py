"""Combine the ring, the /proc data and the stacks of one worker into a record."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from echelon.analysis.activity import Doing, read_activity
from echelon.errors import DumpFormatError
from echelon.host import process
from echelon.host.children import look_at_children
from echelon.host.facts import HostChild, HostFacts
from echelon.host.identity import find_process, start_ticks
from echelon.host.native_stacks import named
from echelon.host.threads import program_of, threads
from echelon.launcher.incident.error_file import read_error_file
from echelon.launcher.incident.stacks import Stacks
from echelon.launcher.incident.worker import Occasion, Worker
from echelon.recorder.format.schema import Fault, Identity, Live, Record, State
from echelon.recorder.read import read_ring
from echelon.recorder.read.dump import empty_record

_STDERR_TAIL_BYTES = 16 << 10


class Witness:
    """The evidence about one worker, gathered while an incident is being collected."""

    def __init__(self, worker: Worker, occasion: Occasion) -> None:
        self.worker = worker
        self._occasion = occasion
        record = _read(worker)
        self._identity = record.identity
        # The script may run in a child of the program.
        self._pid = _process_of(worker, record.identity)
        self._waits_for_torch = (
            worker.alive
            and not _tells_all(record)
            and worker.torch is not None
            and worker.torch.ask()
        )
        self._before = process.sample(self._pid) if worker.alive else process.Sample()
        self._surroundings = process.Surroundings(self._pid) if worker.alive else None
        self._sampled_s = time.monotonic()
        self._children: tuple[HostChild, ...] = ()
        self._num_children = 0
        self.record = record
        self.look(native=True)

    def look(self, *, native: bool = False) -> None:
        """Prepare to read the stacks of the process if it is alive."""
        folder, alive = self.worker.folder, self.worker.alive
        self._stacks = Stacks(folder, self._pid, self._identity, native=native) if alive else None

    def ask(self) -> None:
        """Request the stacks with a signal; see `Stacks.ask`."""
        if self._stacks is not None and self.worker.may_signal:
            self._stacks.ask()

    @property
    def is_seen_from_outside(self) -> bool:
        """True if the worker is alive but its operations are missing from its ring."""
        return self.worker.alive and not _tells_all(self.record)

    def has_answered(self) -> bool:
        """Return whether the wait for the process's stacks can end."""
        return self._stacks is None or self._stacks.have_arrived()

    def has_torch_answered(self) -> bool:
        """Return whether waiting for torch's dump is no longer necessary."""
        torch = self.worker.torch
        return not self._waits_for_torch or torch is None or torch.has_come()

    def spy(self) -> None:
        """Read the stacks from outside the process; see `Stacks.spy`."""
        if self._stacks is not None:
            self._stacks.spy()

    @property
    def may_wait_below(self) -> bool:
        """True if the worker might be waiting for a child process rather than for other ranks."""
        if self._stacks is None:
            return False
        activity = read_activity(self._stacks.text(), self._stacks.native)
        return activity.doing is not Doing.COLLECTIVE

    def look_below(self) -> None:
        """Examine the descendants of the worker's process. Can be called on another thread."""
        self._children, self._num_children = look_at_children(self._pid)

    def testify(self) -> None:
        """Update `record` to include all evidence gathered so far."""
        record = self.record
        if record.has_ring:
            record = _read(self.worker)  # read again, to include what it has done since
        identity = record.identity
        if not record.has_ring:
            identity = Identity(
                rank=self.worker.rank,
                local_rank=self.worker.local_rank,
                world_size=self._occasion.world_size,
                attempt=self._occasion.attempt,
                job_id=self._occasion.job_id,
                pid=self._pid,
                mono_ns=time.monotonic_ns(),
                wall_ns=time.time_ns(),
            )
        elif self.worker.alive and identity.pid:
            identity = replace(
                identity, pid=self._pid
            )  # the pid on this host, not in its container
        self.record = replace(
            record,
            identity=identity,
            fault=_named_frames(record.fault),
            host=self._facts(),
            dumped_mono_ns=time.monotonic_ns(),
        )

    def testify_later(self, gap_s: float) -> None:
        """Add the results of a second examination to the record."""
        if not self.worker.alive:
            return
        now = _read(self.worker)
        is_recorded = now.has_ring and self.record.has_ring
        recorded = _activity(now) - _activity(self.record) if is_recorded else -1
        host = replace(
            self.record.host,
            later_gap_s=gap_s,
            later_recorded=recorded,
            later_stacks="" if self._stacks is None else self._stacks.text(),
            later_heartbeat_mono_ns=now.live[Live.HEARTBEAT_MONO_NS] if is_recorded else 0,
        )
        self.record = replace(self.record, host=host)

    def _facts(self) -> HostFacts:
        worker = self.worker
        after = process.sample(self._pid) if worker.alive else process.Sample()
        elapsed_s = time.monotonic() - self._sampled_s
        tail = process.tail(worker.logs / "stderr.log", _STDERR_TAIL_BYTES)
        facts = HostFacts(
            alive=worker.alive,
            exit_code=worker.exit_code,
            exited_mono_ns=worker.exited_mono_ns,
            exit_order=worker.exit_order,
            stopped_by_agent=worker.stopped_by_agent,
            process_state=after.state,
            wait_channel=after.wait_channel,
            cpu_share=process.cpu_share(self._before, after, elapsed_s),
            rss_bytes=after.rss_bytes,
            oom_kill=self._was_killed_for_memory(),
            stacks="" if self._stacks is None else self._stacks.text(),
            stacks_from="" if self._stacks is None else self._stacks.origin(),
            native_stacks="" if self._stacks is None else self._stacks.native,
            children=self._children,
            num_children=self._num_children,
            stderr_tail=tail or worker.start_error,
            error_file=read_error_file(worker.folder / "error.json"),
            snapshot_mono_ns=time.monotonic_ns(),
            not_permitted=after.not_permitted + self._not_traced(),
        )
        if self._surroundings is None:
            return facts
        if not _tells_all(self.record):
            denied = list(facts.not_permitted)
            seen = threads(self._pid, denied)
            facts = replace(facts, threads=seen, not_permitted=tuple(denied))
        return self._surroundings.add_to(facts)

    def _not_traced(self) -> tuple[str, ...]:
        """Return (TRACING,) if stacks are missing because tracing is not permitted, else ()."""
        if self._stacks is None or self._stacks.text():
            return ()
        return self._stacks.not_permitted

    def _was_killed_for_memory(self) -> bool | None:
        """Return whether the kernel's OOM killer killed the worker; None if unknown.

        The evidence is a SIGKILL that the launcher did not send, and an OOM kill that the cgroup
        has counted since the job began.
        """
        before = self._occasion.oom_kills_before
        if self.worker.exit_code != -9 or self.worker.stopped_by_agent:
            return False if self.worker.exit_code is not None else None
        now = process.oom_kills(os.getpid())
        return None if before is None or now is None else now > before


def _process_of(worker: Worker, identity: Identity) -> int:
    """Return the pid of the process that writes the ring.

    If that process is unknown, return the pid of the worker's main process.
    """
    if not worker.alive:
        return identity.pid or worker.pid
    if not identity.pid:
        return program_of(worker.pid)
    found = find_process(identity.pid, identity.pid_start_ticks)
    if found is None and start_ticks(identity.pid) is not None and identity.pid_start_ticks:
        return program_of(worker.pid)  # another process has this pid here
    return found or identity.pid


def _activity(record: Record) -> int:
    """Return a count that grows whenever a rank's operations, spans or steps advance."""
    states = record.operations["state"]
    ended = int(((states == State.COMPLETED) | (states == State.FAILED)).sum())
    live = record.live
    return live[Live.NUM_OPERATIONS] + ended + live[Live.NUM_SPANS] + live[Live.STEP]


def _tells_all(record: Record) -> bool:
    """Return whether a rank has a ring that contains its operations, not only its spans."""
    return record.has_ring and not record.identity.misses_operations


def _read(worker: Worker) -> Record:
    path = worker.folder / "ring"
    try:
        return read_ring(path)
    except DumpFormatError as err:
        warnings = [str(err)] if path.exists() else []
        return empty_record(path, Identity(rank=worker.rank), HostFacts(), *warnings)


def _named_frames(fault: Fault | None) -> Fault | None:
    """Add function names to the frames that a dying process recorded."""
    return None if fault is None else replace(fault, frames=tuple(map(named, fault.frames)))
