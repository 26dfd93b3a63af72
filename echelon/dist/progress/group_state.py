"""Track a group's calls, its operations in progress, and how the group ended.

Only this module records whether a group is broken, aborted or closed. Engines raise errors for the
failures that they observe (see `backends/interface.py`). This module converts the first engine
error into the group's error. Every later call reports the group's error, on this rank and, through
`Evidence`, on the other ranks.

[Note: the end of a group] A group ends when it fails, is aborted or is closed, whichever happens
first. An atomic `dict.setdefault` decides which event came first. A lock would not work, because a
signal handler might call `abort` on a thread that already holds the lock. The first event cuts the
engine's connections. The engine is released only when no thread is inside the engine, so `close`
waits briefly for other threads. If a signal handler interrupts a call to the engine and closes the
group, the interrupted call releases the engine when it returns.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import echelon.recorder.current as black_box
from echelon.dist.backends.interface import (
    ConnectionBroken,
    EndedElsewhere,
    Engine,
    Members,
    Pending,
    Refused,
)
from echelon.dist.errors import build
from echelon.dist.operation.operation import COLLECTIVES, Operation
from echelon.dist.progress.evidence import Evidence, NoEvidence
from echelon.dist.progress.interruption import is_from_handler
from echelon.dist.progress.watcher import watcher
from echelon.dist.work import Work
from echelon.errors import CollectiveError
from echelon.recorder.spent import spent
from echelon.recorder.write.recorder import NOT_RECORDED

_CLOSE_S = 1.0  # in all, for other threads to leave the engine and for verdicts to be published
# For a collective that all ranks took part in, once a later one has failed elsewhere.
_GRACE_S = 0.5
_LOOK_S = 0.001


_num_forks = 0  # between this process and the one that imported this module


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class Turn:
    """A lock that a signal handler can acquire on the thread that already owns the lock.

    Use: `with turn as is_nested`. A nested block runs within the block that owns the lock.
    """

    __slots__ = ("_depth", "_lock", "_owner")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._depth = 0

    def __enter__(self) -> bool:
        me = threading.get_ident()
        if self._owner != me:
            self._lock.acquire()
            self._owner = me
        self._depth += 1
        return self._depth > 1

    def __exit__(self, *raised: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
            self._lock.release()


@dataclass(frozen=True, slots=True)
class _End:
    """The way a group ended on this rank: failed, aborted without an error, or closed."""

    error: CollectiveError | None = None
    is_abort: bool = False


class GroupState:
    """The operations of one group on this rank, and how the group ended."""

    def __init__(self, members: Members, engine: Engine, evidence: Evidence | None = None) -> None:
        self.members = members
        self.engine = engine
        self.evidence: Evidence = evidence or NoEvidence(members)
        self.num_collectives = 0
        self.is_closed = False
        self._num_forks = _num_forks
        self._message_numbers: dict[tuple[str, int], int] = {}
        self._ends: dict[str, _End] = {}  # empty, or the one end: see the note above
        self.collectives = Turn()  # held by a collective from its number to its end
        self.messages = Turn()  # held by a message while it gets its number
        # The threads that are inside the engine, by ident, and in which operation.
        self._inside: list[tuple[int, Operation]] = []
        self._explained: list[Operation] = []  # failed; which rank is at fault is being determined
        self._running = -1  # number of the collective that a thread carries out; -1: none
        self._releasing = threading.Lock()
        self._is_released = False
        self._works: list[Work] = []
        self._lock = threading.RLock()

    @property
    def is_foreign(self) -> bool:
        """True if this process was forked from the process that owns the group."""
        return self._num_forks != _num_forks

    @property
    def error(self) -> CollectiveError | None:
        """The error that ended the group.

        The value is None if the group has not ended or has ended without an error.
        """
        end = self._ends.get("end")
        return None if end is None else end.error

    # ---- numbers ----

    def next_message(self, kind: str, peer: int) -> int:
        """Return the number that `admit` reserves for the next message to or from a peer."""
        return self._message_numbers.get((kind, peer), 0)

    def admit(self, operation: Operation, *, is_nested: bool = False) -> None:
        """Admit an operation and reserve its number, unless the operation is refused.

        The caller must hold the `Turn` of the operation's kind.

        Raises:
            ValueError: the engine refuses the operation, and its number remains free.
            CollectiveError: the group has ended, or a nested collective cannot run.
        """
        if self._works:
            self.sweep()
        if self._ends:
            raise self.end_of(operation)
        if is_nested and not self.engine.nests:
            raise build.nested(self.members, operation)
        self.engine.prepare(operation)
        if operation.peer != -1:
            self._message_numbers[operation.kind, operation.peer] = operation.sequence + 1
        else:
            self.num_collectives = operation.sequence + 1

    # ---- carrying out ----

    def run(self, operation: Operation) -> None:
        """Run an admitted operation on this thread.

        Raises:
            CollectiveError: the operation failed, and the group has ended.
        """
        before_s, began_s = spent.collectives_s, time.monotonic()
        me = (threading.get_ident(), operation)
        self._inside.append(me)
        outer = self._running  # a signal handler's collective interrupts another one
        if operation.peer == -1:
            self._running = operation.sequence
        try:
            self.engine.execute(operation, OperationWatch(self, operation))
        except BaseException as err:  # noqa: BLE001 -- raised again, as what it means
            self.raise_end(operation, err)
        finally:
            if operation.peer == -1:
                self._running = outer
            self._leave(me)
            spent.collectives_s = before_s + time.monotonic() - began_s

    def launch(self, operation: Operation, record: int) -> Work:
        """Start an admitted operation without waiting for it to end.

        Raises:
            CollectiveError: the operation failed immediately, and the group has ended.
        """
        watch = OperationWatch(self, operation)
        me = (threading.get_ident(), operation)
        self._inside.append(me)
        try:
            pending = self.engine.submit(operation, watch)
        except BaseException as err:  # noqa: BLE001 -- raised again, as what it means
            self.raise_end(operation, err)
        finally:
            self._leave(me)
        work = Work(self, operation, pending, record, watch)
        with self._lock:
            self._works.append(work)
        watcher().add(self)
        return work

    def wait(self, operation: Operation, pending: Pending, timeout_s: float | None) -> bool:
        """Wait for a submitted operation; see `Pending.wait`."""
        if pending.done:
            return pending.wait(0.0)
        before_s, began_s = spent.collectives_s, time.monotonic()
        me = (threading.get_ident(), operation)
        self._inside.append(me)
        try:
            return pending.wait(timeout_s)
        finally:
            self._leave(me)
            spent.collectives_s = before_s + time.monotonic() - began_s

    def _leave(self, thread: tuple[int, Operation]) -> None:
        """Record that a thread left the engine.

        In a closed group, the last thread to leave the engine releases it.
        """
        self._inside.remove(thread)
        if self.is_closed and not self._inside:
            self._release(time.monotonic() + _CLOSE_S)

    # ---- operations under way ----

    def sweep(self) -> None:
        """Record the end of each operation that has ended, unless it is already recorded."""
        if self._works:
            with self._lock:
                for work in self._ended():
                    self._settle(work)

    def settle(self, work: Work) -> None:
        """Record the end of an operation, after the ends of all operations that ended earlier.

        If the operation is still running on a device, its end is recorded later.
        """
        with self._lock:
            for earlier in self._ended():
                self._settle(earlier)
            if work.pending.done:
                self._settle(work)

    def tick(self) -> bool:
        """Record ended operations and check running ones, on the watcher's thread.

        Return False if no operations are in progress.
        """
        self.sweep()
        with self._lock:
            works = list(self._works)
        for work in works:
            if work.operation.device == "cpu":
                continue  # a thread of the engine checks it
            try:
                work.watch.check()
            except CollectiveError as err:
                if work.pending.done:
                    continue  # it has ended since the sweep: this thread may have stood still
                self.fail(err)
                break
        return bool(works)

    def _ended(self) -> list[Work]:
        """Return the operations that have ended, in the order in which they were called."""
        ended: list[Work] = []
        busy: set[object] = set()
        for work in self._works:
            if work.lane not in busy and work.pending.done:
                ended.append(work)
            elif work.operation.device != "cpu":  # a stream is ordered: asking is not free
                busy.add(work.lane)
        return ended

    def _settle(self, work: Work) -> None:
        if work.is_settled:
            return
        work.is_settled = True
        with contextlib.suppress(ValueError):
            self._works.remove(work)
        raised = work.pending.error
        if raised is not None:
            work.failure = self.explain(work.operation, raised)
        recorder = None if work.record == NOT_RECORDED else black_box.current()
        if recorder is None:
            return
        if work.failure is not None:
            recorder.failed(work.record, work.failure)
        else:
            began_ns = getattr(work.pending, "started_mono_ns", 0)
            if began_ns:  # a device knows when it began, once it has ended
                recorder.started(work.record, began_ns)
            recorder.completed(work.record, work.pending.ended_mono_ns or time.monotonic_ns())

    # ---- failing ----

    def raise_end(self, operation: Operation, raised: BaseException) -> NoReturn:
        """Raise the error to report for an operation.

        Raises:
            BaseException: always.
        """
        error = self.explain(operation, raised)
        if error is raised or error.__cause__ is not None:
            raise error
        raise error from None

    def explain(self, operation: Operation, raised: BaseException) -> BaseException:
        """Convert an engine's error into an error for the user, and fail the group with it."""
        if isinstance(raised, Refused):
            return raised
        is_ours = isinstance(raised, Exception) and not is_from_handler(raised)
        if not is_ours:  # a signal handler raised: the other ranks must not wait for this one
            self.fail(build.interrupted(self.members, operation, raised))
            return raised
        if self._ends:
            return self.end_of(operation, raised)
        error = self._determine(operation, raised)
        first = self.fail(error)
        return error if first is error else self.end_of(operation, error)

    def _determine(self, operation: Operation, raised: BaseException) -> CollectiveError:
        """Return an error that names the ranks that caused an engine's error.

        Blocks for at most 3 s, or 4 s if the store is slow.
        """
        self._explained.append(operation)
        try:
            if isinstance(raised, CollectiveError):
                return self.evidence.explain(operation, raised)
            if isinstance(raised, EndedElsewhere):
                return self.evidence.hear(operation, raised.error)
            if isinstance(raised, ConnectionBroken):
                return self.evidence.find(operation, raised, None)
        finally:
            self._explained.remove(operation)
        error = build.local_failure(self.members, operation, raised)
        error.__cause__ = raised
        return error

    def waits(self) -> list[Operation]:
        """Return the operations that this rank's threads are waiting for.

        Safe to call on any thread.
        """
        return [operation for _, operation in list(self._inside)] + list(self._explained)

    def fail(self, error: CollectiveError) -> CollectiveError | None:
        """End the group with an error, unless it has already ended.

        Returns:
            The error that ended the group; None if the group had already been closed or aborted.
        """
        mine = _End(error)
        first = self._ends.setdefault("end", mine)
        if first is mine:
            self._cut(error)
            self.evidence.publish(error)
        return first.error

    def hear(self, error: CollectiveError) -> None:
        """End the group with the error that another rank published as its verdict; never blocks.

        Collectives that precede the failed operation and are still in progress on this rank have up
        to 0.5 s to finish.
        """
        number = error.sequence
        if error.operation in COLLECTIVES and self._is_before(number):
            watcher().post(lambda: self._fail_after(number, error))
        else:
            self.fail(error)

    def _fail_after(self, number: int, error: CollectiveError) -> None:
        limit_s = time.monotonic() + _GRACE_S
        while not self._ends and self._is_before(number) and time.monotonic() < limit_s:
            time.sleep(_LOOK_S)
        self.fail(error)

    def _is_before(self, number: int) -> bool:
        """Return whether a collective with a number lower than `number` is in progress."""
        if 0 <= self._running < number:
            return True
        return any(
            work.operation.peer == -1 and work.operation.sequence < number and not work.pending.done
            for work in list(self._works)
        )

    def abort(self) -> None:
        """Abort the group on all ranks. Safe to call on any thread and in signal handlers."""
        mine = _End(is_abort=True)
        if self._ends.setdefault("end", mine) is mine:
            error = build.aborted(self.members, Operation("abort", 0))
            self._cut(error)
            self.evidence.publish(error)

    def end_of(self, operation: Operation, raised: BaseException | None = None) -> CollectiveError:
        """Return the error to raise for an operation on a group that has ended.

        Args:
            raised: the engine's error for this operation, if the operation was in progress.
        """
        end = self._ends["end"]
        if end.error is not None:
            first = (end.error.operation, end.error.sequence)
            is_first = first == (operation.kind, operation.sequence)
            # A rank that enters a collective after the others have lost it gets its whole story.
            if end.error is raised or (is_first and (raised or not operation.is_message)):
                return end.error
            return build.broken_since(self.members, operation, end.error)
        if end.is_abort:
            return build.aborted(self.members, operation)
        return build.closed(self.members, operation)

    def check_end(self, operation: Operation) -> None:
        """Raise an error if the group has ended."""
        if self._ends:
            raise self.end_of(operation)

    def _cut(self, reason: CollectiveError | None) -> None:
        try:
            self.engine.cut(reason)
        except Exception as err:  # noqa: BLE001 -- the group has ended; a second error helps no one
            if reason is not None and reason.__context__ is None:
                reason.__context__ = err

    # ---- the end ----

    def close(self) -> None:
        """Close the group on this rank and release its resources within 1 s. Not collective.

        Within that second, the method waits for a pending verdict to be published. If the store
        does not answer in time, the watcher continues publishing after the method has returned.
        """
        if self.is_closed or self.is_foreign:
            return
        limit_s = time.monotonic() + _CLOSE_S
        self.sweep()  # before the end: an operation that has failed by then is the cause
        self.is_closed = True
        mine = _End()
        if self._ends.setdefault("end", mine) is mine:
            self.evidence.leave()
            self._cut(None)
        self.sweep()
        me = threading.get_ident()
        while self._inside and time.monotonic() < limit_s:
            if any(thread == me for thread, _ in self._inside):
                break
            time.sleep(_LOOK_S)
        if not self._inside:
            self._release(limit_s)

    def _release(self, limit_s: float) -> None:
        with self._releasing:
            if self._is_released:
                return
            self._is_released = True
        self.sweep()
        self.engine.close()
        self.evidence.close(max(0.0, limit_s - time.monotonic()))
        watcher().remove(self)


class OperationWatch:
    """The conditions under which one operation of a group is aborted; see `interface.Watch`."""

    __slots__ = ("_operation", "_state", "deadline_s")

    def __init__(self, state: GroupState, operation: Operation) -> None:
        self._state = state
        self._operation = operation
        self.deadline_s = time.monotonic() + operation.timeout_s

    def check(self, needed: Callable[[], Sequence[int]] | None = None) -> None:
        """Raise an error if this operation must be aborted; see `interface.Watch.check`."""
        state, operation = self._state, self._operation
        state.check_end(operation)
        members = state.members
        others = [r for r in range(members.size) if r != members.rank]
        dead = state.evidence.dead(others if needed is None else needed())
        if dead and needed is not None:
            still = set(needed())
            dead = [rank for rank in dead if rank in still]
        if dead:
            raise state.evidence.find(operation, None, None if needed is None else needed(), dead)
        if time.monotonic() >= self.deadline_s:
            late = None if needed is None else needed()
            if late is None or late:
                raise state.evidence.find(operation, None, late)
