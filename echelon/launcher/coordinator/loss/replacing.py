"""Start processes to replace lost ranks, and let them join (`--on-loss replace`).

The other ranks do not wait: they continue among themselves, as under `--on-loss shrink`. Once the
incident of the loss has been collected, a new process starts on the rank's node, from a standby
process if one is ready. If the node itself was lost, one other node that runs no ranks takes over
all of its ranks: either a spare or a node that connects later. The new process loads the program
and reports that it has no state yet (`State.JOINING`). It is then admitted by a separate epoch (a
new published list of ranks), which the other ranks enter at the end of a step. Until then, the
process is not a rank, and the other ranks are not affected if it ends. The ranks of a node that
connects late, while the world has fewer nodes than `--nnodes` allows, join in the same way.

[Note: two processes of one rank] A node that is cut off might still be running its ranks after
other processes have replaced these ranks. Each epoch therefore identifies the process of a rank by
how many processes held the rank before it (`Epoch.lives`). A process that finds that it has been
replaced exits with an error.

[Note: no endless replacement] `--max-replacements` limits the number of replacement processes in a
job. If a process exits on its own before it has joined, another process would probably exit in the
same way, so no further process is started for that rank. A process that keeps the other ranks
waiting for it is killed after `JOINS_S` seconds. A process that is slow to load is not killed,
because no rank waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator import decide
from echelon.launcher.coordinator.gathering.roster import Node
from echelon.launcher.coordinator.loss.admissions import Admissions
from echelon.launcher.coordinator.loss.losses import LOST, named
from echelon.launcher.coordinator.world import World
from echelon.launcher.job.report import Report
from echelon.launcher.options.options import Options
from echelon.recorder.continuation import REPLACE

STARTS_S = 600.0  # from the start of a process to the line about its taking so long
JOINS_S = 120.0  # from the meeting of the other ranks to the state's arrival
_EXITS_S = 20.0  # for a dismissed process, on a busy machine


class _Stage(Enum):
    WANTED = "wanted"
    STARTED = "started"
    ADMITTED = "admitted"
    DISMISSED = "dismissed"


@dataclass(slots=True)
class _Place:
    """The state of one lost rank's replacement.

    Attributes:
        until_s: the deadline of the current stage. When it passes, a process that is still loading
            the program is reported, a process that was admitted but has not joined is killed, a
            process that was dismissed but has not exited is killed, and a killed process that is
            still running is reported.
        is_killed: whether the node was sent a command to kill the dismissed process.
    """

    stage: _Stage = _Stage.WANTED
    until_s: float = float("inf")
    is_killed: bool = False


class Replacements:
    """The processes that replace the current attempt's lost ranks.

    Args:
        admissions: admits the processes.
        send: sends a command to a node.
        say: prints a line for the user.
        report: the job's report, to which each rank that is not replaced is added.
        free: returns the connected nodes that run no ranks.
        start_joining: starts all ranks of a node as joining processes. The arguments are the world,
            the node's name, the newest epoch, and how many earlier processes held each rank.
        joins_s: how long an admitted process is allowed to keep other ranks waiting, in seconds.
    """

    def __init__(
        self,
        options: Options,
        admissions: Admissions,
        send: Callable[[str, m.Command], None],
        say: Callable[[str], None],
        report: Report,
        *,
        free: Callable[[], Sequence[Node]],
        start_joining: Callable[[World, str, int, Sequence[int]], None],
        joins_s: float = JOINS_S,
    ) -> None:
        self._is_on = options.on_loss == REPLACE
        self._max = options.max_replacements
        self._admissions = admissions
        self._send = send
        self._say = say
        self._report = report
        self._free = free
        self._start_joining = start_joining
        self._joins_s = joins_s
        self._num_started = 0  # in this job
        self._attempt = -1
        self._places: dict[int, _Place] = {}
        self._numbers: dict[int, int] = {}  # of processes started for each rank in this attempt
        self._vacant: dict[str, int] = {}  # lost nodes that wait for another one; their ranks
        self._new: set[int] = set()  # ranks of late nodes that have not joined yet

    @property
    def is_busy(self) -> bool:
        """True if any replacement has yet to join or could be started now."""
        return bool(self._places) or any(self._fitting(num) for num in self._vacant.values())

    def deadline_s(self) -> float:
        """Return the time by which `step` must be called."""
        return min((place.until_s for place in self._places.values()), default=float("inf"))

    def is_joining(self, world: World, rank: int) -> bool:
        """Return whether a replacement process is running for a rank but is not admitted yet."""
        self._follow(world)
        place = self._places.get(rank)
        return place is not None and place.stage in (_Stage.STARTED, _Stage.DISMISSED)

    def _follow(self, world: World) -> None:
        if world.number != self._attempt:
            self._attempt = world.number
            self._places.clear()
            self._vacant.clear()
            self._numbers.clear()
            self._new.clear()

    def note_lost(self, world: World, ended: Mapping[int, int]) -> None:
        """Plan a replacement process for each lost rank, on another node if its node was lost.

        Args:
            ended: the exit codes of the lost ranks, keyed by rank.
        """
        self._follow(world)
        if not self._is_on:
            return
        self._new.difference_update(ended)
        absent = {world.node_of(rank) for rank in ended}.difference(world.present)
        for node in absent:
            self._vacate(world, node)
        for rank, code in ended.items():
            if world.node_of(rank) in absent:
                continue
            self._places.pop(rank, None)
            if code < 0:
                self._places[rank] = _Place()
            else:  # it was to join, and failed
                self._give_up(world, [rank], f"its replacement {decide.describe_code(code)}")

    def _vacate(self, world: World, node: str) -> None:
        """Mark a lost node's ranks as waiting for another node.

        If no free node is large enough, report that these ranks will not be replaced.
        """
        ranks = world.nodes[node]
        for rank in ranks:
            self._places.pop(rank, None)
        if node in self._vacant:
            return
        self._vacant[node] = len(ranks)
        if self._fitting(len(ranks)) is None:
            lost = [rank for rank in ranks if rank in world.ended]
            self._give_up(world, lost, "the node was lost, and no other node is free")

    def _fitting(self, num_ranks: int) -> Node | None:
        """Return a free node that can run the given number of ranks, or None."""
        return next((node for node in self._free() if node.num_workers >= num_ranks), None)

    def _give_up(
        self, world: World, ranks: Sequence[int], why: str, line: str | None = None
    ) -> None:
        """Report that ranks will not be replaced.

        Args:
            why: the reason, as recorded in the report.
            line: the line to print instead of the default line.
        """
        for rank in ranks:
            self._places.pop(rank, None)
            self._forget_given_up(world, [rank])  # for another reason
            entry = {"attempt": world.number, "rank": rank, "why": why}
            self._report.not_replaced.append(entry)
        if ranks:
            self._say(line or f"{self._not_replaced(ranks)}: {why}")

    def _not_replaced(self, ranks: Sequence[int]) -> str:
        if all(map(self._is_new, ranks)):
            return f"new {named(ranks)} cannot join"
        return f"{named(ranks)} {'is' if len(ranks) == 1 else 'are'} not replaced"

    def _forget_given_up(self, world: World, ranks: Sequence[int]) -> None:
        self._report.not_replaced = [
            one
            for one in self._report.not_replaced
            if one["attempt"] != world.number or one["rank"] not in ranks
        ]

    def set_aside(self, ranks: Iterable[int]) -> dict[int, int]:
        """Return the lost ranks whose folders will be renamed to make room for new processes.

        The result maps each rank to the number of its folders that have already been renamed.
        """
        wanted = self._at(_Stage.WANTED)[: self._max - self._num_started]
        return {rank: self._numbers.get(rank, 0) for rank in ranks if rank in wanted}

    def note_ended(self, world: World, rank: int, code: int, error: str = "") -> decide.JoinerEnded:
        """Handle the end of a process that had not yet been admitted to the world.

        The attempt can be running or stopping at that time.

        Args:
            error: why the process could not be started; "" if it was started.
        """
        place = self._places.pop(rank, None)  # None: the loss of its node was handled already
        if place is None or place.stage is not _Stage.STARTED:
            return decide.JoinerEnded(rank)
        if world.attempt.phase is not decide.Phase.RUNNING:
            return decide.JoinerEnded(rank)
        if code == LOST:
            self._vacate(world, world.node_of(rank))
            return decide.JoinerEnded(rank)
        how = decide.describe_code(code)
        line = f"{self._process_of(rank)} {how} before it joined"
        if error:
            self._give_up(world, [rank], f"no process could be started: {error}")
        elif code < 0:
            self._say(line)
            self._places[rank] = _Place()
        else:
            whose = "it" if self._is_new(rank) else "its replacement"
            self._give_up(world, [rank], f"{whose} {how} before it joined", line)
        return decide.JoinerEnded(rank)

    def step(
        self, world: World, now_s: float, *, may_start: bool, may_grow: bool = True
    ) -> list[decide.Event]:
        """Start, admit or kill processes as needed; return events for the attempt.

        Args:
            may_start: whether processes can be started now.
            may_grow: whether the ranks of late nodes can be admitted now.
        """
        self._follow(world)
        if not self.is_busy or world.attempt.phase is not decide.Phase.RUNNING:
            return []
        self._forget_lost_nodes(world)
        events = self._watch(world, now_s)
        events += self._admit(world, may_grow=may_grow)
        if may_start:
            events += self._start(world, now_s)
        return events

    def _forget_lost_nodes(self, world: World) -> None:
        """Schedule lost ranks to run on another node if their own node has been lost as well."""
        nodes = {world.node_of(rank) for rank in self._at(_Stage.WANTED)}
        for node in nodes.difference(world.present):
            self._vacate(world, node)

    def _start_elsewhere(self, world: World, now_s: float) -> list[decide.Event]:
        """Start the ranks of lost nodes on free nodes."""
        events: list[decide.Event] = []
        for lost, num_ranks in list(self._vacant.items()):
            node = self._fitting(num_ranks)
            if node is None:
                continue
            del self._vacant[lost]
            if self._num_started + num_ranks > self._max:
                why = f"--max-replacements allows {self._max} in a job"
                self._give_up(world, world.nodes[lost], why)
                continue
            self._num_started += num_ranks
            events += self._move(world, lost, node, now_s)
        return events

    def _move(self, world: World, lost: str, node: Node, now_s: float) -> list[decide.Event]:
        """Start the ranks of a lost node on another node."""
        ranks, former = world.nodes[lost], world.hosts[lost]
        world.move_ranks(lost, node)
        self._forget_given_up(world, ranks)
        epoch = 0
        for rank in ranks:
            self._numbers[rank] = self._numbers.get(rank, 0) + 1
            self._places[rank] = _Place(_Stage.STARTED, now_s + STARTS_S)
            epoch = self._admissions.begin(rank, self._numbers[rank])
        self._start_joining(world, node.name, epoch, [self._numbers[rank] for rank in ranks])
        self._say(f"node {node.host} takes the place of lost node {former} with {named(ranks)}")
        return [decide.JoinerStarted(rank) for rank in ranks]

    def grow(self, world: World, node: Node, now_s: float) -> list[decide.Event]:
        """Start the ranks of a late node. They join the existing ranks without replacing any."""
        self._follow(world)
        ranks = world.grow(node, max(1, self._admissions.number))
        self._new.update(ranks)
        for rank in ranks:
            self._places[rank] = _Place(_Stage.STARTED, now_s + STARTS_S)
            self._admissions.begin(rank, 0)
        lives = [0] * len(ranks)
        self._start_joining(world, node.name, self._admissions.number, lives)
        self._say(f"node {node.host} adds {named(ranks)}")
        return [decide.JoinerStarted(rank) for rank in ranks]

    def _start(self, world: World, now_s: float) -> list[decide.Event]:
        events = self._start_elsewhere(world, now_s)
        for rank in self._at(_Stage.WANTED):
            if self._num_started >= self._max:
                why = f"--max-replacements allows {self._max} in a job"
                self._give_up(world, [rank], why)
                continue
            self._num_started += 1
            self._numbers[rank] = self._numbers.get(rank, 0) + 1
            self._places[rank] = _Place(_Stage.STARTED, now_s + STARTS_S)
            life = self._numbers[rank]
            epoch = self._admissions.begin(rank, life)
            replace = m.Replace(attempt=world.number, rank=rank, epoch=epoch, life=life)
            self._send(world.node_of(rank), replace)
            events.append(decide.JoinerStarted(rank))
        return events

    def _admit(self, world: World, *, may_grow: bool) -> list[decide.Event]:
        """Admit all waiting processes in one epoch.

        The ranks of a late node are admitted only once all of them are waiting.
        """
        started = self._at(_Stage.STARTED)
        ready = [rank for rank in self._admissions.waiting(world) if rank in started]
        new = [rank for rank in self._places if self._is_new(rank)]
        early = {world.node_of(rank) for rank in new if rank not in ready or not may_grow}
        ready = [rank for rank in ready if world.node_of(rank) not in early]
        if not ready or not self._admissions.admit(world, ready):
            return []
        for rank in ready:
            self._places[rank] = _Place(_Stage.ADMITTED)
        return [decide.JoinerAdmitted(rank) for rank in ready]

    def _at(self, stage: _Stage) -> list[int]:
        return [rank for rank, place in self._places.items() if place.stage is stage]

    def _watch(self, world: World, now_s: float) -> list[decide.Event]:
        """Stop tracking processes that have joined, and act on those past their deadline.

        At its deadline, a process that is not yet ready to join is reported, and a process that was
        admitted is killed.
        """
        delaying = self._admissions.delayed_by(world)
        events: list[decide.Event] = []
        for rank, place in list(self._places.items()):
            if place.stage is _Stage.STARTED:
                self._watch_start(world, rank, now_s)
            elif place.stage is _Stage.ADMITTED and self._admissions.has_joined(rank):
                del self._places[rank]
                self._new.discard(rank)
            elif place.stage is _Stage.ADMITTED and rank not in delaying:
                place.until_s = float("inf")
            elif place.until_s == float("inf") and rank in delaying:
                place.until_s = now_s + self._joins_s
            elif now_s >= place.until_s:
                events += self._end(world, rank, now_s)
        return events

    def _watch_start(self, world: World, rank: int, now_s: float) -> None:
        """Report once if a process is taking a long time to get ready to join."""
        place = self._places[rank]
        if now_s < place.until_s:
            return
        place.until_s = float("inf")
        if not self._admissions.is_waiting(world, rank):
            self._say(f"{self._process_of(rank)} has not been ready to join for {STARTS_S:g} s")

    def _end(self, world: World, rank: int, now_s: float) -> list[decide.Event]:
        """Kill a process whose deadline has passed; if it survives SIGKILL, stop waiting for it."""
        place = self._places[rank]
        if place.stage is _Stage.ADMITTED:
            place.until_s = float("inf")
            self._say(f"rank {rank} did not join within {self._joins_s:g} s; ending it")
            self._kill(world, rank)
            return []
        if not place.is_killed:
            place.until_s, place.is_killed = now_s + _EXITS_S, True
            self._kill(world, rank)
            return []
        place.until_s = float("inf")  # the place is kept: the process may still end
        self._say(f"{self._process_of(rank)} survived SIGKILL for {_EXITS_S:g} s")
        return [decide.JoinerEnded(rank)]

    def _is_new(self, rank: int) -> bool:
        """Return whether a rank has not joined yet and is an additional rank, not a replacement."""
        return rank in self._new

    def _process_of(self, rank: int) -> str:
        return f"new rank {rank}" if self._is_new(rank) else f"the replacement of rank {rank}"

    def _kill(self, world: World, rank: int) -> None:
        self._send(world.node_of(rank), m.KillRanks(attempt=world.number, ranks=[rank]))

    def dismiss(self, world: World, ranks: Iterable[int], now_s: float) -> None:
        """End the processes that have not joined, now that all ranks have finished.

        A process that is waiting to join exits on its own, with code 0. Any other process is
        killed.

        Args:
            ranks: the ranks to dismiss; some of their processes might have ended already.
        """
        self._vacant.clear()
        for rank in self._at(_Stage.WANTED):
            del self._places[rank]
        ranks = [rank for rank in ranks if rank in self._places]
        if not ranks or world.attempt.phase is not decide.Phase.RUNNING:
            return
        waiting = [rank for rank in ranks if self._admissions.is_waiting(world, rank)]
        if waiting:
            self._admissions.dismiss(world, waiting)
        for rank in ranks:
            self._dismissed(world, rank, now_s)
            if rank not in waiting:
                self._places[rank].is_killed = True
                self._kill(world, rank)

    def stop(self, world: World) -> None:
        """Kill the processes that have not been admitted, because all ranks are being stopped.

        These processes have nothing to save. They do not belong to a process group yet, so a signal
        handler that waits for other ranks could use up the whole grace period.
        """
        self._follow(world)
        for rank in (*self._at(_Stage.STARTED), *self._at(_Stage.DISMISSED)):
            self._kill(world, rank)

    def note_taken_back(self, world: World, now_s: float) -> list[decide.JoinerStarted]:
        """Dismiss the processes whose admission was withdrawn; return an event for each of them."""
        gone = [
            rank for rank in self._at(_Stage.ADMITTED) if not self._admissions.is_admitted(rank)
        ]
        for rank in gone:
            self._dismissed(world, rank, now_s)
        return [decide.JoinerStarted(rank) for rank in gone]

    def _dismissed(self, world: World, rank: int, now_s: float) -> None:
        if self._places[rank].stage is _Stage.DISMISSED:
            return
        why = "the other ranks have finished"
        line = f"rank {rank} is not replaced any more: {why}"
        if self._is_new(rank):
            line = f"new rank {rank} does not join: {why}"
        self._give_up(world, [rank], why, line)
        self._places[rank] = _Place(_Stage.DISMISSED, now_s + _EXITS_S)
