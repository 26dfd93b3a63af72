"""Define how a group obtains information that its engine does not have.

`membership/liveness.py` implements `Evidence` for groups of several ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from echelon.dist.backends.interface import ConnectionBroken, Members
from echelon.dist.errors import build
from echelon.dist.operation.operation import Operation
from echelon.errors import CollectiveError

if TYPE_CHECKING:
    from echelon.dist.progress.group_state import GroupState


class Evidence(Protocol):
    """Information about the other members, from sources other than the engine."""

    def serve(self, state: GroupState) -> None:
        """Start answering liveness checks and applying the verdicts of other ranks to `state`."""

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Return the given group ranks whose processes are known to have ended. Not collective."""

    def find(
        self,
        operation: Operation,
        broken: ConnectionBroken | None,
        needed: Sequence[int] | None,
        dead: Sequence[int] = (),
    ) -> CollectiveError:
        """Determine the ranks at fault, and return an error that names them.

        Blocks for at most 2.5 s, or 4 s if the store is slow.

        Args:
            operation: the operation that cannot complete.
            broken: the error that the engine observed; None if a rank died or the operation timed
                out.
            needed: group ranks that have not arrived; None if the engine cannot determine them.
            dead: group ranks that are known to have died.
        """

    def explain(self, operation: Operation, error: CollectiveError) -> CollectiveError:
        """Return a more precise error for a failed operation, or `error` if none is found."""

    def hear(self, operation: Operation, error: CollectiveError) -> CollectiveError:
        """Return the verdict of the rank whose failure ended the operation, as an error.

        Blocks until that rank has published its verdict on which rank is at fault, but for at most
        3 s. If no verdict arrives in this time, `error` is returned.
        """

    def arriving(self) -> AbstractContextManager[object]:
        """Mark this rank as being in a monitored barrier while the block runs."""

    def publish(self, error: CollectiveError) -> None:
        """Report to the other members the error that ended the group. Does not block."""

    def leave(self) -> None:
        """Notify the other members that this rank closed the group. Does not block."""

    def close(self, timeout_s: float = 1.0) -> None:
        """Release all resources. Calling this twice is safe.

        Args:
            timeout_s: the maximum time in seconds for publishing pending notices.
        """


class NoEvidence:
    """The implementation of `Evidence` for a group with a single rank."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def serve(self, state: GroupState) -> None:
        """Do nothing, because there are no other ranks."""

    def dead(self, ranks: Sequence[int]) -> list[int]:  # noqa: ARG002
        """Return an empty list, because there are no other ranks."""
        return []

    def find(
        self,
        operation: Operation,
        broken: ConnectionBroken | None,
        needed: Sequence[int] | None,
        dead: Sequence[int] = (),  # noqa: ARG002
    ) -> CollectiveError:
        """Return the error for a broken connection, or a timeout error if `broken` is None."""
        if broken is not None:
            return build.connection_broken(self._members, operation, broken)
        return build.timed_out(self._members, operation, needed or [])

    def explain(self, operation: Operation, error: CollectiveError) -> CollectiveError:  # noqa: ARG002
        """Return the error unchanged."""
        return error

    def hear(self, operation: Operation, error: CollectiveError) -> CollectiveError:  # noqa: ARG002
        """Return the error unchanged."""
        return error

    def arriving(self) -> AbstractContextManager[object]:
        """Return a no-op context manager."""
        return contextlib.nullcontext()

    def publish(self, error: CollectiveError) -> None:
        """Do nothing, because there are no other ranks."""

    def leave(self) -> None:
        """Do nothing, because there are no other ranks."""

    def close(self, timeout_s: float = 1.0) -> None:
        """Do nothing, because there are no other ranks."""
