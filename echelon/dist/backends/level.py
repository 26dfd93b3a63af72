"""Level: a sub-group on which an engine of two levels takes its steps."""

from __future__ import annotations

import time

from echelon.dist.backends.host_engine import HostEngine
from echelon.dist.backends.interface import Engine, Members, Watch
from echelon.dist.operation.arrays import Flat
from echelon.dist.operation.operation import Operation, encode_call


class Level:
    """A sub-group on one level, with its own numbers for what it is asked to do."""

    def __init__(self, members: Members, engine: Engine) -> None:
        self.members = members
        self.engine = engine
        self._carry_out = engine.carry_out if isinstance(engine, HostEngine) else engine.execute
        self._sequence = 0

    def run(
        self,
        kind: str,
        source: Flat | None,
        target: Flat | None,
        like: Operation,
        watch: Watch,
        *,
        dtype: str = "",
        reduce_op: str = "",
        root: int = -1,
    ) -> None:
        """Carry out one step of `like` among the members of this level, on its dtype or another."""
        shown = source if source is not None else target
        shape = None if shown is None else (len(shown),)
        dtype = dtype or like.dtype
        operation = Operation(
            kind=kind,
            sequence=self._sequence,
            dtype=dtype,
            reduce_op=reduce_op,
            root=root,
            source=source,
            target=target,
            shape=shape or (),
            timeout_s=max(0.001, watch.deadline_s - time.monotonic()),
            call=encode_call(kind, reduce_op, dtype, root, shape),
        )
        self._sequence += 1
        self._carry_out(operation, watch)
