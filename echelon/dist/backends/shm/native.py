"""Wrap the C core, which runs collectives and messages without holding the GIL.

Blocking operations run on the caller's thread, and asynchronous operations on the engine's thread.
See `native/engine.h` for the memory model and `native/collectives.c` for the algorithms.
"""

from __future__ import annotations

import contextlib
import importlib
import struct
import zlib
from contextlib import AbstractContextManager
from typing import Any

from echelon.dist.backends.interface import EndedElsewhere, Members, Watch
from echelon.dist.backends.shm.faults import Fault
from echelon.dist.backends.shm.memory import SharedMemory
from echelon.dist.backends.shm.rendezvous import Plan
from echelon.dist.errors import build
from echelon.dist.errors.mismatch import message_error, mismatch_error, split_error
from echelon.dist.membership.peers import Peers
from echelon.dist.operation.arrays import DTYPES, Flat
from echelon.dist.operation.operation import (
    ANY_SOURCE,
    HEAD_BYTES,
    OPERATIONS,
    REDUCE_OPS,
    Operation,
)
from echelon.errors import CollectiveError

try:
    _native: Any = importlib.import_module("echelon.dist.backends.shm._native")
except ImportError:  # no compiler where the package was installed
    _native = None

_KINDS = {kind: number for number, kind in enumerate(OPERATIONS)}
_DTYPES = {dtype: number for number, dtype in enumerate(DTYPES)}
_UINT8 = _DTYPES["uint8"]
_DTYPES[""] = _UINT8
_REDUCE_OPS = {op: number for number, op in enumerate(REDUCE_OPS)}
_REDUCE_OPS[""] = 0


def available() -> bool:
    """Return whether the C core was built."""
    return _native is not None


def core() -> Any:
    """Return the C core's module, or None if it was not built."""
    return _native


def max_ranks() -> int:
    """Return the maximum number of ranks in a group, or 0 if the C core was not built."""
    return int(_native.MAX_RANKS) if _native is not None else 0


def engine_bytes(size: int, plan: Plan) -> int:
    """Return the amount of shared memory that a group's engine needs, in bytes."""
    assert _native is not None
    return int(_native.segment_bytes(size, plan.slot_bytes, plan.ring_bytes))


class NativePending:
    """A submitted operation in the C core, with the data needed to explain a failure."""

    __slots__ = ("_engine", "_known", "_operation", "_ticket")

    def __init__(self, engine: NativeEngine, operation: Operation, ticket: Any) -> None:
        self._engine = engine
        self._operation = operation
        self._ticket = ticket
        self._known: CollectiveError | None = None

    @property
    def done(self) -> bool:
        """True once the operation has ended."""
        return bool(self._ticket.done)

    @property
    def ended_mono_ns(self) -> int:
        """The monotonic time when the operation ended, in nanoseconds; 0 while it is running."""
        return int(self._ticket.ended_mono_ns)

    @property
    def error(self) -> CollectiveError | None:
        """The error that ended the operation, or None."""
        fault = self._ticket.fault
        if fault is not None and self._known is None:
            self._known = self._engine.explain(self._operation, fault)
        return self._known

    @property
    def source(self) -> int:
        """The group rank that sent the received message, or -1 while the receive is running."""
        return int(self._ticket.source)

    def withdraw(self) -> bool:
        """Cancel an any-source receive; return False if a message has already been matched."""
        return bool(self._ticket.withdraw())

    def wait(self, timeout_s: float | None) -> bool:
        """Block until the operation ends or the timeout expires; return whether it has ended."""
        return bool(self._ticket.wait(-1.0 if timeout_s is None else timeout_s))


