"""What to do next: events in, actions out, no clock, no process, no socket.

    RUNNING --a worker fails--> SETTLING --0.5 s, or all ended--> STOPPING --grace--> KILLING
       |                                                             ^                  |
       +--stall with `stop`, or a signal from the user---------------+                  |
       +--all ended well--> over                    all ended in any phase: over <------+

The pause after the first failure lets its victims say how they ended (they notice within 0.1 s), so
that the black boxes hold both cause and effect. It never grows: the second failure does not start
it again.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

SETTLE_S = 0.5


class Phase(Enum):
    """Where an attempt stands."""

    RUNNING = "running"
    SETTLING = "settling"
    STOPPING = "stopping"
    KILLING = "killing"
    OVER = "over"


class EndedBy(Enum):
    """What ended the job, as `report.json` says it."""

    WORKER = "worker"
    STALL = "stall"
    SIGNAL = "signal"
    AGENT = "agent"


# ---- events ----


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker has ended, or could not be started (`code` 127)."""

    rank: int
    code: int
    how: str = ""  # in words, if not by its code


@dataclass(frozen=True, slots=True)
class StallSeen:
    """The ranks make no progress."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The user sent the launcher a signal that ends the job."""

    number: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing else happened; deadlines may have passed."""


Event = WorkerEnded | StallSeen | StopRequested | TimePassed

# ---- actions ----


@dataclass(frozen=True, slots=True)
class CollectIncident:
    """Snapshot all ranks and explain."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class SignalWorkers:
    """Signal every worker that still runs, with its process group."""

    number: int


@dataclass(frozen=True, slots=True)
class EndAttempt:
    """All workers have ended."""

    ended_by: EndedBy
    failed: bool


Action = CollectIncident | SignalWorkers | EndAttempt


class Attempt:
    """One start of all workers, from its first event to `EndAttempt`."""

    def __init__(self, world_size: int, *, grace_s: float, stop_on_stall: bool) -> None:
        self._running = set(range(world_size))
        self._grace_s = grace_s
        self._stop_on_stall = stop_on_stall
        self._ended_by = EndedBy.WORKER
        self._first_failure: WorkerEnded | None = None
        self.phase = Phase.RUNNING
        self.deadline_s: float | None = None  # when to send TimePassed, at the latest
        self.stop_signal = 0

    def on(self, event: Event, now_s: float) -> list[Action]:
        """Return what an event asks for, in order. `now_s` is monotonic."""
        if self.phase is Phase.OVER:
            return []
        if isinstance(event, WorkerEnded):
            return self._on_worker_ended(event, now_s)
        if isinstance(event, StallSeen):
            return self._on_stall(event, now_s)
        if isinstance(event, StopRequested):
            return self._on_stop(event, now_s)
        return self._on_time(now_s)

    def _on_worker_ended(self, event: WorkerEnded, now_s: float) -> list[Action]:
        self._running.discard(event.rank)
        if event.code != 0 and self.phase is Phase.RUNNING:
            self._first_failure = event
            self._enter(Phase.SETTLING, now_s + SETTLE_S)
        if self._running:
            return []
        settled = self._collect_failure() if self.phase is Phase.SETTLING else []
        self._enter(Phase.OVER, None)
        failed = self._first_failure is not None or self._ended_by is not EndedBy.WORKER
        return [*settled, EndAttempt(self._ended_by, failed)]

    def _on_stall(self, event: StallSeen, now_s: float) -> list[Action]:
        if self.phase is not Phase.RUNNING:
            return []
        collect = CollectIncident("stall", event.reason)
        if not self._stop_on_stall:
            return [collect]
        self._ended_by = EndedBy.STALL
        return [collect, *self._stop(signal.SIGTERM, now_s)]

    def _on_stop(self, event: StopRequested, now_s: float) -> list[Action]:
        if self._ended_by is EndedBy.SIGNAL and self.phase is not Phase.RUNNING:
            return self._kill()  # asked twice: the user does not want to wait
        self._ended_by = EndedBy.SIGNAL
        self.stop_signal = event.number
        return self._stop(event.number, now_s)

    def _on_time(self, now_s: float) -> list[Action]:
        if self.deadline_s is None or now_s < self.deadline_s:
            return []
        if self.phase is Phase.SETTLING:
            return [*self._collect_failure(), *self._stop(signal.SIGTERM, now_s)]
        return self._kill() if self.phase is Phase.STOPPING else []

    def _collect_failure(self) -> list[Action]:
        first = self._first_failure
        assert first is not None
        how = first.how or describe_code(first.code)
        return [CollectIncident("failure", f"rank {first.rank} {how}")]

    def _stop(self, number: int, now_s: float) -> list[Action]:
        self._enter(Phase.STOPPING, now_s + self._grace_s)
        # A process stopped by a signal takes SIGTERM only once it runs again.
        return [SignalWorkers(number), SignalWorkers(signal.SIGCONT)]

    def _kill(self) -> list[Action]:
        self._enter(Phase.KILLING, None)
        return [SignalWorkers(signal.SIGKILL)]

    def _enter(self, phase: Phase, deadline_s: float | None) -> None:
        self.phase = phase
        self.deadline_s = deadline_s


def describe_code(code: int) -> str:
    """Say how a process ended: "exited with code 1", "was killed by SIGKILL"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
