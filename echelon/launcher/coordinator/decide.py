"""Turn an attempt's events into actions, without using clocks, processes or sockets.

    RUNNING --a worker fails--> SETTLING --0.5 s, or all ended--> STOPPING --backstop--> KILLING
       |                                                             ^                     |
       +--a stall (`stop_on_stall`), a signal, a node leaving--------+          35 s: give up
       +--all succeeded--> over                     all ended in any phase: over <---------+

The first failure starts a short pause (SETTLING) in which the exit codes of other failed ranks can
arrive. A second failure does not extend the pause. The pause ends early once all workers have
ended, unless a stop signal from outside the job killed the first worker that failed. In that case,
a scheduler might be stopping every process on the node.

If a worker is lost and the others continue, the phase does not change, and an incident is collected
after a pause of 0.5 s. A process that replaces a lost worker (a joiner) does not count as a worker
until it has been admitted. If a joiner ends before its admission, the workers are not affected. If
no worker remains, the joiners are dismissed.

Each node enforces the grace period between SIGTERM and SIGKILL on its own. The coordinator's
backstop is a longer time limit for nodes that do not kill their workers in time. A second stop
request can change the job's outcome but not the grace period.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

SETTLE_S = 0.5
BACKSTOP_S = 30.0  # beyond the grace: a node may still be reading stacks when the stop arrives
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GIVE_UP_S = 35.0  # after SIGKILL; a node reports its unkillable ranks somewhat earlier


class Phase(Enum):
    """The phases of an attempt."""

    RUNNING = "running"
    SETTLING = "settling"
    STOPPING = "stopping"
    KILLING = "killing"
    OVER = "over"


class EndedBy(Enum):
    """The possible reasons for the end of a job, as written to `report.json`."""

    WORKER = "worker"
    STALL = "stall"
    SIGNAL = "signal"
    LEAVE = "leave"  # only of an attempt: a node leaves, and the others continue
    AGENT = "agent"


# ---- events ----


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """An event: a worker has ended, or could not be started (`code` 127)."""

    rank: int
    code: int
    how: str = ""  # in words, if the code does not describe it


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """An event: a worker was lost, and the other workers continue without it."""

    rank: int
    how: str  # in words
    is_explained: bool = False  # by the incident of a stall that it was ended for


@dataclass(frozen=True, slots=True)
class JoinerStarted:
    """An event: a replacement for a lost worker was started, or its admission was withdrawn."""

    rank: int


@dataclass(frozen=True, slots=True)
class JoinerAdmitted:
    """An event: a replacement for a lost worker was admitted, and now counts as a worker."""

    rank: int


@dataclass(frozen=True, slots=True)
class JoinerEnded:
    """An event: a replacement for a lost worker ended before it was admitted."""

    rank: int


@dataclass(frozen=True, slots=True)
class StallSeen:
    """An event: the ranks are making no progress."""

    reason: str


@dataclass(frozen=True, slots=True)
class SlowSeen:
    """An event: no rank is making progress, and an operation or span exceeds its learned limit."""

    reason: str


@dataclass(frozen=True, slots=True)
class StallExamined:
    """An event: the incident for a stall is complete, or could not be collected.

    Attributes:
        lasts: whether the stall persists, which means that no rank has made progress since the
            incident began.
        hung: the ranks that hang in their own code. If the attempt is stopped, these ranks are
            killed after a short grace period, because the ranks that wait for them cannot shut down
            cleanly until then.
    """

    lasts: bool
    hung: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StopRequested:
    """An event: the user sent a launcher a signal that stops the job."""

    number: int


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """An event: the user asked a node to leave, and enough nodes remain to continue."""

    number: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """An event: time has passed; the attempt checks whether its `deadline_s` has been reached."""


Event = (
    WorkerEnded | WorkerLost | JoinerStarted | JoinerAdmitted | JoinerEnded | StallSeen | SlowSeen
    | StallExamined | StopRequested | LeaveRequested | TimePassed
)  # fmt: skip

# ---- actions ----


@dataclass(frozen=True, slots=True)
class CollectIncident:
    """An action: collect and analyze an incident.

    Attributes:
        is_early: whether the incident was triggered by a learned limit, before the stall timeout.
            An early incident never causes ranks to be stopped.
        lost: the lost ranks, if the attempt continues without them; () otherwise.
    """

    kind: str
    reason: str
    is_early: bool = False
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """An action: send all workers a stop signal, and kill them after the grace period.

    Attributes:
        urgent: whether to stop the workers at once, without waiting for an incident to be
            collected.
        hung: the hung ranks, which are killed after a short grace period.
    """

    number: int
    urgent: bool = False
    hung: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KillWorkers:
    """An action: send SIGKILL to every worker that is still running."""


@dataclass(frozen=True, slots=True)
class EndAttempt:
    """An action: end the attempt. All workers have ended or cannot be killed."""

    ended_by: EndedBy
    failed: bool
    unkillable: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DismissJoiners:
    """An action: end the joining processes that were not admitted; no other worker remains."""

    ranks: tuple[int, ...]


Action = CollectIncident | StopWorkers | KillWorkers | DismissJoiners | EndAttempt


class Attempt:
    """The state machine of one attempt, from the start of its workers to `EndAttempt`."""

    def __init__(self, world_size: int, *, grace_s: float, stop_on_stall: bool) -> None:
        self._running = set(range(world_size))
        self._grace_s = grace_s
        self._stop_on_stall = stop_on_stall
        self._ended_by = EndedBy.WORKER
        self._first_failure: WorkerEnded | None = None
        self._losses: list[WorkerLost] = []  # not collected yet
        self._joining: set[int] = set()  # running, but not admitted
        self.phase = Phase.RUNNING
        self.deadline_s: float | None = None  # when to send TimePassed, at the latest
        self.stop_signal = 0

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks that are still running."""
        return tuple(sorted(self._running))

    @property
    def awaits_collection(self) -> bool:
        """True if the incident for a lost worker has yet to be collected."""
        return bool(self._losses)

    def on(self, event: Event, now_s: float) -> list[Action]:
        """Handle an event; return the actions to carry out, in order."""
        if self.phase is Phase.OVER:
            return []
        if isinstance(event, WorkerEnded):
            return self._on_worker_ended(event, now_s)
        if isinstance(event, WorkerLost):
            return self._on_worker_lost(event, now_s)
        if isinstance(event, JoinerStarted | JoinerAdmitted | JoinerEnded):
            return self._on_joiner(event)
        if isinstance(event, StallSeen | SlowSeen):
            is_early, running = isinstance(event, SlowSeen), self.phase is Phase.RUNNING
            return [CollectIncident("stall", event.reason, is_early)] if running else []
        if isinstance(event, StallExamined):
            return self._on_examined(event, now_s)
        if isinstance(event, StopRequested | LeaveRequested):
            return self._on_stop(event, now_s)
        return self._on_time(now_s)

    def _on_worker_ended(self, event: WorkerEnded, now_s: float) -> list[Action]:
        self._running.discard(event.rank)
        if event.code != 0 and self.phase is Phase.RUNNING:
            self._first_failure = event
            self._enter(Phase.SETTLING, now_s + SETTLE_S)
        return self._over_if_last()

    def _on_joiner(self, event: JoinerStarted | JoinerAdmitted | JoinerEnded) -> list[Action]:
        self._joining.discard(event.rank)
        if isinstance(event, JoinerStarted):
            self._running.add(event.rank)
            self._joining.add(event.rank)
        elif isinstance(event, JoinerEnded):
            self._running.discard(event.rank)
            return self._over_if_last()
        return []

    def _over_if_last(self) -> list[Action]:
        """If no admitted worker is still running, return the actions to take; otherwise []."""
        if not self._running:
            return [] if self._may_be_stopped else self._over()
        if self.phase is Phase.RUNNING and self._running == self._joining:
            return [DismissJoiners(self.running)]
        return []

    def _on_worker_lost(self, event: WorkerLost, now_s: float) -> list[Action]:
        """Record the loss of a worker. The incident is collected after a short pause."""
        self._running.discard(event.rank)
        if not event.is_explained:
            if not self._losses:
                self.deadline_s = now_s + SETTLE_S
            self._losses.append(event)
        return self._over_if_last()

    def _collect_losses(self) -> list[Action]:
        lost, self._losses = self._losses, []
        if not lost:
            return []
        reason = ", ".join(f"rank {one.rank} {one.how}" for one in lost)
        return [CollectIncident("failure", reason, lost=tuple(one.rank for one in lost))]

    @property
    def _may_be_stopped(self) -> bool:
        """True if the first failure might be due to a scheduler that is stopping the whole node."""
        first = self._first_failure
        settles = self.phase is Phase.SETTLING
        return settles and first is not None and -first.code in _STOP_SIGNALS

    def _over(self, *, unkillable: tuple[int, ...] = ()) -> list[Action]:
        settled = self._collect_failure() if self.phase is Phase.SETTLING else []
        settled += self._collect_losses()
        self._enter(Phase.OVER, None)
        failed = self._first_failure is not None or self._ended_by is not EndedBy.WORKER
        return [*settled, EndAttempt(self._ended_by, failed or bool(unkillable), unkillable)]

    def _on_examined(self, event: StallExamined, now_s: float) -> list[Action]:
        if not (event.lasts and self._stop_on_stall and self.phase is Phase.RUNNING):
            return []
        self._ended_by = EndedBy.STALL
        return self._stop(signal.SIGTERM, now_s, hung=event.hung)

    def _on_stop(self, event: StopRequested | LeaveRequested, now_s: float) -> list[Action]:
        if isinstance(event, StopRequested):
            self._ended_by = EndedBy.SIGNAL
            self.stop_signal = event.number
        elif self._ended_by is EndedBy.WORKER:
            self._ended_by = EndedBy.LEAVE
        if self.phase in (Phase.STOPPING, Phase.KILLING):
            # Workers are signaled once and keep their grace; only a node that is still reading
            # stacks has to hurry.
            return [StopWorkers(event.number, urgent=True)]
        if not self._running:
            self._enter(Phase.STOPPING, None)
            return self._over()
        return self._stop(event.number, now_s, urgent=True)

    def _on_time(self, now_s: float) -> list[Action]:
        if self.deadline_s is None or now_s < self.deadline_s:
            return []
        if self.phase is Phase.RUNNING:
            self.deadline_s = None
            return self._collect_losses()
        if self.phase is Phase.SETTLING and not self._running:
            return self._over()
        if self.phase is Phase.SETTLING:
            return [*self._collect_failure(), *self._stop(signal.SIGTERM, now_s)]
        if self.phase is Phase.STOPPING:
            self._enter(Phase.KILLING, now_s + GIVE_UP_S)
            return [KillWorkers()]
        return self._over(unkillable=self.running)

    def _collect_failure(self) -> list[Action]:
        self._losses.clear()  # the incident shows these ranks, too
        first = self._first_failure
        assert first is not None
        how = first.how or describe_code(first.code)
        return [CollectIncident("failure", f"rank {first.rank} {how}")]

    def _stop(
        self, number: int, now_s: float, *, urgent: bool = False, hung: tuple[int, ...] = ()
    ) -> list[Action]:
        self._enter(Phase.STOPPING, now_s + self._grace_s + BACKSTOP_S)
        return [StopWorkers(number, urgent, hung)]

    def _enter(self, phase: Phase, deadline_s: float | None) -> None:
        self.phase = phase
        self.deadline_s = deadline_s


def describe_code(code: int) -> str:
    """Describe how a process ended, e.g., "exited with code 1" or "was killed by SIGKILL"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
