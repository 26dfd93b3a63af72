"""Notify observers of a job's events.

Observers collect statistics, send notices and serve metrics, but make no decisions. They are called
on the coordinator's own thread, so they must not block. An observer that raises an exception is
removed, and the job continues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from echelon.launcher.control import messages as m
from echelon.launcher.job.report import Incident


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptBegan:
    """An event: the nodes were sent commands to start their ranks.

    `hosts` maps each rank to its host.
    """

    attempt: int
    restart: int  # how many attempts there were before
    hosts: Mapping[int, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnded:
    """An event: a rank has ended.

    `code` is a return code as in `subprocess`; None if the rank's node was lost.
    """

    attempt: int
    rank: int
    code: int | None
    is_survived: bool = False  # the others continue without it


@dataclass(frozen=True, kw_only=True, slots=True)
class IncidentBegan:
    """An event: ranks have failed or stalled. `kind` is "failure" or "stall"."""

    attempt: int
    kind: str
    reason: str
    is_early: bool = False  # an early look, before the stall rule's limit


@dataclass(frozen=True, kw_only=True, slots=True)
class StallCleared:
    """An event: ranks that had stalled are making progress again."""

    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictKnown:
    """An event: the analysis of an incident has finished, with or without a verdict."""

    incident: Incident


@dataclass(frozen=True, kw_only=True, slots=True)
class Continued:
    """An event: an attempt continues without the ranks that it lost.

    `line` is the line printed for the user.
    """

    attempt: int
    line: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReplaced:
    """An event: a replacement process for a lost rank, or a rank of a late node, was admitted."""

    attempt: int
    rank: int
    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnded:
    """An event: all ranks of an attempt, and all processes that they started, have ended."""

    attempt: int
    failed: bool
    ended_by: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Restarting:
    """An event: an attempt has ended, and the job is starting another.

    `decision` is the line printed for the user.
    """

    attempt: int  # the one that ended
    decision: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LapsReported:
    """An event: a node has reported the progress of its ranks."""

    node: str
    laps: m.Laps


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEnded:
    """An event: the job has ended."""

    ended_by: str
    exit_code: int
    error: str


Happening = (
    AttemptBegan | RankEnded | IncidentBegan | StallCleared | VerdictKnown | Continued
    | RankReplaced | AttemptEnded | Restarting | LapsReported | JobEnded
)  # fmt: skip
Observer = Callable[[Happening], None]


class Observers:
    """The observers of one job.

    Args:
        say: prints a line for the user; called once for each observer that fails.
    """

    def __init__(self, say: Callable[[str], None], observers: Sequence[Observer] = ()) -> None:
        self._say = say
        self._observers = list(observers)

    def tell(self, happening: Happening) -> None:
        """Notify every observer of an event."""
        for observer in list(self._observers):
            try:
                observer(happening)
            except Exception as err:  # noqa: BLE001 -- see the module's text
                self._observers.remove(observer)
                self._say(
                    f"a report about the job failed and is omitted: {type(err).__name__}: {err}"
                )
