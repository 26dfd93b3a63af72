"""The facts of one failed attempt on which the policy decides."""

from __future__ import annotations

from dataclasses import dataclass

UNKNOWN = "unknown"
DEAD = "dead_process"
MEMORY = "out_of_memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How one attempt failed.

    Attributes:
        cause: the verdict's cause; if the verdict is late, derived from exit codes and error files.
        is_likely: whether there is a verdict with the confidence `likely` or `certain`.
        is_certain: whether its confidence is `certain`.
        said: one clause for people, such as "rank 2 raised ValueError: a corrupt batch".
        site: what failed where ("ValueError at train.py:88 in compute"); equal for repetitions.
        culprit_ranks: the verdict's culprits, or the first rank that failed.
        nodes: names of the culprits' launchers, in rank order.
        hosts: those nodes' host names, in the same order.
        last_step: the last step that the culprit began, -1 if it recorded none.
        is_killed: whether a signal ended the culprit, or its node was lost.
        is_outside: whether the culprit's error reports a network or a file system.
        owns_memory: whether the job's own use exhausted memory; None if that is not known.
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

    def repeats(self, other: Failure) -> bool:
        """Return whether this is the same failure as an earlier one."""
        return self.cause == other.cause and self.site == other.site
