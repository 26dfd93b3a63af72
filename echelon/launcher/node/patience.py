"""Limit how long a stopping node waits for the coordinator and for the node's own workers.

A user's request to stop is sent to the coordinator. If the coordinator does not respond within a
few seconds, the node stops on its own. If the user presses Ctrl-C again after at least a second,
this node's workers are killed immediately. Repeated signals from a scheduler have no effect.

Workers that were asked to stop are killed at the end of their grace period. A rank that survives
SIGKILL is reported after a few seconds and abandoned after 30 s.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

ANSWER_S = 5.0  # for the coordinator to answer a request to stop
_AGAIN_S = 1.0  # the shell and the kernel may both send a signal; a person takes longer
_NAME_S = 5.0  # from SIGKILL to the report of the ranks that survive it
_HUNG_S = 1.0  # the grace period of a rank that hangs
UNKILLABLE_S = 30.0  # from SIGKILL to abandoning them


class Asked(Enum):
    """The possible meanings of a user's stop signal."""

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
        """Handle a stop signal; return the request that it stands for."""
        if not self.first:
            self.first, self._first_s = number, now_s
            return Asked.STOP
        if number != signal.SIGINT or now_s - self._first_s < _AGAIN_S or self._hurried:
            return Asked.NOTHING
        self._hurried = True
        return Asked.HURRY

    def answer(self) -> None:
        """Record that the coordinator has responded."""
        self._is_answered = True

    def deadline_s(self) -> float:
        """Return the time at which this node stops by itself if the coordinator has not responded.

        Return infinity if no stop signal is waiting for a response.
        """
        if not self.first or self._is_answered:
            return float("inf")
        return self._first_s + ANSWER_S


class Due(Enum):
    """The actions that can become due while workers are being stopped."""

    NOTHING = "nothing"
    KILL_HUNG = "kill hung ranks"
    KILL = "kill"
    NAME = "name"
    GIVE_UP = "give up"


class Grace:
    """The time limits for workers that were asked to stop."""

    def __init__(self) -> None:
        self._kill_s = float("inf")
        self._kill_hung_s = float("inf")
        self._killed_s = float("inf")
        self._named = self._given_up = False

    @property
    def is_running(self) -> bool:
        """True once workers have been asked to stop or have been killed."""
        return self._kill_s < float("inf") or self._killed_s < float("inf")

    def begin(self, grace_s: float, now_s: float, *, has_hung: bool = False) -> None:
        """Record that the launcher has asked workers to stop. Only the first call has an effect.

        Args:
            has_hung: whether some of the workers are hung. Hung workers are killed before the grace
                period ends.
        """
        if not self.is_running:
            self._kill_s = now_s + grace_s
            if has_hung:
                self._kill_hung_s = now_s + min(_HUNG_S, grace_s)

    def note_killed(self, now_s: float) -> None:
        """Record that workers were killed."""
        self._killed_s = min(self._killed_s, now_s)

    def due(self, now_s: float) -> Due:
        """Return the action that is due now. Each action is returned only once.

        While workers are running, call this method at each time that `deadline_s` returns.
        """
        if self._killed_s == float("inf"):
            return self._due_before_kill(now_s)
        if not self._named and now_s >= self._killed_s + _NAME_S:
            self._named = True
            return Due.NAME
        if not self._given_up and now_s >= self._killed_s + UNKILLABLE_S:
            self._given_up = True
            return Due.GIVE_UP
        return Due.NOTHING

    def _due_before_kill(self, now_s: float) -> Due:
        if now_s >= self._kill_s:
            return Due.KILL
        if now_s >= self._kill_hung_s:
            self._kill_hung_s = float("inf")
            return Due.KILL_HUNG
        return Due.NOTHING

    def deadline_s(self) -> float:
        """Return the time at which to call `due` next."""
        if self._killed_s == float("inf"):
            return min(self._kill_s, self._kill_hung_s)
        if not self._named:
            return self._killed_s + _NAME_S
        return float("inf") if self._given_up else self._killed_s + UNKILLABLE_S
