"""The nccl backend: real NCCL through nccl4py, on CUDA arrays.

Written against nccl4py 0.6.0's source and checked by eye only: it has never run, since no machine
with an NVIDIA GPU was at hand. Its test is marked `gpu`. NCCL compares nothing between ranks: a
mismatch shows as a timeout here, and the black box names it.

An operation is put on a stream of the group that first waits for the caller's current stream, and
the current stream then waits for it: the host never blocks on the device, and work that the caller
queues afterwards sees the result. So a blocking call returns when the operation is *ordered*, as in
torch; `Work.wait()` does the same, and `Work.done` asks the event. A small thread watches
unfinished operations: one that outlives its timeout, or a communicator that reports an asynchronous
error, aborts the communicator, which ends the stuck kernel on the device.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from echelon.dist import failures
from echelon.dist.arrays import DeviceFlat
from echelon.dist.backends.interface import Members
from echelon.dist.backends.operation import Operation
from echelon.dist.backends.survivors import Survivors
from echelon.errors import CollectiveError, StoreTimeoutError
from echelon.store import PrefixStore

_WATCH_S = 0.1
_SUCCESS, _IN_PROGRESS = 0, 7
_NO_DTYPES = frozenset({"int16", "uint16", "bool"})
_OPS = frozenset({"sum", "avg", "min", "max", "prod"})


def not_ready() -> str:
    """Say why this machine cannot run the backend; "" if it can."""
    for name in ("nccl", "torch"):
        if importlib.util.find_spec(name) is None:
            return f"needs {name}: pip install '.[nccl,torch]'"
    try:
        importlib.import_module("nccl.core")
        torch: Any = importlib.import_module("torch")
    except Exception as err:  # noqa: BLE001 -- without a driver it fails in many ways
        return f"nccl4py cannot be loaded: {type(err).__name__}: {err}".splitlines()[0]
    return "" if torch.cuda.is_available() else "no CUDA device is usable here"


def create(members: Members, store: PrefixStore, timeout_s: float) -> NcclBackend:
    """Make the engine of a group; every member calls this.

    Raises:
        CollectiveTimeoutError: members did not come within `timeout_s`.
    """
    return NcclBackend(members, store, timeout_s)


class _Pending:
    """An operation on the device."""

    def __init__(self, backend: NcclBackend, operation: Operation, event: Any) -> None:
        self._backend = backend
        self.operation = operation
        self.event = event
        self.deadline_s = time.monotonic() + operation.timeout_s
        self.error: CollectiveError | None = None
        self.ended_mono_ns = 0

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        if not self.ended_mono_ns and (self.error is not None or self.event.query()):
            self.ended_mono_ns = time.monotonic_ns()
        return bool(self.ended_mono_ns)

    def wait(self, timeout_s: float | None) -> bool:  # noqa: ARG002 -- orders streams, at once
        """Order the current stream behind it."""
        if self.error is None:
            self._backend.torch.cuda.current_stream().wait_event(self.event)
        return True


class NcclBackend:
    """Carries out operations on CUDA arrays."""

    name = "nccl"
    device = "cuda"

    def __init__(self, members: Members, store: PrefixStore, timeout_s: float) -> None:
        self.torch: Any = importlib.import_module("torch")
        self._nccl: Any = importlib.import_module("nccl.core")
        self._members = members
        self._lost: CollectiveError | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._flying: list[_Pending] = []
        self._batched: list[Any] | None = None
        deadline_s = time.monotonic() + timeout_s
        self._survivors = Survivors(members, store, store, deadline_s)
        self._stream = self.torch.cuda.Stream()
        self._communicator = self._join(store, deadline_s, timeout_s)
        self._watcher = threading.Thread(target=self._watch, name="echelon-nccl", daemon=True)
        self._watcher.start()

    def refuses(self, kind: str, dtype: str, reduce_op: str) -> str:  # noqa: ARG002
        """Say what NCCL lacks."""
        if dtype in _NO_DTYPES:
            return f"has no {dtype}"
        return f"has no {reduce_op}" if reduce_op and reduce_op not in _OPS else ""

    def execute(self, operation: Operation) -> None:
        """Put one operation on the stream and order the current stream behind it."""
        pending = self.submit(operation)
        pending.wait(None)
        if operation.kind == "barrier":
            pending.event.synchronize()
        if pending.error is not None:
            raise pending.error

    def submit(self, operation: Operation) -> _Pending:
        """Put one operation on the stream."""
        if self._lost is not None:
            raise failures.broken_since(self._members, operation, self._lost)
        self._stream.wait_stream(self.torch.cuda.current_stream())
        arrays: tuple[Any, ...] = (operation.source, operation.target)
        for data in arrays:
            if isinstance(data, DeviceFlat) and hasattr(data.owner, "record_stream"):
                data.owner.record_stream(self._stream)
        try:
            self._launch(operation)
        except Exception as err:  # its errors have no common base among the public names
            raise self._give_up(operation, False) from err
        event = self.torch.cuda.Event()
        if self._batched is None:
            event.record(self._stream)
        else:
            self._batched.append(event)  # recorded when the group is launched
        pending = _Pending(self, operation, event)
        with self._lock:
            self._flying.append(pending)
        return pending

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Launch what is submitted inside as one NCCL group."""
        self._batched = []
        try:
            with self._nccl.group():
                yield
            for event in self._batched:
                event.record(self._stream)
        finally:
            self._batched = None

    def abort(self) -> None:
        """End the group on this rank: kernels that wait for peers end."""
        self._survivors.leave()
        self._communicator.abort()

    def close(self) -> None:
        """Give the communicator back."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._watcher.join(2 * _WATCH_S)
        self._survivors.leave()
        if self._lost is None:
            self._communicator.destroy()
        self._survivors.close()

    def _join(self, store: PrefixStore, deadline_s: float, timeout_s: float) -> Any:
        if self._members.rank == 0:
            store.set("unique_id", bytes(self._nccl.get_unique_id()))
        try:
            drawn = store.get("unique_id", timeout=max(0.001, deadline_s - time.monotonic()))
        except StoreTimeoutError as err:
            init = Operation("init", 0, timeout_s=timeout_s)
            raise failures.timed_out(self._members, init, [0]) from err
        unique_id = self._nccl.UniqueId.from_bytes(drawn)
        return self._nccl.Communicator.init(self._members.size, self._members.rank, unique_id)

    def _launch(self, operation: Operation) -> None:
        stream, communicator = self._stream.cuda_stream, self._communicator
        source, target = _tensor(operation.source), _tensor(operation.target)
        op = getattr(self._nccl, operation.reduce_op.upper(), None)
        launches: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: communicator.allreduce(source, target, op, stream=stream),
            "reduce": lambda: communicator.reduce(
                source, target, op, operation.root, stream=stream
            ),
            "all_gather": lambda: communicator.allgather(source, target, stream=stream),
            "reduce_scatter": lambda: communicator.reduce_scatter(
                source, target, op, stream=stream
            ),
            "broadcast": lambda: communicator.broadcast(
                target if source is None else source,
                source if target is None else target,
                operation.root,
                stream=stream,
            ),
            "gather": lambda: communicator.gather(source, target, operation.root, stream=stream),
            "scatter": lambda: communicator.scatter(source, target, operation.root, stream=stream),
            "all_to_all": lambda: self._all_to_all(operation),
            "send": lambda: communicator.send(source, operation.peer, stream=stream),
            "recv": lambda: communicator.recv(target, operation.peer, stream=stream),
            "barrier": self._barrier,
        }
        launches[operation.kind]()

    def _all_to_all(self, operation: Operation) -> None:
        """Exchange pieces of any size: one group of sends and receives."""
        source, target = _tensor(operation.source), _tensor(operation.target)
        stream = self._stream.cuda_stream
        pairs = zip(
            source.view(-1).split(operation.input_splits),
            target.view(-1).split(operation.output_splits),
            strict=True,
        )
        with self._nccl.group():
            for rank, (outgoing, incoming) in enumerate(pairs):
                if outgoing.numel():
                    self._communicator.send(outgoing, rank, stream=stream)
                if incoming.numel():
                    self._communicator.recv(incoming, rank, stream=stream)

    def _barrier(self) -> None:
        one = self.torch.ones(1, device="cuda")
        self._communicator.allreduce(one, one, self._nccl.SUM, stream=self._stream.cuda_stream)

    def _watch(self) -> None:
        while not self._closed.wait(_WATCH_S):
            with self._lock:
                self._flying = [pending for pending in self._flying if not pending.done]
                flying = list(self._flying)
            late = [one for one in flying if time.monotonic() >= one.deadline_s]
            if late or (flying and self._has_failed()):
                error = self._give_up((late or flying)[0].operation, bool(late))
                for pending in flying:
                    pending.error = error

    def _has_failed(self) -> bool:
        try:
            self._survivors.look(self._flying[0].operation)
        except CollectiveError:
            return True
        return int(self._communicator.get_async_error()) not in (_SUCCESS, _IN_PROGRESS)

    def _give_up(self, operation: Operation, timed_out: bool) -> CollectiveError:
        error = self._survivors.find(operation, timed_out)
        self._lost = self._lost or error
        self._survivors.tell(error)
        self._communicator.abort()
        return error


def _tensor(data: Any) -> Any:
    return data.owner if isinstance(data, DeviceFlat) else data
