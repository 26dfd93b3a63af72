"""Collect the black boxes of a node's ranks, and what the host knows of each process.

    1. look at every living process once: its ring, /proc
    2. read the stacks from outside, which nothing in the process notices
    3. ask by signal only those whose stacks could not be read, and give them a moment to answer
    4. look again (the difference is their share of a core), read every ring
    5. for a stall, two seconds later, once more: what has moved is slow, what has not is stuck

Looking must not change what is looked at. A signal ends the system call that a thread waits in, and
with it, often, the hang: a verdict on what was gone by then would be about nothing. So it is the
last resort, and `HostFacts.stacks_from` says that it was used.

This is a generator that yields how long it wants to wait: the agent's loop goes on between its
steps, so that output keeps flowing, and a user who stops the job is obeyed at once.

A rank that never opened a ring still gets a dump: its exit, its stderr, its stacks and what its
threads wait for speak. If it is a torch program, torch's own recorder is asked for its dump.
"""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.errors import DumpFormatError
from echelon.host import process
from echelon.host.facts import OUTSIDE, SIGNAL
from echelon.host.native_stacks import named, native_stacks
from echelon.host.stacks import spy_stacks
from echelon.host.threads import program_of, threads
from echelon.launcher.incident.error_file import read_error_file
from echelon.launcher.incident.torch_dumps import TorchDump
from echelon.recorder.format.schema import Fault, HostFacts, Identity, Live, Record, State
from echelon.recorder.read import read_ring
from echelon.recorder.read.dump import empty_record

_STACKS_S = 1.0  # a process stopped by a signal never answers
_TORCH_S = 12.0  # its first dump with stacks loads hundreds of modules inside the hung process
_SETTLED_S = 0.06
_SECOND_LOOK_S = 2.0
_SPY_S, _SPIES = 5.0, 8
_SAMPLE_S = 0.3  # a share of a core takes so long to show, in ticks of 10 ms
_STDERR_TAIL_BYTES = 16 << 10
_STACKS_BYTES = 64 << 10


@dataclass(kw_only=True, slots=True)
class Worker:
    """A worker as the agent knows it."""

    rank: int
    local_rank: int
    folder: Path
    logs: Path = Path()  # of its stdout.log and stderr.log
    pid: int = 0
    exit_code: int | None = None
    exited_mono_ns: int = 0
    exit_order: int = -1
    stopped_by_agent: bool = False
    start_error: str = ""
    torch: TorchDump | None = None

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
    job_id: str
    oom_kills_before: int | None  # the cgroup's count when the job began


class _Stacks:
    """The stacks of one process's threads, at one moment."""

    def __init__(self, folder: Path, pid: int, identity: Identity, *, native: bool) -> None:
        self.native = ""
        self._wants_native = native
        self._path = folder / "stacks"
        self._pid = pid
        self._identity = identity
        self._spied = ""
        self._asked = False
        self._from = 0
        self._seen = (0, 0.0)

    def ask(self) -> None:
        """Ask by signal if they could not be read from outside."""
        identity = self._identity
        if self._spied or not identity.stack_signal or not self._can_answer():
            return
        self._from = _size(self._path)
        self._seen = (self._from, time.monotonic())
        self._asked = process.send(self._pid, identity.pid_start_ticks, identity.stack_signal)

    def _can_answer(self) -> bool:
        """Return whether the handler's descriptor still is the file: a daemon closes them all.

        Else it would write stacks into whatever the program opened since.
        """
        number = self._identity.settings.get("stacks_fd")
        try:
            return Path(f"/proc/{self._pid}/fd/{number}").samefile(self._path)
        except OSError:
            return False

    def have_arrived(self) -> bool:
        """Return whether the answer is there and no longer grows, or will never arrive."""
        if not self._asked:
            return True
        size, since = _size(self._path), self._seen[1]
        if size != self._seen[0]:
            self._seen = (size, time.monotonic())
            return False
        return size > self._from and time.monotonic() - since > _SETTLED_S

    def spy(self) -> None:
        """Read them from outside, where that is possible. May run on another thread."""
        self._spied = spy_stacks(self._pid)
        if self._wants_native:
            self.native = native_stacks(self._pid, [])[:_STACKS_BYTES]

    def text(self) -> str:
        """Return what was read from outside, else what was answered."""
        return self._spied or (_text_from(self._path, self._from) if self._asked else "")

    def origin(self) -> str:
        """Return how they were read, see `HostFacts.stacks_from`."""
        if self._spied:
            return OUTSIDE
        return SIGNAL if self.text() else ""


