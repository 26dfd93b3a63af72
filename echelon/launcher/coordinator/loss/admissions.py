"""Admit the processes that replace lost ranks, by publishing epochs that include them.

An epoch is a published list of the ranks that continue together; see `continuation.Epoch`.

`Replacements` starts the processes. Once admitted, a process is a rank like any other, except that
it holds no training state until it has joined. If a rank finishes its training without noticing an
admission, all admissions are withdrawn and the processes are dismissed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from echelon.launcher.coordinator.loss.epochs import PublishedEpochs
from echelon.launcher.coordinator.loss.reports import Known, Reports, are_finishing, is_joining
from echelon.launcher.coordinator.world import World
from echelon.launcher.job.report import Ended
from echelon.recorder.continuation import Epoch


class Admissions:
    """The ranks whose new processes have been admitted to the attempt but have not yet joined.

    Args:
        epochs: the attempt's epochs.
        reports: what the attempt's ranks have reported.
    """

    def __init__(self, epochs: PublishedEpochs, reports: Reports) -> None:
        self._epochs = epochs
        self._reports = reports
        self._joining: dict[int, tuple[Ended, int]] = {}  # admitted; see `World.admit`

    @property
    def number(self) -> int:
        """The number of the newest epoch."""
        return self._epochs.number

    def clear(self) -> None:
        """Discard all pending admissions, because another attempt begins."""
        self._joining.clear()

    def begin(self, rank: int, life: int) -> int:
        """Prepare for a new process to take over a rank; return the number of the newest epoch.

        Args:
            life: how many earlier processes held this rank.
        """
        self._reports.forget(rank)
        self._epochs.lives[rank] = life
        return self._epochs.number

    def waiting(self, world: World) -> list[int]:
        """Return the lost ranks whose new processes are waiting to join.

        The list is empty while a rank has yet to enter the newest epoch, and after a rank has
        finished all its steps.
        """
        known = self._reports.read(world)
        if self._epochs.awaited is not None or are_finishing(known):
            return []
        return [rank for rank in world.ended if is_joining(known, rank)]

    def is_waiting(self, world: World, rank: int) -> bool:
        """Return whether the process of a rank is waiting to join."""
        return is_joining(self._reports.read(world), rank)

    def admit(self, world: World, ranks: Sequence[int]) -> bool:
        """Publish an epoch in which the given ranks join; return False if publishing failed."""
        taken = {rank: world.admit(rank) for rank in ranks}
        lost = [rank for rank in self._epochs.lost if rank not in ranks]
        if self._epochs.publish(world, lost, self._reports.read(world), joins=ranks):
            for rank, (ended, epoch) in taken.items():
                world.take_back(rank, ended, epoch)
            return False
        self._joining |= taken
        return True

    def is_admitted(self, rank: int) -> bool:
        """Return whether a lost rank has been admitted again, even if it has not joined yet."""
        return rank not in self._epochs.lost

    def has_joined(self, rank: int) -> bool:
        """Return whether the given rank was admitted and has joined."""
        return self.is_admitted(rank) and rank not in self._joining

    def delayed_by(self, world: World) -> list[int]:
        """Return the joining ranks if all other ranks are waiting for them, otherwise [].

        A rank that has already entered the epoch is also considered to be waiting. It can enter
        before the joining ranks do, because a send to them completes immediately if the data fits
        into a buffer.
        """
        epoch = self._epochs.awaited
        if epoch is None or not self._joining:
            return []
        known = self._reports.read(world)
        joining = [rank for rank in self._joining if is_joining(known, rank)]
        others = [known[rank] for rank in epoch.roster if rank in known and rank not in joining]
        if any(max(one.meets, one.epoch) < epoch.number for one in others):
            return []
        return joining

    def withdrawn_by(self, ended: Iterable[int], known: Known) -> int:
        """Return the number of the epoch to withdraw after a loss; 0 if other ranks are affected.

        If all of the lost ranks were still joining, and no other rank has been lost since their
        admission, the other ranks are not affected. In this case, only the epoch in which the lost
        ranks were to join is withdrawn.
        """
        epoch = self._epochs.awaited
        if epoch is None or any(r not in self._joining or not is_joining(known, r) for r in ended):
            return 0
        return epoch.number if epoch.joins else epoch.withdraws

    def note_lost(self, ranks: Iterable[int]) -> None:
        """Record that ranks were lost, including ranks that might still be joining."""
        for rank in ranks:
            self._joining.pop(rank, None)

    def note_joined(self, epoch: Epoch) -> list[int]:
        """Record that an epoch is complete; return the ranks that joined during that epoch."""
        joined = sorted(rank for rank in self._joining if rank in epoch.roster)
        for rank in joined:
            del self._joining[rank]
        return joined

    def take_back(self, world: World) -> None:
        """Withdraw all admissions, because a rank has finished without noticing them."""
        ranks = sorted(self._joining)
        for rank in ranks:
            world.take_back(rank, *self._joining.pop(rank))
        self._epochs.lost = sorted({*self._epochs.lost, *ranks})
        self._epochs.awaited = None
        if ranks:
            self.dismiss(world, ranks)

    def dismiss(self, world: World, ranks: Sequence[int]) -> None:
        """Dismiss the processes that are waiting to join, because the other ranks have finished."""
        known = self._reports.read(world)
        self._epochs.publish(world, self._epochs.lost, known, dismissed=ranks)
        self._epochs.awaited = None
