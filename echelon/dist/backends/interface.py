"""What a backend is to `ProcessGroup`.

A backend carries out checked operations of one group. It does not record, does not number, does not
check arguments: `group.py` does all that once, for every backend. Collectives are carried out in
the order in which they are handed over; sends and receives run beside them and beside each other.
A backend that can only block derives from `lanes.LaneBackend` and writes `execute` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from echelon.dist.operation.operation import Operation
from echelon.dist.options import Options


@dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """A group as its backend is told about it."""

    name: str
    rank: int  # mine, within the group
    ranks: Sequence[int]  # global ones, in group order
    options: Options = field(default_factory=Options)
    device: str = (
        ""  # what to carry, if the caller knows: "cuda", "xpu", ...; "": the backend's own
    )
    device_index: int = 0

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


class Pending(Protocol):
    """An operation that was submitted."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or badly."""

    @property
    def ended_mono_ns(self) -> int:
        """When it ended; 0 while it has not."""

    @property
    def error(self) -> BaseException | None:
        """What it ended with; None if well, or not yet."""

    def wait(self, timeout_s: float | None) -> bool:
        """Block until it has ended or the time is up; return whether it has ended."""


class Backend(Protocol):
    """Carries out the operations of one group."""

    name: str
    device: str  # where its arrays lie: "cpu", "cuda", "xpu"

    def refuses(self, kind: str, dtype: str, reduce_op: str) -> str:
        """Say why this library cannot carry such an operation; "" if it can."""

    def execute(self, operation: Operation) -> None:
        """Carry out one operation; block until it is done on this rank.

        Raises:
            CollectiveMismatchError: the members called different things.
            CollectiveTimeoutError: members did not come within `operation.timeout_s`.
            PeerLostError: a member died or left.
        """

    def submit(self, operation: Operation) -> Pending:
        """Queue one operation."""

    def batch(self) -> AbstractContextManager[object]:
        """Launch what is submitted inside as one, where the library can."""

    def abort(self) -> None:
        """End the group on this rank, from any thread: what runs raises, on the others too."""

    def close(self) -> None:
        """Give everything back. Safe to call twice; does not block on other ranks."""
