"""The pure-Python engine: collectives by NumPy over shared memory, with futexes to wait.

Every chunk of every operation begins with the same phase: a rank puts its data into its slot,
announces that, and waits until all have announced theirs. After it each rank sees what every other
called (a mismatch is an error before any result is written) and may read everyone's data.

    up to 16 KB, or two ranks   each sums all slots                     1 phase
    larger                      each sums its share, all copy shares    2 phases
    all_gather, reduce_scatter, broadcast                               1 phase

Slots are used in turns (even and odd chunks): a rank that writes chunk k+2 has seen everybody
announce chunk k+1, so everybody is done reading chunk k. That is why no third phase is needed.

Waiting follows the machine: with more ranks than usable cores it sleeps on the futex at once, else
it first yields for up to 300 us, and stops yielding when one yield takes over 30 us, because then
somebody else needs the core (measured: sleeping at once wins only when oversubscribed).
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable

import numpy as np

from echelon.dist.arrays import Flat
from echelon.dist.backends.interface import Members
from echelon.dist.backends.operation import OPERATIONS, REDUCE_OPS, Operation
from echelon.dist.backends.shm import futex
from echelon.dist.backends.shm.reduction import reduce_into
from echelon.dist.backends.shm.rendezvous import join
from echelon.dist.backends.shm.segment import CONTROL_BYTES
from echelon.dist.mismatch import mismatch_error
from echelon.errors import CollectiveError, CollectiveTimeoutError, PeerLostError
from echelon.store import PrefixStore

SLOT_BYTES = 1 << 20
SMALL_BYTES = 16 << 10
_SLICE_S = 0.1  # longest sleep before looking after abort, deadline and the peers' lives
_YIELD_S = 300e-6
_SLOW_YIELD_S = 30e-6
_HEADER = struct.Struct("<qBBi12sq")
_WORDS = CONTROL_BYTES // 4
_HALF = 1 << 31
_U32 = 0xFFFFFFFF


class ShmBackend:
    """Carries out operations of ranks on one host."""

    name = "shm"

    def __init__(self, members: Members, store: PrefixStore, timeout_s: float) -> None:
        """Map the group's memory.

        Raises:
            ValueError: the members do not run on one host, or this platform has no futex.
            CollectiveTimeoutError: members did not come within `timeout_s`.
        """
        if not futex.available():
            raise ValueError("backend 'shm' needs Linux on a known architecture for its futex")
        self._members = members
        self._rank = members.rank
        self._size = members.size
        self._others = [r for r in range(members.size) if r != members.rank]
        self._segment, self._peers = join(members, store, SLOT_BYTES, timeout_s)
        self._words = self._segment.words
        self._published = 0
        self._chunk = 0
        self._header = b""
        self._agreed = -1  # sequence of the last operation whose call all members share
        self._lost: CollectiveError | None = None
        self._closed = False
        self._yields = len(os.sched_getaffinity(0)) >= members.size
        self._run: dict[str, Callable[[Operation, float], None]] = {
            "all_reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "broadcast": self._broadcast,
            "barrier": self._barrier,
        }

    def execute(self, operation: Operation) -> None:
        """Carry out one operation; block until it is done on this rank."""
        if self._lost is not None:
            raise self._again(operation, self._lost)
        deadline_s = time.monotonic() + operation.timeout_s
        self._announce_call(operation)
        try:
            self._run[operation.kind](operation, deadline_s)
        except (CollectiveTimeoutError, PeerLostError) as err:
            self._give_up(err)
            raise

    def close(self) -> None:
        """Unmap the memory and forget the peers. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        # Who leaves in order blames itself: others that still need it then name it at once.
        self._segment.blame(self._rank, [self._rank])
        futex.wake(self._segment.address(self._rank))
        self._peers.close()
        self._segment.close()

    # ---- the operations ----

    def _all_reduce(self, operation: Operation, deadline_s: float) -> None:
        data = _array(operation.target)
        per_slot = SLOT_BYTES // data.itemsize
        for start in _chunks(len(data), per_slot):
            chunk = data[start : start + per_slot]
            parts = self._exchange(operation, deadline_s, chunk)
            if self._size == 2 or chunk.nbytes <= SMALL_BYTES:
                reduce_into(chunk, parts, operation.reduce_op, operation.dtype)
            else:
                self._reduce_by_shares(operation, deadline_s, chunk, parts)

    def _reduce_by_shares(
        self, operation: Operation, deadline_s: float, chunk: Flat, parts: list[Flat]
    ) -> None:
        """Sum my share of the chunk in my own slot, then copy everybody's share."""
        shares = _shares(len(chunk), self._size)
        mine = shares[self._rank]
        reduce_into(
            parts[self._rank][mine],
            [part[mine] for part in parts],
            operation.reduce_op,
            operation.dtype,
        )
        self._meet(operation, deadline_s)
        for part, share in zip(parts, shares, strict=True):
            np.copyto(chunk[share], part[share])

    def _all_gather(self, operation: Operation, deadline_s: float) -> None:
        source, target = _array(operation.source), _array(operation.target)
        rows = target.reshape(self._size, len(source))
        per_slot = SLOT_BYTES // source.itemsize
        for start in _chunks(len(source), per_slot):
            parts = self._exchange(operation, deadline_s, source[start : start + per_slot])
            for row, part in zip(rows, parts, strict=True):
                np.copyto(row[start : start + per_slot], part)

    def _reduce_scatter(self, operation: Operation, deadline_s: float) -> None:
        source, target = _array(operation.source), _array(operation.target)
        rows = source.reshape(self._size, len(target))
        per_slot = max(1, SLOT_BYTES // (source.itemsize * self._size))
        for start in _chunks(len(target), per_slot):
            columns = np.ascontiguousarray(rows[:, start : start + per_slot])
            parts = self._exchange(operation, deadline_s, columns.reshape(-1))
            width = columns.shape[1]
            mine = slice(self._rank * width, (self._rank + 1) * width)
            reduce_into(
                target[start : start + width],
                [part[mine] for part in parts],
                operation.reduce_op,
                operation.dtype,
            )

    def _broadcast(self, operation: Operation, deadline_s: float) -> None:
        data = _array(operation.target)
        per_slot = SLOT_BYTES // data.itemsize
        is_root = self._rank == operation.root
        for start in _chunks(len(data), per_slot):
            chunk = data[start : start + per_slot]
            parts = self._exchange(operation, deadline_s, chunk, write=is_root)
            if not is_root:
                np.copyto(chunk, parts[operation.root])

    def _barrier(self, operation: Operation, deadline_s: float) -> None:
        self._exchange(operation, deadline_s, np.empty(0, np.uint8))

    # ---- phases ----

    def _exchange(
        self, operation: Operation, deadline_s: float, chunk: Flat, *, write: bool = True
    ) -> list[Flat]:
        """Show my chunk to all and wait for theirs; return everybody's, in rank order."""
        parity = self._chunk & 1
        self._chunk += 1
        if write:
            np.copyto(self._segment.typed(self._rank, parity, chunk, len(chunk)), chunk)
        self._meet(operation, deadline_s)
        self._check_same_call(operation)
        return [self._segment.typed(r, parity, chunk, len(chunk)) for r in range(self._size)]

    def _meet(self, operation: Operation, deadline_s: float) -> None:
        """Announce a phase and wait until every member has announced it."""
        self._published = (self._published + 1) & _U32
        address = self._segment.address(self._rank)
        if not futex.STORES_STAY_IN_ORDER:
            futex.wake(address)  # for its barrier: the data must be seen before the word
        self._words[self._rank * _WORDS] = self._published
        if self._size > 1:
            futex.wake(address)
        for rank in self._others:
            if not self._has_announced(rank):
                self._wait(operation, deadline_s, rank)

    def _has_announced(self, rank: int) -> bool:
        return (self._words[rank * _WORDS] - self._published) & _U32 < _HALF

    def _wait(self, operation: Operation, deadline_s: float, rank: int) -> None:
        if self._yields:
            stop = time.perf_counter() + _YIELD_S
            now = time.perf_counter()
            while now < stop:
                os.sched_yield()
                if self._has_announced(rank):
                    return
                before, now = now, time.perf_counter()
                if now - before > _SLOW_YIELD_S:
                    break
        while not self._has_announced(rank):
            seen = self._words[rank * _WORDS]
            if (seen - self._published) & _U32 < _HALF:
                return
            futex.wait(self._segment.address(rank), seen, _SLICE_S)
            if not self._has_announced(rank):
                self._look_around(operation, deadline_s)

    # ---- faults ----

    def _look_around(self, operation: Operation, deadline_s: float) -> None:
        """Raise if who has not come will not come, or if the time is up."""
        late = [r for r in self._others if not self._has_announced(r)]
        dead = self._peers.dead(late)
        gone = {
            r for r in dead if self._segment.blamed_by(r) is None and not self._has_announced(r)
        }
        for rank in late:
            gone.update(self._segment.blamed_by(rank) or ())
        gone.discard(self._rank)
        if gone:
            raise self._peer_lost(operation, sorted(gone))
        late = [r for r in late if not self._has_announced(r)]
        if late and time.monotonic() >= deadline_s:
            raise self._timed_out(operation, late)

    def _peer_lost(self, operation: Operation, gone: list[int]) -> PeerLostError:
        ranks = [self._members.ranks[r] for r in gone]
        named = ", ".join(f"rank {rank}" for rank in ranks)
        return PeerLostError(
            f"{self._place(operation)}: {named} died or left and did not take part",
            group=self._members.name,
            operation=operation.kind,
            sequence=operation.sequence,
            ranks=ranks,
        )

    def _timed_out(self, operation: Operation, late: list[int]) -> CollectiveTimeoutError:
        ranks = [self._members.ranks[r] for r in late]
        return CollectiveTimeoutError(
            f"{self._place(operation)} after {operation.timeout_s:.1f} s: "
            f"{self._size - len(ranks)} of {self._size} ranks came "
            f"(missing: {', '.join(map(str, ranks))})",
            group=self._members.name,
            operation=operation.kind,
            sequence=operation.sequence,
            ranks=ranks,
        )

    def _give_up(self, error: CollectiveError) -> None:
        """Tell the others whom we blame, so that they name the same ranks and not us."""
        self._lost = error
        places = {rank: place for place, rank in enumerate(self._members.ranks)}
        self._segment.blame(self._rank, [places[r] for r in error.ranks if r in places])
        futex.wake(self._segment.address(self._rank))

    def _again(self, operation: Operation, first: CollectiveError) -> CollectiveError:
        return type(first)(
            f"{self._place(operation)}: the group is broken since {first.operation} "
            f"#{first.sequence}, for want of {', '.join(f'rank {rank}' for rank in first.ranks)}",
            group=self._members.name,
            operation=operation.kind,
            sequence=operation.sequence,
            ranks=first.ranks,
        )

    def _place(self, operation: Operation) -> str:
        return (
            f"{operation.kind} #{operation.sequence} in group {self._members.name!r} "
            f"({self._size} ranks)"
        )

    # ---- what each rank called ----

    def _announce_call(self, operation: Operation) -> None:
        size = 0
        for data in (operation.source, operation.target):
            size += 0 if data is None else len(data)
        header = _HEADER.pack(
            operation.sequence,
            OPERATIONS.index(operation.kind),
            REDUCE_OPS.index(operation.reduce_op) + 1 if operation.reduce_op else 0,
            operation.root,
            operation.dtype.encode(),
            size,
        )
        text = str(operation).encode("utf-8", "replace")
        self._header = header
        self._segment.write_header(self._rank, operation.sequence & 1, header + text)

    def _check_same_call(self, operation: Operation) -> None:
        if self._agreed == operation.sequence:
            return
        parity = operation.sequence & 1
        headers = [self._segment.read_header(r, parity) for r in range(self._size)]
        if all(header[: _HEADER.size] == self._header for header in headers):
            self._agreed = operation.sequence
            return
        raise mismatch_error(
            self._members,
            operation,
            calls=[header[: _HEADER.size] for header in headers],
            texts=[header[_HEADER.size :].decode("utf-8", "replace") for header in headers],
        )


def _array(data: Flat | None) -> Flat:
    assert data is not None
    return data


def _chunks(length: int, per_chunk: int) -> range:
    """Starts of the chunks; one empty chunk for no data, since the ranks must meet all the same."""
    return range(0, max(length, 1), per_chunk)


def _shares(length: int, size: int) -> list[slice]:
    """Split [0, length) into `size` nearly equal runs."""
    return [slice(length * r // size, length * (r + 1) // size) for r in range(size)]
