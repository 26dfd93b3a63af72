"""ProcessGroup: the one place where every operation passes.

Here, and only here, an operation's arguments are checked, it gets its number in the group, it is
recorded, and it is handed to the engine. An engine therefore never sees a bad argument, and the
black box never misses an operation.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import echelon.recorder.current as black_box
from echelon.dist import objects
from echelon.dist.backends.interface import Engine, Members
from echelon.dist.operation.arrays import View, view
from echelon.dist.operation.checks import (
    check_overlap,
    check_pair,
    check_rank,
    check_reduce_op,
    check_rows,
    check_splits,
    check_tag,
    check_uneven,
)
from echelon.dist.operation.operation import Operation, encode_call
from echelon.dist.progress.group_state import Evidence, GroupState
from echelon.dist.progress.watcher import watcher
from echelon.dist.work import Work
from echelon.errors import CollectiveError
from echelon.recorder import sites
from echelon.recorder.recorder import NOT_RECORDED
from echelon.recorder.schema import Flag

MakeGroup = Callable[[Sequence[int], str, str], "ProcessGroup | None"]


class ProcessGroup:
    """Ranks that act together. Made by `init`, `new_group` and `split`, never directly.

    Every call is collective: all members make the same calls in the same order; `send` and `recv`
    concern their two ends only. Arrays are NumPy arrays, torch tensors, CuPy arrays or other DLPack
    arrays, contiguous; results are written in place. `root`, `to` and `source` are ranks within the
    group. Calls raise

    * ValueError before anything is sent, if an argument cannot be carried;
    * CollectiveMismatchError on every rank, if members called different things;
    * CollectiveTimeoutError, if members did not come within the group's timeout;
    * PeerLostError, if a member died or left.

    After the last three the group is of no further use, and says so. With `async_op=True` a call
    returns a `Work` at once and raises from its `wait()`.
    """

    def __init__(
        self,
        members: Members,
        engine: Engine,
        timeout_s: float,
        make_group: MakeGroup,
        evidence: Evidence | None = None,
    ) -> None:
        self._members = members
        self._engine = engine
        self._timeout_s = timeout_s
        self._make_group = make_group
        self._state = GroupState(members, engine, evidence)
        self.created_mono_ns = time.monotonic_ns()
        self._num_splits = 0
        self._coalesced = threading.local()
        recorder = black_box.current()
        self._reference = 0 if recorder is None else recorder.new_group(members.name, members.ranks)

    # ---- who we are ----

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
        """The backend's name."""
        return self._engine.name

    @property
    def timeout_s(self) -> float:
        """How long an operation of this group may take."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"timeout_s must be above 0, got {seconds!r}")
        self._timeout_s = seconds

    @property
    def num_collectives(self) -> int:
        """How many collectives were called on this rank so far."""
        return self._state.num_collectives

    def __repr__(self) -> str:
        return f"ProcessGroup({self.name!r}, rank {self.rank} of {self.size}, {self.backend})"

    # ---- collectives ----

    def all_reduce(self, x: Any, op: str = "sum", async_op: bool = False) -> Work | None:
        """Reduce `x` over all ranks, in place.

        Args:
            x: any shape, equal on all ranks.
            op: sum, avg, min, max, prod; band, bor, bxor (integers and bool). The average of
                integers is their sum, which wraps around in the array's own width, truncated toward
                zero. On bool, sum is "or", prod is "and", and there is no avg.
            async_op: return a `Work` at once instead of blocking.
        """
        data = view(x, "x", writable=True)
        op = check_reduce_op(op, data.dtype)
        return self._collective("all_reduce", data, data, reduce_op=op, async_op=async_op)

    def reduce(self, x: Any, root: int, op: str = "sum", async_op: bool = False) -> Work | None:
        """Reduce `x` over all ranks into `root`'s `x`; the others' are left as they are."""
        root = self._check_rank(root, "root")
        data = view(x, "x", writable=root == self.rank)
        op = check_reduce_op(op, data.dtype)
        target = data if root == self.rank else None
        return self._collective("reduce", data, target, reduce_op=op, root=root, async_op=async_op)

    def all_gather(
        self,
        out: Any,
        x: Any,
        async_op: bool = False,
        *,
        output_splits: Sequence[int] | None = None,
    ) -> Work | None:
        """Collect every rank's `x` into `out`, in rank order.

        Args:
            out: [size * n, ...]; with `output_splits`: [sum(output_splits), ...].
            x: [n, ...]; with `output_splits`: [output_splits[rank], ...]. May be exactly this
                rank's part of `out`, and may not overlap it otherwise.
            async_op: return a `Work` at once instead of blocking.
            output_splits: rows (dim 0) that come from each rank, the same on all ranks; None: equal
                parts.
        """
        source = view(x, "x", writable=False)
        target = view(out, "out", writable=True)
        if output_splits is None:
            check_pair("all_gather", "out", target, "x", source, self.size, self.rank)
            return self._collective("all_gather", source, target, async_op=async_op)
        rows, counts = check_uneven(
            "all_gather", ("out", target), ("x", source), ("output_splits", output_splits),
            self.size, self.rank,
        )  # fmt: skip
        return self._collective(
            "all_gather", source, target, output_splits=counts, splits=rows, async_op=async_op
        )

    def reduce_scatter(
        self,
        out: Any,
        x: Any,
        op: str = "sum",
        async_op: bool = False,
        *,
        input_splits: Sequence[int] | None = None,
    ) -> Work | None:
        """Reduce `x` over all ranks and keep this rank's part in `out`.

        Args:
            out: [n, ...]; with `input_splits`: [input_splits[rank], ...]. May be exactly this
                rank's part of `x`, and may not overlap it otherwise.
            x: [size * n, ...]; with `input_splits`: [sum(input_splits), ...]. Equal on all ranks.
            op: as for `all_reduce`.
            async_op: return a `Work` at once instead of blocking.
            input_splits: rows (dim 0) that go to each rank, the same on all ranks; None: equal
                parts.
        """
        source = view(x, "x", writable=False)
        target = view(out, "out", writable=True)
        op = check_reduce_op(op, source.dtype)
        rows: tuple[int, ...] = ()
        counts: tuple[int, ...] = ()
        if input_splits is None:
            check_pair("reduce_scatter", "x", source, "out", target, self.size, self.rank)
        else:
            rows, counts = check_uneven(
                "reduce_scatter", ("x", source), ("out", target), ("input_splits", input_splits),
                self.size, self.rank,
            )  # fmt: skip
        return self._collective(
            "reduce_scatter", source, target, reduce_op=op, input_splits=counts, splits=rows,
            async_op=async_op,
        )  # fmt: skip

    def broadcast(self, x: Any, root: int, async_op: bool = False) -> Work | None:
        """Copy `x` of `root` to every rank's `x`, of any shape."""
        root = self._check_rank(root, "root")
        data = view(x, "x", writable=root != self.rank)
        source, target = (data, None) if root == self.rank else (None, data)
        return self._collective("broadcast", source, target, root=root, async_op=async_op)

    def all_to_all(
        self,
        out: Any,
        x: Any,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Send rows of `x` to each rank and put the rows that each sends into `out`.

        Args:
            out, x: arrays of rows (dim 0) of equal size.
            output_splits: rows that come from each rank; None: equal parts.
            input_splits: rows that go to each rank; None: equal parts.
            async_op: return a `Work` at once instead of blocking.
        """
        source = view(x, "x", writable=False)
        target = view(out, "out", writable=True)
        check_rows("all_to_all", target, source)
        check_overlap("all_to_all", "out", target, "x", source)
        return self._collective(
            "all_to_all",
            source,
            target,
            input_splits=check_splits("input_splits", input_splits, source, self.size),
            output_splits=check_splits("output_splits", output_splits, target, self.size),
            async_op=async_op,
        )

    def gather(self, out: Any | None, x: Any, root: int, async_op: bool = False) -> Work | None:
        """Collect every rank's `x` into `root`'s `out`: [size * n, ...]; others pass None."""
        root = self._check_rank(root, "root")
        source = view(x, "x", writable=False)
        target = self._rooted(out, "out", root, writable=True)
        if target is not None:
            check_pair("gather", "out", target, "x", source, self.size, self.rank)
        return self._collective("gather", source, target, root=root, async_op=async_op)

    def scatter(self, out: Any, x: Any | None, root: int, async_op: bool = False) -> Work | None:
        """Give each rank its part of `root`'s `x`: [size * n, ...], in `out`: [n, ...]."""
        root = self._check_rank(root, "root")
        target = view(out, "out", writable=True)
        source = self._rooted(x, "x", root, writable=False)
        if source is not None:
            check_pair("scatter", "x", source, "out", target, self.size, self.rank)
        return self._collective("scatter", source, target, root=root, async_op=async_op)

    def barrier(self, async_op: bool = False) -> Work | None:
        """Block until every rank of the group has called it."""
        return self._collective("barrier", None, None, async_op=async_op)

    def monitored_barrier(self, timeout_s: float | None = None) -> None:
        """Block until all have come; after `timeout_s` raise an error that names who has not."""
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, got {timeout_s!r}")
        self._collective("barrier", None, None, timeout_s=timeout_s)

    # ---- messages ----

    def send(self, x: Any, to: int, tag: int = 0, async_op: bool = False) -> Work | None:
        """Send `x` to a rank, which receives it with the same tag, dtype and size.

        May return before the receiver came. Messages of one pair and tag arrive in order.
        """
        to = self._check_peer(to, "to")
        source = view(x, "x", writable=False)
        return self._message("send", to, source, check_tag(tag), async_op=async_op)

    def recv(self, x: Any, source: int, tag: int = 0, async_op: bool = False) -> Work | None:
        """Receive into `x` what a rank sends with this tag."""
        peer = self._check_peer(source, "source")
        target = view(x, "x", writable=True)
        return self._message("recv", peer, target, check_tag(tag), async_op=async_op)

    # ---- objects ----

    def broadcast_object(self, obj: Any, root: int) -> Any:
        """Return `root`'s object on every rank: plain data that msgpack can hold.

        None, bool, numbers, text, bytes, lists and dicts; tuples come out as lists.

        Raises:
            TypeError: the object holds something else.
        """
        root = self._check_rank(root, "root")
        data = objects.encode(obj) if self.rank == root else None
        return objects.broadcast(self, data, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object, in rank order; see `broadcast_object` for what may be one."""
        return objects.all_gather(self, objects.encode(obj))

    # ---- several at once ----

    @contextlib.contextmanager
    def coalesce(self) -> Iterator[None]:
        """Launch the operations called inside together; all are done when the block ends."""
        if self._batch() is not None:
            raise ValueError("coalesce() does not nest")
        recorder = black_box.current()
        number = -1 if recorder is None else recorder.next_coalesced()
        works: list[Work] = []
        self._coalesced.batch = (number, works)
        try:
            with self._engine.batch():
                yield
        finally:
            self._coalesced.batch = None
        for work in works:
            work.wait()

    def split(self, color: int | None, key: int = 0, name: str | None = None) -> Any:
        """Divide the group: ranks of equal `color` form one, ordered by `key`, then rank.

        Every member calls it. Returns this rank's new ProcessGroup; None for color None.
        """
        number = self._num_splits
        self._num_splits += 1
        chosen = self.all_gather_object([color, key])
        if color is None:
            return None
        alike = [rank for rank in range(self.size) if chosen[rank][0] == color]
        alike.sort(key=lambda rank: (chosen[rank][1], rank))
        ranks = [self.ranks[rank] for rank in alike]
        title = name or f"{self.name}/{color}"
        return self._make_group(ranks, title, f"split/{number}/{color}")

    # ---- the end ----

    def abort(self) -> None:
        """End the group on all ranks: what waits in it raises CollectiveError.

        Callable from any thread and from a signal handler. Returns within 1 s; asks no other rank.
        """
        if not self._state.is_closed and not self._state.is_foreign:
            self._state.abort()

    def close(self) -> None:
        """End the group on this rank and release what it holds. Safe to call twice.

        Takes at most 1 s, and asks no other rank. Ranks that still need this one raise
        PeerLostError. Called by a signal handler during a call of this group, it ends that call,
        which then releases the group.
        """
        self._state.close()

    @property
    def closer(self) -> Callable[[], None]:
        """Closes the group, soon, on another thread; does not keep the group itself alive."""
        state = self._state
        return lambda: None if state.is_closed else watcher().post(state.close)

    # ---- dispatch ----

    def _collective(
        self,
        kind: str,
        source: View | None,
        target: View | None,
        *,
        reduce_op: str = "",
        root: int = -1,
        input_splits: tuple[int, ...] = (),
        output_splits: tuple[int, ...] = (),
        splits: tuple[int, ...] = (),
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> Work | None:
        is_part = kind == "scatter" or (kind == "all_gather" and splits)
        shown = target if is_part or source is None else source
        dtype, shape = ("", ()) if shown is None else (shown.dtype, shown.shape)
        self._check_use(kind, shown, reduce_op)
        device = "cpu" if shown is None else shown.device
        compared = None if shown is None else shape
        call = encode_call(kind, reduce_op, dtype, root, compared, device, splits)
        with self._state.collectives as is_nested:
            operation = Operation(
                kind=kind,
                sequence=self._state.num_collectives,
                dtype=dtype,
                device=device,
                reduce_op=reduce_op,
                root=root,
                source=None if source is None else source.data,
                target=None if target is None else target.data,
                input_splits=input_splits,
                output_splits=output_splits,
                shape=shape,
                timeout_s=self._timeout_s if timeout_s is None else timeout_s,
                call=call,
            )
            return self._dispatch(operation, shown, async_op, is_nested=is_nested)

    def _message(
        self, kind: str, peer: int, data: View, tag: int, *, async_op: bool
    ) -> Work | None:
        self._check_use(kind, data, "")
        with self._state.messages:
            operation = Operation(
                kind=kind,
                sequence=self._state.next_message(kind, peer),
                dtype=data.dtype,
                device=data.device,
                peer=peer,
                tag=tag,
                source=data.data if kind == "send" else None,
                target=data.data if kind == "recv" else None,
                shape=data.shape,
                timeout_s=self._timeout_s,
            )
            if async_op or self._batch() is not None or operation.device != "cpu":
                return self._dispatch(operation, data, async_op)
            record = self._admit(operation, data, async_op)
        with self._failing(record):
            self._execute(operation, record)
        return None

    def _dispatch(
        self, operation: Operation, shown: View | None, async_op: bool, *, is_nested: bool = False
    ) -> Work | None:
        """Number, record and launch one operation; its turn is held."""
        batch = self._batch()
        record = self._admit(operation, shown, async_op, is_nested=is_nested)
        with self._failing(record):
            if not async_op and batch is None and operation.device == "cpu" and not is_nested:
                self._execute(operation, record)
                return None
            recorder = None if record == NOT_RECORDED else black_box.current()
            if recorder is not None:
                recorder.started(record)
            work = self._state.launch(operation, record)
        if batch is not None:
            batch[1].append(work)
        elif not async_op:
            work.wait()  # on a device: once it is in order behind what the caller has queued there
        return work if async_op else None

    def _admit(
        self, operation: Operation, shown: View | None, async_op: bool, *, is_nested: bool = False
    ) -> int:
        """Give an operation its number and its record, unless it is refused."""
        self._state.sweep()
        try:
            self._state.admit(operation, is_nested=is_nested)
        except CollectiveError as err:
            record = self._record(operation, shown, async_op)
            with self._failing(record):
                raise err
        return self._record(operation, shown, async_op)

    @contextlib.contextmanager
    def _failing(self, record: int) -> Iterator[None]:
        """Record a failure, and let it name the caller's line."""
        try:
            yield
        except BaseException as err:
            recorder = None if record == NOT_RECORDED else black_box.current()
            if recorder is not None:
                recorder.failed(record, err)
            if not isinstance(err, CollectiveError):
                raise
            frame = sites.caller(1)
            if frame is not None and "Called at" not in str(err):
                err.args = (f"{err}. Called at {frame.f_code.co_filename}:{frame.f_lineno}",)
            # The message says it all; a user's traceback should end in the user's code, not ours.
            cause = err.__cause__
            raise err.with_traceback(None) from cause

    def _execute(self, operation: Operation, record: int) -> None:
        recorder = None if record == NOT_RECORDED else black_box.current()
        if recorder is None:
            self._state.run(operation)
            return
        recorder.started(record)
        self._state.run(operation)
        recorder.completed(record)

    def _record(self, operation: Operation, shown: View | None, async_op: bool) -> int:
        recorder = black_box.current()
        if recorder is None:
            return NOT_RECORDED
        root, batch, is_message = operation.root, self._batch(), operation.is_message
        flags = int(Flag.ASYNC) if async_op else 0
        return recorder.begin(
            self._reference,
            operation.kind,
            sequence=-1 if is_message else operation.sequence,
            p2p_sequence=operation.sequence if is_message else -1,
            dtype=operation.dtype,
            shapes=() if shown is None else (tuple(shown.shape),),
            input_splits=operation.input_splits,
            output_splits=operation.output_splits,
            num_bytes=0 if shown is None else shown.num_bytes,
            reduce_op=operation.reduce_op,
            root=-1 if root < 0 else self._members.ranks[root],
            peer=self._members.ranks[operation.peer] if is_message else -1,
            tag=operation.tag if is_message else -1,
            coalesced=-1 if batch is None else batch[0],
            timeout_s=operation.timeout_s,
            flags=flags | (int(Flag.P2P) if is_message else 0),
            depth=4,
        )

    # ---- checks ----

    def _batch(self) -> tuple[int, list[Work]] | None:
        batch: tuple[int, list[Work]] | None = getattr(self._coalesced, "batch", None)
        return batch

    def _check_use(self, kind: str, shown: View | None, reduce_op: str) -> None:
        state = self._state
        if state.is_foreign:
            raise ValueError(
                f"group {self.name!r} belongs to another process: a forked child cannot use it"
            )
        if state.is_closed:
            raise ValueError(f"group {self.name!r} is shut down")
        if shown is None or shown.device != self._engine.device:
            return  # the engine's `prepare` refuses it, if it does
        reason = self._engine.refuses(kind, shown.dtype, reduce_op)
        if reason:
            raise ValueError(f"{kind} of {shown}: backend {self.backend!r} {reason}")

    def _check_rank(self, rank: Any, name: str) -> int:
        return check_rank(rank, name, self.name, self.size)

    def _check_peer(self, rank: Any, name: str) -> int:
        peer = self._check_rank(rank, name)
        if peer == self.rank:
            raise ValueError(f"{name} {rank}: a rank cannot send to itself")
        return peer

    def _rooted(self, array: Any, name: str, root: int, *, writable: bool) -> View | None:
        if root == self.rank:
            return view(array, name, writable=writable)
        if array is not None:
            raise ValueError(f"{name} is given by root {root} alone; pass None on rank {self.rank}")
        return None
