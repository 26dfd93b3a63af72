"""Coordinate a job: gather the nodes, start worlds, collect incidents, and end the job.

The coordinator runs on the hosting node, in the agent's event loop. It communicates with all nodes,
including its own, only through messages. Separate classes make the decisions, and the coordinator
carries them out: `Roster` decides which nodes take part, `decide.Attempt` turns a world's events
into actions, `StallRule` detects stalls, and `Restarting` decides how long a restart waits for the
verdict.

The user's stop signal is forwarded to the ranks immediately, even while an incident is being
collected. Only the end of an attempt waits for the incident. Failures are ordered by their arrival
at the coordinator, never by timestamps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from echelon.errors import LaunchError
from echelon.launcher.control import messages as m
from echelon.launcher.control.lived import LivedTime
from echelon.launcher.coordinator import decide
from echelon.launcher.coordinator import observers as o
from echelon.launcher.coordinator.conclusion import conclude
from echelon.launcher.coordinator.decide import EndedBy
from echelon.launcher.coordinator.gathering.meeting import MeetingPlace
from echelon.launcher.coordinator.gathering.membership import Membership
from echelon.launcher.coordinator.gathering.roster import Node, Roster
from echelon.launcher.coordinator.gathering.starting import starts_of, world_of
from echelon.launcher.coordinator.gathering.waiting import why_roster_waits, why_world_waits
from echelon.launcher.coordinator.incidents import Incidents
from echelon.launcher.coordinator.loss.hung import DIES_S, HungRanks
from echelon.launcher.coordinator.loss.losses import LOST, Losses, named
from echelon.launcher.coordinator.loss.replacing import Replacements
from echelon.launcher.coordinator.observers import Observers
from echelon.launcher.coordinator.restart.probing import Probing
from echelon.launcher.coordinator.restart.restarting import Restarting
from echelon.launcher.coordinator.stalls import Stalls
from echelon.launcher.coordinator.world import World
from echelon.launcher.job.report import NOT_CONCLUDED, Incident, Report
from echelon.launcher.job.resume import POLL_S, Search
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.job.stopped import where_it_stopped
from echelon.launcher.limits.rule import DISARMED
from echelon.launcher.options.options import Options
from echelon.launcher.output.output import Terminal
from echelon.recorder.continuation import BOARD, REPLACE, lost_notice

if TYPE_CHECKING:  # gRPC only where several nodes need it
    from echelon.launcher.election.succession import Succession
    from echelon.launcher.election.takeover import Inheritance

_CLEAR_S = 8.0
_LOOK_S = 0.5
_JOIN_LOOK_S = 0.05  # the same while a process is to join
_LOOSE_S = 10.0  # from the loss of a node to its being noticed, on a busy host
_STEP_S = 2.0  # between two looks; a longer gap counts as this process's own standstill
_VERDICT_S = 120.0  # for the analyses at the end of the job
_PROBES_S = 2.0  # probes begin so long before a pause ends, because they take time, too
_EXPLAIN_S = 15.0  # a state that lasts longer prints what it waits for

Send = Callable[[str, m.Command], None]


class Coordinator:
    """The coordinator of a job.

    Call `take` for each message. Call `step` after handling messages and whenever `deadline_s`
    passes.

    Args:
        succession: manages this host's lease and mandate (the job's replicated state); None for a
            job without failover.
        observers: the objects that report on the job but make no decisions.
    """

    def __init__(
        self,
        options: Options,
        directory: RunDirectory,
        report: Report,
        meeting: MeetingPlace,
        send: Send,
        terminal: Terminal,
        succession: Succession | None = None,
        observers: Observers | None = None,
    ) -> None:
        self._succession = succession
        self._observers = observers or Observers(terminal.say)
        self._options = options
        self._report = report
        self._meeting = meeting
        self._send = send
        self._say = terminal.say
        self._incidents = Incidents(
            directory,
            report,
            terminal,
            options.node_name,
            self._tell,
            self._note_examined,
            self._observers,
            stalls_end=options.on_stall != "report",
        )
        self._verdicts = self._incidents.verdicts
        self._losses = Losses(
            options, directory, meeting, report, terminal.say, self._note_continued
        )
        self._replacements = Replacements(
            options, self._losses.admissions, send, terminal.say, report,
            free=self._free_nodes, start_joining=self._start_joining,
        )  # fmt: skip
        # The end of a rank is known at the latest once its node counts as lost.
        dies_s = max(DIES_S, options.conf.lost_after_s + _LOOSE_S)
        self._hung = HungRanks(self._losses, send, terminal.say, dies_s)
        self._stalls = Stalls(
            options, self._verdicts.is_open, self._decide, terminal.say, self._hung,
            look=self._look, begin_again=self._begin_again,
        )  # fmt: skip
        self._roster = Roster(
            options.min_nodes,
            options.max_nodes,
            spares=options.spares,
            join_timeout_s=options.conf.join_timeout_s,
            last_call_s=options.conf.last_call_s,
        )
        self._roster.open(time.monotonic())
        self._members = Membership(options, self._roster, meeting, send, terminal.say)
        self._world: World | None = None
        self._todo: deque[decide.Action] = deque()
        self._numbers = directory.next_attempt()
        self._latest = -1  # the latest attempt of this job that began
        self._restarting = Restarting(options, self._roster, report, self._verdicts, terminal.say)
        self._restarts = self._restarting.restarts
        self._probing = Probing(
            options, self._roster, lambda: report.decisions, send, terminal.say, meeting.host,
            note=self._remember,
        )  # fmt: skip
        self._must_probe = False  # what a former host had to probe, once the nodes are connected
        self._run = directory.path
        self._search = Search(directory.path, options.checkpoint_dir, terminal.say)
        self._search.begin(time.monotonic())
        self._started_s = time.monotonic()
        self._stop_signal = 0
        self._look_s = min(_LOOK_S, options.stall_timeout_s / 5)
        self._next_look_s = self._next_join_look_s = 0.0
        self._lived = LivedTime(_STEP_S, self._started_s)
        self._ending: tuple[World, decide.EndAttempt] | None = None  # waits for verdicts
        self._ending_deadline_s = 0.0
        self._waits_since_s = self._started_s
        self._next_reason_s = self._started_s + _EXPLAIN_S
        self._store_died = False
        self.is_over = False
        if succession is not None and succession.inherited is not None:
            self._inherit(succession, succession.inherited)

    def deadline_s(self) -> float:
        """Return the `time.monotonic` time by which `step` must be called."""
        due = min(self._verdicts.deadline_s(), self._own_deadline_s())
        if self._succession is not None:
            due = min(due, self._succession.deadline_s())
        return due if self._why_waiting() == "" else min(due, self._next_reason_s)

    def _own_deadline_s(self) -> float:
        if self._ending is not None:
            return self._ending_deadline_s
        world = self._world
        if world is None:
            waits = self._succession is not None and self._succession.waits_for
            if time.monotonic() < self._restarting.not_before_s:
                return min(self._restarting.not_before_s, self._probing.deadline_s())
            if not self._search.is_over(time.monotonic()):
                return time.monotonic() + POLL_S
            if not self._probing.is_over:
                return self._probing.deadline_s()
            return float("inf") if waits else self._roster.deadline_s()
        due = min(self._next_look_s, self._incidents.deadline_s(), self._stalls.deadline_s())
        if world.clearing is not None:
            return min(due, world.clear_deadline_s)
        if self._replacements.is_busy:
            due = min(due, self._next_join_look_s)
        return min(due, world.attempt.deadline_s or float("inf"))

    def close(self) -> None:
        """Terminate any analyses that are still running."""
        self._verdicts.close()

    # ---- what comes in ----

    def take(self, node: str, event: m.Event) -> None:
        """Handle a message from a node."""
        if isinstance(event, m.Hello):
            self._join(node, event)
        elif isinstance(event, m.Left):
            self._leave(node, event.reason)
        elif isinstance(event, m.StopAsked):
            self._stop(node, event.number)
        elif isinstance(event, m.DumpPart):
            self._incidents.keep(self._world, event)
        elif isinstance(event, m.Harvested):
            self._incidents.note_harvested(node, event)
        elif isinstance(event, m.LeaseReply):
            if self._succession is not None:
                self._succession.on_reply(node, event)
        elif isinstance(event, m.Laps):
            self._observers.tell(o.LapsReported(node=node, laps=event))
        elif isinstance(event, m.Ask):
            self._show_job(node)
        elif isinstance(event, m.Statuses):
            self._send(event.visitor, event)
        elif isinstance(event, m.Probed):
            self._probing.take(node, event)
        elif isinstance(event, m.CheckIn):
            busy = "another job is already running at this endpoint: see `echelon status`"
            self._send(node, m.Over(exit_code=1, ended_by="agent", text=busy))
        elif isinstance(event, m.WorkerEnded | m.Sights | m.Unkillable | m.Idle | m.Standings):
            self._take_from_world(node, event)

    def _take_from_world(
        self,
        node: str,
        event: m.WorkerEnded | m.Sights | m.Unkillable | m.Idle | m.Standings,
    ) -> None:
        world = self._world
        if world is None or event.attempt != world.number or node not in world.nodes:
            return  # from an attempt that is over, or a node in whose place another one is
        if isinstance(event, m.WorkerEnded):
            self._note_ended(world, {event.rank: event.code}, event.error)
        elif isinstance(event, m.Standings):
            self._losses.take_standings(world, event)
        elif isinstance(event, m.Sights):
            world.note_sights(node, event, self._lived_ns())
        elif isinstance(event, m.Unkillable):
            self._note_unkillable(world, event)
        else:
            for rank in event.stopped:
                if rank in world.ended and not world.is_survived(rank):
                    world.ended[rank].stopped = True
            if world.clearing is not None:
                world.clearing.discard(node)

    def _join(self, node: str, hello: m.Hello) -> None:
        is_host = node == self._options.node_name
        if not self._members.join(hello):
            return
        if self._succession is not None:
            self._succession.admit(hello)
        if self._world is not None and self._replacements.is_busy:
            self._say(f"node {hello.host} connected")  # it may take the place of a lost node
        elif self._world is not None and self._has_room(self._world):
            self._say(
                f"node {hello.host} connected; it will join after a step of resilient.run, or at "
                "the next restart"
            )
        elif self._world is not None:
            self._say(f"node {hello.host} connected; it will join at the next restart")
        elif not is_host:
            here, needed = len(self._roster.nodes), self._options.min_nodes
            self._say(f"node {hello.host} connected ({here} of {needed} required nodes)")

    def _leave(self, node: str, reason: str) -> None:
        left = [n for n in self._roster.nodes if n.name == node]
        self._roster.leave(node)
        if self._succession is not None:
            self._succession.lose(node)
        self._incidents.note_lost(node)
        self._probing.lose(node)
        world = self._world
        if world is None or node not in world.nodes:
            return
        for one in left:
            ranks = world.nodes[node]
            self._say(f"lost node {one.host} ({reason}); it ran {_span(ranks)}")
        self._lose_ranks(world, node)

    def _lose_ranks(self, world: World, node: str) -> None:
        world.lost.append(node)
        if world.clearing is not None:
            world.clearing.discard(node)
        running = [
            rank
            for rank in world.nodes[node]
            if rank not in world.ended or self._replacements.is_joining(world, rank)
        ]
        ended = dict.fromkeys(running, LOST)
        if ended:
            self._note_ended(world, ended)

    def _show_job(self, visitor: str) -> None:
        """Send the job's state to a status client, and ask the nodes to report on their ranks."""
        world = self._world
        present = [] if world is None else world.present
        came = (
            f"waiting for nodes: {len(self._roster.nodes)} of {self._options.min_nodes} connected"
        )
        shown = m.JobShown(
            job_id=self._report.job_id,
            phase=came if world is None else world.attempt.phase.value,
            restarts=self._report.attempts,
            world_size=0 if world is None else world.size,
            num_nodes=len(present),
        )
        self._send(visitor, shown)
        self._tell(present, m.TellStatus(visitor=visitor))

    def _stop(self, node: str, number: int) -> None:
        """Handle a stop signal from the user: end the job, or let only the signaled node leave."""
        world = self._world
        is_host = node == self._options.node_name
        is_late = world is not None and node in world.present and node not in world.members
        if not is_host and (world is None or node not in world.nodes or is_late):
            self._members.let_go(node, number)  # it waits for a place, so no rank depends on it
            return
        if world is None or self._ending is not None:
            self._stop_signal = number
            self._note_stopped()
            self._finish(EndedBy.SIGNAL, 128 + number)
            return
        self._incidents.hurry()
        gone = {*world.leaving, node}
        stays = [one for one in self._roster.nodes if one.name not in gone]
        name = signal.Signals(number).name
        if is_host or len(stays) < self._options.min_nodes:
            if self._stop_signal == 0:
                self._say(f"{name} at node {self._members.host_of(node)}: stopping the job")
            self._stop_signal = number
            self._decide(world, decide.StopRequested(number))
            return
        if node not in world.leaving:
            world.leaving[node] = number
            self._say(
                f"node {self._members.host_of(node)} is leaving the job ({name}); all ranks stop, "
                "and the other nodes continue without it"
            )
            self._decide(world, decide.LeaveRequested(number))

    def _note_ended(self, world: World, ended: Mapping[int, int], error: str = "") -> None:
        """Handle the end of a rank, or of several ranks that ended together.

        Args:
            ended: the exit code of each rank that ended; LOST for a rank that was lost with its
                node.
            error: why the ranks could not be started; "" if they were started.
        """
        self._look_at_losses(world)  # the ranks may have continued after an earlier one
        joiners = [rank for rank in ended if self._replacements.is_joining(world, rank)]
        for rank in joiners:
            self._decide(world, self._replacements.note_ended(world, rank, ended[rank], error))
        ended = {rank: code for rank, code in ended.items() if rank not in joiners}
        if not ended:
            return
        for rank, code in ended.items():
            world.note_ended(rank, None if code == LOST else code)
            if self._hung.cause_of(rank):
                self._losses.note_hang(world, rank, self._hung.cause_of(rank))
        is_survived = not self._stop_signal and self._losses.takes(world, ended)
        for rank, code in ended.items():
            self._note_end(world, rank, code, is_survived=is_survived)
        if is_survived:
            self._replacements.note_lost(world, ended)
            self._note_survived(world)

    def _note_survived(self, world: World) -> None:
        """Treat any current stall as ended, because a rank was lost and the others continue."""
        self._stalls.note_loss()
        if self._hung.is_killing:  # the stall lasts until the last of its ranks has ended
            return
        if world.rule.is_stalled or world.limits.is_reported:
            self._incidents.note_loss(world)
        self._begin_again(world)

    def _begin_again(self, world: World) -> None:
        world.begin_again(self._lived_ns())

    def _note_end(self, world: World, rank: int, code: int, *, is_survived: bool) -> None:
        known = None if code == LOST else code
        self._observers.tell(
            o.RankEnded(attempt=world.number, rank=rank, code=known, is_survived=is_survived)
        )
        how = self._how_ended(world, rank, code)
        self._hung.note_ended(rank, is_survived=is_survived)
        is_hung = bool(self._hung.cause_of(rank))
        if is_survived:
            self._decide(world, decide.WorkerLost(rank, how, is_hung))
            return
        if is_hung and code == -signal.SIGKILL:
            world.ended[rank].stopped = True
            self._decide(world, decide.StallExamined(lasts=True))  # the failure is its stall
        self._decide(world, decide.WorkerEnded(rank, 1 if code == LOST else code, how))

    def _look_at_losses(self, world: World) -> None:
        rank = self._losses.look(world)
        for event in self._replacements.note_taken_back(world, time.monotonic()):
            self._decide(world, event)
            self._report.world_size = world.size
            told = o.RankEnded(attempt=world.number, rank=event.rank, code=None, is_survived=True)
            self._observers.tell(told)
        if rank is None:
            return
        code = world.ended[rank].code
        how = self._how_ended(world, rank, LOST if code is None else code)
        self._decide(world, decide.WorkerEnded(rank, 1 if code is None else code, how))

    def _note_continued(self, attempt: int, line: str) -> None:
        self._observers.tell(o.Continued(attempt=attempt, line=line))

    def _how_ended(self, world: World, rank: int, code: int) -> str:
        cause = self._hung.cause_of(rank)
        if cause and code == -signal.SIGKILL:
            return f"was ended for its hang ({cause})"
        if code != LOST:
            return decide.describe_code(code)
        return f"was lost with node {world.host_of(rank)}"

    def _note_unkillable(self, world: World, event: m.Unkillable) -> None:
        if event.rank in world.ended:
            return
        world.unkillable[event.rank] = event.why
        self._say(f"rank {event.rank} cannot be killed ({event.why}); it is left behind")
        world.note_ended(event.rank, None)
        self._decide(world, decide.WorkerEnded(event.rank, 1, "could not be killed"))

    def _lived_ns(self) -> int:
        """Return the time on a clock that stands still while this process is suspended."""
        return int(self._lived.at(time.monotonic()) * 1e9)

    def _look(self, world: World) -> None:
        self._look_early(world)
        was_stalled = world.rule.is_stalled
        stall = world.look(self._lived_ns())
        running = (
            world.attempt.phase is decide.Phase.RUNNING
        )  # ranks that are being stopped also move
        if was_stalled and not world.rule.is_stalled and running:
            self._incidents.note_progress(world)
            self._stalls.note_progress()
        if stall is not None and not self._incidents.covers_stall():
            self._decide(world, decide.StallSeen(stall.reason))

    def _look_early(self, world: World) -> None:
        """If an operation or span has exceeded its learned limit, collect an early incident.

        An early incident is collected before the stall timeout.
        """
        was_reported = world.limits.is_reported
        early = world.look_early(self._lived_ns())
        if world.rule.is_stalled or world.attempt.phase is not decide.Phase.RUNNING:
            return
        if was_reported and not world.limits.is_reported:
            self._incidents.note_progress(world)
            if world.limits.is_disarmed:
                self._say(DISARMED)
        if early is not None:
            self._decide(world, decide.SlowSeen(early.reason))

    def _note_examined(
        self, world: World, event: decide.StallExamined, incident: Incident | None
    ) -> None:
        self._stalls.on_examined(world, event, incident, time.monotonic())

    def _decide(self, world: World, event: decide.Event) -> None:
        self._todo.extend(world.attempt.on(event, time.monotonic()))

    # ---- what follows ----

    def step(self) -> None:
        """Carry out all actions that are due."""
        if self.is_over:
            return
        now_s = time.monotonic()
        self._lived.tick(now_s)
        self._verdicts.poll()
        if self._succession is not None and self._has_lapsed(self._succession):
            return
        if self._ending is not None:
            self._check_verdicts(now_s)
        elif self._world is None:
            self._gather(now_s)
        else:
            self._step_world(self._world, now_s)
        self._explain_waiting(now_s)

    def _has_lapsed(self, succession: Succession) -> bool:
        """Send heartbeats, and stop this node if it must no longer host the job.

        Return whether the node was stopped.
        """
        succession.step()
        world = self._world
        running = world is not None and world.clearing is None
        why = "" if self._ending is not None else succession.why_lapsed(has_world=running)
        if not why:
            return False
        self._say(f"this node stops: {why}")
        self.is_over = True
        self._report.error = f"lost the right to host the job: {why}"
        # Sent to this node only: the others elect a host.
        own = self._options.node_name
        self._send(own, m.Over(exit_code=1, ended_by=EndedBy.AGENT.value))
        return True

    def _inherit(self, succession: Succession, inherited: Inheritance) -> None:
        """Resume a job from its replicated state (the mandate) after the hosting node's loss."""
        mandate = inherited.mandate
        self._restarts.num_used, self._report.attempts = mandate.restarts, mandate.num_attempts
        self._numbers = max(self._numbers, mandate.attempt + 1)
        self._restarting.inherit(mandate.memory)
        for hello in inherited.hellos:
            self._members.join(hello)
            succession.admit(hello)
        self._roster.resume([one.name for one in mandate.members])
        holders = {hello.node for hello in inherited.hellos if hello.holds == mandate.attempt}
        if self._restarting.over == mandate.attempt:  # its end has been decided about
            self._must_probe = self._restarting.suspected is not None
        elif holders:
            members = [
                Node(name=one.name, host=one.host, num_workers=one.num_workers)
                for one in mandate.members
            ]
            self._world = self._world_of(members, mandate.attempt)
            gone = [one.name for one in members if one.name not in holders]
            gone.sort(key=lambda name: name != inherited.former)  # the cause first
            for name in gone:
                self._lose_ranks(self._world, name)
        for name, event in inherited.events:
            self.take(name, event)

    def _explain_waiting(self, now_s: float) -> None:
        """If the job has been waiting for a while, print what it is waiting for."""
        why = self._why_waiting()
        if not why:
            self._waits_since_s, self._next_reason_s = now_s, now_s + _EXPLAIN_S
        elif now_s >= self._next_reason_s:
            self._next_reason_s = now_s + 2 * (now_s - self._waits_since_s)
            self._say(f"waiting for {now_s - self._waits_since_s:.0f} s: {why}")

    def _why_waiting(self) -> str:
        """Return what the job is currently waiting for; "" if it is not waiting."""
        if self._ending is not None:
            return "the analysis of an incident"
        if self._world is not None:
            return why_world_waits(self._world, self._incidents.awaited)
        if self._succession is not None and self._succession.waits_for:
            return self._succession.waits_for
        return self._probing.waits_for or why_roster_waits(self._roster, self._options)

    def _step_world(self, world: World, now_s: float) -> None:
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + self._look_s
            self._look(world)
            self._look_at_losses(world)
            self._grow(world, now_s)
            self._check_store()
        self._decide(world, decide.TimePassed())
        self._step_replacements(world, now_s)
        if self._incidents.is_complete(now_s):
            self._look(world)  # the nodes have just reported what they see after the second look
            self._incidents.finish(world)
        self._stalls.step(now_s)
        self._act_all(world)
        if world.owes_notice and not self._incidents.is_collecting:  # it changes what ranks do
            world.owes_notice = False
            self._post_lost(world)
        self._check_cleared(world, now_s)

    def _step_replacements(self, world: World, now_s: float) -> None:
        if not self._replacements.is_busy or now_s < self._next_join_look_s:
            return
        self._next_join_look_s = now_s + _JOIN_LOOK_S
        self._look_at_losses(world)
        # An incident's dumps are read from the folder of the lost rank.
        awaits = self._incidents.is_collecting or world.attempt.awaits_collection or self._todo
        may_start = not (awaits or self._stop_signal or self._hung.is_killing)
        may_grow = not self._is_disturbed(world)
        for event in self._replacements.step(world, now_s, may_start=may_start, may_grow=may_grow):
            if isinstance(event, decide.JoinerAdmitted):
                self._hung.forget(event.rank)
                replaced = o.RankReplaced(
                    attempt=world.number, rank=event.rank, host=world.host_of(event.rank)
                )
                self._observers.tell(replaced)
                self._report.world_size = world.size
                self._begin_again(world)
            self._decide(world, event)

    def _has_room(self, world: World) -> bool:
        """Return whether a node that connects late can add ranks to a running world."""
        is_on = self._options.on_loss == REPLACE and not self._options.conf.failover
        is_running = world.attempt.phase is decide.Phase.RUNNING and not self._stop_signal
        return is_on and is_running and len(world.nodes) < self._options.max_nodes

    def _grow(self, world: World, now_s: float) -> None:
        """Start the ranks of a node that connected late, if they can join the running ranks."""
        if not self._has_room(world) or self._replacements.is_busy or self._is_disturbed(world):
            return
        free = self._free_nodes()
        if not free or not self._losses.may_grow(world):
            return
        before = sum(map(len, world.nodes.values()))
        for event in self._replacements.grow(world, free[0], now_s):
            self._decide(world, event)
        self._losses.note_grown(range(before, before + free[0].num_workers))

    def _is_disturbed(self, world: World) -> bool:
        """Return whether new ranks would disturb the handling of a stall or an incident."""
        is_stalled = world.rule.is_stalled or world.limits.is_reported
        awaits = self._incidents.is_collecting or world.attempt.awaits_collection
        return bool(is_stalled or awaits or self._todo)

    def _check_store(self) -> None:
        how = self._meeting.how_it_died()
        if how and not self._store_died:
            self._say(f"the job's store {how}; ranks that still need it will fail")
        self._store_died = bool(how)

    def _act_all(self, world: World) -> None:
        """Carry out the pending actions, except those that must wait for the current incident."""
        waiting: deque[decide.Action] = deque()
        while self._todo:
            action = self._todo.popleft()
            urgent = isinstance(action, decide.StopWorkers) and action.urgent
            busy = self._incidents.is_collecting
            waits = waiting or (
                busy and isinstance(action, decide.CollectIncident | decide.EndAttempt)
            )
            if waits and not urgent:
                waiting.append(action)
            else:
                self._act(world, action)
        self._todo = waiting

    def _gather(self, now_s: float) -> None:
        self._probing.step(now_s)
        if now_s < self._restarting.not_before_s:
            return
        if not (self._probing.is_over and self._search.is_over(now_s)):
            return
        nodes = self._roster.world(now_s)
        if nodes is not None and self._must_probe:
            self._must_probe = False
            self._begin_probes(now_s)
        elif nodes is not None:
            if self._may_begin(nodes):
                self._begin(nodes)
        elif self._roster.has_failed(now_s):
            self._report.error = self._roster.shortage()
            self._say(self._report.error)
            self._finish(EndedBy.AGENT, 1)

    def _begin_probes(self, now_s: float) -> None:
        begins_s = max(now_s, self._restarting.not_before_s - _PROBES_S)
        self._probing.begin(self._restarting.suspected, self._numbers, begins_s)
        self._remember()

    def _remember(self) -> None:
        """Send all decisions and findings to the other nodes, so that any node can take over."""
        if self._probing.is_over:
            self._restarting.suspected = None
        if self._succession is not None:
            self._succession.remember(
                restarts=self._restarts.num_used,
                num_attempts=self._report.attempts,
                memory=self._restarting.memory(),
            )

    def _may_begin(self, nodes: Sequence[Node]) -> bool:
        return self._succession is None or self._succession.may_begin(
            nodes,
            attempt=self._numbers,
            restarts=self._restarts.num_used,
            num_attempts=self._report.attempts,
            memory=self._restarting.memory(),
        )

    def _begin(self, nodes: Sequence[Node]) -> None:
        self._world = self._world_of(nodes, self._numbers)
        self._latest = self._numbers
        self._numbers += 1
        if self._succession is not None:
            self._succession.begin(nodes)
        for node, start in self._starts(self._world).items():
            self._send(node, start)
        self._observers.tell(
            o.AttemptBegan(
                attempt=self._world.number,
                restart=self._report.attempts,
                hosts={r: n.host for n in nodes for r in self._world.nodes[n.name]},
            )
        )

    def _starts(self, world: World) -> dict[str, m.Start]:
        """Return, for each node of a world, the command that starts the node's ranks."""
        starts = starts_of(
            world, self._options, self._meeting,
            job_id=self._report.job_id, restart=self._report.attempts,
            resume=self._resume_path(), history=self._restarting.history(),
        )  # fmt: skip
        return dict(zip(world.nodes, starts, strict=True))

    def _free_nodes(self) -> list[Node]:
        """Return the connected nodes that are not part of the current world but could join it."""
        world = self._world
        if world is None:
            return []
        taken = {*world.nodes, *world.leaving, *self._roster.avoided}
        return [node for node in self._roster.nodes if node.name not in taken]

    def _start_joining(self, world: World, node: str, epoch: int, lives: Sequence[int]) -> None:
        """Start all ranks of a node as processes that join the running world."""
        start = self._starts(world)[node]
        self._send(node, dataclasses.replace(start, join_after=epoch, lives=list(lives)))

    def _resume_path(self) -> str:
        found = self._search.found
        return "" if found is None else found.path

    def _world_of(self, nodes: Sequence[Node], number: int) -> World:
        world = world_of(nodes, number, self._options, self._lived_ns())
        self._report.world_size = world.size
        return world

    def _act(self, world: World, action: decide.Action) -> None:
        if isinstance(action, decide.StopWorkers):
            grace_ms = int(self._options.shutdown_timeout_s * 1000)
            stop = m.Stop(
                number=action.number,
                grace_ms=grace_ms,
                urgent=action.urgent,
                hung=list(action.hung),
            )
            world.owes_notice = True
            self._tell(world.nodes, stop)
            self._replacements.stop(world)
        elif isinstance(action, decide.DismissJoiners):
            self._replacements.dismiss(world, action.ranks, time.monotonic())
        elif isinstance(action, decide.KillWorkers):
            self._tell(world.nodes, m.Kill())
        elif isinstance(action, decide.CollectIncident):
            self._incidents.begin(world, action, self._replacements.set_aside(action.lost))
        else:
            for rank in action.unkillable:
                world.unkillable.setdefault(rank, "its node did not report")
                world.note_ended(rank, None)
            world.end = action
            world.clearing = set(world.present)
            world.clear_deadline_s = time.monotonic() + _CLEAR_S
            self._tell(world.nodes, m.ClearUp(attempt=world.number))

    def _post_lost(self, world: World) -> None:
        """Notify the remaining ranks that the ranks of a lost node will never respond.

        A rank that handles SIGTERM to save its state cannot act on the signal while it is blocked
        in a collective. Without this notice, the rank would wait in the collective for the whole
        grace period.
        """
        ranks = world.ranks_lost_for_good
        if not ranks:
            return
        text = f"{named(ranks)} {'was' if len(ranks) == 1 else 'were'} lost with the node"
        with contextlib.suppress(LaunchError):  # `_check_store` reports that
            self._meeting.post(BOARD, lost_notice(ranks, text))

    def _tell(self, nodes: Iterable[str], command: m.Command) -> None:
        for node in nodes:
            self._send(node, command)

    # ---- the end of an attempt, and of the job ----

    def _check_cleared(self, world: World, now_s: float) -> None:
        if world.clearing is None or (world.clearing and now_s < world.clear_deadline_s):
            return
        assert world.end is not None
        self._verdicts.release()  # the ranks that suffered are known now
        self._stalls.clear()
        self._note_cleared(world, world.end)
        if not self._stop_signal and self._restarting.awaits_verdict(world, world.end, now_s):
            return
        self._report.attempts += 1
        ended = [world.ended[rank] for rank in sorted(world.ended)]
        self._report.ranks = [one for one in ended if not one.is_new]
        self._todo.clear()
        for node, number in world.leaving.items():
            self._members.let_go(node, number)
        if not self._restart(world, world.end):
            self._ending = (world, world.end)
            self._ending_deadline_s = now_s + _VERDICT_S
            self._check_verdicts(now_s)
            return
        self._world = None
        self._meeting.renew()
        self._search.begin(now_s)
        self._begin_probes(now_s)
        self._roster.open(max(now_s, self._restarting.not_before_s))
        here, low = len(self._roster.nodes), self._options.min_nodes
        if here < low:
            self._say(f"{here} of {low} required nodes connected; waiting for more")

    def _note_cleared(self, world: World, end: decide.EndAttempt) -> None:
        """Report to the observers, once per world, that all of the world's processes have ended."""
        if not world.is_reported:
            world.is_reported = True
            how = end.ended_by.value
            told = o.AttemptEnded(attempt=world.number, failed=end.failed, ended_by=how)
            self._observers.tell(told)

    def _check_verdicts(self, now_s: float) -> None:
        """Conclude the job once every incident has its verdict or the wait for verdicts times out.

        If the user stopped the job, do not wait for verdicts.
        """
        assert self._ending is not None
        world, end = self._ending
        stopped_by_user = self._stop_signal or end.ended_by in (EndedBy.SIGNAL, EndedBy.LEAVE)
        if self._verdicts.num_open and not stopped_by_user and now_s < self._ending_deadline_s:
            return
        self._world = None
        self._conclude(world, end)

    def _restart(self, world: World, end: decide.EndAttempt) -> bool:
        """Return whether another attempt follows, and print the reason."""
        if world.unkillable or self._stop_signal:
            return False
        follows = self._restarting.decide(world, end)
        if follows:
            told = o.Restarting(attempt=world.number, decision=self._restarting.last_line)
            self._observers.tell(told)
        return follows

    def _conclude(self, world: World, end: decide.EndAttempt) -> None:
        report = self._report
        if not end.failed:
            elapsed_s = time.monotonic() - self._started_s
            self._say(f"{_which_finished(world)} finished successfully in {elapsed_s:.1f} s")
        ended_by, code = conclude(world, end, report, self._stop_signal)
        if ended_by is EndedBy.SIGNAL:
            self._note_stopped()
        self._finish(ended_by, code)

    def _note_stopped(self) -> None:
        """Report and print the step at which the last attempt stopped, if any attempt started."""
        if self._latest < 0:
            return
        stopped = where_it_stopped(self._run, self._latest)
        self._report.stopped = stopped.to_json()
        if stopped.line():
            self._say(stopped.line())

    def _finish(self, ended_by: EndedBy, code: int) -> None:
        self.is_over = True
        self._report.ended_by = ended_by
        self._report.exit_code = code
        if self._report.error == NOT_CONCLUDED:
            self._report.error = ""
        error = self._report.error
        self._observers.tell(o.JobEnded(ended_by=ended_by.value, exit_code=code, error=error))
        for node in self._roster.nodes:
            self._send(node.name, m.Over(exit_code=code, ended_by=ended_by.value))


def _which_finished(world: World) -> str:
    lost = sum(ended.code != 0 for ended in world.ended.values() if not ended.is_new)
    size = world.num_members
    if lost:
        return f"{size - lost} of {size} ranks"
    return "the rank" if size == 1 else f"all {size} ranks"


def _span(ranks: range) -> str:
    one = len(ranks) == 1
    return f"rank {ranks.start}" if one else f"ranks {ranks.start}-{ranks.stop - 1}"