class _Witness:
    """One worker during a harvest."""

    def __init__(self, worker: Worker, occasion: Occasion) -> None:
        self.worker = worker
        self._occasion = occasion
        record = _read(worker)
        self._identity = record.identity
        # The script may run below the program.
        self._pid = record.identity.pid or (program_of(worker.pid) if worker.alive else worker.pid)
        self._waits_for_torch = (
            worker.alive and not record.has_ring and worker.torch is not None and worker.torch.ask()
        )
        self._before = process.sample(self._pid) if worker.alive else process.Sample()
        self._surroundings = process.Surroundings(self._pid) if worker.alive else None
        self._sampled_s = time.monotonic()
        self.record = record
        self.look(native=True)

    def look(self, *, native: bool = False) -> None:
        """Begin to read a living process's stacks."""
        folder, alive = self.worker.folder, self.worker.alive
        self._stacks = _Stacks(folder, self._pid, self._identity, native=native) if alive else None

    def ask(self) -> None:
        """See `_Stacks.ask`."""
        if self._stacks is not None:
            self._stacks.ask()

    @property
    def is_seen_from_outside(self) -> bool:
        """Whether only its processor time will tell whether it is busy."""
        return self.worker.alive and not self.record.has_ring

    def has_answered(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self._stacks is None or self._stacks.have_arrived()

    def has_torch_answered(self) -> bool:
        """Whether torch's dump has come, or will never come."""
        torch = self.worker.torch
        return not self._waits_for_torch or torch is None or torch.has_come()

    def spy(self) -> None:
        """See `_Stacks.spy`."""
        if self._stacks is not None:
            self._stacks.spy()

    def testify(self) -> None:
        """Put together all that is known now."""
        record = self.record
        if record.has_ring:
            record = _read(self.worker)  # again: what it did since counts
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
        self.record = replace(
            record,
            identity=identity,
            fault=_named_frames(record.fault),
            host=self._facts(),
            dumped_mono_ns=time.monotonic_ns(),
        )

    def testify_later(self, gap_s: float) -> None:
        """Add what a second look shows: has it moved, and where does it stand now?"""
        if not self.worker.alive or not self.record.has_ring:
            return
        now = _read(self.worker)
        recorded = _activity(now) - _activity(self.record) if now.has_ring else -1
        host = replace(
            self.record.host,
            later_gap_s=gap_s,
            later_recorded=recorded,
            later_stacks="" if self._stacks is None else self._stacks.text(),
            later_heartbeat_mono_ns=now.live[Live.HEARTBEAT_MONO_NS],
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
            stderr_tail=tail or worker.start_error,
            error_file=read_error_file(worker.folder / "error.json"),
            snapshot_mono_ns=time.monotonic_ns(),
            not_permitted=after.not_permitted,
        )
        if self._surroundings is None:
            return facts
        if not self.record.has_ring:
            denied = list(facts.not_permitted)
            seen = threads(self._pid, denied)
            facts = replace(facts, threads=seen, not_permitted=tuple(denied))
        return self._surroundings.add_to(facts)

    def _was_killed_for_memory(self) -> bool | None:
        """A SIGKILL that was not ours, while the cgroup counted a kill for memory."""
        before = self._occasion.oom_kills_before
        if self.worker.exit_code != -9 or self.worker.stopped_by_agent:
            return False if self.worker.exit_code is not None else None
        now = process.oom_kills(os.getpid())
        return None if before is None or now is None else now > before


Steps = Generator[float, None, list[Record]]
Waits = Generator[float, None, None]


def harvest(
    workers: Sequence[Worker], occasion: Occasion, idle: Callable[[float], None]
) -> list[Record]:
    """Collect the black boxes of this node's workers, in their order.

    Takes about a second at most, twelve where torch is asked for dumps, and two more for a stall,
    which is looked at twice: what has moved in between is slow, what has not is stuck.
    `idle(seconds)` is called while ranks answer.
    """
    steps = harvest_steps(workers, occasion, lambda: False)
    while True:
        try:
            wait_s = next(steps)
        except StopIteration as end:
            records: list[Record] = end.value
            return records
        idle(wait_s)


def harvest_steps(
    workers: Sequence[Worker], occasion: Occasion, is_urgent: Callable[[], bool]
) -> Steps:
    """Do what `harvest` does, step by step: yields the seconds to wait, returns the records.

    Args:
        is_urgent: once it returns True, no step waits any longer.
    """
    witnesses = [_Witness(worker, occasion) for worker in workers]
    asked_s = time.monotonic()
    yield from _read_stacks(witnesses, is_urgent)
    while (
        time.monotonic() < asked_s + _TORCH_S
        and not all(witness.has_torch_answered() for witness in witnesses)
        and not is_urgent()
    ):
        yield 0.02
    if any(witness.is_seen_from_outside for witness in witnesses):
        yield from _wait_until(asked_s + _SAMPLE_S, is_urgent)
    first_look_s = time.monotonic()
    for witness in witnesses:
        witness.testify()
    if occasion.kind == "stall" and not is_urgent():
        yield from _look_again(witnesses, first_look_s, is_urgent)
    return [witness.record for witness in witnesses]


def _wait_until(deadline_s: float, is_urgent: Callable[[], bool]) -> Waits:
    while (left_s := deadline_s - time.monotonic()) > 0 and not is_urgent():
        yield min(left_s, 0.1)


def _read_stacks(witnesses: Sequence[_Witness], is_urgent: Callable[[], bool]) -> Waits:
    """Read all stacks from outside; ask those by signal whose stacks cannot be read so."""
    yield from _spy_all(witnesses, is_urgent)
    if is_urgent():
        return
    for witness in witnesses:
        witness.ask()
    yield from _wait_for_answers(witnesses, is_urgent)


def _wait_for_answers(witnesses: Sequence[_Witness], is_urgent: Callable[[], bool]) -> Waits:
    deadline_s = time.monotonic() + _STACKS_S
    while time.monotonic() < deadline_s and not all(w.has_answered() for w in witnesses):
        if is_urgent():
            return
        yield 0.02


def _spy_all(witnesses: Sequence[_Witness], is_urgent: Callable[[], bool]) -> Waits:
    """Read stacks from outside, some processes at a time, for 5 s at most."""
    if is_urgent():
        return
    deadline_s = time.monotonic() + _SPY_S
    pool = concurrent.futures.ThreadPoolExecutor(_SPIES)
    try:
        looks = [pool.submit(witness.spy) for witness in witnesses]
        while not all(look.done() for look in looks) and time.monotonic() < deadline_s:
            if is_urgent():
                return
            yield 0.02
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _look_again(
    witnesses: Sequence[_Witness], first_look_s: float, is_urgent: Callable[[], bool]
) -> Waits:
    yield from _wait_until(first_look_s + _SECOND_LOOK_S, is_urgent)
    recording = [witness for witness in witnesses if witness.record.has_ring]
    for witness in recording:
        witness.look()
    yield from _read_stacks(recording, is_urgent)
    gap_s = time.monotonic() - first_look_s
    for witness in witnesses:
        witness.testify_later(gap_s)


def _activity(record: Record) -> int:
    """Count what a rank has begun or ended so far."""
    states = record.operations["state"]
    ended = int(((states == State.COMPLETED) | (states == State.FAILED)).sum())
    live = record.live
    return live[Live.NUM_OPERATIONS] + ended + live[Live.NUM_SPANS] + live[Live.STEP]


def _read(worker: Worker) -> Record:
    path = worker.folder / "ring"
    try:
        return read_ring(path)
    except DumpFormatError as err:
        warnings = [str(err)] if path.exists() else []
        return empty_record(path, Identity(rank=worker.rank), HostFacts(), *warnings)


def _named_frames(fault: Fault | None) -> Fault | None:
    """Add the functions' names to the places that the dying process left."""
    return None if fault is None else replace(fault, frames=tuple(map(named, fault.frames)))


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
