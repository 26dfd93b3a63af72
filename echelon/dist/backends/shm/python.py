"""The pure-Python engine: collectives by NumPy over shared memory, with futexes to wait.

It is the fallback where no compiler was, and the oracle of the C core's tests. Every chunk of every
collective begins with the same phase: a rank puts its data into its slot, announces that, and waits
until all have announced theirs. After it each rank sees what every other called (a mismatch is an
error before any result is written) and may read everyone's data.

    up to 16 KB, or two ranks   each sums all slots                     1 phase
    larger sums                 each sums its share, all copy shares    2 phases
    everything else                                                     1 phase

Slots are used in turns (even and odd chunks): a rank that writes chunk k+2 has seen everybody
announce chunk k+1, so everybody is done reading chunk k. That is why no third phase is needed.

Waiting follows the machine: with more ranks than usable cores it sleeps on the futex at once, else
it first yields for up to 300 us. A yield that takes over 30 us gave the core to somebody who needed
it, for a whole time slice: then it sleeps at once for a while (measured beside busy neighbours).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from echelon.dist.arithmetic.reduce_numpy import reduce_into
from echelon.dist.backends.interface import Members
from echelon.dist.backends.shm import futex
from echelon.dist.backends.shm.faults import Fault
from echelon.dist.backends.shm.memory import SharedMemory
from echelon.dist.backends.shm.messages import Mailbox
from echelon.dist.backends.shm.rendezvous import Plan
from echelon.dist.backends.shm.segment import CONTROL_BYTES, Segment, segment_bytes
from echelon.dist.errors import build
from echelon.dist.errors.mismatch import message_error, mismatch_error, split_error
from echelon.dist.membership.peers import Peers
from echelon.dist.operation.arrays import Flat
from echelon.dist.operation.operation import HEAD_BYTES, Operation
from echelon.dist.progress.executor import LaneBackend
from echelon.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)

_SLOT_BYTES = 1 << 20  # larger than the C core's: a phase costs more here
SMALL_BYTES = 16 << 10
_SLICE_S = 0.1  # longest sleep before looking after abort, deadline and the peers' lives
_YIELD_S = 300e-6
_SLOW_YIELD_S = 30e-6
_NO_YIELD_S = 0.2  # after a slow one
_WORDS = CONTROL_BYTES // 4
_HALF = 1 << 31
_U32 = 0xFFFFFFFF


def engine_bytes(size: int, plan: Plan) -> int:
    """Return how much memory the engine of a group needs."""
    return segment_bytes(size, _SLOT_BYTES, plan.ring_bytes)


class PythonEngine(LaneBackend):
    """Carries out operations of ranks on one host, in Python."""

    name = "shm"
    engine = "python"

    def __init__(
        self, members: Members, plan: Plan, memory: SharedMemory, peers: Peers, yields: bool
    ) -> None:
        super().__init__()
        self._members = members
        self._rank = members.rank
        self._size = members.size
        self._others = [r for r in range(members.size) if r != members.rank]
        self._memory = memory
        self._peers = peers
        self._segment = Segment(memory, _SLOT_BYTES, plan.ring_bytes)
        self._words = self._segment.words
        self._mailbox = Mailbox(self._segment, self._rank, self._wait_for_message)
        self._published = 0
        self._chunk = 0
        self._call = b""
        self._turn = 0  # which of the two headers is the running collective's
        self._agreed = -1  # sequence of the last operation whose call all members share
        self._lost: CollectiveError | None = None
        self._aborted = False
        self._closed = False
        self._yields = yields
        self._yields_from_s = 0.0
        self._run: dict[str, Callable[[Operation, float], None]] = {
            "all_reduce": self._all_reduce,
            "reduce": self._reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "broadcast": self._broadcast,
            "all_to_all": self._all_to_all,
            "gather": self._gather,
            "scatter": self._scatter,
            "barrier": self._barrier,
            "send": self._send,
            "recv": self._recv,
        }

    def _carry_out(self, operation: Operation) -> None:
        if self._lost is not None:
            raise build.broken_since(self._members, operation, self._lost)
        deadline_s = time.monotonic() + operation.timeout_s
        if not operation.is_message:
            self._call = operation.head
            self._turn ^= 1
            self._segment.write_header(self._rank, self._turn, operation.head)
        try:
            self._run[operation.kind](operation, deadline_s)
        except CollectiveError as err:
            self._give_up(err)
            raise
        except BaseException:  # a signal's handler raised: the others must not wait for us
            self.abort()
            raise

    def abort(self) -> None:
        """End the group on this rank; what waits here notices within a slice."""
        self._aborted = True
        self._blame(Fault.ABORTED, [self._rank])

    def close(self) -> None:
        """Leave the group, unmap the memory and forget the peers."""
        if self._closed:
            return
        self._closed = True
        self._aborted = True
        # Who leaves in order blames itself: others that still need it then name it at once.
        self._blame(Fault.LEFT, [self._rank])
        self.close_lanes()
        self._peers.close()
        self._mailbox.close()
        self._segment.close()
        self._memory.close()

    # ---- the collectives ----

    def _all_reduce(self, operation: Operation, deadline_s: float) -> None:
        self._reduce_chunks(operation, deadline_s, _array(operation.source), operation.target)

    def _reduce(self, operation: Operation, deadline_s: float) -> None:
        self._reduce_chunks(operation, deadline_s, _array(operation.source), operation.target)

    def _reduce_chunks(
        self, operation: Operation, deadline_s: float, source: Flat, target: Flat | None
    ) -> None:
        per_slot = _SLOT_BYTES // source.itemsize
        for start in _chunks(len(source), per_slot):
            part = slice(start, start + per_slot)
            parts = self._exchange(operation, deadline_s, source[part])
            out = None if target is None else target[part]
            if self._size > 2 and source[part].nbytes > SMALL_BYTES:
                self._reduce_by_shares(operation, deadline_s, parts, out)
            elif out is not None:
                reduce_into(out, parts, operation.reduce_op, operation.dtype)

    def _reduce_by_shares(
        self, operation: Operation, deadline_s: float, parts: list[Flat], out: Flat | None
    ) -> None:
        """Sum my share of the chunk in my own slot, then copy everybody's share."""
        shares = _shares(len(parts[0]), self._size)
        mine = shares[self._rank]
        reduce_into(
            parts[self._rank][mine],
            [part[mine] for part in parts],
            operation.reduce_op,
            operation.dtype,
        )
        self._meet(operation, deadline_s)
        if out is not None:
            for part, share in zip(parts, shares, strict=True):
                np.copyto(out[share], part[share])

    def _all_gather(self, operation: Operation, deadline_s: float) -> None:
        self._gather(operation, deadline_s)

    def _gather(self, operation: Operation, deadline_s: float) -> None:
        source, target = _array(operation.source), operation.target
        splits = operation.output_splits or (len(source),) * self._size
        rows = None if target is None else np.split(target, np.cumsum(splits)[:-1])
        per_slot = _SLOT_BYTES // source.itemsize
        for start in _chunks(max(splits), per_slot):
            lengths = [min(per_slot, max(0, split - start)) for split in splits]
            chunk = source[start : start + per_slot]
            parts = self._exchange(operation, deadline_s, chunk, lengths)
            if rows is not None:
                for row, part in zip(rows, parts, strict=True):
                    np.copyto(row[start : start + per_slot], part)

    def _reduce_scatter(self, operation: Operation, deadline_s: float) -> None:
        source, target = _array(operation.source), _array(operation.target)
        splits = operation.input_splits or (len(target),) * self._size
        rows = np.split(source, np.cumsum(splits)[:-1])
        per_slot = max(1, _SLOT_BYTES // (source.itemsize * self._size))
        for start in _chunks(max(splits), per_slot):
            columns = [row[start : start + per_slot] for row in rows]
            parts = self._exchange(operation, deadline_s, np.concatenate(columns))
            first = sum(len(column) for column in columns[: self._rank])
            mine = slice(first, first + len(columns[self._rank]))
            reduce_into(
                target[start : start + per_slot],
                [part[mine] for part in parts],
                operation.reduce_op,
                operation.dtype,
            )

    def _broadcast(self, operation: Operation, deadline_s: float) -> None:
        is_root = self._rank == operation.root
        data = _array(operation.source if is_root else operation.target)
        per_slot = _SLOT_BYTES // data.itemsize
        for start in _chunks(len(data), per_slot):
            chunk = data[start : start + per_slot]
            parts = self._exchange(operation, deadline_s, chunk, write=is_root)
            if not is_root:
                np.copyto(chunk, parts[operation.root])

    def _scatter(self, operation: Operation, deadline_s: float) -> None:
        target = _array(operation.target)
        per_slot = max(1, _SLOT_BYTES // (target.itemsize * self._size))
        for start in _chunks(len(target), per_slot):
            width = min(per_slot, len(target) - start)
            columns = np.empty(0, target.dtype)
            if operation.source is not None:
                rows = operation.source.reshape(self._size, len(target))
                columns = np.ascontiguousarray(rows[:, start : start + width]).reshape(-1)
            self._exchange(operation, deadline_s, columns)
            parity = (self._chunk - 1) & 1
            part = self._segment.typed(operation.root, parity, target, width * self._size)
            np.copyto(target[start : start + width], part.reshape(self._size, width)[self._rank])

    def _all_to_all(self, operation: Operation, deadline_s: float) -> None:
        source, target = _array(operation.source), _array(operation.target)
        longest = self._agree_on_splits(operation, deadline_s)
        per_slot = max(1, _SLOT_BYTES // (source.itemsize * self._size))
        to, come = np.cumsum((0, *operation.input_splits)), np.cumsum((0, *operation.output_splits))
        for start in range(0, longest, per_slot):
            outgoing = np.zeros((self._size, per_slot), source.dtype)
            for rank in range(self._size):
                part = source[to[rank] + start : min(to[rank] + start + per_slot, to[rank + 1])]
                outgoing[rank, : len(part)] = part
            parts = self._exchange(operation, deadline_s, outgoing.reshape(-1))
            for rank, part in enumerate(parts):
                place = target[
                    come[rank] + start : min(come[rank] + start + per_slot, come[rank + 1])
                ]
                np.copyto(place, part.reshape(self._size, per_slot)[self._rank, : len(place)])

    def _agree_on_splits(self, operation: Operation, deadline_s: float) -> int:
        """Compare what each sends with what its peers expect; return the longest piece."""
        mine = np.array([*operation.input_splits, *operation.output_splits], np.int64)
        tables = np.stack(self._exchange(operation, deadline_s, mine))
        sent, wanted = tables[:, : self._size], tables[:, self._size :].T
        if (sent != wanted).any():
            pairs = np.argwhere(sent != wanted)
            raise split_error(self._members, operation, sorted(set(pairs.reshape(-1).tolist())))
        return int(sent.max())

    def _barrier(self, operation: Operation, deadline_s: float) -> None:
        self._exchange(operation, deadline_s, np.empty(0, np.uint8))

    # ---- messages ----

    def _send(self, operation: Operation, deadline_s: float) -> None:
        self._mailbox.send(operation, deadline_s)

    def _recv(self, operation: Operation, deadline_s: float) -> None:
        if not self._mailbox.receive(operation, deadline_s):
            raise message_error(self._members, operation, sorted((self._rank, operation.peer)))

    def _wait_for_message(
        self, operation: Operation, deadline_s: float, word: int, seen: int
    ) -> None:
        """Sleep a slice while a ring's word is `seen`; raise if the peer will not come."""
        futex.wait(self._segment.address(word), seen, _SLICE_S)
        if self._words[word] == seen:
            self._look_around(operation, deadline_s, [operation.peer], lambda: [operation.peer])

    # ---- phases ----

    def _exchange(
        self,
        operation: Operation,
        deadline_s: float,
        chunk: Flat,
        lengths: list[int] | None = None,
        *,
        write: bool = True,
    ) -> list[Flat]:
        """Publish this rank's chunk and wait for all others.

        Args:
            lengths: elements per rank; None: as many as here.

        Returns:
            Every rank's chunk, in rank order.
        """
        parity = self._chunk & 1
        self._chunk += 1
        if write:
            np.copyto(self._segment.typed(self._rank, parity, chunk, len(chunk)), chunk)
        self._meet(operation, deadline_s)
        self._check_same_call(operation)
        if lengths is None:
            lengths = [len(chunk)] * self._size
        return [self._segment.typed(r, parity, chunk, lengths[r]) for r in range(self._size)]

    def _meet(self, operation: Operation, deadline_s: float) -> None:
        """Announce a phase and wait until every member has announced it."""
        self._published = (self._published + 1) & _U32
        futex.publish(self._segment, self._rank * _WORDS, self._published, self._size > 1)
        for rank in self._others:
            if not self._has_announced(rank):
                self._wait(operation, deadline_s, rank)

    def _has_announced(self, rank: int) -> bool:
        return (self._words[rank * _WORDS] - self._published) & _U32 < _HALF

    def _late(self) -> list[int]:
        return [r for r in self._others if not self._has_announced(r)]

    def _wait(self, operation: Operation, deadline_s: float, rank: int) -> None:
        now = time.perf_counter()
        if self._yields and now >= self._yields_from_s:
            stop = now + _YIELD_S
            while now < stop:
                os.sched_yield()
                if self._has_announced(rank):
                    return
                before, now = now, time.perf_counter()
                if now - before > _SLOW_YIELD_S:
                    self._yields_from_s = now + _NO_YIELD_S
                    break
        while not self._has_announced(rank):
            seen = self._words[rank * _WORDS]
            if (seen - self._published) & _U32 < _HALF:
                return
            left = max(0.0, min(_SLICE_S, deadline_s - time.monotonic()))
            futex.wait(self._segment.address(rank * _WORDS), seen, left)
            if not self._has_announced(rank):
                self._look_around(operation, deadline_s, self._late(), self._late)

    # ---- faults ----

    def _look_around(
        self,
        operation: Operation,
        deadline_s: float,
        late: list[int],
        still_late: Callable[[], list[int]],
    ) -> None:
        """Raise if who has not come will not come, or if the time is up."""
        if self._lost is not None:
            raise build.broken_since(self._members, operation, self._lost)
        if self._aborted:
            raise build.aborted(self._members, operation)
        dead = self._peers.dead(late)
        late = still_late()
        gone = {rank for rank in dead if rank in late and not self._segment.blamed_by(rank)[0]}
        reason = Fault.PEER_LOST
        for rank in late:
            fault, blamed = self._segment.blamed_by(rank)
            gone.update(blamed)
            if fault in (Fault.TIMED_OUT, Fault.MISMATCH):
                reason = Fault(fault)
        if gone:
            raise self._explain(operation, reason, sorted(gone))
        if late and time.monotonic() >= deadline_s:
            raise build.timed_out(self._members, operation, late)

    def _explain(self, operation: Operation, reason: Fault, gone: list[int]) -> CollectiveError:
        if reason == Fault.TIMED_OUT:
            return build.timed_out(self._members, operation, gone)
        if reason == Fault.MISMATCH:
            return message_error(self._members, operation, gone)
        return build.peer_lost(self._members, operation, gone)

    def _give_up(self, error: CollectiveError) -> None:
        """Tell the others whom we blame, so that they name the same ranks and not us."""
        if self._lost is None:
            self._lost = error
        fault = Fault.ABORTED
        if isinstance(error, CollectiveMismatchError):
            fault = Fault.MISMATCH
        elif isinstance(error, CollectiveTimeoutError):
            fault = Fault.TIMED_OUT
        elif isinstance(error, PeerLostError):
            fault = Fault.PEER_LOST
        places = {rank: place for place, rank in enumerate(self._members.ranks)}
        self._blame(fault, [places[r] for r in error.ranks if r in places])

    def _blame(self, fault: Fault, ranks: list[int]) -> None:
        self._segment.blame(self._rank, fault, ranks)
        futex.wake(self._segment.address(self._rank * _WORDS))
        self._mailbox.wake_all()

    def _check_same_call(self, operation: Operation) -> None:
        if self._agreed == operation.sequence:
            return
        calls = [self._segment.read_header(r, self._turn)[:HEAD_BYTES] for r in range(self._size)]
        if not all(call == self._call for call in calls):
            raise mismatch_error(self._members, operation, calls)
        self._check_nobody_gave_up(operation)
        self._agreed = operation.sequence

    def _check_nobody_gave_up(self, operation: Operation) -> None:
        """Fail with a member that told its caller so, though what we need of it is there."""
        for rank in self._others:
            fault, blamed = self._segment.blamed_by(rank)
            if fault not in (Fault.FINE, Fault.LEFT, Fault.MISMATCH):
                raise self._explain(operation, Fault(fault), blamed)


def _array(data: Flat | None) -> Flat:
    assert data is not None
    return data


def _chunks(length: int, per_chunk: int) -> range:
    """Starts of the chunks; one empty chunk for no data, since the ranks must meet all the same."""
    return range(0, max(length, 1), per_chunk)


def _shares(length: int, size: int) -> list[slice]:
    """Split [0, length) into `size` nearly equal runs."""
    return [slice(length * r // size, length * (r + 1) // size) for r in range(size)]
