"""Define a store's waiters, and the rounds of its barriers and gathers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

# What a waiter that gives up knows of its round: world size, how many had joined (itself included),
# and the ranks that had not. Of a wait for keys: (0, 0, []).
RoundStory = tuple[int, int, list[int]]

# A peer's numbers decide how long the loop counts: both bound what a false one can cost.
MAX_WORLD_SIZE = 131072
MAX_MISSING = 4096


class Wants(Enum):
    """The kinds of results that a waiter can expect."""

    WAKE = "wait"
    CLAIM = "wait of a torch client"
    VALUE = "get"
    VALUES = "multi_get"
    ITEM = "queue_pop"
    BARRIER = "barrier"
    GATHER = "gather"


@dataclass(eq=False, slots=True)
class Waiter:
    """A pending wait, which belongs to one owner.

    Attributes:
        owner: the token of the connection or caller that is waiting.
        wants: the kind of result that satisfies the waiter.
        keys: the keys that the owner waits for; a barrier or gather has one key.
        missing: the keys that did not exist at the last check.
        tag: the tag of the waiting query, or 0 for torch's clients.
        rank: in a barrier or gather, the rank that arrived; -1 if no rank was given.
        value: in a gather, the rank's own value; after waking, the value or item received.
        values: after a gather, all ranks' values in rank order; after a wait for values, the values
            of the keys.
        failure: why the wait failed; None if it has not failed.
    """

    owner: Hashable
    wants: Wants
    keys: list[bytes]
    missing: set[bytes] = field(default_factory=set)
    tag: int = 0
    rank: int = -1
    value: bytes = b""
    values: list[bytes] | None = None
    failure: str | None = None


@dataclass(eq=False, slots=True)
class Round:
    """One round of a barrier or gather, with the arrivals so far.

    Attributes:
        wants: BARRIER or GATHER.
        world_size: the number of arrivals that complete the round.
        arrivals: the waiters that have arrived, in order.
        by_rank: the arrivals that specified a rank, keyed by rank.
    """

    wants: Wants
    world_size: int
    arrivals: dict[Waiter, None] = field(default_factory=dict)
    by_rank: dict[int, Waiter] = field(default_factory=dict)

    def add(self, waiter: Waiter) -> None:
        """Record the arrival of a waiter."""
        self.arrivals[waiter] = None
        if waiter.rank >= 0:
            self.by_rank[waiter.rank] = waiter

    def remove(self, waiter: Waiter) -> None:
        """Withdraw the arrival of a waiter."""
        del self.arrivals[waiter]
        if self.by_rank.get(waiter.rank) is waiter:
            del self.by_rank[waiter.rank]

    def missing_ranks(self, most: int = MAX_MISSING) -> list[int]:
        """Return up to `most` missing ranks, lowest first.

        The result is empty if any caller arrived without specifying its rank.
        """
        if len(self.by_rank) < len(self.arrivals):
            return []
        absent = (rank for rank in range(self.world_size) if rank not in self.by_rank)
        return list(islice(absent, most))
