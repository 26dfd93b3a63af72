"""What a backend is to `ProcessGroup`, and how one is found by name.

A backend carries out checked operations of one group, one after the other, in the order in which
they are handed over. It does not record, does not number, does not check arguments: `group.py` does
all that once, for every backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from echelon.dist.backends.operation import Operation
from echelon.store import PrefixStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """A group as its backend is told about it."""

    name: str
    rank: int  # mine, within the group
    ranks: Sequence[int]  # global ones, in group order

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


class Backend(Protocol):
    """Carries out the operations of one group."""

    name: str

    def execute(self, operation: Operation) -> None:
        """Carry out one operation; block until it is done on this rank.

        Raises:
            CollectiveMismatchError: the members called different things.
            CollectiveTimeoutError: members did not come within `operation.timeout_s`.
            PeerLostError: a member died or left.
        """

    def close(self) -> None:
        """Give everything back. Safe to call twice; does not block on other ranks."""


def create(name: str | None, members: Members, store: PrefixStore, timeout_s: float) -> Backend:
    """Make the backend `name` for a group; every member calls this.

    Raises:
        ValueError: there is no such backend.
        CollectiveTimeoutError: members did not come within `timeout_s`.
    """
    if name not in (None, "shm"):
        raise ValueError(f"backend {name!r} is not known; this version has: shm")
    from echelon.dist.backends.shm.backend import ShmBackend

    return ShmBackend(members, store, timeout_s)
