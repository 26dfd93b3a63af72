"""Define the placeholder world that a replacement process uses until it joins the other ranks.

A process that replaces a lost rank starts while the other ranks are training. Its placeholder world
has the size of the real world, and the process has its final rank in it. Every operation is refused
until the process has joined the other ranks.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn

from echelon.dist.backends.interface import Members, Pending, Watch
from echelon.dist.operation.operation import Operation
from echelon.errors import CollectiveError

if TYPE_CHECKING:
    from echelon.dist.group import ProcessGroup


def is_absent(group: ProcessGroup) -> bool:
    """Return whether a group belongs to a process that has not joined the other ranks yet."""
    return group.backend == AbsentEngine.name


class AbsentEngine:
    """An engine that refuses all operations; see `backends.interface.Engine`."""

    name = "none"
    device = "cpu"
    nests = False

    def __init__(self, members: Members) -> None:
        self._members = members

    def refuses(self, kind: str, dtype: str, reduce_op: str) -> str:
        """Return "" (supported), because `prepare` refuses every operation with a clearer error."""
        del kind, dtype, reduce_op
        return ""

    def prepare(self, operation: Operation) -> NoReturn:
        """Refuse an operation.

        Raises:
            CollectiveError: always.
        """
        raise CollectiveError(
            f"{operation.kind} in group {self._members.name!r}: rank {self._members.rank} has "
            "yet to join the other ranks, which are already training. With --on-loss replace, call "
            "no collectives before resilient.run. checkpoint.load is also a collective: skip it "
            "if ECHELON_JOIN_AFTER is set",
            group=self._members.name,
            operation=operation.kind,
            sequence=operation.sequence,
        )

    def execute(self, operation: Operation, watch: Watch) -> None:
        """Never called, because `prepare` refuses the operation."""
        raise AssertionError((operation, watch))

    def submit(self, operation: Operation, watch: Watch) -> Pending:
        """Never called, because `prepare` refuses the operation."""
        raise AssertionError((operation, watch))

    def batch(self) -> AbstractContextManager[object]:
        """Return a no-op context manager."""
        return contextlib.nullcontext()

    def cut(self, reason: CollectiveError | None) -> None:
        """Do nothing, because no operation can be in progress."""

    def close(self) -> None:
        """Do nothing, because the engine holds no resources."""
