"""Publish the epochs of the current attempt in the job's store.

An epoch is a published list of the ranks that continue together; see `continuation.Epoch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns

from echelon.errors import LaunchError
from echelon.launcher.coordinator.gathering.meeting import MeetingPlace
from echelon.launcher.coordinator.loss.reports import Known
from echelon.launcher.coordinator.world import World
from echelon.recorder.continuation import Epoch, State, epoch_key, meeting_key


class PublishedEpochs:
    """The epochs of the current attempt.

    Attributes:
        number: the number of the newest epoch; 0 if none was published.
        awaited: the newest epoch, until all of its ranks have entered it; then None.
        lost: the ranks that count as lost in the newest epoch.
        left: the ranks that exited on their own before their last step.
        lives: for each replaced rank, how many earlier processes held the rank.
        first_lost_ns: the monotonic time, in ns, at which the first loss since the last complete
            epoch was handled.
    """

    def __init__(self, meeting: MeetingPlace) -> None:
        self._meeting = meeting
        self.clear()

    def clear(self) -> None:
        """Forget all epochs, because another attempt begins."""
        self.number = 0
        self.awaited: Epoch | None = None
        self.lost: list[int] = []
        self.left: list[int] = []
        self.lives: dict[int, int] = {}
        self.first_lost_ns = 0

    def publish(
        self,
        world: World,
        lost: list[int],
        known: Known,
        *,
        joins: Sequence[int] = (),
        dismissed: Sequence[int] = (),
        withdraws: int = 0,
    ) -> str:
        """Publish a new epoch with the remaining ranks; return "" on success, else what failed.

        Args:
            lost: all ranks that the attempt has lost so far.
            known: what the ranks have reported.
            joins: the ranks that join in this epoch.
            dismissed: the ranks whose processes must exit instead of joining.
            withdraws: the earlier epoch whose admissions are cancelled; 0 if there is none.
        """
        done = [one for one, standing in known.items() if standing.state is State.DONE]
        gone = {*world.ended, *done}
        roster = tuple(one for one in range(world.size) if one not in gone)
        epoch = Epoch(
            number=self.number + 1,
            roster=roster,
            lost=tuple(sorted(lost)),
            done=tuple(sorted(done)),
            left=tuple(sorted(self.left)),
            joins=tuple(sorted(joins)),
            dismissed=tuple(sorted(dismissed)),
            withdraws=withdraws,
            lives=tuple((one, self.lives[one]) for one in roster if one in self.lives),
        )
        try:
            self._meeting.publish(epoch_key(epoch.number), epoch.pack())
            # Ranks that are already meeting wait for the lost one.
            self._meeting.publish(f"{meeting_key(self.number)}/gate", "superseded")
        except LaunchError as err:
            return str(err)
        if self.awaited is None or self.awaited.joins:
            self.first_lost_ns = monotonic_ns()
        self.lost, self.number, self.awaited = lost, epoch.number, epoch
        for rank in lost:
            world.published.setdefault(rank, epoch.number)
        return ""
