"""Carry out a group's operations on device streams.

Each operation is queued on one of the engine's streams, behind the work on the caller's streams.
`wait` makes the caller's streams wait for the operation, but the host does not wait for the device.
Calls that can block the host run on a separate thread (`Launcher`), where the operation's timeout
also applies.

Collectives share one communicator and one stream. Messages use lanes (see `Lane`). While a graph is
being captured, operations are queued directly on the captured stream.

The engine does not compare the ranks' calls, so mismatching calls lead to a timeout. In this case,
the black box shows the mismatch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from echelon.dist.backends.device.clock import DeviceClock
from echelon.dist.backends.device.communicators.collectives import Collectives, refuses
from echelon.dist.backends.device.communicators.handle import Handle
from echelon.dist.backends.device.communicators.lanes import Lanes, Opening
from echelon.dist.backends.device.communicators.launcher import Launcher
from echelon.dist.backends.device.communicators.pairs import Lane
from echelon.dist.backends.device.engines.batch import Call, apart, connection_key
from echelon.dist.backends.device.engines.streams import callers, tensor_of
from echelon.dist.backends.device.library import DeviceLibrary
from echelon.dist.backends.device.pending import DevicePending, DonePending
from echelon.dist.backends.interface import Members, Pending, Watch
from echelon.dist.errors import build
from echelon.dist.operation.operation import OPEN, Operation
from echelon.dist.progress.aside import make_aside
from echelon.errors import CollectiveError, StoreTimeoutError
from echelon.store import PrefixStore
from echelon.store.deadline import time_left_s

_LOOK_S = 0.1
_END_S = 0.5  # how long `cut` and `close` wait for the library
_LET_GO_S = 0.4
_DRAIN_S = 0.0005

_Taken = TypeVar("_Taken", bound="DevicePending | Opening")

_kept: list[Any] = []  # arrays on which a device may work until the process ends


class StreamEngine:
    """An engine that carries out operations on one device of this rank."""

    nests = False

    def __init__(
        self, library: DeviceLibrary, members: Members, store: PrefixStore, timeout_s: float
    ) -> None:
        """Create the group's communicator; every member must call this.

        Raises:
            CollectiveTimeoutError: some members did not join within `timeout_s` seconds.
            RuntimeError: the library reported an error.
        """
        self.name = library.name
        self.device = library.device
        self._library = library
        self._members = members
        self._store = store
        self._index = members.device_index
        self._is_rank_ordered = members.options.reduction == "rank_ordered"
        self._collectives = Collectives(
            library, members.size, members.rank, is_rank_ordered=self._is_rank_ordered
        )
        self._launcher = Launcher(f"echelon-{self.name}")
        self._lock = threading.Lock()
        self._flying: deque[DevicePending | Opening] = deque()
        self._here = threading.local()
        self._reason: BaseException | None = None
        self._is_cut = False
        self._is_closed = False
        self._looked_s = 0.0
        self._handle = self._join(time.monotonic() + timeout_s, timeout_s)
        self._lanes = Lanes(library, members.rank, members.name, self._index, store, self._clock)

    # ---- what can be carried ----

    def refuses(self, kind: str, dtype: str, reduce_op: str) -> str:
        """Return the reason the library cannot run this kind of operation, or "" if it can."""
        return refuses(self._library, kind, dtype, reduce_op)

    def prepare(self, operation: Operation) -> None:
        """Check that the operation can run on this device and, during graph capture, be captured.

        Raises:
            ValueError: an array is on the wrong device, a captured operation needs a new
                connection, a receive does not name its source, or there are too many lanes.
        """
        arrays: list[Any] = [operation.source, operation.target]
        for data in arrays:
            if data is not None and data.index != self._index:
                raise ValueError(
                    f"the array is on {self.device}:{data.index}, but this group "
                    f"(backend {self.name!r}) uses {self.device}:{self._index}"
                )
        if operation.is_message:
            if operation.peer < 0:
                raise ValueError(f"a receive on {self.device} must name its source rank")
            self._lanes.prepare(operation)
        with self._library.accelerator.device(self._index):
            is_capturing = self._library.is_capturing()
        if is_capturing and not self._is_connected(operation):
            raise ValueError(
                f"{operation.kind} of {operation.dtype}{list(operation.shape)} cannot be "
                "captured in a graph yet: the library establishes connections during the first "
                "such operation. Run the operation once before capturing it"
            )

    # ---- carrying out ----

    def execute(self, operation: Operation, watch: Watch) -> None:
        """Queue one operation, and make the caller's stream wait for it."""
        pending = self.submit(operation, watch)
        pending.wait(None)
        if pending.error is not None:
            raise pending.error

    def submit(self, operation: Operation, watch: Watch) -> Pending:
        """Start one operation without blocking.

        A detached send uses a copy of the array, so all ranks can send first and then receive.
        """
        if self._reason is not None:
            raise self._reason
        if operation.kind == OPEN:
            return self._take(Opening(self._lanes.of(operation), watch.check))
        library = self._library
        with library.accelerator.device(self._index):
            tensors = tensor_of(library, operation.source), tensor_of(library, operation.target)
            if library.is_capturing():
                return self._capture(operation, tensors)
            streams = callers(library, operation)
            if operation.is_detached:
                tensors = (library.copy(tensors[0], streams), None)
                for stream in streams[1:]:  # another library's: it may write the array next
                    stream.wait_stream(streams[0])
            pending = DevicePending(
                library, operation, tensors, self._index, streams, self._failure
            )
        self._take(pending)
        if pending.error is not None:
            return pending
        call = Call(operation, pending, watch.check)
        if self._batch is not None:
            self._batch.append(call)
        else:
            self._launch_one(call)
        return pending

    def _take(self, pending: _Taken) -> _Taken:
        """Track an in-flight operation so that `cut` can abort it."""
        self._fly()
        with self._lock:
            self._flying.append(pending)
        if self._reason is not None:  # cut since, and this one was not seen there
            pending.fail(self._reason)
        return pending

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Collect the operations submitted in a `with` block, and launch them together at its end.

        If the block raises an exception, the operations fail without being launched.
        """
        batch: list[Call] = []
        self._here.batch = batch
        try:
            yield
        except BaseException as err:
            for call in batch:
                call.pending.fail(RuntimeError(f"not launched: its coalesce() raised {err!r}"))
            raise
        finally:
            self._here.batch = None
        collectives = [call for call in batch if not call.operation.is_message]
        one_by_one = [[call] for call in collectives]
        for part in one_by_one if self._is_rank_ordered else apart(collectives):
            self._launch(part)
        for call in batch:
            if call.operation.is_message:
                self._launch_one(call)

    def drain(self, check: Callable[[], None]) -> None:
        """Block until the group's collectives and the work on the current stream are complete.

        Messages might still be in flight.

        Raises:
            Exception: any exception that `check` or the device raised.
        """
        if self._library.is_capturing():
            return
        accelerator = self._library.accelerator
        events = []
        with accelerator.device(self._index):
            for stream in (accelerator.current_stream(), self.stream):
                event = accelerator.Event()
                event.record(stream)
                events.append(event)
        while not all(self._library.has_happened(event) for event in events):
            check()
            time.sleep(_DRAIN_S)

    def cut(self, reason: CollectiveError | None) -> None:
        """Reject new operations on this rank, and abort running operations."""
        self._reason = reason or build.closed(self._members, Operation("close", 0))
        if reason is None:
            self._let_go()
        flying = list(self._flying)  # without the lock: a signal handler may have interrupted it
        self._is_cut = reason is not None or not all(one.is_at_rest for one in flying)
        for pending in flying:
            pending.fail(self._reason)
        if self._is_cut:
            self._free(time.monotonic() + _END_S)

    def close(self) -> None:
        """Release the communicators within 1 s."""
        if self._is_closed:
            return
        self._is_closed = True
        limit_s = time.monotonic() + _END_S
        self._free(limit_s)
        stuck = [one for one in list(self._flying) if not one.is_at_rest]
        if stuck:  # their memory must not be used for anything else
            _kept.extend(stuck)

    # ---- one operation ----

    @property
    def _batch(self) -> list[Call] | None:
        batch: list[Call] | None = getattr(self._here, "batch", None)
        return batch

    def _launch_one(self, call: Call) -> None:
        if call.operation.is_message:
            (lane,) = self._lanes.of(call.operation)
            lane.launch(call.pending, call.check)
        else:
            self._launch([call])

    def _launch(self, batch: Sequence[Call]) -> None:
        """Launch several collectives in one library call."""
        keys = tuple(connection_key(call.operation) for call in batch)
        key = keys[0] if len(keys) == 1 else keys

        def job() -> bool:
            try:
                with (
                    self._library.accelerator.device(self._index),
                    self._handle.entered() as communicator,
                ):
                    for call in batch:
                        call.pending.begin(self.stream, self._clock)
                    self._put(communicator, batch)
                    self._launcher.note(key)  # before callers continue: they may capture
                    for call in batch:
                        call.pending.launched(self.stream)
            except Exception as err:  # noqa: BLE001 -- the group decides what it means
                for call in batch:
                    call.pending.fail(self._reason or err)
                return False
            return True

        self._launcher.launch(job, key)

    def _put(self, communicator: Any, batch: Sequence[Call]) -> None:
        launch = self._collectives.launch
        with self._library.group() if len(batch) > 1 else contextlib.nullcontext():
            for call in batch:
                launch(communicator, call.operation, *call.pending.tensors, self.stream)

    def _capture(self, operation: Operation, tensors: tuple[Any, Any]) -> DonePending:
        stream = self._library.accelerator.current_stream()
        if operation.is_message:
            (lane,) = self._lanes.of(operation)
            assert lane.handle is not None, "an unconnected lane passed prepare"
            with lane.handle.entered() as communicator:
                lane.put(communicator, *tensors, stream)
        else:
            with self._handle.entered() as communicator:
                self._collectives.launch(communicator, operation, *tensors, stream)
        return DonePending()

    def _is_connected(self, operation: Operation) -> bool:
        if operation.is_message:
            return all(lane.is_connected for lane in self._lanes.of(operation))
        return self._launcher.knows(connection_key(operation))

    # ---- joining and ending ----

    def _join(self, deadline_s: float, timeout_s: float) -> Handle:
        members = self._members
        init = Operation("init", 0, timeout_s=timeout_s)
        if members.rank == 0:
            self._store.set("unique_id", self._library.unique_id())
        drawn = self._drawn(deadline_s, init)

        def join() -> Handle:
            with self._library.accelerator.device(self._index):
                self._clock = DeviceClock(self._library)
                self.stream = self._library.accelerator.Stream()
                return Handle(
                    self._library.open(
                        members.size, members.rank, drawn, self._index, is_lane=False
                    )
                )

        def check() -> None:
            members.check()
            if time.monotonic() >= deadline_s:
                raise build.timed_out(members, init, [])

        return make_aside(join, lambda handle: handle.abort(0.0), check)

    def _drawn(self, deadline_s: float, init: Operation) -> bytes:
        left_s = time_left_s(deadline_s)
        try:
            self._store.wait(["unique_id"], timeout=left_s, check=self._members.check)
        except StoreTimeoutError as err:
            raise build.timed_out(self._members, init, [0]) from err
        return self._store.get("unique_id")

    def _fly(self) -> bool:
        """Drop completed operations from the front of the queue; return whether any remain."""
        with self._lock:
            while self._flying and self._flying[0].is_over:
                self._flying.popleft()
            return bool(self._flying)

    def _let_go(self) -> None:
        """Wait up to `_LET_GO_S` seconds for detached sends to complete."""
        limit_s = time.monotonic() + _LET_GO_S
        sent = [one for one in list(self._flying) if one.is_detached]
        while time.monotonic() < limit_s and not all(one.done for one in sent):
            time.sleep(_DRAIN_S)

    def _free(self, limit_s: float) -> None:
        """Free all communicators concurrently, waiting at most until the deadline `limit_s`."""
        owners: list[Handle | Lane] = [self._handle, *self._lanes.all()]
        for wait_s in (0.0, None):
            for one in owners:
                left_s = max(0.0, limit_s - time.monotonic()) if wait_s is None else wait_s
                (one.abort if self._is_cut else one.destroy)(left_s)

    def _failure(self) -> str:
        """Return the error that the library reports for a communicator, or "" if none is known.

        The library is queried at most once every `_LOOK_S` seconds. Calls in between return "".
        """
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S:
            return ""
        self._looked_s = now_s
        handles = [self._handle, *(lane.handle for lane in self._lanes.all())]
        return next((said for one in handles if one is not None and (said := one.failure())), "")
