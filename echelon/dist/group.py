"""ProcessGroup: the one place where every collective passes.

Here, and only here, an operation's arguments are checked, it gets its number in the group, it is
recorded, and it is handed to the backend. A backend therefore never sees a bad argument, and the
black box never misses an operation.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import echelon.recorder.recorder as black_box
from echelon.dist.arrays import View, is_floating, view
from echelon.dist.backends.interface import Backend, Members
from echelon.dist.backends.operation import REDUCE_OPS, Operation
from echelon.dist.work import Lane, Work
from echelon.errors import CollectiveError
from echelon.recorder import sites
from echelon.recorder.recorder import NOT_RECORDED
from echelon.recorder.schema import Flag

_BITWISE = frozenset({"band", "bor", "bxor"})
_CLOSE_S = 1.0


class ProcessGroup:
    """Ranks that act together. Made by `init` and `new_group`, never directly.

    Every call is collective: all members make the same calls in the same order. Arrays are NumPy
    arrays, torch CPU tensors or other DLPack arrays on the CPU, contiguous; results are written in
    place. Calls raise

    * ValueError before anything is sent, if an argument cannot be carried;
    * CollectiveMismatchError on every rank, if members called different things;
    * CollectiveTimeoutError, if members did not come within the group's timeout;
    * PeerLostError, if a member died or left.

    With `async_op=True` a call returns a `Work` at once and raises from its `wait()`.
    """

    def __init__(self, members: Members, backend: Backend, timeout_s: float) -> None:
        self._members = members
        self._backend = backend
        self._timeout_s = timeout_s
        self._sequence = 0
        self._order = threading.Lock()
        self._lane = Lane(members.name)
        self._closed = False
        recorder = black_box.current()
        self._reference = 0 if recorder is None else recorder.group(members.name, members.ranks)

    @property
    def rank(self) -> int:
        """My rank within the group."""
        return self._members.rank

    @property
    def size(self) -> int:
        """Number of members."""
        return self._members.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' global ranks, in group order."""
        return tuple(self._members.ranks)

    @property
    def name(self) -> str:
        """The group's name, as verdicts show it."""
        return self._members.name

    @property
    def backend(self) -> str:
        """The engine's name."""
        return self._backend.name

    def __repr__(self) -> str:
        return f"ProcessGroup({self.name!r}, rank {self.rank} of {self.size}, {self.backend})"

    def all_reduce(self, x: Any, op: str = "sum", async_op: bool = False) -> Work | None:
        """Reduce `x` over all ranks, in place.

        Bytes read from shared memory per rank: size * n for two ranks or up to 16 KB, else about
        2 n (n: bytes of x).

        Args:
            x: any shape, equal on all ranks.
            op: sum, avg (floats only), min, max, prod, band, bor, bxor (integers and bool).
            async_op: return a `Work` at once instead of blocking.
        """
        data = view(x, "x", writable=True)
        _check_reduce_op(op, data.dtype)
        return self._run("all_reduce", data, data, reduce_op=op, async_op=async_op)

    def all_gather(self, out: Any, x: Any, async_op: bool = False) -> Work | None:
        """Collect every rank's `x` into `out`: [size * n, ...] for x: [n, ...]."""
        source = view(x, "x", writable=False)
        target = view(out, "out", writable=True)
        _check_pair("all_gather", "out", target, "x", source, self.size)
        return self._run("all_gather", source, target, async_op=async_op)

    def reduce_scatter(
        self, out: Any, x: Any, op: str = "sum", async_op: bool = False
    ) -> Work | None:
        """Reduce `x`: [size * n, ...] over all ranks; keep my part in `out`: [n, ...]."""
        source = view(x, "x", writable=False)
        target = view(out, "out", writable=True)
        _check_reduce_op(op, source.dtype)
        _check_pair("reduce_scatter", "x", source, "out", target, self.size)
        return self._run("reduce_scatter", source, target, reduce_op=op, async_op=async_op)

    def broadcast(self, x: Any, root: int, async_op: bool = False) -> Work | None:
        """Copy `x` of group rank `root` to every rank's `x`, of any shape."""
        if not isinstance(root, int) or not 0 <= root < self.size:
            raise ValueError(f"root {root!r} is no rank of group {self.name!r} (0-{self.size - 1})")
        data = view(x, "x", writable=root != self.rank)
        return self._run("broadcast", data, data, root=root, async_op=async_op)

    def barrier(self, async_op: bool = False) -> Work | None:
        """Block until every rank of the group has called it."""
        return self._run("barrier", None, None, async_op=async_op)

    def close(self) -> None:
        """End the group on this rank and free what it holds. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._lane.close(_CLOSE_S)
        self._backend.close()

    def _run(
        self,
        kind: str,
        source: View | None,
        target: View | None,
        *,
        reduce_op: str = "",
        root: int = -1,
        async_op: bool,
    ) -> Work | None:
        if self._closed:
            raise ValueError(f"group {self.name!r} is shut down")
        shown = source if source is not None else target
        with self._order:
            operation = Operation(
                kind=kind,
                sequence=self._sequence,
                dtype="" if shown is None else shown.dtype,
                reduce_op=reduce_op,
                root=root,
                source=None if source is None else source.data,
                target=None if target is None else target.data,
                signature="" if shown is None else str(shown),
                timeout_s=self._timeout_s,
            )
            self._sequence += 1
            record = self._record(operation, shown, async_op)
        if async_op:
            work = Work(f"{kind} #{operation.sequence} in group {self.name!r}")
            self._lane.submit(work, lambda: self._execute(operation, record))
            return work
        try:
            self._lane.run_inline(lambda: self._execute(operation, record))
        except CollectiveError as err:
            frame = sites.caller(1)
            if frame is not None:
                err.args = (f"{err}. Called at {frame.f_code.co_filename}:{frame.f_lineno}",)
            # The message says it all; a user's traceback should end in the user's code, not ours.
            raise err.with_traceback(None) from None
        return None

    def _record(self, operation: Operation, shown: View | None, async_op: bool) -> int:
        recorder = black_box.current()
        if recorder is None:
            return NOT_RECORDED
        root = operation.root
        return recorder.begin(
            self._reference,
            operation.kind,
            sequence=operation.sequence,
            dtype=operation.dtype,
            shapes=() if shown is None else (tuple(shown.shape),),
            num_bytes=0 if shown is None else shown.num_bytes,
            reduce_op=operation.reduce_op,
            root=-1 if root < 0 else self._members.ranks[root],
            timeout_s=operation.timeout_s,
            flags=int(Flag.ASYNC) if async_op else 0,
            depth=3,
        )

    def _execute(self, operation: Operation, record: int) -> None:
        recorder = None if record == NOT_RECORDED else black_box.current()
        if recorder is None:
            self._backend.execute(operation)
            return
        recorder.started(record)
        try:
            self._backend.execute(operation)
        except BaseException as err:
            recorder.failed(record, err)
            raise
        recorder.completed(record)


def _check_reduce_op(op: str, dtype: str) -> None:
    if op not in REDUCE_OPS:
        raise ValueError(f"op {op!r} is not known; use one of {', '.join(REDUCE_OPS)}")
    if op == "avg" and not is_floating(dtype):
        raise ValueError(f"op 'avg' needs a floating-point array, got {dtype}")
    if op in _BITWISE and is_floating(dtype):
        raise ValueError(f"op {op!r} needs integers or bool, got {dtype}")
    if dtype == "bool" and op in ("sum", "prod"):
        raise ValueError(f"op {op!r} is not defined on bool; use bor or band")


def _check_pair(
    call: str, large_name: str, large: View, small_name: str, small: View, size: int
) -> None:
    if large.dtype != small.dtype:
        raise ValueError(f"{call}: {large_name} is {large}, {small_name} is {small}: dtypes differ")
    if len(large.data) != size * len(small.data):
        raise ValueError(
            f"{call}: {large_name} must hold {size} times {small_name}: "
            f"{large_name} is {large}, {small_name} is {small}"
        )


def check_ranks(ranks: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Check the members of a new group.

    Raises:
        ValueError: none, one twice, or one that is no rank of the world.
    """
    members = tuple(int(rank) for rank in ranks)
    if not members:
        raise ValueError("a group needs at least one rank")
    if len(set(members)) != len(members):
        raise ValueError(f"ranks {list(members)}: one comes twice")
    outside = [rank for rank in members if not 0 <= rank < world_size]
    if outside:
        raise ValueError(f"ranks {outside} are not in the world (0-{world_size - 1})")
    return members
