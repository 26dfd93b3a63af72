"""Carry out operations on device arrays with a host engine, through pinned host memory.

This approach is used for ranks that share a GPU, and for groups created with a host backend. An
operation's input is copied to the host, the host engine carries out the operation, and the result
is copied back. One thread per group (the pump) moves operations from one stage to the next. `wait`
blocks until the copy of the result has been queued on the device.

Operations on host arrays go through a separate host engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import deque
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from echelon.dist.backends.device.clock import DeviceClock
from echelon.dist.backends.device.engines.streams import callers, tensor_of
from echelon.dist.backends.device.pending import DevicePending, DonePending
from echelon.dist.backends.device.runtime import DeviceRuntime
from echelon.dist.backends.interface import Engine, Members, Pending, Watch
from echelon.dist.errors import build
from echelon.dist.operation.arrays import DTYPES, Flat
from echelon.dist.operation.operation import OPEN, Operation
from echelon.errors import CollectiveError

_SHORT_S, _LONG_S = 0.00005, 0.001  # between two looks of the pump
_JOIN_S = 0.3


@dataclasses.dataclass(slots=True)
class _Staged:
    """An operation whose arrays pass through the host."""

    pending: DevicePending
    operation: Operation  # on the host's copies
    watch: Watch
    is_down: Any  # event: the input is on the host
    up: Any  # tensor to copy back from; None if this rank gets nothing
    running: Pending | None = None


class StagedEngine:
    """An engine for device arrays that carries out operations with a host engine."""

    nests = False

    def __init__(self, runtime: DeviceRuntime, members: Members, host: Engine) -> None:
        """Create the engine for a group, and take ownership of the host engine `host`."""
        self.name = host.name
        self.device = runtime.device
        self._runtime = runtime
        self._members = members
        self._host = host
        self._streams: dict[int, tuple[Any, Any, DeviceClock]] = {}
        self._making = threading.RLock()
        self._coming: deque[_Staged] = deque()
        self._work = threading.Semaphore(0)
        self._flying: list[DevicePending] = []
        self._reason: BaseException | None = None
        self._pump: threading.Thread | None = None
        self._is_closed = False

    def refuses(self, kind: str, dtype: str, reduce_op: str) -> str:
        """Return why the host engine refuses a kind of operation, or "" if it is accepted."""
        return self._host.refuses(kind, dtype, reduce_op)

    def prepare(self, operation: Operation) -> None:
        """Check that no graph is being captured.

        Raises:
            ValueError: a graph is being captured.
        """
        if self._runtime.is_capturing():
            raise ValueError(
                f"{operation.kind} cannot be captured in a graph: backend {self.name!r} copies "
                f"arrays on {self.device} through the host"
            )

    def execute(self, operation: Operation, watch: Watch) -> None:
        """Carry out one operation; block until the copy of the result has been queued."""
        pending = self.submit(operation, watch)
        pending.wait(None)
        if pending.error is not None:
            raise pending.error

    def submit(self, operation: Operation, watch: Watch) -> DevicePending | DonePending:
        """Start one operation without blocking."""
        if self._reason is not None:
            raise self._reason
        if operation.kind == OPEN:
            return DonePending()  # the host's messages need no connection of their own
        data: Any = operation.target if operation.source is None else operation.source
        runtime, index = self._runtime, data.index
        with runtime.accelerator.device(index):
            down, _, clock = self._on(index)
            source, target = (
                tensor_of(runtime, one) for one in (operation.source, operation.target)
            )
            streams = callers(runtime, operation)
            pending = DevicePending(runtime, operation, (source, target), index, streams, _nothing)
            pending.begin(down, clock)
            staged = self._stage(operation, watch, pending, down)
            if operation.is_detached:  # the caller may write the array once it is copied
                for stream in streams:
                    stream.wait_event(staged.is_down)
        self._fly(pending)
        reason = self._ended_with()
        if reason is not None:  # cut since, and this one was not seen there
            pending.fail(reason)
            return pending
        self._coming.append(staged)
        self._start()
        self._work.release()
        return pending

    def _fly(self, pending: DevicePending) -> None:
        """Track an in-flight operation so that `cut` can abort it."""
        with self._making:
            self._flying = [*(one for one in self._flying if not one.done), pending]

    def _ended_with(self) -> BaseException | None:
        return self._reason

    def batch(self) -> AbstractContextManager[object]:
        """Return a no-op context manager, because operations are not batched."""
        return contextlib.nullcontext()

    def cut(self, reason: CollectiveError | None) -> None:
        """Reject new operations on this rank, and abort those in flight."""
        self._reason = reason or build.closed(self._members, Operation("close", 0))
        self._host.cut(reason)
        for pending in list(self._flying):
            pending.fail(self._reason)
        self._work.release()

    def close(self) -> None:
        """Release the host engine within 1 s."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pump is not None and self._pump is not threading.current_thread():
            self._pump.join(_JOIN_S)
        self._host.close()

    def drain(self, check: Any) -> None:
        """Block until each device used so far has completed the work on its current stream."""
        accelerator = self._runtime.accelerator
        events = []
        for index in list(self._streams):
            with accelerator.device(index):
                event = accelerator.Event()
                event.record(accelerator.current_stream())
                events.append(event)
        while not all(self._runtime.has_happened(event) for event in events):
            check()
            time.sleep(_LONG_S)

    # ---- stages ----

    def _stage(
        self, operation: Operation, watch: Watch, pending: DevicePending, down: Any
    ) -> _Staged:
        """Queue the device-to-host copy of an operation's input.

        The operation's device must be the current device.
        """
        source, target = pending.tensors
        copies: dict[int, Any] = {}
        for tensor, is_input in ((source, True), (target, False)):
            if tensor is None or tensor.data_ptr() in copies:
                continue
            as_bytes = tensor.view(self._runtime.torch.uint8)
            copy = copies[tensor.data_ptr()] = self._runtime.pinned(as_bytes.numel())
            if is_input and as_bytes.numel():
                self._runtime.copy_over(copy, as_bytes, down)
        is_down = self._runtime.accelerator.Event()
        is_down.record(down)
        up = None if target is None else copies[target.data_ptr()]
        on_host = dataclasses.replace(
            operation,
            device="cpu",
            source=None if source is None else _flat(copies[source.data_ptr()], operation.dtype),
            target=None if up is None else _flat(up, operation.dtype),
        )
        return _Staged(pending, on_host, watch, is_down, up)

    def _start(self) -> None:
        if self._pump is None:
            with self._making:
                if self._pump is None:
                    self._pump = threading.Thread(
                        target=self._serve, name=f"echelon-staged-{self._members.name}", daemon=True
                    )
                    self._pump.start()

    def _serve(self) -> None:
        running: list[_Staged] = []
        while self._reason is None:
            if not running and not self._coming:
                self._work.acquire()  # until there is something to do
                continue
            pause_s = _SHORT_S
            while self._reason is None and not self._advance(running):
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONG_S)

    def _advance(self, running: list[_Staged]) -> bool:
        """Advance the operations; return True if any operation advanced or if none are left."""
        moved = False
        while self._coming and self._is_down(self._coming[0]):
            staged = self._coming.popleft()
            moved = True
            if staged.pending.error is not None:
                continue
            try:
                staged.running = self._host.submit(staged.operation, staged.watch)
                running.append(staged)
            except Exception as err:  # noqa: BLE001 -- the group decides what it means
                staged.pending.fail(err)
        for staged in [one for one in running if one.running is not None and one.running.done]:
            running.remove(staged)
            self._finish(staged)
            moved = True
        return moved or not (running or self._coming)

    def _is_down(self, staged: _Staged) -> bool:
        try:
            return self._runtime.has_happened(staged.is_down)
        except Exception as err:  # noqa: BLE001 -- a failed device raises at every question
            staged.pending.fail(err)
            return True

    def _finish(self, staged: _Staged) -> None:
        assert staged.running is not None
        error, pending = staged.running.error, staged.pending
        target = pending.tensors[1]
        if error is not None:
            pending.fail(error)
            return
        try:
            with self._runtime.accelerator.device(pending.index):
                _, up, _ = self._on(pending.index)
                up.wait_event(
                    staged.is_down
                )  # so behind what the caller had queued before the call
                if target is not None and staged.up.numel():
                    as_bytes = target.view(self._runtime.torch.uint8)
                    self._runtime.copy_over(as_bytes, staged.up, up)
                pending.launched(up)
        except Exception as err:  # noqa: BLE001 -- the group decides what it means
            pending.fail(err)

    def _on(self, index: int) -> tuple[Any, Any, DeviceClock]:
        """Return a device's two copy streams (to the host, to the device) and its clock.

        The device must be the current device.
        """
        with self._making:
            if index not in self._streams:
                make = self._runtime.accelerator.Stream
                self._streams[index] = (make(), make(), DeviceClock(self._runtime))
            return self._streams[index]


def _flat(copy: Any, dtype: str) -> Flat:
    """View host memory as a flat array for a host engine."""
    name = "uint16" if dtype == "bfloat16" else dtype if dtype in DTYPES else "uint8"
    return np.asarray(copy.numpy()).view(np.dtype(name))


def _nothing() -> str:
    return ""
