"""Ensure that two worlds never run at the same time, by means of leases and permits.

    host                                  node
    beat n at h        ------------->     promise: no vote for another host until now + P
    lease: h + 0.9 P,  <-------------     reply to n, stamped s
    once a majority
    has replied
    beat n+1, echo s,  ------------->     permit: its ranks may run until s + remaining
    remaining lease

P is the duration of a promise, and h is the time at which the host sends the heartbeat.

Timestamps of different nodes are never compared: the lease is measured on the host's clock, and the
permit on the node's clock. Both periods start when a message is sent, so a delayed reply can only
shorten them.

A new host is elected by a majority whose promises have expired. By then, the former host's lease
and all permits have expired too, and the ranks of the former world are dead or are being killed.
The lease is a tenth shorter than the promise, to allow for clocks that run at different rates.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

_LEASE_SHARE = 0.9
_BEATS_PER_LEASE = 8


def now_s() -> float:
    """Return the time, in seconds, on a clock that also advances while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def beat_interval_s(promise_s: float) -> float:
    """Return the interval between the host's heartbeats, in seconds."""
    return promise_s / _BEATS_PER_LEASE


class Lease:
    """The host's right to run a world; it is valid while a majority of the electors reply.

    Args:
        name: the host's own name.
        promise_s: how long an elector's promise lasts, in seconds.
    """

    def __init__(self, name: str, promise_s: float) -> None:
        self._name = name
        self._duration_s = promise_s * _LEASE_SHARE
        self._sent: dict[int, float] = {}  # beat -> when it was sent
        self._last = 0
        self._acknowledged: dict[str, float] = {}  # elector -> when the beat it replied to was sent

    def beat(self, now_s: float) -> int:
        """Register a heartbeat that is about to be sent; return its number."""
        self._last += 1
        self._sent[self._last] = now_s
        while len(self._sent) > 4 * _BEATS_PER_LEASE:
            del self._sent[next(iter(self._sent))]
        return self._last

    def acknowledge(self, name: str, number: int) -> None:
        """Record a node's reply to a heartbeat, unless the heartbeat is too old."""
        sent_s = self._sent.get(number)
        if sent_s is not None:
            self._acknowledged[name] = max(sent_s, self._acknowledged.get(name, sent_s))

    def remaining_s(
        self, electorates: Sequence[Sequence[str]], now_s: float, *, without: str = ""
    ) -> float:
        """Return the number of seconds until the lease expires; 0 if it has expired.

        Args:
            electorates: the sets of electors. The lease needs a majority of each set.
            without: an elector whose replies are ignored.
        """
        return min(self._of(electors, now_s, without) for electors in electorates)

    def _of(self, electors: Sequence[str], now_s: float, without: str) -> float:
        never = float("-inf")
        since = [
            now_s
            if name == self._name
            else never
            if name == without
            else self._acknowledged.get(name, never)
            for name in electors
        ]
        since.sort(reverse=True)
        return max(0.0, since[len(since) // 2] + self._duration_s - now_s)


class Permit:
    """The time until which the host allows this node's ranks to run."""

    def __init__(self) -> None:
        self._stamps: dict[int, float] = {}
        self._last = 0
        self.expires_s = float("-inf")

    def stamp(self, now_s: float) -> int:
        """Register a reply that is about to be sent; return its number."""
        self._last += 1
        self._stamps[self._last] = now_s
        while len(self._stamps) > 4 * _BEATS_PER_LEASE:
            del self._stamps[next(iter(self._stamps))]
        return self._last

    def extend(self, echo: int, remaining_s: float) -> None:
        """Extend the permit to `remaining_s` seconds after reply number `echo` was sent.

        Args:
            echo: the number of the reply that the host's heartbeat acknowledges.
            remaining_s: the remaining seconds of the host's lease when the heartbeat was sent.
        """
        stamped_s = self._stamps.get(echo)
        if stamped_s is not None:
            self.expires_s = max(self.expires_s, stamped_s + remaining_s)