class NativeEngine:
    """An engine, written in C, for ranks on one host."""

    name = "shm"
    device = "cpu"
    engine = "native"
    nests = True

    def __init__(
        self, members: Members, plan: Plan, memory: SharedMemory, peers: Peers, spins: bool
    ) -> None:
        assert _native is not None
        self._members = members
        self._memory = memory
        self._peers = peers
        self._engine = _native.Engine(
            memory.map,
            memory.offset,
            members.rank,
            members.size,
            plan.slot_bytes,
            plan.ring_bytes,
            spins,
            peers.table(members.size),
        )

    def refuses(self, kind: str, dtype: str, reduce_op: str) -> str:  # noqa: ARG002
        """Return "", because every operation is supported."""
        return ""

    def prepare(self, operation: Operation) -> None:
        """Do nothing, because no further checks are needed."""

    def execute(self, operation: Operation, watch: Watch | None = None) -> None:  # noqa: ARG002
        """Carry out one operation on the calling thread."""
        fault = self._engine.run(*self._arguments(operation))
        if fault is not None:
            raise self.explain(operation, fault)

    def submit(self, operation: Operation, watch: Watch | None = None) -> NativePending:  # noqa: ARG002
        """Queue one operation for the engine's thread."""
        return NativePending(self, operation, self._engine.start(*self._arguments(operation)))

    def submit_shared(self, operation: Operation, watch: Watch | None = None) -> NativePending:  # noqa: ARG002
        """Start an any-source receive that can also be completed through another engine."""
        return NativePending(self, operation, self._engine.start(*self._arguments(operation), True))

    @property
    def statistics(self) -> dict[str, int]:
        """Counts of sleeps, spins, lost wake-ups (expected to be 0) and stashed messages."""
        return dict(self._engine.statistics())

    def batch(self) -> AbstractContextManager[object]:
        """Return a no-op context manager, because submitted operations start immediately."""
        return contextlib.nullcontext()

    def cut(self, reason: CollectiveError | None) -> None:
        """End all waits in the core; record whether this rank failed or left normally."""
        if reason is None:
            self._engine.close()
        else:
            self._engine.abort()

    def abort(self) -> None:
        """Abort the group on this rank. Called by engines that are built on top of this engine."""
        self._engine.abort()

    def close(self) -> None:
        """Leave the group, unmap the shared memory and release the peers' descriptors."""
        self._engine.close()
        self._peers.close()
        self._memory.close()

    def explain(self, operation: Operation, fault: tuple[int, list[int], int, int, bool]) -> Any:
        """Convert a fault that the core reported into an error for the operation."""
        reason, ranks, kind, sequence, is_adopted = fault
        mine = _KINDS[operation.kind] == kind and operation.sequence == sequence
        if reason == Fault.MISMATCH:
            return self._explain_mismatch(operation, ranks, kind, sequence, mine)
        if reason == Fault.TIMED_OUT:
            error = build.timed_out(self._members, operation, ranks)
            return error if mine and not is_adopted else EndedElsewhere(error)
        if reason == Fault.PEER_LOST:
            return build.peer_lost(self._members, operation, ranks)
        if reason == Fault.NO_MEMORY:
            return self._no_memory(operation, ranks)
        return build.aborted(self._members, operation)

    def _no_memory(self, operation: Operation, ranks: list[int]) -> CollectiveError:
        full = [self._members.ranks[rank] for rank in ranks]
        return CollectiveError(
            f"{build.place(self._members, operation)}: {build.named(full)} has no memory left for "
            "messages that arrived before their receives; post receives in the order of the sends",
            group=self._members.name,
            operation=operation.kind,
            sequence=operation.sequence,
            ranks=full,
        )

    def _explain_mismatch(
        self, operation: Operation, ranks: list[int], kind: int, sequence: int, mine: bool
    ) -> CollectiveError:
        first = operation if mine else Operation(OPERATIONS[kind], sequence)
        if OPERATIONS[kind] in ("send", "recv"):
            return message_error(self._members, operation, ranks)
        if ranks:
            error: CollectiveError = split_error(self._members, first, ranks)
        else:
            heads = [head[:HEAD_BYTES] for head in self._engine.calls()]
            error = mismatch_error(self._members, first, heads or [b""])
        return error if mine else build.broken_since(self._members, operation, error)

    def _arguments(self, operation: Operation) -> tuple[Any, ...]:
        return (
            _KINDS[operation.kind],
            operation.sequence,
            _type_id(operation),
            _REDUCE_OPS[operation.reduce_op],
            _root(operation),
            operation.tag,
            operation.source,
            operation.target,
            _split_bytes(operation),
            operation.call,
            operation.timeout_s,
        )


def _root(operation: Operation) -> int:
    if operation.peer == ANY_SOURCE:
        return int(_native.ANY)
    return operation.peer if operation.peer >= 0 else max(operation.root, 0)


def _type_id(operation: Operation) -> int:
    """Return the number that identifies the operation's dtype in the C core."""
    number = _DTYPES.get(operation.dtype)
    if number is not None:
        return number
    return zlib.crc32(operation.dtype.encode()) | 1 << 31 if operation.is_message else _UINT8


def _split_bytes(operation: Operation) -> bytes | None:
    """Return the split sizes in bytes, as packed integers; None if there are no explicit splits."""
    splits = [*operation.input_splits, *operation.output_splits]
    if not splits:
        return None
    itemsize = _array(operation.source).itemsize
    return struct.pack(f"<{len(splits)}Q", *(count * itemsize for count in splits))


def _array(data: Flat | None) -> Flat:
    assert data is not None
    return data
