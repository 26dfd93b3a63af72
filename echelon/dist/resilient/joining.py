"""Let new ranks join the training ranks at the end of a step.

[Note: the step at which ranks join] The launcher publishes an epoch whose `joins` field lists the
joining ranks. The training ranks receive the epoch at different times, but must all leave the
current epoch after the same step. Under `--on-loss replace`, each step therefore ends with an
all-reduce instead of a barrier. The all-reduce computes the minimum, over all ranks, of the newest
such epoch that each rank has received. If the minimum is newer than the current epoch, all ranks
have received that epoch, and they enter it. No work is lost, because all ranks have finished the
step. After the last step, no rank enters another epoch, and the launcher dismisses the ranks that
are waiting to join. If an admitted rank dies before the rendezvous, the other ranks enter an epoch
without it in the same way.

A joining rank has no state to offer at the rendezvous of the epoch's ranks. If a rank dies during
the rendezvous or while the state is being sent, the loss is handled like any other. The launcher
publishes a newer epoch, in which the ranks that still lack the state join.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from echelon.dist import runtime
from echelon.dist.group import ProcessGroup
from echelon.dist.resilient.epochs import Epochs
from echelon.errors import CollectiveError
from echelon.recorder.continuation import Epoch
from echelon.store.deadline import time_left_s

ADMITTED_S = 1e6  # 11 days: a rank that joins waits for the end of a step, however long
JOINS_S = 180.0  # the launcher ends a rank that does not join within 120 s of the others' meeting
JOINS = {"joins": True}  # the row of such a rank in the meeting of an epoch


class JoinDue(CollectiveError):  # noqa: N818 -- not an error that a user sees
    """Raised after a step if all ranks are about to enter an epoch in which other ranks join."""


class Joins:
    """The newest epoch that this rank is to enter at the end of a step.

    Args:
        is_on: True if the launcher replaces lost ranks.

    Attributes:
        entered: the newest epoch whose rendezvous this rank has entered.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self.entered = 0
        self._newest = 0

    def is_orderly(self, epoch: Epoch) -> bool:
        """Return whether this rank enters a new epoch only at the end of a step.

        If so, this rank can finish the step, because all ranks that the step needs are still
        running. A rank that is entering the rendezvous of an earlier epoch detects the new epoch at
        that rendezvous.
        """
        return bool(epoch.joins) or epoch.withdraws > self.entered

    def note(self, epoch: Epoch) -> None:
        """Record an epoch to enter at the end of a step. Callable from any thread."""
        self._newest = epoch.number

    def end_step(self, group: ProcessGroup, number: int) -> int:
        """End a step on all ranks. Collective.

        Args:
            group: the ranks of the current epoch.
            number: the number of the current epoch.

        Returns:
            The number of the epoch to enter next, which is the same on all ranks; 0 if there is
            none.
        """
        if not self.is_on:
            group.barrier()
            return 0
        return self.end_step_with(group, number, 0)[0]

    def end_step_with(self, group: ProcessGroup, number: int, value: int) -> tuple[int, int]:
        """End a step, and compute the minimum of a value over all ranks. Collective.

        Returns:
            The result of `end_step`, and the minimum.
        """
        least = np.array([self._newest, value], np.int64)
        group.all_reduce(least, "min")
        newest, value = least.tolist()
        return newest if newest > number else 0, value


def is_newcomer(row: Mapping[str, Any]) -> bool:
    """Return whether a rank joins without the training state, given the values that it sent."""
    return bool(row.get("joins"))


def places_of(rows: Sequence[Mapping[str, Any]]) -> tuple[int, list[int]]:
    """Return the group rank that sends the training state, and the newcomers' group ranks.

    Raises:
        CollectiveError: no rank has the training state.
    """
    newcomers = [place for place, row in enumerate(rows) if is_newcomer(row)]
    source = next((place for place in range(len(rows)) if place not in newcomers), None)
    if source is None:
        raise CollectiveError("none of the remaining ranks holds the training state")
    return source, newcomers


def wait_until_admitted(epochs: Epochs, timeout_s: float = ADMITTED_S) -> Epoch:
    """Wait for an epoch that includes this rank, and return it; exit with code 0 if dismissed.

    Raises:
        StoreTimeoutError: no such epoch was published within `timeout_s` seconds.
        StoreError: the store cannot be reached.
    """
    own = runtime.own_rank()
    deadline_s = time.monotonic() + timeout_s
    while True:
        epoch = epochs.next(time_left_s(deadline_s))
        if own in epoch.dismissed:
            sys.exit(0)
        if own in epoch.roster and epoch.life_of(own) == runtime.own_life():
            return epoch
