"""Decide which losses of ranks an attempt survives, and let the remaining ranks continue.

With `--on-loss shrink`, an attempt may survive the loss of a rank that is killed by a signal or
lost with its node. Every other rank must hold all the data that it needs to continue. The remaining
ranks are published in the job's store as an epoch. Each rank then reports once it is ready to
continue training. If an attempt cannot survive a loss, the loss is handled as an ordinary failure,
and one line gives the reason.

[Note: one world] Only the launcher that hosts the store publishes epochs, and a world begins only
once all ranks of an epoch have met in that store. So ranks that are cut off from the store never
begin another world. They cannot finish a step of the former world either, because its barrier needs
all of its ranks. With failover, a host cannot know whether it has been cut off and replaced. So
with failover, the loss of a node is an ordinary failure.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic_ns

from echelon.errors import LaunchError
from echelon.launcher.control import messages as m
from echelon.launcher.coordinator import decide
from echelon.launcher.coordinator.meeting import MeetingPlace
from echelon.launcher.coordinator.world import World
from echelon.launcher.job.report import Report
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.node.standings import of_row
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

LOST = -1001  # exit code of a rank whose node was lost; no process can have it
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Losses:
    """The losses of the current attempt.

    Args:
        report: the job's report, to which each survived loss is added.
        say: a function that prints a line.
        note: a function that is called with an attempt and the line about how it continued.
    """

    def __init__(
        self,
        options: Options,
        directory: RunDirectory,
        meeting: MeetingPlace,
        report: Report,
        say: Callable[[str], None],
        note: Callable[[int, str], None] = lambda _attempt, _line: None,
    ) -> None:
        self._note_line = note
        self._is_on = options.on_loss == SHRINK
        self._min_ranks = options.min_ranks
        self._own_node = options.node_name
        self._may_move = options.conf.failover  # the store, to another node
        self._directory = directory
        self._meeting = meeting
        self._report = report
        self._say = say
        self._remote: dict[int, Standing] = {}  # of ranks on other nodes
        self._begin(-1)

    def _begin(self, attempt: int) -> None:
        self._attempt = attempt
        self._lost: list[int] = []
        self._left: list[int] = []  # ranks that ended by themselves, before their last step
        self._number = 0  # of the newest epoch
        self._awaited: Epoch | None = None  # an epoch whose ranks have not all reported
        self._causes: dict[int, str] = {}  # of ranks that were ended because they hang
        self._first_lost_ns = 0  # when the first rank was lost since the last complete epoch
        self._remote.clear()

    def take_standings(self, world: World, event: m.Standings) -> None:
        """Store a node's report about its ranks."""
        self._follow(world)
        self._remote.update(of_row(row) for row in event.ranks)

    def _follow(self, world: World) -> None:
        if world.number != self._attempt:
            self._begin(world.number)

    def why_not_without(self, world: World, ranks: Sequence[int]) -> str:
        """Return why the attempt could not continue without some running ranks; "" if it could."""
        if not self._is_on:
            return "--on-loss shrink is not given"
        self._follow(world)
        gone = [rank for rank in ranks if rank in world.ended]
        if gone or world.attempt.phase is not decide.Phase.RUNNING:
            return "ranks have ended by themselves"
        ended = dict.fromkeys(ranks, -int(signal.SIGKILL))
        return self._why_not(world, ended, self._standings(world))

    def note_hang(self, world: World, rank: int, cause: str) -> None:
        """Record why a rank has been ended, before its loss is handled."""
        self._follow(world)
        self._causes[rank] = cause

    def takes(self, world: World, ended: Mapping[int, int]) -> bool:
        """Return whether the attempt continues without some ranks. If it does, publish an epoch.

        Args:
            ended: the exit codes of ranks that ended at the same time, as in `subprocess`, or LOST.
        """
        is_running = world.attempt.phase is decide.Phase.RUNNING
        if not self._is_on or not is_running:
            return False
        self._follow(world)
        if any(code >= 0 or -code in _STOPS for code in ended.values()):
            self._note_left(world, [rank for rank, code in ended.items() if code == 0])
            return False
        known = self._standings(world)
        lost = [*self._lost, *ended]
        why_not = self._why_not(world, ended, known) or self._publish(world, lost, known)
        who = named(ended)
        if why_not:
            self._say(f"cannot continue without {who}: {why_not}")
            return False
        verb = "is" if len(ended) == 1 else "are"
        left = named(self._awaited.roster if self._awaited else ())
        self._say(f"{who} {verb} lost; continuing with {left}")
        return True

    def _note_left(self, world: World, ranks: Sequence[int]) -> None:
        """Publish that ranks ended on their own, so that other ranks do not wait for another epoch.

        Only waiting ranks are affected. The other ranks may be ending too, after a requested stop.
        """
        known = self._standings(world)
        early = [one for one in ranks if one in known and known[one].state is not State.DONE]
        living = [one for one in range(world.size) if one not in world.ended]
        if not early or not living:
            return
        self._left += early
        if len(self._left) == len(early):  # the first
            self._publish(world, self._lost, known)
            self._awaited = None

    def look(self, world: World) -> int | None:
        """Report once all ranks of the newest epoch are ready to continue training.

        A rank may finish its training without noticing a loss. The other ranks would then wait for
        it indefinitely, so an epoch that lists this rank as done is published.

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
        found = dict(self._remote)
        for rank in world.nodes.get(self._own_node, ()):
            standing = read_standing(self._directory.rank_dir(rank, world.number))
            if standing is not None:
                found[rank] = standing
        return found

    def _why_not(
        self, world: World, ended: Mapping[int, int], known: Mapping[int, Standing]
    ) -> str:
        """Return why the attempt cannot continue without some ranks, or "" if it can."""
        died = self._meeting.how_it_died()
        if died:
            return f"the job's store {died}"
        living = [one for one in range(world.size) if one not in {*world.ended, *ended}]
        if self._may_move and LOST in ended.values():
            return "with failover=true, the loss of a node ends the attempt"
        if self._left:
            return f"rank {self._left[0]} has left before its last step"
        bare = [one for one in (*ended, *living) if one not in known]
        if bare:
            return f"rank {bare[0]} is not in resilient.run (or cannot write to its folder)"
        done = [one for one, standing in known.items() if standing.state is State.DONE]
        if done:  # its groups are those of the world that is lost
            return f"rank {done[0]} has finished its steps already"
        if not living:
            return "no rank would be left"
        if len(living) < self._min_ranks:
            left = "1 rank is" if len(living) == 1 else f"{len(living)} ranks are"
            return f"{left} left, below --min-ranks {self._min_ranks}"
        return ""

    def _publish(self, world: World, lost: list[int], known: Mapping[int, Standing]) -> str:
        """Publish the remaining ranks; return "", or the reason if they cannot be published."""
        done = [one for one, standing in known.items() if standing.state is State.DONE]
        gone = {*world.ended, *done}
        epoch = Epoch(
            number=self._number + 1,
            roster=tuple(one for one in range(world.size) if one not in gone),
            lost=tuple(sorted(lost)),
            done=tuple(sorted(done)),
            left=tuple(sorted(self._left)),
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
        for rank in lost:
            world.published.setdefault(rank, epoch.number)
        return ""

    @staticmethod
    def _last_ready_ns(ready: Sequence[Standing]) -> int:
        return max((one.ready_mono_ns for one in ready), default=0)

    def _note(self, world: World, epoch: Epoch, ready: Sequence[Standing]) -> None:
        seconds = max(0.0, (self._last_ready_ns(ready) - self._first_lost_ns) / 1e9)
        step = max((one.step for one in ready), default=0)
        repeats = max((one.repeats for one in ready), default=0)
        steps_lost = max(0, repeats - 1)
        since_ns = min((one.ready_mono_ns for one in ready), default=0)
        there = {
            rank: one.ready_there_ns for rank, one in self._remote.items() if one.ready_there_ns
        }
        world.note_continued(epoch.number, epoch.lost, since_ns, there)
        causes = {rank: self._causes.pop(rank) for rank in epoch.lost if rank in self._causes}
        self._report.continuations.append(
            {
                "attempt": world.number,
                "epoch": epoch.number,
                "lost_ranks": list(epoch.lost),
                "ended_for": {str(rank): cause for rank, cause in causes.items()},
                "num_ranks": len(epoch.roster),
                "step": step,
                "repeated": repeats > 0,
                "steps_lost": steps_lost,
                "seconds": round(seconds, 3),
            }
        )
        what = f"step {step} repeated" if repeats else f"no step repeated, {step} is next"
        if steps_lost:
            what = f"steps {step} to {step + steps_lost} repeated"
        hung = ", ".join(f"rank {rank} ({cause})" for rank, cause in causes.items())
        without = f" without {hung}, with" if hung else " with"
        line = (
            f"continued{without} {len(epoch.roster)} of {world.size} ranks in {seconds:.2f} s: "
            f"{what}, {steps_lost} steps lost"
        )
        self._say(line)
        self._note_line(world.number, line)


def named(ranks: Iterable[int]) -> str:
    """Format rank numbers as "rank 1, 2"."""
    return f"rank {', '.join(map(str, ranks))}"
