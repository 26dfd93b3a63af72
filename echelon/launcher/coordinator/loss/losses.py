"""Decide which losses of ranks an attempt survives, and let the remaining ranks continue.

Under `--on-loss shrink` and `--on-loss replace`, an attempt can survive the loss of a rank that was
killed by a signal or lost with its node, provided that the remaining ranks hold all the state that
they need to continue. The remaining ranks are published in the job's store as an epoch, and each of
them reports once it is ready to continue training. A loss that the attempt cannot survive is
handled as an ordinary failure, and the reason is printed.

[Note: one world] Only the launcher that hosts the store publishes epochs, and a world begins only
once all ranks of an epoch have completed the rendezvous in that store. Ranks that are cut off from
the store therefore never begin another world. Nor can they finish a step of the former world,
because the barrier of that world needs all of its ranks. With failover, a host cannot determine
whether it has been cut off and replaced, so the loss of a node is treated as an ordinary failure.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic_ns

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator import decide
from echelon.launcher.coordinator.gathering.meeting import MeetingPlace
from echelon.launcher.coordinator.loss.admissions import Admissions
from echelon.launcher.coordinator.loss.epochs import PublishedEpochs
from echelon.launcher.coordinator.loss.reports import Known, Reports, are_finishing, is_joining
from echelon.launcher.coordinator.world import World
from echelon.launcher.job.report import Report
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.options.options import Options
from echelon.recorder.continuation import REPLACE, SHRINK, Epoch, Standing, State

LOST = -1001  # exit code of a rank whose node was lost; no process can have it
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Losses:
    """The losses of ranks in the current attempt.

    Args:
        report: the job's report, to which each loss that an attempt survives is added.
        say: prints a line for the user.
        note: called with the attempt's number and the printed line whenever an attempt continues
            after a loss.

    Attributes:
        admissions: the admissions of processes that replace lost ranks.
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
        self._is_on = options.on_loss in (SHRINK, REPLACE)
        self._min_ranks = options.min_ranks
        self._may_move = options.conf.failover  # the store, to another node
        self._meeting = meeting
        self._report = report
        self._say = say
        self._reports = Reports(directory, options.node_name, meeting)
        self._epochs = PublishedEpochs(meeting)
        self.admissions = Admissions(self._epochs, self._reports)
        self._begin(-1)

    def _begin(self, attempt: int) -> None:
        self._attempt = attempt
        self._causes: dict[int, str] = {}  # of ranks that were ended because they hang
        self._lost_ns: dict[int, int] = {}  # when each rank was lost, or started if it is new
        self._new = set[int]()  # ranks of late nodes that have yet to join
        self._reports.clear()
        self._epochs.clear()
        self.admissions.clear()

    def take_standings(self, world: World, event: m.Standings) -> None:
        """Store a node's report about its ranks."""
        self._follow(world)
        self._reports.take(event.ranks)

    def _follow(self, world: World) -> None:
        if world.number != self._attempt:
            self._begin(world.number)

    def why_not_without(self, world: World, ranks: Sequence[int]) -> str:
        """Return why the attempt could not continue without the given ranks; "" if it could."""
        if not self._is_on:
            return "neither --on-loss shrink nor --on-loss replace is given"
        self._follow(world)
        gone = [rank for rank in ranks if rank in world.ended]
        if gone or world.attempt.phase is not decide.Phase.RUNNING:
            return "ranks have ended by themselves"
        ended = dict.fromkeys(ranks, -int(signal.SIGKILL))
        return self._why_not(world, ended, self._read(world, ended))

    def may_grow(self, world: World) -> bool:
        """Return whether further ranks could join now.

        All running ranks must be in a step of `resilient.run`, because new ranks join at the end of
        a step.
        """
        self._follow(world)
        known = self._reports.read(world)
        living = [rank for rank in range(world.size) if rank not in world.ended]
        is_quiet = self._epochs.awaited is None and not self._epochs.left
        return is_quiet and all(
            rank in known and known[rank].state is State.PROTECTED for rank in living
        )

    def note_grown(self, ranks: Iterable[int]) -> None:
        """Record that processes for new ranks were started."""
        self._new.update(ranks)
        self._lost_ns |= dict.fromkeys(ranks, monotonic_ns())

    def note_hang(self, world: World, rank: int, cause: str) -> None:
        """Record the hang that caused a rank to be killed. Call this before the loss is handled."""
        self._follow(world)
        self._causes[rank] = cause

    def takes(self, world: World, ended: Mapping[int, int]) -> bool:
        """Return whether the attempt continues without the ended ranks; if so, publish an epoch.

        Args:
            ended: the exit code (as in `subprocess`, or LOST) of each rank; these ranks ended at
                the same time.
        """
        is_running = world.attempt.phase is decide.Phase.RUNNING
        if not self._is_on or not is_running:
            return False
        self._follow(world)
        known: Known = self._reports.read(world)
        if any(_is_own_end(code) and not is_joining(known, rank) for rank, code in ended.items()):
            self._note_left(world, [rank for rank, code in ended.items() if code == 0])
            return False
        self._new.difference_update(ended)  # if they return, then as replacements
        lost, who = [*self._epochs.lost, *ended], named(ended)
        withdraws = self.admissions.withdrawn_by(ended, known)
        if withdraws and are_finishing(known):
            self.admissions.take_back(world)
            verb, them = ("is", "it") if len(ended) == 1 else ("are", "they")
            self._say(f"{who} {verb} lost before {them} joined; the other ranks have finished")
            return True
        known = self._read(world, ended)
        why_not = self._why_not(world, ended, known)
        why_not = why_not or self._epochs.publish(world, lost, known, withdraws=withdraws)
        if why_not:
            self._say(f"cannot continue without {who}: {why_not}")
            return False
        self._lost_ns |= dict.fromkeys(ended, monotonic_ns())
        self.admissions.note_lost(ended)
        verb = "is" if len(ended) == 1 else "are"
        awaited = self._epochs.awaited
        left = f"; continuing with {named(awaited.roster)}" if awaited else ""
        self._say(f"{who} {verb} lost{left}")
        return True

    def _note_left(self, world: World, ranks: Sequence[int]) -> None:
        """Announce that ranks exited before their last step, so that no rank waits for an epoch.

        Only ranks that are waiting for an epoch react to this notice. The other ranks might be
        exiting as well, e.g., after a stop request, and are not disturbed.
        """
        known = self._reports.read(world)
        early = [one for one in ranks if one in known and known[one].state is not State.DONE]
        living = [one for one in range(world.size) if one not in world.ended]
        if not early or not living:
            return
        self._epochs.left += early
        if len(self._epochs.left) == len(early):  # the first
            self._epochs.publish(world, self._epochs.lost, known)
            self._epochs.awaited = None

    def look(self, world: World) -> int | None:
        """Check whether all ranks of the newest epoch are ready; if so, print how they continue.

        A rank can finish its training without noticing a loss. The other ranks would then wait for
        this rank indefinitely, so a further epoch that lists this rank as done is published, and
        the loss becomes a failure.

        Returns:
            The first lost rank, if its loss has just become a failure; None otherwise.
        """
        epoch = self._epochs.awaited
        if epoch is None or world.number != self._attempt:
            return None
        known = self._reports.read(world)
        standings = [known[rank] for rank in epoch.roster if rank in known]
        if all(one.epoch >= epoch.number for one in standings):
            self._epochs.awaited = None
            self._note(world, epoch, standings)
        elif any(one.state is State.DONE and one.epoch < epoch.number for one in standings):
            if epoch.joins or epoch.withdraws:
                self.admissions.take_back(world)
                return None
            self._epochs.publish(world, self._epochs.lost, known)
            self._epochs.awaited = None
            self._say("cannot continue: a rank finished its last step while another one was lost")
            return next(rank for rank in self._epochs.lost if not world.ended[rank].epoch)
        return None

    def _read(self, world: World, ended: Iterable[int]) -> Known:
        """Return all ranks' reports, including those that a node has not forwarded yet.

        Missing reports are looked up in the store, but not for ranks that were lost before the
        ranks in `ended`. The report that the store has for such a rank is from its old process, not
        from the process that took its place.
        """
        gone = world.ended.keys() - {*ended} | world.published.keys()
        self._reports.ask_store(world, [one for one in range(world.size) if one not in gone])
        return self._reports.read(world)

    def _why_not(self, world: World, ended: Mapping[int, int], known: Known) -> str:
        """Return why the attempt cannot continue without the ended ranks, or "" if it can."""
        died = self._meeting.how_it_died()
        if died:
            return f"the job's store {died}"
        living = [one for one in range(world.size) if one not in {*world.ended, *ended}]
        if self._may_move and LOST in ended.values():
            return "with failover=true, the loss of a node ends the attempt"
        if self._epochs.left:
            return f"rank {self._epochs.left[0]} has left before its last step"
        bare = [one for one in (*ended, *living) if one not in known]
        if bare:
            return f"rank {bare[0]} is not in resilient.run (or cannot write to its folder)"
        done = [one for one, standing in known.items() if standing.state is State.DONE]
        if done:  # its groups are those of the world that is lost
            return f"rank {done[0]} has finished its steps already"
        if not living:
            return "no rank would be left"
        if not any(known[one].state is State.PROTECTED for one in living):
            return "no rank would be left that holds the state"
        if len(living) < self._min_ranks:
            left = "1 rank is" if len(living) == 1 else f"{len(living)} ranks are"
            return f"{left} left, below --min-ranks {self._min_ranks}"
        return ""

    @staticmethod
    def _last_ready_ns(ready: Sequence[Standing]) -> int:
        return max((one.ready_mono_ns for one in ready), default=0)

    def _note(self, world: World, epoch: Epoch, ready: Sequence[Standing]) -> None:
        seconds = max(0.0, (self._last_ready_ns(ready) - self._epochs.first_lost_ns) / 1e9)
        step = max((one.step for one in ready), default=0)
        repeats = max((one.repeats for one in ready), default=0)
        steps_lost = max(0, repeats - 1)
        since_ns = min((one.ready_mono_ns for one in ready), default=0)
        there_ns = self._reports.ready_there_ns()
        world.note_continued(epoch.number, epoch.lost, since_ns, there_ns)
        causes = {rank: self._causes.pop(rank) for rank in epoch.lost if rank in self._causes}
        joined = self.admissions.note_joined(epoch)
        if joined:
            seconds = max((monotonic_ns() - self._lost_ns[rank]) / 1e9 for rank in joined)
        self._report.continuations.append(
            {
                "attempt": world.number,
                "epoch": epoch.number,
                "lost_ranks": list(epoch.lost),
                "joined_ranks": joined,
                "ended_for": {str(rank): cause for rank, cause in causes.items()},
                "num_ranks": len(epoch.roster),
                "step": step,
                "repeated": repeats > 0,
                "steps_lost": steps_lost,
                "seconds": round(seconds, 3),
            }
        )
        if joined:
            self._say_joined(world, epoch, joined, step, seconds)
        if epoch.joins:
            return
        what = f"step {step} repeated" if repeats else f"no step repeated, {step} is next"
        if steps_lost:
            what = f"steps {step} to {step + steps_lost} repeated"
        hung = ", ".join(f"rank {rank} ({cause})" for rank, cause in causes.items())
        without = f" without {hung}, with" if hung else " with"
        line = (
            f"continued{without} {len(epoch.roster)} of {world.num_members} ranks in "
            f"{seconds:.2f} s: "
            f"{what}, {steps_lost} steps lost"
        )
        self._say(line)
        self._note_line(world.number, line)

    def _say_joined(
        self, world: World, epoch: Epoch, joined: Sequence[int], step: int, seconds: float
    ) -> None:
        """Print that replacement processes or new ranks have joined."""
        new = [rank for rank in joined if rank in self._new]
        replaced = [rank for rank in joined if rank not in self._new]
        self._new.difference_update(new)
        what = [f"{named(replaced)} replaced"] if replaced else []
        what += [f"new {named(new)} ready"] if new else []
        line = (
            f"{', '.join(what)} in {seconds:.2f} s: joined at step {step}; "
            f"{len(epoch.roster)} of {world.num_members} ranks"
        )
        self._say(line)
        self._note_line(world.number, line)


def _is_own_end(code: int) -> bool:
    """Return whether a rank exited on its own or was ended by a stop signal such as SIGTERM."""
    return code >= 0 or -code in _STOPS


def named(ranks: Iterable[int]) -> str:
    """Format rank numbers: "rank 1", "ranks 1, 2 and 3", or "a rank" if none are given."""
    names = [str(rank) for rank in ranks]
    if len(names) < 2:
        return f"rank {names[0]}" if names else "a rank"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
