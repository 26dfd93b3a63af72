"""How long this node waits for its user, the coordinator and its workers: pure, time handed in.

Two deadlines that no other part keeps:

* A user's request to stop goes to the coordinator. If no command to stop follows within a few
  seconds, the node stops alone. A person who asks again (Ctrl-C, not a scheduler's repeated signal)
  after a second does not want to wait: this node's workers, and only these, are killed.
* Workers that were told to stop are killed after the grace, counted from their signal; a rank that
  outlives SIGKILL is named after a few seconds and given up half a minute later.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

ANSWER_S = 5.0  # for the coordinator to react to a request to stop
_AGAIN_S = 1.0  # the shell and the kernel may both signal; a person takes longer
_NAME_S = 5.0  # SIGKILL to naming the ranks that live on
UNKILLABLE_S = 30.0  # SIGKILL to giving them up


class Asked(Enum):
    """What a signal from the user means."""

    STOP = "stop"
    HURRY = "hurry"
    NOTHING = "nothing"


@dataclass(slots=True)
class UserRequest:
    """The stop signals that this launcher has received."""

    first: int = 0  # its number; 0: none
    _first_s: float = 0.0
    _is_answered: bool = False
    _hurried: bool = False

    def on(self, number: int, now_s: float) -> Asked:
        """Take in a stop signal."""
        if not self.first:
            self.first, self._first_s = number, now_s
            return Asked.STOP
        if number != signal.SIGINT or now_s - self._first_s < _AGAIN_S or self._hurried:
            return Asked.NOTHING
        self._hurried = True
        return Asked.HURRY

    def answer(self) -> None:
        """Note that the coordinator reacted."""
        self._is_answered = True

    def deadline_s(self) -> float:
        """Return when this node stops alone; infinity if nothing is asked, or all is answered."""
        if not self.first or self._is_answered:
            return float("inf")
        return self._first_s + ANSWER_S


class Due(Enum):
    """What the grace of stopping workers asks for."""

    NOTHING = "nothing"
    KILL = "kill"
    NAME = "name"
    GIVE_UP = "give up"


class Grace:
    """The time of workers between their signal and their end."""

    def __init__(self) -> None:
        self._kill_s = float("inf")
        self._killed_s = float("inf")
        self._named = self._given_up = False

    @property
    def is_running(self) -> bool:
        """Whether workers were told to stop, or killed."""
        return self._kill_s < float("inf") or self._killed_s < float("inf")

    def begin(self, grace_s: float, now_s: float) -> None:
        """Note that workers were signalled; only the first time counts."""
        if not self.is_running:
            self._kill_s = now_s + grace_s

    def note_killed(self, now_s: float) -> None:
        """Note that workers were killed."""
        self._killed_s = min(self._killed_s, now_s)

    def due(self, now_s: float) -> Due:
        """Return what is due now, once each. Call it while workers still run."""
        if self._killed_s == float("inf"):
            return Due.KILL if now_s >= self._kill_s else Due.NOTHING
        if not self._named and now_s >= self._killed_s + _NAME_S:
            self._named = True
            return Due.NAME
        if not self._given_up and now_s >= self._killed_s + UNKILLABLE_S:
            self._given_up = True
            return Due.GIVE_UP
        return Due.NOTHING

    def deadline_s(self) -> float:
        """Return when to ask `due` again."""
        if self._killed_s == float("inf"):
            return self._kill_s
        if not self._named:
            return self._killed_s + _NAME_S
        return float("inf") if self._given_up else self._killed_s + UNKILLABLE_S
