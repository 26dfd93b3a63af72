"""Choose the engine for each of a group's operations.

A group has several engines in three cases:

* Its backend is a host backend, and the program passes device arrays. All ranks create a device
  engine during the first collective on such an array, after they have compared their calls. After
  `init(None)`, the device engine uses the device's library (see `device/choose.py`); otherwise it
  copies the arrays and uses the host engine.
* Its backend is a device backend ("nccl"). The group has a device engine from the start, and a host
  engine for objects, barriers and host arrays.
* Its backend does not support messages. Another host engine then transfers the messages. (oneCCL's
  CPU plugin crashes in sends and receives.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

from echelon.dist.backends.device import choose
from echelon.dist.backends.device.pending import DonePending
from echelon.dist.backends.interface import (
    EndedElsewhere,
    Engine,
    Members,
    Pending,
    Refused,
    Watch,
)
from echelon.dist.errors import build
from echelon.dist.operation.arrays import DeviceFlat
from echelon.dist.operation.operation import OPEN, Operation
from echelon.errors import CollectiveError
from echelon.store import PrefixStore


class Router:
    """An engine that delegates each operation to one of a group's engines.

    Args:
        host: the engine for host arrays.
        messages: the engine for host messages; None means `host`.
        device: a device engine that already exists.
        makes_engines: whether to create engines that use a device's own library; if False, device
            arrays go through the host engine.
    """

    def __init__(
        self,
        members: Members,
        store: PrefixStore,
        host: Engine,
        *,
        messages: Engine | None = None,
        device: Engine | None = None,
        makes_engines: bool = False,
    ) -> None:
        self.name = host.name if device is None else device.name
        self.device = host.device
        self._members = members
        self._store = store
        self._host = host
        self._messages = messages or host
        self._engines = {host.device: host}
        if device is not None:
            self._engines[device.device] = device
        self._makes_engines = makes_engines
        self._making = threading.Lock()
        self._cut_for: list[CollectiveError | None] = []

    @property
    def nests(self) -> bool:
        """True if a signal handler can run a host collective while another one is in progress."""
        return self._host.nests

    @property
    def closes_together(self) -> bool:
        """True if closing one of the engines requires waiting for the other members."""
        return any(
            engine.device != "cpu" or getattr(engine, "closes_together", False)
            for engine in self._all()
        )

    def engine_for(self, device: str) -> Engine | None:
        """Return the engine for a device's arrays, or None if it has not been created."""
        return self._engines.get(device)

    def refuses(self, kind: str, dtype: str, reduce_op: str) -> str:
        """Return why the host engine refuses a kind of operation, or "" if it does not."""
        engine = self._messages if kind in ("send", "recv") else self._host
        return engine.refuses(kind, dtype, reduce_op)

    def prepare(self, operation: Operation) -> None:
        """Check that an engine can carry out an operation.

        Raises:
            ValueError: no engine can carry out the operation.
        """
        engine = self._find(operation)
        if engine is not None:
            _check(engine, operation, ValueError)
            engine.prepare(operation)
            return
        reason = choose.refusal(operation.device, is_staged=not self._makes_engines)
        if reason and not self._makes_engines:
            reason = f"backend {self.name!r} carries arrays on {self._devices()}; {reason}"
        if not reason and operation.is_message:
            reason = (
                f"the first operation on {operation.device} must be a collective, in which all "
                "ranks take part"
            )
        if reason:
            raise ValueError(
                f"{operation.kind}: the array on {operation.device} cannot be used in group "
                f"{self._members.name!r}: {reason}"
            )

    def execute(self, operation: Operation, watch: Watch) -> None:
        """Carry out one operation; block until it is done on this rank.

        A barrier first waits for outstanding work on the devices that this rank uses in the group.
        """
        if operation.kind == "barrier":
            self._drain(watch)
        self._engine(operation, watch).execute(operation, watch)

    def submit(self, operation: Operation, watch: Watch) -> Pending:
        """Start one operation. The first one on a device blocks until all ranks have issued it."""
        if operation.kind == OPEN and operation.device == self.device:
            return DonePending()  # messages of the host need no connection of their own
        return self._engine(operation, watch).submit(operation, watch)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Batch the operations in a `with` block if their engine supports batching."""
        with contextlib.ExitStack() as stack:
            for engine in self._all():
                stack.enter_context(engine.batch())
            yield

    def cut(self, reason: CollectiveError | None) -> None:
        """Abort all operations in every engine."""
        self._cut_for.append(reason)
        for engine in self._all():
            engine.cut(reason)

    def close(self) -> None:
        """Release every engine."""
        for engine in reversed(self._all()):
            engine.close()

    def _drain(self, watch: Watch) -> None:
        for engine in self._engines.values():
            drain = getattr(engine, "drain", None)
            if drain is not None:
                drain(watch.check)

    def _all(self) -> list[Engine]:
        engines = list(self._engines.values())
        return engines if self._messages is self._host else [*engines, self._messages]

    def _devices(self) -> str:
        return " and ".join(self._engines)

    def _find(self, operation: Operation) -> Engine | None:
        if operation.is_message and operation.device == self.device:
            return self._messages
        return self._engines.get(operation.device)

    def _engine(self, operation: Operation, watch: Watch) -> Engine:
        engine = self._find(operation)
        if engine is not None:
            return engine
        with self._making:
            engine = self._engines.get(operation.device) or self._make(operation, watch)
        _check(engine, operation, Refused)
        engine.prepare(operation)
        return engine

    def _make(self, operation: Operation, watch: Watch) -> Engine:
        """Create a device's engine as part of an operation that every member of the group calls."""
        self._compare(operation, watch)
        data = operation.source if operation.source is not None else operation.target
        members = dataclasses.replace(
            self._members,
            device=operation.device,
            device_index=data.index if isinstance(data, DeviceFlat) else 0,
            check=watch.check,
        )
        engine = choose.create(
            members,
            PrefixStore(f"device/{operation.device}", self._store),
            self._host.name,
            watch.deadline_s,
            is_staged=not self._makes_engines,
        )
        self._engines = {**self._engines, operation.device: engine}
        if self._cut_for:  # the group ended while the engine was being made
            engine.cut(self._cut_for[0])
        return engine

    def _compare(self, operation: Operation, watch: Watch) -> None:
        """Compare all members' calls through the host engine."""
        meeting = Operation(
            "barrier", operation.sequence, timeout_s=operation.timeout_s, call=operation.call
        )
        try:
            self._host.execute(meeting, watch)
        except CollectiveError as err:
            self._rename(err, meeting, operation)
            raise
        except EndedElsewhere as err:
            self._rename(err.error, meeting, operation)
            raise

    def _rename(self, error: CollectiveError, meeting: Operation, operation: Operation) -> None:
        """Make an error name the user's operation instead of the internal comparison of calls."""
        before, now = (build.place(self._members, one) for one in (meeting, operation))
        error.args = (str(error).replace(before, now, 1),)
        error.operation = operation.kind


def _check(engine: Engine, operation: Operation, error: type[ValueError]) -> None:
    reason = engine.refuses(operation.kind, operation.dtype, operation.reduce_op)
    if reason:
        raise error(
            f"{operation.kind} of {operation.dtype}{list(operation.shape)}: "
            f"backend {engine.name!r} {reason}"
        )
