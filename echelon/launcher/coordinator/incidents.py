"""Collect one job's incidents from the nodes, start their analysis, and show the verdicts.

Only one incident is collected at a time. An incident that cannot be written to disk is reported and
dropped. Once the incident of a stall has been collected, the attempt is notified, because a stall
that persists can end the attempt.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator import decide
from echelon.launcher.coordinator.observers import (
    IncidentBegan,
    Observers,
    StallCleared,
    VerdictKnown,
)
from echelon.launcher.coordinator.restart.probing import evidence
from echelon.launcher.coordinator.world import World
from echelon.launcher.incident.collection import Collection
from echelon.launcher.incident.verdicts import Verdicts
from echelon.launcher.job.report import Incident, Report
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.output.output import Terminal

_COLLECT_S = 30.0  # a node that has not sent its dumps by then is left out
_HURRIED_S = 5.0  # the same, after the user has asked to stop
# Stall incidents to keep; each may take half a megabyte per rank. Those that ended with the loss of
# a rank are not counted: there are at most as many as ranks.
_MAX_STALLS = 16


class Incidents:
    """All incidents of a job. At most one incident is collected at a time.

    Args:
        node_name: the name of this node.
        tell: called with nodes and a command; sends the command to these nodes.
        examined: called after each stall has been examined. Its last argument is the stall's
            incident, or None if no incident was stored.
        observers: the observers to notify.
        stalls_end: whether `--on-stall` stops or kills ranks if a stall persists.
    """

    def __init__(
        self,
        directory: RunDirectory,
        report: Report,
        terminal: Terminal,
        node_name: str,
        tell: Callable[[Iterable[str], m.Command], None],
        examined: Callable[[World, decide.StallExamined, Incident | None], None],
        observers: Observers,
        *,
        stalls_end: bool,
    ) -> None:
        self._stalls_end = stalls_end
        self._observers = observers
        self._directory = directory
        self._report = report
        self._say = terminal.say
        self._node_name = node_name
        self._tell = tell
        self._examined = examined
        self._collection: Collection | None = None
        self._lost: Sequence[int] = ()  # whose loss is being collected, if the attempt continues
        self._ended_before: frozenset[int] = frozenset()  # ranks that had ended when it began
        self.verdicts = Verdicts(
            directory,
            terminal,
            self._show_others,
            lambda i: observers.tell(VerdictKnown(incident=i)),
        )

    @property
    def is_collecting(self) -> bool:
        """True if nodes are still sending their dumps."""
        return self._collection is not None

    @property
    def awaited(self) -> frozenset[str]:
        """The nodes that have not sent all their dumps yet."""
        return frozenset() if self._collection is None else frozenset(self._collection.waiting)

    def deadline_s(self) -> float:
        """Return the deadline for the nodes' dumps; infinity if no incident is being collected."""
        return float("inf") if self._collection is None else self._collection.deadline_s

    def hurry(self) -> None:
        """Bring the deadline for dumps forward, because the user has asked the job to stop."""
        if self._collection is not None:
            hurried_s = time.monotonic() + _HURRIED_S
            self._collection.deadline_s = min(self._collection.deadline_s, hurried_s)

    def note_lost(self, node: str) -> None:
        """Stop waiting for the dumps of a lost node."""
        if self._collection is not None:
            self._collection.waiting.discard(node)

    def note_harvested(self, node: str, event: m.Harvested) -> None:
        """Record that a node has sent all its dumps."""
        if self._collection is not None:
            self._collection.note_harvested(node, event)

    def note_progress(self, world: World) -> None:
        """Record that the current or most recent stall has cleared."""
        self._observers.tell(StallCleared(attempt=world.number))
        if self._collection is not None:
            self._collection.has_progressed = True
            return
        stall = self._last_stall(world)
        if stall is not None:
            stall.recovered = True
            if world.records:
                self.verdicts.withdraw(stall)
        self._say("stall cleared: ranks are making progress again")

    def note_loss(self, world: World) -> None:
        """Record that the current or most recent stall ended with the loss of a rank.

        The verdict on the stall is still shown, because it can explain the loss.
        """
        collection = self._collection
        if collection is not None and collection.kind == "stall":
            collection.has_progressed = True
            return
        stall = self._last_stall(world)
        if stall is not None:
            stall.recovered = stall.is_survived = True

    def _last_stall(self, world: World) -> Incident | None:
        """Return an attempt's most recent stall, ended or not; None if there was no stall."""
        stalls = (one for one in reversed(self._report.incidents) if one.kind == "stall")
        return next((one for one in stalls if one.attempt == world.number), None)

    def covers_stall(self) -> bool:
        """Return whether a new stall belongs to the incident that is being collected.

        If nodes recover one after another, a new stall is detected for the nodes that have not
        recovered yet.
        """
        collection = self._collection
        if collection is None or collection.kind != "stall" or collection.is_early:
            return False
        collection.has_progressed = False
        return True

    def _has_running_ranks(self, action: decide.CollectIncident) -> bool:
        """Return whether ranks might still be running during the incident's analysis."""
        if action.kind == "stall":
            return action.is_early or not self._stalls_end
        return bool(action.lost)

    def begin(
        self,
        world: World,
        action: decide.CollectIncident,
        set_aside: Mapping[int, int] | None = None,
    ) -> None:
        """Begin an incident: request dumps from all nodes.

        Args:
            set_aside: the lost ranks whose folders will be renamed, as returned by
                `Replacements.set_aside`.
        """
        self._observers.tell(
            IncidentBegan(
                attempt=world.number,
                kind=action.kind,
                reason=action.reason,
                is_early=action.is_early,
            )
        )
        stalls = sum(one.kind == "stall" and not one.is_survived for one in self._report.incidents)
        if action.kind == "stall" and stalls >= _MAX_STALLS:
            self._say(f"stall: {action.reason}; not collected because {stalls} are already kept")
            event = decide.StallExamined(lasts=True)
            self._note_examined(world, event, None, is_early=action.is_early)
            return
        former = self._early_look(world, action)
        what = "early look" if action.is_early else action.kind
        if action.lost:
            what = "loss"  # the job has not failed
        again = "" if former is None else " again"
        self._say(f"{what}: {action.reason}; collecting diagnostics from all ranks{again}")
        self._lost, self._ended_before = action.lost, frozenset(world.ended)
        self.verdicts.expect(gives_way=self._has_running_ranks(action))
        try:
            self._collection = Collection(
                self._directory,
                kind=action.kind,
                reason=action.reason,
                attempt=world.number,
                nodes=world.members,
                deadline_s=time.monotonic() + _COLLECT_S,
                is_early=action.is_early,
                is_survived=bool(action.lost),
                lost_earlier=world.lost_earlier(action.lost, is_stall=action.kind == "stall"),
                set_aside=set_aside or {},
                continues=former,
            )
        except OSError as err:
            self.verdicts.expect_none()
            self._say_not_kept(err)
            if action.kind == "stall":
                event = decide.StallExamined(lasts=True)
                self._note_examined(world, event, None, is_early=action.is_early)
            return
        collect = m.Collect(
            incident=self._collection.number, kind=action.kind, reason=action.reason
        )
        self._tell(list(self._collection.waiting), collect)

    def _early_look(self, world: World, action: decide.CollectIncident) -> Incident | None:
        """Return the incident that an early look at the same stall created, or None."""
        last = self._report.incidents[-1] if self._report.incidents else None
        is_stall = action.kind == "stall" and not action.is_early
        if last is None or not (is_stall and last.is_early and last.attempt == world.number):
            return None
        return None if last.recovered else last

    def _add(self, incident: Incident, former: Incident | None) -> None:
        """Add an incident to the report, or replace `former` if the incident continues it."""
        if former is None:
            self._report.incidents.append(incident)
            return
        self.verdicts.drop(former)
        self._report.incidents[self._report.incidents.index(former)] = incident

    def keep(self, world: World | None, part: m.DumpPart) -> None:
        """Store one part of a dump, as received from a node."""
        if self._collection is None or (world is not None and world.is_new(part.rank)):
            return  # there is none, or the rank has yet to join
        try:
            self._collection.keep(part)
        except OSError as err:
            self._give_up(world, err)

    def is_complete(self, now_s: float) -> bool:
        """Return whether the current incident has all its dumps or its deadline has passed."""
        return self._collection is not None and self._collection.is_complete(now_s)

    def finish(self, world: World) -> None:
        """Complete the current incident and start its analysis."""
        collection = self._collection
        assert collection is not None
        late = set(collection.waiting)
        ended = world.ended
        ranks_lost = world.ranks_lost_first(collection.lost_earlier.ranks)
        if collection.is_survived:  # ranks that ended during the collection have their own incident
            ended = {rank: one for rank, one in ended.items() if rank in self._ended_before}
            ranks_lost = sorted(rank for rank in self._lost if ended[rank].code is None)
        try:
            incident = collection.finish(
                self._report.job_id,
                world.size,
                lambda rank: world.why_absent(rank, late),
                ranks_lost,
                [one for one in ended.values() if not one.is_new],
                evidence(self._report.decisions),
            )
        except OSError as err:
            self._give_up(world, err)
            return
        self._collection = None
        self._add(incident, collection.continues)
        is_stall = incident.kind == "stall"
        incident.recovered = collection.is_survived or (is_stall and collection.has_progressed)
        incident.ended = ended
        is_due = is_stall or collection.is_survived
        self.verdicts.begin(incident, world.members, is_due=is_due)
        # Examining ranks that do not record makes them active, which is not progress.
        is_withdrawn = is_stall and incident.recovered and world.records
        if is_withdrawn:
            self.verdicts.withdraw(incident)
            self._say("stall cleared: ranks made progress while it was being examined")
        if is_stall:
            event = decide.StallExamined(lasts=not is_withdrawn)
            self._note_examined(world, event, incident, is_early=collection.is_early)

    def _note_examined(
        self,
        world: World,
        event: decide.StallExamined,
        incident: Incident | None,
        *,
        is_early: bool,
    ) -> None:
        """Report that a stall has been examined, unless the incident is an early one.

        An early incident never ends an attempt.
        """
        if not is_early:
            self._examined(world, event, incident)

    def _give_up(self, world: World | None, err: OSError) -> None:
        """Drop an incident that cannot be written to disk."""
        self.verdicts.expect_none()
        collection = self._collection
        if world is not None and collection is not None and collection.kind == "stall":
            lasts = not (collection.has_progressed and world.records)
            event = decide.StallExamined(lasts=lasts)
            self._note_examined(world, event, None, is_early=collection.is_early)
        if collection is not None:
            with contextlib.suppress(OSError):
                collection.close()
        self._collection = None
        self._say_not_kept(err)

    def _say_not_kept(self, err: OSError) -> None:
        where = self._directory.shown / "dump"
        self._say(f"could not save the incident to {where}: {err.strerror or err}")

    def _show_others(self, nodes: Sequence[str], text: str) -> None:
        self._tell([node for node in nodes if node != self._node_name], m.Show(text=text))
