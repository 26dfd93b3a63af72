"""Provide the xccl backend for host memory, which uses oneCCL's CPU plugin.

all_reduce, all_gather, reduce_scatter, broadcast and all_to_all are oneCCL's own collectives. The
other operations are built as follows:

    dtypes and reductions that oneCCL lacks  all_gather, then a local reduction in rank order
    reduce, gather                           all_reduce, all_gather into the engine's own memory
    scatter                                  broadcast; each rank keeps its shard
    all_to_all with splits                   all_to_all of splits padded to the longest
    send, recv                               refused, because the plugin crashes (seen with
                                             2022.1.2); `router.py` uses another engine for them

oneCCL's calls block in C and cannot be aborted. They therefore run on a separate thread, and the
caller checks its watch while it waits. When an operation fails, its thread, arrays and communicator
are retained until the process exits.

All groups of a process share one thread, because the library processes one call at a time. All
ranks must therefore use their communicators in the same order.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from echelon.dist.arithmetic import inline
from echelon.dist.arithmetic.reduce import reduce
from echelon.dist.arithmetic.reduce_numpy import divide
from echelon.dist.backends.interface import CHECK_EVERY_S, Engine, Members, Pending, Watch
from echelon.dist.backends.xccl import library
from echelon.dist.backends.xccl.ending import keep_for_ever
from echelon.dist.errors import build
from echelon.dist.errors.mismatch import mismatch_error, split_error
from echelon.dist.operation.arrays import Flat, is_floating
from echelon.dist.operation.operation import Operation
from echelon.dist.progress.executor import Lane, LanePending
from echelon.errors import CollectiveError, StoreTimeoutError
from echelon.store import PrefixStore
from echelon.store.deadline import time_left_s

_JOIN_S = 1.0
_BYTE = library.DTYPES["uint8"]


def not_ready() -> str:
    """Return the reason this machine cannot run the backend, or "" if it can."""
    return library.check("xpu" if _has_gpu() else "cpu")


def create(members: Members, store: PrefixStore, timeout_s: float) -> Engine:
    """Create a group's engine; every member must call this.

    Raises:
        ValueError: the library cannot be loaded, or is already loaded for another kind of device.
        CollectiveTimeoutError: some members did not join within `timeout_s` seconds.
    """
    device = members.device or ("xpu" if _has_gpu() else "cpu")
    try:
        library.load(device)
    except OSError as err:
        raise ValueError(f"backend 'xccl': {err}") from err
    if device == "cpu":
        return XcclEngine(members, store, timeout_s)
    from echelon.dist.backends.xccl import device as gpus

    return gpus.create(members, store, timeout_s)


def _has_gpu() -> bool:
    if not Path("/dev/dri").exists() or importlib.util.find_spec("torch") is None:
        return False
    torch: Any = importlib.import_module("torch")
    return bool(torch.xpu.is_available())


class _Worker:
    """The thread that makes the library's calls."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[LanePending, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._serve, name="echelon-xccl", daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], None]) -> LanePending:
        pending = LanePending()
        self._jobs.put((pending, job))
        return pending

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(_JOIN_S)

    def _serve(self) -> None:
        while (item := self._jobs.get()) is not None:
            pending, job = item
            pending.run(job)
            del item, pending, job


class _Shared:
    """Resources shared by all groups of the process; the last group to close releases them."""

    def __init__(self) -> None:
        self.lane = Lane("echelon-xccl-lane")
        self.worker = _Worker()
        self.num_groups = 0
        self.is_stuck = False

    def give_up(self, *kept: Any) -> None:
        """Abandon the worker, keep its memory alive, and do not wait for it at process exit."""
        self.is_stuck = True
        keep_for_ever(self, kept)


_shared: _Shared | None = None
_shared_lock = threading.Lock()


def _take_shared() -> _Shared:
    global _shared
    with _shared_lock:
        if _shared is None or _shared.is_stuck:
            _shared = _Shared()
        _shared.num_groups += 1
        return _shared


