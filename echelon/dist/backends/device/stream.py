"""Base of backends whose library works on a device's streams: NCCL on CUDA's, oneCCL on SYCL's.

An operation is put on a stream of the group that first waits for the caller's current stream, and
the current stream then waits for it: the host never blocks on the device, and work that the caller
queues afterwards sees the result. So a blocking call returns when the operation is *ordered*, as in
torch; `Work.wait()` does the same, and `Work.done` asks the event. A small thread watches
unfinished operations: one that outlives its timeout, a member's death, or an error that the library
reports later ends the group.

Nothing is compared between ranks here: a mismatch shows as a timeout, and the black box names it.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from echelon.dist.backends.interface import Members
from echelon.dist.errors import build
from echelon.dist.membership.survivors import Survivors
from echelon.dist.operation.arrays import DeviceFlat
from echelon.dist.operation.operation import REDUCING, Operation
from echelon.dist.progress.executor import LanePending
from echelon.errors import CollectiveError, StoreTimeoutError
from echelon.store import PrefixStore

_WATCH_S = 0.1
_CLOSE_S = 5.0
_LOOK_S = 0.0005
_WIDE = ("float16", "bfloat16")


class StreamPending:
    """An operation on the device."""

    def __init__(self, backend: StreamBackend, operation: Operation, event: Any) -> None:
        self._backend = backend
        self.operation = operation
        self.event = event
        self.is_recorded = False  # before that, the event knows nothing of the operation
        self.deadline_s = time.monotonic() + operation.timeout_s
        self.error: CollectiveError | None = None
        self.ended_mono_ns = 0

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        if not self.ended_mono_ns and (
            self.error is not None or (self.is_recorded and self.event.query())
        ):
            self.ended_mono_ns = time.monotonic_ns()
        return bool(self.ended_mono_ns)

    def wait(self, timeout_s: float | None) -> bool:  # noqa: ARG002 -- orders streams, at once
        """Order the current stream behind it."""
        if not self.done:
            self._backend.order_behind(self.event)
        return True


class StreamBackend(ABC):
    """Carries out operations on a device's arrays; what the library does is the subclass's."""

    name = ""
    device = ""
    own_dtypes: frozenset[str] = frozenset()  # what the library can reduce, beside bool as uint8
    own_ops: frozenset[str] = frozenset()

    def __init__(self, members: Members, store: PrefixStore, timeout_s: float) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.accelerator: Any = self._find_accelerator()
        self._members = members
        self._size = members.size
        self._ordered = members.options.reduction == "rank_ordered"
        self._index: int = (
            members.device_index if members.device else self.accelerator.current_device()
        )
        self._lost: CollectiveError | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        self._flying: list[StreamPending] = []
        self._batched: list[StreamPending] | None = None
        deadline_s = time.monotonic() + timeout_s
        self._survivors = Survivors(members, store, store, deadline_s)
        with self.accelerator.device(self._index):
            self.stream = self.accelerator.Stream()
        self._join(store, deadline_s, timeout_s)
        self._watcher = threading.Thread(
            target=self._watch, name=f"echelon-{self.name}", daemon=True
        )
        self._watcher.start()

    # ---- what a library is ----

    @abstractmethod
    def _draw_id(self) -> bytes:
        """Draw the id by which the members of a new communicator find each other."""

    @abstractmethod
    def _open(self, unique_id: bytes) -> None:
        """Make the communicator on the current device; blocks until all members do."""

    @abstractmethod
    def _launch(self, kind: str, source: Any, target: Any, reduce_op: str, peer: int) -> None:
        """Put one of the library's operations on `stream`.

        all_reduce, reduce, all_gather, reduce_scatter, broadcast, send, recv, on flat tensors;
        `peer`: the root or the other end.
        """

    @abstractmethod
    def _together(self) -> AbstractContextManager[object]:
        """Launch what is called inside as one."""

    @abstractmethod
    def _failure(self) -> str:
        """Return the error that the library has found since; "" if none."""

    @abstractmethod
    def _abort(self) -> None:
        """End what runs, if the library can; the communicator is of no further use."""

    @abstractmethod
    def _close(self) -> None:
        """Give the communicator back; may block until the members of this host do so too."""

    def _find_accelerator(self) -> Any:
        return getattr(self.torch, self.device)

    def _as_tensor(self, owner: Any) -> Any:
        """View an array of another library as a tensor."""
        return self.torch.as_tensor(owner, device=f"{self.device}:{self._index}")

    # ---- the way of an operation ----

    def refuses(self, kind: str, dtype: str, reduce_op: str) -> str:  # noqa: ARG002
        """Say what the library lacks: only reductions; bytes can always be moved."""
        if reduce_op and reduce_op not in self.own_ops:
            return f"has no {reduce_op}"
        if reduce_op and dtype not in self.own_dtypes and dtype != "bool":
            return f"has no sums of {dtype}"
        return ""

    def execute(self, operation: Operation) -> None:
        """Put one operation on the stream; a barrier's host waits until it has ended."""
        pending = self.submit(operation)
        pending.wait(None)
        while operation.kind == "barrier" and not pending.done:
            time.sleep(_LOOK_S)
        if pending.error is not None:
            raise pending.error

    def submit(self, operation: Operation) -> StreamPending:
        """Put one operation on the stream.

        Raises:
            ValueError: an array is on another device than the group's.
        """
        if self._lost is not None:
            raise build.broken_since(self._members, operation, self._lost)
        source, target = self._tensor(operation.source), self._tensor(operation.target)
        with self.accelerator.device(self._index):
            self.stream.wait_stream(self.accelerator.current_stream())
            with self.accelerator.stream(self.stream):
                for tensor in (source, target):
                    if tensor is not None:
                        tensor.record_stream(self.stream)
                try:
                    self._carry_out(operation, source, target)
                except Exception as err:  # the libraries' errors have no common base
                    raise self._give_up(operation, False) from err
                pending = StreamPending(self, operation, self.accelerator.Event())
                self._note(pending)
        with self._lock:
            pending.error = self._lost  # the group may have ended since this call began
            self._flying.append(pending)
        return pending

    def order_behind(self, event: Any) -> None:
        """Let the current stream wait for an event."""
        with self.accelerator.device(self._index):
            self.accelerator.current_stream().wait_event(event)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Launch what is submitted inside as one; sums in rank order need theirs at once."""
        if self._ordered:
            yield
            return
        batched: list[StreamPending] = []
        self._batched = batched
        try:
            with self._together():
                yield
        finally:
            self._batched = None
            for pending in batched:
                self._note(pending)

    def abort(self) -> None:
        """End the group on this rank: kernels that wait for peers end."""
        self._survivors.leave()
        with self._ending:
            if self._lost is None:
                self._lost = build.aborted(self._members, Operation("abort", 0))
            self._fail_flying(self._lost)
            self._abort()

    def close(self) -> None:
        """Give the communicator back; safe to call twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._watcher.join(2 * _WATCH_S)
        with self._lock:
            is_idle = all(pending.done for pending in self._flying)
        if not is_idle:
            self.abort()
        self._survivors.leave()
        if self._lost is None and not self._run_aside(self._close).wait(_CLOSE_S):
            self._abort()
        self._survivors.close()

    # ---- one operation ----

    def _tensor(self, data: Any) -> Any:
        if data is None:
            return None
        assert isinstance(data, DeviceFlat)
        if data.index != self._index:
            raise ValueError(
                f"an array on {self.device}:{data.index}; this group of backend {self.name!r} "
                f"works on {self.device}:{self._index}"
            )
        is_torch = isinstance(data.owner, self.torch.Tensor)
        return (data.owner if is_torch else self._as_tensor(data.owner)).reshape(-1)

    def _carry_out(self, operation: Operation, source: Any, target: Any) -> None:
        if operation.kind == "barrier":
            one = self.torch.ones(1, device=f"{self.device}:{self._index}")
            self._launch("all_reduce", one, one, "max", 0)
        elif max(0 if one is None else one.numel() for one in (source, target)) == 0:
            return  # all members know, since their shapes are equal
        elif operation.kind in REDUCING and self._ordered:
            self._reduce_in_order(operation, source, target)
        elif operation.kind in REDUCING:
            if operation.dtype == "bool":
                source, target = self._bytes(source), self._bytes(target)
            self._launch(operation.kind, source, target, operation.reduce_op, operation.root)
        else:
            self._move(operation, self._bytes(source), self._bytes(target))

    def _move(self, operation: Operation, source: Any, target: Any) -> None:
        """Move bytes, whatever they mean."""
        if operation.kind == "all_to_all":
            width = _item_bytes(operation)
            self._exchange(
                source.split([count * width for count in operation.input_splits]),
                target.split([count * width for count in operation.output_splits]),
            )
        elif operation.kind == "gather":
            parts = None if target is None else target.chunk(self._size)
            self._to_root(operation.root, source, parts)
        elif operation.kind == "scatter":
            parts = None if source is None else source.chunk(self._size)
            self._from_root(operation.root, parts, target)
        else:
            peer = operation.peer if operation.is_message else operation.root
            self._launch(operation.kind, source, target, "", peer)

    def _exchange(self, outgoing: Any, incoming: Any) -> None:
        mine = self._members.rank
        with self._together():
            for rank in range(self._size):
                if rank == mine:
                    continue
                if outgoing[rank].numel():
                    self._launch("send", outgoing[rank], None, "", rank)
                if incoming[rank].numel():
                    self._launch("recv", None, incoming[rank], "", rank)
        incoming[mine].copy_(outgoing[mine])

    def _to_root(self, root: int, source: Any, parts: Any) -> None:
        if parts is None:
            self._launch("send", source, None, "", root)
            return
        with self._together():
            for rank in range(self._size):
                if rank != root:
                    self._launch("recv", None, parts[rank], "", rank)
        parts[root].copy_(source)

    def _from_root(self, root: int, parts: Any, target: Any) -> None:
        if parts is None:
            self._launch("recv", None, target, "", root)
            return
        with self._together():
            for rank in range(self._size):
                if rank != root:
                    self._launch("send", parts[rank], None, "", rank)
        target.copy_(parts[root])

    def _reduce_in_order(self, operation: Operation, source: Any, target: Any) -> None:
        """Exchange everybody's data and reduce it in rank order, 16-bit floats in float32."""
        if operation.kind == "reduce_scatter":
            parts = self.torch.empty_like(source)
            mine = self._bytes(source).chunk(self._size)
            self._exchange(mine, self._bytes(parts).chunk(self._size))
        else:
            parts = source.new_empty(self._size * source.numel())
            self._launch("all_gather", self._bytes(source), self._bytes(parts), "", 0)
        if target is not None:
            rows = parts.view(self._size, -1)
            target.copy_(self._reduced(rows, operation))

    def _reduced(self, rows: Any, operation: Operation) -> Any:
        total = rows[0].float() if operation.dtype in _WIDE else rows[0].clone()
        combine = {
            "sum": self.torch.add, "avg": self.torch.add, "prod": self.torch.mul,
            "min": self.torch.minimum, "max": self.torch.maximum,
        }[operation.reduce_op]  # fmt: skip
        for row in rows[1:]:
            combine(total, row.to(total.dtype), out=total)
        if operation.reduce_op == "avg":  # by an array: CUDA multiplies with a number's inverse
            total.div_(total.new_full((1,), self._size))
        return total

    def _bytes(self, tensor: Any) -> Any:
        return None if tensor is None else tensor.view(self.torch.uint8)

    def _note(self, pending: StreamPending) -> None:
        """Record its event behind it; inside a batch nothing is on the stream yet."""
        if self._batched is not None:
            self._batched.append(pending)
            return
        pending.event.record(self.stream)
        pending.is_recorded = True

    # ---- joining, watching, ending ----

    def _join(self, store: PrefixStore, deadline_s: float, timeout_s: float) -> None:
        init = Operation("init", 0, timeout_s=timeout_s)
        if self._members.rank == 0:
            store.set("unique_id", self._draw_id())
        try:
            drawn = store.get("unique_id", timeout=max(0.001, deadline_s - time.monotonic()))
        except StoreTimeoutError as err:
            raise build.timed_out(self._members, init, [0]) from err
        joining = self._run_aside(lambda: self._open(drawn))
        while not joining.wait(_WATCH_S):
            self._survivors.look(init)
            if time.monotonic() >= deadline_s:
                raise self._survivors.find(init, True)
        if joining.error is not None:
            raise joining.error

    def _run_aside(self, job: Any) -> LanePending:
        """Run what may block in C on a thread of its own: it may be left behind there."""
        pending = LanePending()

        def on_device() -> None:
            with self.accelerator.device(self._index):
                job()

        threading.Thread(target=pending.run, args=(on_device,), daemon=True).start()
        return pending

    def _watch(self) -> None:
        while not self._closed.wait(_WATCH_S):
            with self._lock:
                self._flying = [pending for pending in self._flying if not pending.done]
                flying = list(self._flying)
            if not flying or self._lost is not None:
                continue
            late = [one for one in flying if time.monotonic() >= one.deadline_s]
            if late or self._has_failed(flying[0].operation):
                self._give_up((late or flying)[0].operation, bool(late))

    def _has_failed(self, operation: Operation) -> bool:
        try:
            self._survivors.look(operation)
        except CollectiveError:
            return True
        return bool(self._failure())

    def _give_up(self, operation: Operation, timed_out: bool) -> CollectiveError:
        with self._ending:
            if self._lost is None:
                self._lost = self._survivors.find(operation, timed_out)
                self._survivors.tell(self._lost)
                self._fail_flying(self._lost)
                self._abort()
            return self._lost

    def _fail_flying(self, error: CollectiveError) -> None:
        with self._lock:
            for pending in self._flying:
                if not pending.done:
                    pending.error = error


def _item_bytes(operation: Operation) -> int:
    data: Any = operation.source
    assert isinstance(data, DeviceFlat)
    return data.itemsize
