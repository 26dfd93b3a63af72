"""Backends of the older interface, which end their groups themselves, as engines.

They have `execute(operation)`, `submit(operation)` and `abort()`; an engine of the interface is
passed through as it is.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from echelon.dist.backends.interface import Engine, Pending, Refused, Watch
from echelon.dist.operation.operation import Operation
from echelon.errors import CollectiveError


def adapted(backend: Any) -> Engine:
    """Return a backend as an engine."""
    return backend if hasattr(backend, "cut") else _Adapter(backend)


class _Adapter:
    nests = False

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.name: str = backend.name
        self.device: str = backend.device
        self._raised: CollectiveError | None = None

    def refuses(self, kind: str, dtype: str, reduce_op: str) -> str:
        return str(self.backend.refuses(kind, dtype, reduce_op))

    def prepare(self, operation: Operation) -> None:
        pass

    def execute(self, operation: Operation, watch: Watch) -> None:  # noqa: ARG002
        try:
            self.backend.execute(operation)
        except CollectiveError as err:
            self._raised = err
            raise

    def submit(self, operation: Operation, watch: Watch) -> Pending:  # noqa: ARG002
        try:
            pending: Pending = self.backend.submit(operation)
        except CollectiveError as err:
            self._raised = err
            raise
        except ValueError as err:
            raise Refused(str(err)) from None
        return _AdaptedPending(self, pending)

    def batch(self) -> AbstractContextManager[object]:
        batch: AbstractContextManager[object] = self.backend.batch()
        return batch

    def cut(self, reason: CollectiveError | None) -> None:
        is_idle = getattr(self.backend, "is_idle", lambda: True)
        if reason is self._raised if reason is not None else is_idle():
            return  # it has ended by itself, or `close` ends it
        self.backend.abort()

    def close(self) -> None:
        self.backend.close()

    def note(self, error: BaseException | None) -> None:
        if isinstance(error, CollectiveError):
            self._raised = error


class _AdaptedPending:
    is_watched = True

    def __init__(self, engine: _Adapter, pending: Pending) -> None:
        self._engine = engine
        self._pending = pending

    @property
    def done(self) -> bool:
        return self._pending.done

    @property
    def ended_mono_ns(self) -> int:
        return self._pending.ended_mono_ns

    @property
    def error(self) -> BaseException | None:
        error = self._pending.error
        self._engine.note(error)
        return error

    @property
    def source(self) -> int:
        return int(getattr(self._pending, "source", -1))

    def wait(self, timeout_s: float | None) -> bool:
        return self._pending.wait(timeout_s)