def _give_shared_back(shared: _Shared) -> None:
    global _shared
    with _shared_lock:
        shared.num_groups -= 1
        if shared.num_groups:
            return
        if _shared is shared:
            _shared = None
    shared.lane.close()
    shared.worker.close()


class _Joining:
    """The watch that an engine checks while it creates a group."""

    def __init__(self, members: Members, timeout_s: float) -> None:
        self.operation = Operation("init", 0, timeout_s=timeout_s)
        self.deadline_s = time.monotonic() + timeout_s
        self._members = members

    def check(self, needed: Callable[[], Sequence[int]] | None = None) -> None:
        """Raise an error if a member has died or the timeout has expired."""
        self._members.check()
        if time.monotonic() >= self.deadline_s:
            late = [] if needed is None else needed()
            raise build.timed_out(self._members, self.operation, late)


class XcclEngine:
    """An engine for host memory that uses oneCCL's CPU plugin."""

    name = "xccl"
    device = "cpu"
    closes_together = True  # oneCCL's destructor waits for the other members
    nests = False  # a collective is waited for on its caller's thread, and the library has one turn

    def __init__(self, members: Members, store: PrefixStore, timeout_s: float) -> None:
        self._members = members
        self._size = members.size
        self._ordered = members.options.reduction == "rank_ordered"
        self._is_broken = False
        self._is_closed = False
        self._communicator: Any = None
        self._shared = _take_shared()
        try:
            self._join(store, _Joining(members, timeout_s))
        except BaseException:
            self._is_broken = True
            self.close()
            raise
        self._run: dict[str, Callable[[Operation, Watch], None]] = {
            "all_reduce": self._reduce,
            "reduce": self._reduce,
            "all_gather": self._all_gather,
            "gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "broadcast": self._broadcast,
            "scatter": self._scatter,
            "all_to_all": self._all_to_all,
            "barrier": lambda operation, watch: None,  # noqa: ARG005 -- comparing was one
        }

    def refuses(self, kind: str, dtype: str, reduce_op: str) -> str:  # noqa: ARG002
        """Return why an operation is refused, or "". Only sends and receives are refused."""
        if kind in ("send", "recv"):
            return "has no messages on the host: oneCCL's CPU plugin crashes in them"
        return ""

    def prepare(self, operation: Operation) -> None:
        """Do nothing, because no further checks are needed."""

    def execute(self, operation: Operation, watch: Watch) -> None:
        """Carry out one operation after all earlier ones; block until it is done on this rank."""
        self._shared.lane.run(lambda: self._carry_out(operation, watch))

    def submit(self, operation: Operation, watch: Watch) -> Pending:
        """Queue one operation and return immediately."""
        return self._shared.lane.submit(lambda: self._carry_out(operation, watch))

    def batch(self) -> AbstractContextManager[object]:
        """Return a no-op context manager, because operations are queued when submitted."""
        return contextlib.nullcontext()

    def cut(self, reason: CollectiveError | None) -> None:
        """Record whether the group failed; if so, `close` does not destroy the communicator."""
        self._is_broken = self._is_broken or reason is not None

    def close(self) -> None:
        """Leave the group; destroy the communicator unless the group failed or a call is stuck."""
        if self._is_closed:
            return
        self._is_closed = True
        if not (self._is_broken or self._shared.is_stuck) and self._communicator is not None:
            self._shared.worker.run(self._communicator.close).wait(_JOIN_S)
        _give_shared_back(self._shared)

    def _join(self, store: PrefixStore, joining: _Joining) -> None:
        if self._members.rank == 0:
            store.set("unique_id", library.unique_id())
        try:
            left_s = time_left_s(joining.deadline_s)
            store.wait(["unique_id"], timeout=left_s, check=self._members.check)
            drawn = store.get("unique_id", timeout=left_s)
        except StoreTimeoutError as err:
            raise build.timed_out(self._members, joining.operation, [0]) from err

        def join() -> None:
            self._communicator = library.Communicator(self._size, self._members.rank, drawn)

        self._wait(joining, join)

    # ---- carrying out ----

    def _carry_out(self, operation: Operation, watch: Watch) -> None:
        watch.check()  # the group may have ended while this waited for its turn
        rows = self._compare_calls(operation, watch)
        if rows is not None and inline.is_small(operation):
            inline.finish(operation, rows, self._members.rank)
        else:
            self._run[operation.kind](operation, watch)

    def _wait(self, watch: Watch, job: Callable[[], None], *kept: Any) -> None:
        pending = self._shared.worker.run(job)
        try:
            while not pending.wait(CHECK_EVERY_S):
                watch.check()
        except BaseException:
            self._is_broken = True
            self._shared.give_up(job, kept)
            raise
        if pending.error is not None:
            watch.check()  # the library may have failed because a rank died
            raise pending.error

    def _call(
        self, watch: Watch, name: str, source: Flat, target: Flat,
        *numbers: int,
    ) -> None:  # fmt: skip
        self._wait(
            watch,
            lambda: self._communicator.call(name, source.ctypes.data, target.ctypes.data, *numbers),
            source,
            target,
        )

    def _compare_calls(self, operation: Operation, watch: Watch) -> Flat | None:
        if self._size == 1:
            return None
        mine = inline.pack(operation)
        rows = np.empty((self._size, len(mine)), np.uint8)
        self._gather_bytes(watch, mine, rows)
        if not inline.are_equal(rows, mine):
            raise mismatch_error(self._members, operation, inline.calls(rows))
        return rows

    def _gather_bytes(self, watch: Watch, source: Flat, target: Flat) -> None:
        self._call(watch, "AllGather", source, target, source.nbytes, _BYTE)

    # ---- sums ----

    def _is_own(self, operation: Operation) -> bool:
        return (
            not self._ordered
            and operation.dtype in library.DTYPES
            and operation.reduce_op in (*library.REDUCE_OPS, "avg")
            and operation.dtype not in ("float16", "bfloat16")
            and not (is_floating(operation.dtype) and operation.reduce_op in ("min", "max"))
        )

    def _reduce(self, operation: Operation, watch: Watch) -> None:
        source, target = _array(operation.source), operation.target
        if not len(source):
            return
        result = np.empty_like(source) if target is None else target
        if self._is_own(operation):
            self._own_sum(operation, watch, "AllReduce", source, result, len(source))
        else:
            parts = self._parts(watch, source)
            reduce(result, parts, operation.reduce_op, operation.dtype)

    def _reduce_scatter(self, operation: Operation, watch: Watch) -> None:
        source, target = _array(operation.source), _array(operation.target)
        if operation.input_splits:
            self._reduce_scatter_uneven(operation, watch, source, target)
            return
        if not len(target):
            return
        if self._is_own(operation):
            self._own_sum(operation, watch, "ReduceScatter", source, target, len(target))
            return
        parts = np.empty((self._size, len(target)), source.dtype)
        self._call(watch, "AllToAll", source, parts, target.nbytes, _BYTE)
        reduce(target, list(parts), operation.reduce_op, operation.dtype)

    def _reduce_scatter_uneven(
        self, operation: Operation, watch: Watch, source: Flat, target: Flat
    ) -> None:
        """Exchange shards padded to the longest shard's length, and reduce them in rank order."""
        longest = max(operation.input_splits)
        if not longest:
            return
        outgoing = np.zeros((self._size, longest), source.dtype)
        starts = np.cumsum(operation.input_splits)[:-1]
        for row, part in zip(outgoing, np.split(source, starts), strict=True):
            row[: len(part)] = part
        incoming = np.empty_like(outgoing)
        num_bytes = longest * source.itemsize
        self._call(watch, "AllToAll", outgoing, incoming, num_bytes, _BYTE)
        if len(target):
            parts = [row[: len(target)] for row in incoming]
            reduce(target, parts, operation.reduce_op, operation.dtype)

    def _own_sum(
        self, operation: Operation, watch: Watch, name: str, source: Flat, target: Flat,
        count: int,
    ) -> None:  # fmt: skip
        average = operation.reduce_op == "avg"
        op = library.REDUCE_OPS["sum" if average else operation.reduce_op]
        dtype = library.DTYPES[operation.dtype]
        self._call(watch, name, source, target, count, dtype, op)
        if average:
            divide(target, self._size, operation.dtype)

    def _parts(self, watch: Watch, source: Flat) -> list[Flat]:
        parts = np.empty((self._size, len(source)), source.dtype)
        self._gather_bytes(watch, source, parts)
        return list(parts)

    # ---- movement ----

    def _all_gather(self, operation: Operation, watch: Watch) -> None:
        source, target = _array(operation.source), operation.target
        if operation.output_splits:
            self._all_gather_uneven(operation, watch, source, _array(target))
            return
        if not len(source):
            return
        if target is None:
            target = np.empty(self._size * len(source), source.dtype)
        self._gather_bytes(watch, source, target)

    def _all_gather_uneven(
        self, operation: Operation, watch: Watch, source: Flat, target: Flat
    ) -> None:
        """Gather all ranks' arrays, padded to the length of the longest, and strip the padding."""
        splits = operation.output_splits
        if not max(splits):
            return
        padded = np.zeros(max(splits), source.dtype)
        padded[: len(source)] = source
        rows = np.empty((self._size, max(splits)), source.dtype)
        self._gather_bytes(watch, padded, rows)
        for part, row in zip(np.split(target, np.cumsum(splits)[:-1]), rows, strict=True):
            np.copyto(part, row[: len(part)])

    def _broadcast(self, operation: Operation, watch: Watch) -> None:
        is_root = self._members.rank == operation.root
        data = _array(operation.source if is_root else operation.target)
        self._spread(operation, watch, data)

    def _spread(self, operation: Operation, watch: Watch, data: Flat) -> None:
        if len(data):
            self._call(watch, "Broadcast", data, data, data.nbytes, _BYTE, operation.root)

    def _scatter(self, operation: Operation, watch: Watch) -> None:
        target = _array(operation.target)
        rows = operation.source
        if rows is None:
            rows = np.empty(self._size * len(target), target.dtype)
        self._spread(operation, watch, rows)
        np.copyto(target, rows.reshape(self._size, len(target))[self._members.rank])

    def _all_to_all(self, operation: Operation, watch: Watch) -> None:
        source, target = _array(operation.source), _array(operation.target)
        longest = self._agree_on_splits(operation, watch)
        if not longest:
            return
        outgoing = np.zeros((self._size, longest), source.dtype)
        starts = np.cumsum((0, *operation.input_splits))
        for rank, count in enumerate(operation.input_splits):
            outgoing[rank, :count] = source[starts[rank] : starts[rank] + count]
        incoming = np.empty_like(outgoing)
        num_bytes = longest * source.itemsize
        self._call(watch, "AllToAll", outgoing, incoming, num_bytes, _BYTE)
        starts = np.cumsum((0, *operation.output_splits))
        for rank, count in enumerate(operation.output_splits):
            target[starts[rank] : starts[rank] + count] = incoming[rank, :count]

    def _agree_on_splits(self, operation: Operation, watch: Watch) -> int:
        mine = np.array([*operation.input_splits, *operation.output_splits], np.int64)
        tables = np.empty((self._size, len(mine)), np.int64)
        self._gather_bytes(watch, mine, tables)
        sent, wanted = tables[:, : self._size], tables[:, self._size :].T
        if (sent != wanted).any():
            pairs = np.argwhere(sent != wanted)
            raise split_error(self._members, operation, sorted(set(pairs.reshape(-1).tolist())))
        return int(sent.max())


def _array(data: Flat | None) -> Flat:
    assert data is not None
    return data
