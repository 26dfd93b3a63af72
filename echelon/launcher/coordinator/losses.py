"""Ranks that an attempt continues without: which losses it survives, and how.

With `--on-loss shrink`, a rank that is killed by a signal does not end its attempt if every other
rank holds what it needs to continue. The remaining ranks are then published in the job's store, as
an epoch, and each of them reports in its folder once it is ready to continue training. A loss that
cannot be survived is an ordinary failure, and one line gives the reason.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns

from echelon.errors import LaunchError
from echelon.launcher.coordinator import decide
from echelon.launcher.coordinator.meeting import MeetingPlace
from echelon.launcher.coordinator.world import World
from echelon.launcher.job.report import Report
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.options.options import Options
from echelon.recorder.continuation import (
    SHRINK,
    Epoch,
    Standing,
    State,
    epoch_key,
    meeting_key,
    read_standing,
)

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Losses:
    """The losses of the present attempt.

    Args:
        report: receives how each loss was survived.
        say: prints a line.
    """

    def __init__(
        self,
        options: Options,
        directory: RunDirectory,
        meeting: MeetingPlace,
        report: Report,
        say: Callable[[str], None],
    ) -> None:
        self._is_on = options.on_loss == SHRINK
        self._min_ranks = options.min_ranks
        self._directory = directory
        self._meeting = meeting
        self._report = report
        self._say = say
        self._attempt = -1
        self._lost: list[int] = []
        self._number = 0  # of the newest epoch
        self._awaited: Epoch | None = None  # an epoch whose ranks have not all reported
        self._first_lost_ns = 0  # when the first rank was lost since the last complete epoch

    def takes(self, world: World, rank: int, code: int) -> bool:
        """Return whether the attempt continues without a rank that ended; if so, publish that.

        Args:
            code: the exit code of the rank's process, as in `subprocess`.
        """
        is_running = world.attempt.phase is decide.Phase.RUNNING
        if not self._is_on or code >= 0 or -code in _STOPS or not is_running:
            return False
        if world.number != self._attempt:
            self._attempt, self._lost, self._number, self._awaited = world.number, [], 0, None
        known = self._standings(world)
        lost = [*self._lost, rank]
        why_not = self._why_not(world, rank, known) or self._publish(world, lost, known)
        if why_not:
            self._say(f"cannot continue without rank {rank}: {why_not}")
            return False
        shown = ", ".join(map(str, self._awaited.roster if self._awaited else ()))
        self._say(f"rank {rank} is lost; continuing with rank {shown}")
        return True

    def look(self, world: World) -> int | None:
        """Report once all ranks of the newest epoch are ready to continue training.

        A rank may have passed the last barrier when another one died, and finish its steps without
        noticing. The others, which fail in that barrier, wait for it in vain: an epoch that names
        it as done ends their wait with an error.

        Returns:
            The first lost rank whose loss turns out to be a failure; None if there is none.
        """
        epoch = self._awaited
        if epoch is None or world.number != self._attempt:
            return None
        known = self._standings(world)
        standings = [known[rank] for rank in epoch.roster if rank in known]
        if all(one.epoch >= epoch.number for one in standings):
            self._awaited = None
            self._note(world, epoch, standings)
        elif any(one.state is State.DONE and one.epoch < epoch.number for one in standings):
            self._publish(world, self._lost, known)
            self._awaited = None
            self._say("cannot continue: a rank finished its last step while another one was lost")
            return next(rank for rank in self._lost if not world.ended[rank].epoch)
        return None

    def _standings(self, world: World) -> dict[int, Standing]:
        found = {}
        for rank in range(world.size):
            standing = read_standing(self._directory.rank_dir(rank, world.number))
            if standing is not None:
                found[rank] = standing
        return found

    def _why_not(self, world: World, rank: int, known: Mapping[int, Standing]) -> str:
        """Return why the attempt cannot continue without a rank, or "" if it can."""
        died = self._meeting.how_it_died()
        if died:
            return f"the job's store {died}"
        living = [one for one in range(world.size) if one not in world.ended]
        bare = [one for one in (rank, *living) if one not in known]
        if bare:
            return f"rank {bare[0]} is not in resilient.run (or cannot write to its folder)"
        done = [one for one, standing in known.items() if standing.state is State.DONE]
        if done:  # its groups are those of the world that is lost
            return f"rank {done[0]} has finished its steps already"
        if len(living) < self._min_ranks:
            left = "1 rank is" if len(living) == 1 else f"{len(living)} ranks are"
            return f"{left} left, below --min-ranks {self._min_ranks}"
        return "" if living else "no rank is left"

    def _publish(self, world: World, lost: list[int], known: Mapping[int, Standing]) -> str:
        """Publish the remaining ranks; return why that is not possible, or ""."""
        done = [one for one, standing in known.items() if standing.state is State.DONE]
        gone = {*world.ended, *done}
        epoch = Epoch(
            number=self._number + 1,
            roster=tuple(one for one in range(world.size) if one not in gone),
            lost=tuple(sorted(lost)),
            done=tuple(sorted(done)),
        )
        try:
            self._meeting.publish(epoch_key(epoch.number), epoch.pack())
            # Ranks that are already meeting wait for the lost one.
            self._meeting.publish(f"{meeting_key(self._number)}/gate", "superseded")
        except LaunchError as err:
            return str(err)
        if self._awaited is None:
            self._first_lost_ns = monotonic_ns()
        self._lost, self._number, self._awaited = lost, epoch.number, epoch
        return ""

    @staticmethod
    def _last_ready_ns(ready: Sequence[Standing]) -> int:
        return max((one.ready_mono_ns for one in ready), default=0)

    def _note(self, world: World, epoch: Epoch, ready: Sequence[Standing]) -> None:
        seconds = max(0.0, (self._last_ready_ns(ready) - self._first_lost_ns) / 1e9)
        step = max((one.step for one in ready), default=0)
        repeats = any(one.repeats for one in ready)
        since_ns = min((one.ready_mono_ns for one in ready), default=0)
        world.note_continued(epoch.number, epoch.lost, since_ns)
        self._report.continuations.append(
            {
                "attempt": world.number,
                "epoch": epoch.number,
                "lost_ranks": list(epoch.lost),
                "num_ranks": len(epoch.roster),
                "step": step,
                "repeated": repeats,
                "steps_lost": 0,
                "seconds": round(seconds, 3),
            }
        )
        what = f"step {step} repeated" if repeats else f"no step repeated, {step} is next"
        self._say(
            f"continued with {len(epoch.roster)} of {world.size} ranks in {seconds:.2f} s: {what}, "
            "0 steps lost"
        )
