"""Define the facts about a failed attempt that the restart policy takes into account."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

UNKNOWN = "unknown"
DEAD = "dead_process"
MEMORY = "out_of_memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The facts about one attempt's failure.

    Attributes:
        cause: the verdict's cause. If there is no verdict yet, the cause is derived from exit codes
            and black boxes.
        is_likely: whether the verdict's confidence is `likely` or `certain`.
        is_certain: whether the verdict's confidence is `certain`.
        said: a one-clause description for users, e.g., "rank 2 raised ValueError: a corrupt batch".
        site: what failed and where, e.g., "ValueError at train.py:88 in compute". Two failures with
            the same cause and site count as the same failure.
        culprit_ranks: the verdict's culprits, or the first rank that failed.
        nodes: the names of the culprits' nodes, in rank order.
        hosts: the host names of these nodes, in the same order.
        last_step: the last step that the culprit began; -1 if the culprit recorded no steps.
        is_killed: whether the culprit was killed by a signal or lost with its node.
        is_outside: whether the culprit's error points to the network or a file system.
        owns_memory: if memory ran out, whether the job itself had used it up; None if unknown.
        saving_s: how long the culprit had been writing or reading a checkpoint when it was
            examined, in seconds; 0 if it was doing neither.
        idle_ranks: the culprits whose processes used no CPU time while they were examined.
    """

    attempt: int
    cause: str = UNKNOWN
    is_likely: bool = False
    is_certain: bool = False
    said: str = ""
    site: str = ""
    culprit_ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    last_step: int = -1
    is_killed: bool = False
    is_outside: bool = False
    owns_memory: bool | None = None
    saving_s: float = 0.0
    idle_ranks: tuple[int, ...] = ()

    def repeats(self, other: Failure) -> bool:
        """Return whether this failure has the same cause and site as another failure."""
        return self.cause == other.cause and self.site == other.site


def without(failure: Failure, ranks: Collection[int]) -> Failure:
    """Return a copy of a failure without the given ranks among its culprits."""
    if not ranks:
        return failure
    return replace(failure, culprit_ranks=tuple(r for r in failure.culprit_ranks if r not in ranks))
