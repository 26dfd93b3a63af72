"""Run collectives over shared memory in pure Python, using NumPy and futexes.

This engine is the fallback for installations without a compiler, and the reference in tests of the
C core. Collectives process their data in chunks. In the first phase of each chunk, every rank
writes its data into its slot, announces the data, and waits for the other ranks. Each rank then
compares the calls of all ranks, and can read the data of all ranks.

    up to 16 KB, or two ranks   each rank sums all slots                         1 phase
    larger sums                 each rank sums its shard, then copies all shards 2 phases
    everything else                                                              1 phase

Each rank has two slots, one for even chunks and one for odd chunks. By the time a rank writes chunk
k+2, all ranks have announced chunk k+1, so they have finished reading chunk k.

If there are more ranks than usable cores, a waiting rank sleeps on the futex immediately. With
enough cores, it first yields the core repeatedly, for up to 300 us in total. A single yield that
takes over 30 us shows that the core is busy, and the rank then stops yielding for 0.2 s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from echelon.dist.arithmetic.reduce_numpy import reduce_into
from echelon.dist.backends.host_engine import HostEngine
from echelon.dist.backends.interface import (
    CHECK_EVERY_S,
    ConnectionBroken,
    EndedElsewhere,
    Members,
    Watch,
)
from echelon.dist.backends.shm import futex
from echelon.dist.backends.shm.faults import Fault
from echelon.dist.backends.shm.memory import SharedMemory
from echelon.dist.backends.shm.rendezvous import Plan
from echelon.dist.backends.shm.rings import Rings
from echelon.dist.backends.shm.segment import CONTROL_BYTES, Segment, segment_bytes
from echelon.dist.errors import build
from echelon.dist.errors.mismatch import message_error, mismatch_error, split_error
from echelon.dist.membership.peers import Peers
from echelon.dist.operation.arrays import Flat
from echelon.dist.operation.operation import HEAD_BYTES, Operation
from echelon.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)

_SLOT_BYTES = 1 << 20  # larger than the C core's: a phase costs more here
SMALL_BYTES = 16 << 10
_YIELD_S = 300e-6
_SLOW_YIELD_S = 30e-6
_NO_YIELD_S = 0.2  # after a slow one
_WORDS = CONTROL_BYTES // 4
_HALF = 1 << 31
_U32 = 0xFFFFFFFF
_ENDS = {
    Fault.LEFT: "it has left",
    Fault.TIMED_OUT: "it ended the group after a timeout",
    Fault.PEER_LOST: "it ended the group after a rank was lost",
    Fault.MISMATCH: "it ended the group after differing calls",
    Fault.ABORTED: "it aborted the group",
    Fault.NO_MEMORY: "it ended the group because it ran out of memory",
}


def engine_bytes(size: int, plan: Plan) -> int:
    """Return the amount of shared memory that a group's engine needs, in bytes."""
    return segment_bytes(size, _SLOT_BYTES, plan.ring_bytes)


