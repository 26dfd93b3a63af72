"""Decide when a persistent stall ends the attempt under `--on-stall restart` or `replace`.

The decision waits for the verdict. If the verdict's cause might be temporary, for example a slow
rank or a broken link, the ranks get a grace period to make progress. If the job stalls again
without having made progress, the next grace period is longer. If the culprit had begun to write or
read a checkpoint before the other ranks began to wait, the time that passed in between is deducted
from the grace period.

Under `replace`, hung ranks are killed if the attempt can continue without them (`HungRanks`).
"""

from __future__ import annotations

from collections.abc import Callable

from echelon.launcher.coordinator.decide import Phase, StallExamined
from echelon.launcher.coordinator.loss.hung import OWN_HANGS, HungRanks, computing
from echelon.launcher.coordinator.policy.failure import UNKNOWN, without
from echelon.launcher.coordinator.policy.judging import failure_of
from echelon.launcher.coordinator.policy.table import PATIENCE, may_pass
from echelon.launcher.coordinator.world import World
from echelon.launcher.job.report import Incident
from echelon.launcher.options.options import Options

VERDICT_S = 5.0  # how long a stall waits for its verdict
_MAX_DOUBLINGS = 4
_CANNOT_SAVE = (*OWN_HANGS, "storage_stall")  # so that the culprits need no grace period to save


class Stalls:
    """A job's current stall, from its examination until it clears or ends the attempt.

    Args:
        is_open: returns whether an incident is still waiting for its verdict.
        end: ends the attempt because of a stall.
        say: prints a line for the user.
        hung: kills the culprits of a stall under `--on-stall replace`.
        look: processes the latest reports from the ranks; can call `note_progress`.
        begin_again: marks the current stall as ended.
    """

    def __init__(
        self,
        options: Options,
        is_open: Callable[[Incident], bool],
        end: Callable[[World, StallExamined], None],
        say: Callable[[str], None],
        hung: HungRanks,
        *,
        look: Callable[[World], None],
        begin_again: Callable[[World], None],
    ) -> None:
        self._look = look
        self._begin_again = begin_again
        restarts, is_smart = options.on_stall == "restart", options.restart_policy == "smart"
        self._replaces = options.on_stall == "replace"
        self._has_patience = is_smart
        self._asks = self._replaces or (restarts and is_smart)
        self._hung = hung
        self._stall_timeout_s = options.stall_timeout_s
        self._least_patience_s = PATIENCE * options.stall_timeout_s
        self._num_in_vain = 0  # stalls that were given time, since the last progress
        self._is_open = is_open
        self._end = end
        self._say = say
        self._world: World | None = None
        self._incident: Incident | None = None  # the incident whose verdict is awaited
        self._until_s = float("inf")
        self._is_late = False  # whether the verdict is late; until it arrives, the stall may pass
        self._culprits: tuple[int, ...] = ()  # the ranks that hang, according to the verdict

    def on_examined(
        self, world: World, event: StallExamined, incident: Incident | None, now_s: float
    ) -> None:
        """Handle a stall whose incident has been collected.

        Args:
            incident: the stall's incident; None if it could not be saved.
        """
        if not (event.lasts and self._asks):
            self._end(world, event)
            return
        if self._replaces and incident is None:
            self._say("no rank is ended: the stall's incident was not kept")
        self._world, self._incident, self._is_late = world, incident, False
        self._until_s = now_s + (self._patience_s if incident is None else VERDICT_S)
        self.step(now_s)

    def clear(self) -> None:
        """Forget the stall, because the attempt in which it occurred has ended."""
        self._forget()
        self._hung.clear()

    def _forget(self) -> None:
        self._world = self._incident = None
        self._until_s = float("inf")
        self._is_late = False
        self._culprits = ()

    def note_loss(self) -> None:
        """Forget the stall after a rank was lost, because the remaining ranks continue.

        If some of the remaining ranks still hang, a new stall will be detected.
        """
        self._forget()

    def note_progress(self) -> None:
        """Forget the stall, now that the ranks are making progress again."""
        self._forget()
        self._num_in_vain = 0

    def deadline_s(self) -> float:
        """Return the time by which `step` must be called."""
        return min(self._until_s, self._hung.deadline_s())

    def step(self, now_s: float) -> None:
        """End the attempt, or kill its hung ranks, once the verdict or a timeout calls for it."""
        undead = self._hung.undead(now_s)
        if undead is not None and undead[1].attempt.phase is Phase.RUNNING:
            line, world = undead
            self._say(line)
            self._end(world, StallExamined(lasts=True))
        self._step_stall(now_s)

    def _step_stall(self, now_s: float) -> None:
        world, incident = self._world, self._incident
        if world is None:
            return
        if incident is not None and not self._is_open(incident):
            self._look(world)  # ranks may have made progress since the last look
            if self._world is None:
                return
            self._incident = None
            self._judge(world, incident, now_s)
        elif incident is not None and now_s >= self._until_s and not self._is_late:
            self._is_late = True
            self._until_s = now_s + self._patience_s
        if now_s >= self._until_s:
            hung = self._culprits
            self._forget()
            self._end(world, StallExamined(lasts=True, hung=hung))

    def _judge(self, world: World, incident: Incident, now_s: float) -> None:
        if world.attempt.phase is not Phase.RUNNING:  # a failure or the user ends it already
            self._forget()
            return
        failure = failure_of(world, incident)
        cause, passes = failure.cause, may_pass(failure.cause)
        if cause in _CANNOT_SAVE and failure.is_certain:
            self._culprits = failure.culprit_ranks
        if self._replaces:
            gone = [rank for rank in failure.culprit_ranks if world.is_survived(rank)]
            failure = without(failure, gone)
            if gone and not failure.culprit_ranks:
                self._forget()
                self._begin_again(world)
                return
            why_not = self._hung.end(world, failure, incident, now_s)
            if not why_not:
                self._forget()
                return
            self._say(f"no rank is ended: {why_not}")
            passes = passes or bool(computing(failure))
        if not (self._has_patience and passes):
            self._until_s = now_s
            return
        if not self._is_late:
            saved_before_s = max(0.0, failure.saving_s - self._stall_timeout_s)
            self._until_s = now_s + max(0.0, self._patience_s - saved_before_s)
        self._num_in_vain += 1
        if self._until_s <= now_s:
            self._say(f"{cause}: the checkpoint has taken {failure.saving_s:.0f} s already")
            return
        what = "an unexplained stall" if cause == UNKNOWN else cause
        self._say(f"{what} may pass: ranks have {self._until_s - now_s:.0f} s to make progress")

    @property
    def _patience_s(self) -> float:
        """The grace period in seconds; it doubles with each stall and is reset by progress."""
        return self._least_patience_s * float(2 ** min(self._num_in_vain, _MAX_DOUBLINGS))
