"""Admit processes that replace lost ranks, by publishing epochs in which these processes join.

`Replacements` starts these processes. Once admitted, they are ranks like any other, but they hold
no state until they have joined. A rank may finish without having noticed an admission. All
admissions are then withdrawn, and the processes are dismissed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from echelon.launcher.coordinator.loss.epochs import PublishedEpochs
from echelon.launcher.coordinator.loss.reports import Known, Reports, are_finishing, is_joining
from echelon.launcher.coordinator.world import World
from echelon.launcher.job.report import Ended
from echelon.recorder.continuation import Epoch


class Admissions:
    """The ranks of the current attempt that are waiting to be admitted, or are joining.

    Args:
        epochs: the epochs of the attempt.
        reports: the reports of the attempt's ranks.
    """

    def __init__(self, epochs: PublishedEpochs, reports: Reports) -> None:
        self._epochs = epochs
        self._reports = reports
        self._joining: dict[int, tuple[Ended, int]] = {}  # admitted; see `World.admit`

    def clear(self) -> None:
        """Forget all admissions, because another attempt begins."""
        self._joining.clear()

    def begin(self, rank: int, life: int) -> int:
        """Prepare for a new process that replaces a rank; return the newest epoch's number.

        Args:
            life: how many processes held the rank before.
        """
        self._reports.forget(rank)
        self._epochs.lives[rank] = life
        return self._epochs.number

    def waiting(self, world: World) -> list[int]:
        """Return the ranks waiting to be admitted; none while an epoch or the job is ending."""
        known = self._reports.read(world)
        if self._epochs.awaited is not None or are_finishing(known):
            return []
        return [rank for rank in world.ended if is_joining(known, rank)]

    def is_waiting(self, world: World, rank: int) -> bool:
        """Return whether a rank's process is waiting to join."""
        return is_joining(self._reports.read(world), rank)

    def admit(self, world: World, ranks: Sequence[int]) -> bool:
        """Publish an epoch in which ranks join; return whether the epoch was published."""
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
        """Return whether an admitted rank has joined."""
        return self.is_admitted(rank) and rank not in self._joining

    def delayed_by(self, world: World) -> list[int]:
        """Return the admitted ranks that have not joined, once all others are waiting for them.

        A rank that has continued counts as waiting, because it can send data that fits into a
        buffer before the joining rank is ready.
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
        """Return the epoch whose admissions a loss withdraws; 0 if ranks must notice the loss.

        That is the epoch in which the lost ranks were joining, if no other rank has been lost since
        then.
        """
        epoch = self._epochs.awaited
        if epoch is None or any(r not in self._joining or not is_joining(known, r) for r in ended):
            return 0
        return epoch.number if epoch.joins else epoch.withdraws

    def note_lost(self, ranks: Iterable[int]) -> None:
        """Record that ranks were lost, whether they had joined or not."""
        for rank in ranks:
            self._joining.pop(rank, None)

    def note_joined(self, epoch: Epoch) -> list[int]:
        """Return the ranks that have joined, now that all ranks of an epoch have reported."""
        joined = sorted(rank for rank in self._joining if rank in epoch.roster)
        for rank in joined:
            del self._joining[rank]
        return joined

    def take_back(self, world: World) -> None:
        """Withdraw all admissions, because a rank has finished without having noticed them."""
        ranks = sorted(self._joining)
        for rank in ranks:
            world.take_back(rank, *self._joining.pop(rank))
        self._epochs.lost = sorted({*self._epochs.lost, *ranks})
        self._epochs.awaited = None
        if ranks:
            self.dismiss(world, ranks)

    def dismiss(self, world: World, ranks: Sequence[int]) -> None:
        """Announce that ranks waiting to join must exit, because the other ranks have finished."""
        known = self._reports.read(world)
        self._epochs.publish(world, self._epochs.lost, known, dismissed=ranks)
        self._epochs.awaited = None