class PythonEngine(HostEngine):
    """An engine, written in Python, for ranks on one host."""

    name = "shm"
    engine = "python"

    def __init__(
        self, members: Members, plan: Plan, memory: SharedMemory, peers: Peers, yields: bool
    ) -> None:
        super().__init__(members)
        self._memory = memory
        self._peers = peers
        self._segment = Segment(memory, _SLOT_BYTES, plan.ring_bytes)
        self._words = self._segment.words
        if self._others:
            self.carry_messages(Rings(self._segment, self._rank, self._gone))
        self._published = 0
        self._chunk = 0
        self._call = b""
        self._turn = 0  # which of the two headers is the running collective's
        self._num_ended = 0  # collectives
        self._agreed = -1  # sequence of the last operation whose call all members share
        self._is_cut = False
        self._is_closed = False
        self._yields = yields
        self._yields_from_s = 0.0
        self._run: dict[str, Callable[[Operation, Watch], None]] = {
            "all_reduce": self._all_reduce,
            "reduce": self._reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "broadcast": self._broadcast,
            "all_to_all": self._all_to_all,
            "gather": self._gather,
            "scatter": self._scatter,
            "barrier": self._barrier,
        }

    def carry_out(self, operation: Operation, watch: Watch) -> None:
        """Run the next collective on the calling thread; block until it is done."""
        self._call = operation.head
        self._turn ^= 1
        self._segment.write_header(self._rank, self._turn, self._call)
        self._run[operation.kind](operation, watch)
        self._num_ended += 1

    def cut(self, reason: CollectiveError | None) -> None:
        """Record in shared memory that this rank has left, so that waiting ranks detect this."""
        if self._is_cut or self._is_closed:
            return
        self._is_cut = True
        if reason is None:
            # A rank that leaves in order names itself, so ranks that still need it name it at once.
            self._blame(Fault.LEFT, [self._rank])
        else:
            self._give_up(reason)
        super().cut(reason)

    def close(self) -> None:
        """Unmap the shared memory, unless a thread is still using it."""
        if self._is_closed:
            return
        self.cut(None)
        self._is_closed = True
        self._peers.close()
        if self.close_threads():
            self._segment.close()
            self._memory.close()

    # ---- the collectives ----

    def _all_reduce(self, operation: Operation, watch: Watch) -> None:
        self._reduce_chunks(operation, watch, _array(operation.source), operation.target)

    def _reduce(self, operation: Operation, watch: Watch) -> None:
        self._reduce_chunks(operation, watch, _array(operation.source), operation.target)

    def _reduce_chunks(
        self, operation: Operation, watch: Watch, source: Flat, target: Flat | None
    ) -> None:
        per_slot = _SLOT_BYTES // source.itemsize
        for start in _chunks(len(source), per_slot):
            part = slice(start, start + per_slot)
            parts = self._exchange(operation, watch, source[part])
            out = None if target is None else target[part]
            if self._size > 2 and source[part].nbytes > SMALL_BYTES:
                self._reduce_by_shares(operation, watch, parts, out)
            elif out is not None:
                reduce_into(out, parts, operation.reduce_op, operation.dtype)

    def _reduce_by_shares(
        self, operation: Operation, watch: Watch, parts: list[Flat], out: Flat | None
    ) -> None:
        """Reduce this rank's shard of a chunk into its slot, then copy all shards to `out`."""
        shares = _shares(len(parts[0]), self._size)
        mine = shares[self._rank]
        reduce_into(
            parts[self._rank][mine],
            [part[mine] for part in parts],
            operation.reduce_op,
            operation.dtype,
        )
        self._meet(operation, watch)
        if out is not None:
            for part, share in zip(parts, shares, strict=True):
                np.copyto(out[share], part[share])

    def _all_gather(self, operation: Operation, watch: Watch) -> None:
        self._gather(operation, watch)

    def _gather(self, operation: Operation, watch: Watch) -> None:
        source, target = _array(operation.source), operation.target
        splits = operation.output_splits or (len(source),) * self._size
        rows = None if target is None else np.split(target, np.cumsum(splits)[:-1])
        per_slot = _SLOT_BYTES // source.itemsize
        for start in _chunks(max(splits), per_slot):
            lengths = [min(per_slot, max(0, split - start)) for split in splits]
            chunk = source[start : start + per_slot]
            parts = self._exchange(operation, watch, chunk, lengths)
            if rows is not None:
                for row, part in zip(rows, parts, strict=True):
                    np.copyto(row[start : start + per_slot], part)

    def _reduce_scatter(self, operation: Operation, watch: Watch) -> None:
        source, target = _array(operation.source), _array(operation.target)
        splits = operation.input_splits or (len(target),) * self._size
        rows = np.split(source, np.cumsum(splits)[:-1])
        per_slot = max(1, _SLOT_BYTES // (source.itemsize * self._size))
        for start in _chunks(max(splits), per_slot):
            columns = [row[start : start + per_slot] for row in rows]
            parts = self._exchange(operation, watch, np.concatenate(columns))
            first = sum(len(column) for column in columns[: self._rank])
            mine = slice(first, first + len(columns[self._rank]))
            reduce_into(
                target[start : start + per_slot],
                [part[mine] for part in parts],
                operation.reduce_op,
                operation.dtype,
            )

    def _broadcast(self, operation: Operation, watch: Watch) -> None:
        is_root = self._rank == operation.root
        data = _array(operation.source if is_root else operation.target)
        per_slot = _SLOT_BYTES // data.itemsize
        for start in _chunks(len(data), per_slot):
            chunk = data[start : start + per_slot]
            parts = self._exchange(operation, watch, chunk, write=is_root)
            if not is_root:
                np.copyto(chunk, parts[operation.root])

    def _scatter(self, operation: Operation, watch: Watch) -> None:
        target = _array(operation.target)
        per_slot = max(1, _SLOT_BYTES // (target.itemsize * self._size))
        for start in _chunks(len(target), per_slot):
            width = min(per_slot, len(target) - start)
            columns = np.empty(0, target.dtype)
            if operation.source is not None:
                rows = operation.source.reshape(self._size, len(target))
                columns = np.ascontiguousarray(rows[:, start : start + width]).reshape(-1)
            self._exchange(operation, watch, columns)
            parity = (self._chunk - 1) & 1
            part = self._segment.typed(operation.root, parity, target, width * self._size)
            np.copyto(target[start : start + width], part.reshape(self._size, width)[self._rank])

    def _all_to_all(self, operation: Operation, watch: Watch) -> None:
        source, target = _array(operation.source), _array(operation.target)
        longest = self._agree_on_splits(operation, watch)
        per_slot = max(1, _SLOT_BYTES // (source.itemsize * self._size))
        to, come = np.cumsum((0, *operation.input_splits)), np.cumsum((0, *operation.output_splits))
        for start in range(0, longest, per_slot):
            outgoing = np.zeros((self._size, per_slot), source.dtype)
            for rank in range(self._size):
                part = source[to[rank] + start : min(to[rank] + start + per_slot, to[rank + 1])]
                outgoing[rank, : len(part)] = part
            parts = self._exchange(operation, watch, outgoing.reshape(-1))
            for rank, part in enumerate(parts):
                place = target[
                    come[rank] + start : min(come[rank] + start + per_slot, come[rank + 1])
                ]
                np.copyto(place, part.reshape(self._size, per_slot)[self._rank, : len(place)])

    def _agree_on_splits(self, operation: Operation, watch: Watch) -> int:
        """Check that ranks send as much as their peers expect; return the largest of all splits."""
        mine = np.array([*operation.input_splits, *operation.output_splits], np.int64)
        tables = np.stack(self._exchange(operation, watch, mine))
        sent, wanted = tables[:, : self._size], tables[:, self._size :].T
        if (sent != wanted).any():
            pairs = np.argwhere(sent != wanted)
            raise split_error(self._members, operation, sorted(set(pairs.reshape(-1).tolist())))
        return int(sent.max())

    def _barrier(self, operation: Operation, watch: Watch) -> None:
        self._exchange(operation, watch, np.empty(0, np.uint8))

    # ---- phases ----

    def _exchange(
        self,
        operation: Operation,
        watch: Watch,
        chunk: Flat,
        lengths: list[int] | None = None,
        *,
        write: bool = True,
    ) -> list[Flat]:
        """Publish this rank's chunk and wait for all other ranks.

        Args:
            lengths: the number of elements on each rank; None if all ranks have the same number.

        Returns:
            Every rank's chunk, in rank order.
        """
        parity = self._chunk & 1
        self._chunk += 1
        if write:
            np.copyto(self._segment.typed(self._rank, parity, chunk, len(chunk)), chunk)
        self._meet(operation, watch)
        self._check_same_call(operation)
        if lengths is None:
            lengths = [len(chunk)] * self._size
        return [self._segment.typed(r, parity, chunk, lengths[r]) for r in range(self._size)]

    def _meet(self, operation: Operation, watch: Watch) -> None:
        """Announce a phase and wait until every member has announced it."""
        self._published = (self._published + 1) & _U32
        futex.publish(self._segment, self._rank * _WORDS, self._published, self._size > 1)
        for rank in self._others:
            if not self._has_announced(rank):
                self._wait(operation, watch, rank)

    def _has_announced(self, rank: int) -> bool:
        return (self._words[rank * _WORDS] - self._published) & _U32 < _HALF

    def _late(self) -> list[int]:
        return [r for r in self._others if not self._has_announced(r)]

    def _wait(self, operation: Operation, watch: Watch, rank: int) -> None:
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
            left_s = max(0.0, min(CHECK_EVERY_S, watch.deadline_s - time.monotonic()))
            futex.wait(self._segment.address(rank * _WORDS), seen, left_s)
            if not self._has_announced(rank):
                self._look_around(operation, watch)

    # ---- faults ----

    def _look_around(self, operation: Operation, watch: Watch) -> None:
        """Raise an error if a late rank has failed or the timeout has expired."""
        gone: set[int] = set()
        reason = Fault.PEER_LOST
        for rank in self._late():
            fault, blamed = self._segment.blamed_by(rank)
            if fault and not blamed:  # for ranks outside this group, or none that is known
                raise ConnectionBroken(_ENDS[Fault(fault)], rank)
            gone.update(blamed)
            if fault in (Fault.TIMED_OUT, Fault.MISMATCH):
                reason = Fault(fault)
        if gone:
            raise self._explain(operation, reason, sorted(gone))
        self._check_nobody_gave_up(operation)
        watch.check(self._late)

    def _gone(self) -> list[tuple[int, str]]:
        """Return the ranks that have exited or left the group, each with the reason."""
        return [
            (rank, _ENDS[Fault(fault)])
            for rank in self._others
            if (fault := self._segment.blamed_by(rank)[0])
        ]

    def _explain(self, operation: Operation, reason: Fault, gone: list[int]) -> Exception:
        if reason == Fault.TIMED_OUT:
            return EndedElsewhere(build.timed_out(self._members, operation, gone))
        if reason == Fault.MISMATCH:
            return message_error(self._members, operation, gone)
        return build.peer_lost(self._members, operation, gone)

    def _give_up(self, error: CollectiveError) -> None:
        """Record which ranks are at fault, so that other ranks do not blame this rank."""
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
        self._segment.blame(self._rank, fault, ranks, self._num_ended)
        futex.wake(self._segment.address(self._rank * _WORDS))

    def _check_same_call(self, operation: Operation) -> None:
        if self._agreed == operation.sequence:
            return
        calls = [self._segment.read_header(r, self._turn)[:HEAD_BYTES] for r in range(self._size)]
        if not all(call == self._call for call in calls):
            raise mismatch_error(self._members, operation, calls)
        self._check_nobody_gave_up(operation)
        self._agreed = operation.sequence

    def _check_nobody_gave_up(self, operation: Operation) -> None:
        """Raise an error if another member failed before finishing this collective."""
        for rank in self._others:
            fault, blamed = self._segment.blamed_by(rank)
            if fault in (Fault.FINE, Fault.LEFT, Fault.MISMATCH):
                continue
            if (self._num_ended - self._segment.num_ended(rank)) & _U32 < _HALF:
                raise self._explain(operation, Fault(fault), blamed)


def _array(data: Flat | None) -> Flat:
    assert data is not None
    return data


def _chunks(length: int, per_chunk: int) -> range:
    """Return the start indices of the chunks; empty data forms one chunk."""
    return range(0, max(length, 1), per_chunk)


def _shares(length: int, size: int) -> list[slice]:
    """Split [0, length) into `size` ranges of nearly equal length."""
    return [slice(length * r // size, length * (r + 1) // size) for r in range(size)]
