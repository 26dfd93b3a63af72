"""A backend that has no messages, with another one of the host beside it that carries them.

oneCCL's CPU plugin crashes in sends and receives; what needs them (pipelines) runs over it all the
same: collectives by the one, messages by the other, which never meet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from echelon.dist.backends.interface import Backend, Pending
from echelon.dist.operation.operation import Operation
from echelon.errors import CollectiveError


class WithMessages:
    """Carries out collectives with one engine and messages with another of the same device."""

    def __init__(self, engine: Backend, carrier: Backend) -> None:
        assert engine.device == carrier.device, (engine.device, carrier.device)
        self.name = engine.name
        self.device = engine.device
        self._engine = engine
        self._carrier = carrier

    def refuses(self, kind: str, dtype: str, reduce_op: str) -> str:
        """Ask the engine that would carry it."""
        engine = self._carrier if kind in ("send", "recv") else self._engine
        return engine.refuses(kind, dtype, reduce_op)

    def execute(self, operation: Operation) -> None:
        """Carry out one operation; block until it is done on this rank."""
        try:
            self._for(operation).execute(operation)
        except CollectiveError:
            self.abort()  # the group is over: peers that wait in the other engine must hear of it
            raise

    def submit(self, operation: Operation) -> Pending:
        """Queue one operation."""
        return self._for(operation).submit(operation)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Launch together what each engine can."""
        with self._engine.batch(), self._carrier.batch():
            yield

    def abort(self) -> None:
        """End the group on this rank."""
        self._engine.abort()
        self._carrier.abort()

    def close(self) -> None:
        """Give both engines back."""
        self._carrier.close()
        self._engine.close()

    def _for(self, operation: Operation) -> Backend:
        return self._carrier if operation.is_message else self._engine
