"""Collect an incident: every rank's black box, and what the host knows of each process.

    1. look at every living process once, and ask those that listen for their stacks
    2. give them a moment to answer; meanwhile the agent goes on passing output
    3. look again (the difference is their share of a core), read every ring, write one dump a rank

A rank that never opened a ring still gets a dump: its exit, its stderr and its stacks speak.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.errors import DumpFormatError
from echelon.launcher.rundir import RunDirectory, write_json
from echelon.recorder import signals
from echelon.recorder.dump import empty_record, write_dump
from echelon.recorder.read import read_ring
from echelon.recorder.schema import HostFacts, Identity, Record

_STACKS_S = 1.0  # a process stopped by a signal never answers
_SETTLED_S = 0.06
_STDERR_TAIL_BYTES = 16 << 10
_STACKS_BYTES = 64 << 10


@dataclass(kw_only=True, slots=True)
class Worker:
    """A worker as the agent knows it."""

    rank: int
    folder: Path
    pid: int = 0
    exit_code: int | None = None
    exited_mono_ns: int = 0
    exit_order: int = -1
    stopped_by_agent: bool = False
    start_error: str = ""

    @property
    def alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self.pid != 0 and self.exit_code is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Occasion:
    """Why an incident is collected."""

    kind: str  # "failure", "stall" or "signal"
    attempt: int
    world_size: int
    reason: str
    job_id: str


class _Witness:
    """One worker during a harvest."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.record = _read(worker)
        identity = self.record.identity
        self.pid = identity.pid or worker.pid  # the script may run below the worker's program
        self.before = signals.sample(self.pid) if worker.alive else signals.Sample()
        self.sampled_s = time.monotonic()
        self.stacks_path = worker.folder / "stacks"
        self.stacks_from = _size(self.stacks_path)
        self.asked = bool(
            worker.alive
            and identity.stack_signal
            and signals.send(self.pid, identity.pid_start_ticks, identity.stack_signal)
        )
        self._seen = (self.stacks_from, self.sampled_s)

    def has_answered(self) -> bool:
        """Whether the stacks are there and have stopped growing."""
        if not self.asked:
            return True
        size, since = _size(self.stacks_path), self._seen[1]
        if size != self._seen[0]:
            self._seen = (size, time.monotonic())
            return False
        return size > self.stacks_from and time.monotonic() - since > _SETTLED_S

    def facts(self) -> HostFacts:
        """Say what the host knows now."""
        worker = self.worker
        after = signals.sample(self.pid) if worker.alive else signals.Sample()
        elapsed_s = time.monotonic() - self.sampled_s
        return HostFacts(
            alive=worker.alive,
            exit_code=worker.exit_code,
            exited_mono_ns=worker.exited_mono_ns,
            exit_order=worker.exit_order,
            stopped_by_agent=worker.stopped_by_agent,
            process_state=after.state,
            wait_channel=after.wait_channel,
            cpu_share=signals.cpu_share(self.before, after, elapsed_s),
            rss_bytes=after.rss_bytes,
            stacks=_text_from(self.stacks_path, self.stacks_from) if self.asked else "",
            stderr_tail=signals.tail(worker.folder / "stderr.log", _STDERR_TAIL_BYTES)
            or worker.start_error,
            snapshot_mono_ns=time.monotonic_ns(),
            not_permitted=after.not_permitted,
        )

    def testify(self, occasion: Occasion) -> Record:
        """Return the rank's whole record."""
        record = self.record
        if record.has_ring:
            record = _read(self.worker)  # again: what it did since counts
        identity = record.identity
        if not record.has_ring:
            identity = Identity(
                rank=self.worker.rank,
                local_rank=self.worker.rank,
                world_size=occasion.world_size,
                attempt=occasion.attempt,
                job_id=occasion.job_id,
                pid=self.worker.pid,
            )
        return replace(
            record, identity=identity, host=self.facts(), dumped_mono_ns=time.monotonic_ns()
        )


def harvest(
    run: RunDirectory,
    workers: Sequence[Worker],
    occasion: Occasion,
    idle: Callable[[float], None],
) -> Path:
    """Collect an incident and return its hidden folder's final path.

    Takes at most about a second: `idle(seconds)` is called while ranks write their stacks.

    Raises:
        OSError: the incident cannot be written.
    """
    number, folder = run.open_incident()
    witnesses = [_Witness(worker) for worker in workers]
    deadline_s = time.monotonic() + _STACKS_S
    while time.monotonic() < deadline_s and not all(w.has_answered() for w in witnesses):
        idle(0.02)
    for witness in witnesses:
        write_dump(witness.testify(occasion), folder / f"rank_{witness.worker.rank}")
    write_json(
        folder / "incident.json",
        {
            "format": 1,
            "kind": occasion.kind,
            "number": number,
            "attempt": occasion.attempt,
            "world_size": occasion.world_size,
            "job_id": occasion.job_id,
            "reason": occasion.reason,
        },
    )
    return run.complete_incident(number, folder)


def _read(worker: Worker) -> Record:
    path = worker.folder / "ring"
    try:
        return read_ring(path)
    except DumpFormatError as err:
        warnings = [str(err)] if path.exists() else []
        return empty_record(path, Identity(rank=worker.rank), HostFacts(), *warnings)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _text_from(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_STACKS_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
