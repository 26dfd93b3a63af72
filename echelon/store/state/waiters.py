"""Who waits at a store, for what, and who has arrived at a barrier or gather."""

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
    """What a waiter wants delivered."""

    WAKE = "wait"
    CLAIM = "wait of a torch client"
    VALUE = "get"
    VALUES = "multi_get"
    ITEM = "queue_pop"
    BARRIER = "barrier"
    GATHER = "gather"


@dataclass(eq=False, slots=True)
class Waiter:
    """One thing that one owner waits for.

    Attributes:
        owner: token of the connection or caller that it belongs to.
        wants: what satisfies it.
        keys: the keys it is about; a round has one.
        missing: keys that were not there when last looked at.
        tag: of the query that waits, 0 of torch's clients; the state does not look at it.
        rank: of a round, who arrived; -1 for an unnamed arrival.
        value: of a gather what the rank put in; after waking, the value or item it gets.
        values: after a gather, all values by rank; after a wait for values, those of the keys.
        failure: set instead of a result when the wait can never be satisfied.
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
    """One use of a barrier or gather key: who has arrived so far.

    Attributes:
        wants: BARRIER or GATHER.
        world_size: how many complete it.
        arrivals: who has arrived, in order.
        by_rank: of them those who gave a rank.
    """

    wants: Wants
    world_size: int
    arrivals: dict[Waiter, None] = field(default_factory=dict)
    by_rank: dict[int, Waiter] = field(default_factory=dict)

    def add(self, waiter: Waiter) -> None:
        """Note an arrival."""
        self.arrivals[waiter] = None
        if waiter.rank >= 0:
            self.by_rank[waiter.rank] = waiter

    def remove(self, waiter: Waiter) -> None:
        """Take an arrival back."""
        del self.arrivals[waiter]
        if self.by_rank.get(waiter.rank) is waiter:
            del self.by_rank[waiter.rank]

    def missing_ranks(self, most: int = MAX_MISSING) -> list[int]:
        """Return ranks that have not come, the lowest `most` of them.

        None are named when an unnamed arrival makes that unknowable.
        """
        if len(self.by_rank) < len(self.arrivals):
            return []
        absent = (rank for rank in range(self.world_size) if rank not in self.by_rank)
        return list(islice(absent, most))
