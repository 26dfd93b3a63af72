"""Arrays of the host over one backend, those of a device over its own: what `init(None)` makes.

With a device's backend asked for by name ("nccl") that one is there from the beginning, and the
host's beside it carries objects and barriers. Otherwise a device's engine is made when the first
array of that device comes, in a collective on all ranks. That operation is compared over the host's
backend first, device and all: a rank that passes another array, or one of the host, is named on
every rank before anything is made. Later operations on the device are compared as its own backend
does, which may be not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator

from echelon.dist.backends import registry
from echelon.dist.backends.interface import Backend, Members, Pending
from echelon.dist.errors import build
from echelon.dist.operation.arrays import DeviceFlat
from echelon.dist.operation.operation import Operation
from echelon.errors import CollectiveError
from echelon.store import PrefixStore


class ByDevice:
    """Carries out each operation with the engine of the device on which its arrays lie."""

    def __init__(
        self, members: Members, store: PrefixStore, host: Backend, engine: Backend | None = None
    ) -> None:
        self.name = host.name if engine is None else engine.name
        self.device = host.device
        self._members = members
        self._store = store
        self._host = host
        self._engines = {host.device: host}
        if engine is not None:
            self._engines[engine.device] = engine
        self._making = threading.Lock()

    def lacks(self, kind: str, device: str) -> str:
        """Say why an operation on a device cannot be carried; "" if it can, as far as we know."""
        if device in self._engines:
            return ""
        name, reason = registry.for_device(device)
        if name and kind in ("send", "recv"):
            return f"the first operation on {device} must be a collective, in which all take part"
        return reason

    def refuses(self, kind: str, dtype: str, reduce_op: str) -> str:  # noqa: ARG002
        """Refuse nothing yet: the engine is asked once it is there."""
        return ""

    def execute(self, operation: Operation) -> None:
        """Carry out one operation; block until it is done on this rank."""
        engine = self._engine(operation)
        try:
            engine.execute(operation)
        except CollectiveError:
            for other in self._engines.values():
                if other is not engine:
                    other.abort()  # peers that wait there must hear of it
            raise

    def submit(self, operation: Operation) -> Pending:
        """Queue one operation; the first on a device blocks until all have come to it."""
        return self._engine(operation).submit(operation)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Launch together what each engine can."""
        with contextlib.ExitStack() as stack:
            for engine in list(self._engines.values()):
                stack.enter_context(engine.batch())
            yield

    def abort(self) -> None:
        """End the group on this rank."""
        for engine in list(self._engines.values()):
            engine.abort()

    def close(self) -> None:
        """Give every engine back."""
        for engine in reversed(list(self._engines.values())):
            engine.close()

    def _engine(self, operation: Operation) -> Backend:
        engine = self._engines.get(operation.device)
        if engine is None:
            with self._making:
                engine = self._engines.get(operation.device) or self._make(operation)
        reason = engine.refuses(operation.kind, operation.dtype, operation.reduce_op)
        if reason:
            raise ValueError(
                f"{operation.kind} of {operation.dtype}{list(operation.shape)}: "
                f"backend {engine.name!r} {reason}"
            )
        return engine

    def _make(self, operation: Operation) -> Backend:
        """Make a device's engine, in an operation of which all members take part."""
        deadline_s = time.monotonic() + operation.timeout_s
        name, reason = registry.for_device(operation.device)
        if not name:
            raise ValueError(reason)
        self._compare(operation)
        data = operation.source if operation.source is not None else operation.target
        members = dataclasses.replace(
            self._members,
            device=operation.device,
            device_index=data.index if isinstance(data, DeviceFlat) else 0,
        )
        engine = registry.create(
            name,
            members,
            PrefixStore(f"device/{operation.device}", self._store),
            max(0.001, deadline_s - time.monotonic()),
        )
        self._engines = {**self._engines, operation.device: engine}
        return engine

    def _compare(self, operation: Operation) -> None:
        """Meet all members over the host's backend, each with what it called."""
        meeting = Operation(
            "barrier", operation.sequence, timeout_s=operation.timeout_s, call=operation.call
        )
        try:
            self._host.execute(meeting)
        except CollectiveError as err:
            before, now = (build.place(self._members, one) for one in (meeting, operation))
            err.args = (str(err).replace(before, now, 1),)
            err.operation = operation.kind
            raise
