"""Detect a worker's activity from outside, for programs that record nothing.

The signs of activity are the processor time of the worker and its descendants, the worker's output,
and traffic on its connections. Connections to the store are ignored, because a hung client keeps
polling the store. Connections are examined only after the worker has been inactive for a while.

An inactive worker inside a collective of torch's Gloo backend counts as having a pending operation.
A Gloo thread that waits for the interpreter's lock is recognized by how often it wakes up.

A worker that uses less than 1/50 of a core counts as inactive, because threads that poll a clock
always use some processor time. On an overloaded machine, a worker that is computing might get no
more than this share. A worker therefore also counts as active if the worker, or a descendant such
as a compiler, is often ready to run but has no processor. This rule applies only for a limited
time, because a hung rank can look similar.
"""

from __future__ import annotations

import os

from echelon.host.facts import GLOO_THREAD
from echelon.host.identity import stat_fields
from echelon.host.procfs import read_text
from echelon.host.sockets import sockets
from echelon.host.threads import descendants, numbers, program_of, threads

_NO_SHARE = 0.02  # of a core
_MIN_TICKS = 2
_STARVED_SHARE = 0.2  # of the time, ready to run without a processor
_STARVED_LEAST_NS = 1_000_000_000
_STARVED_NS = 900_000_000_000  # without any other sign of activity; then it no longer counts
_POLLS_PER_S = 20.0  # a thread that wakes more often waits for a lock, not for its peers
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Activity:
    """The activity of one worker, seen from outside. Timestamps are in ns of the monotonic clock.

    Args:
        quiet_s: how long the worker must be inactive before its connections are examined.
        looks_inside: whether to also examine the system calls in which threads are waiting.
    """

    def __init__(
        self,
        pid: int,
        store_port: int,
        quiet_s: float,
        now_mono_ns: int,
        *,
        looks_inside: bool = True,
    ) -> None:
        self._looks_inside = looks_inside
        self._pid = pid
        self._store_port = f":{store_port}"
        self._quiet_ns = int(quiet_s * 1e9)
        self._ticks, self._since_ns = self._cpu_ticks(), now_mono_ns
        self._waited, self._worked_ns = self._waited_for_cpu_ns(), now_mono_ns
        self._printed = 0
        self._carried: int | None = None
        self._wakes: dict[int, int] = {}
        self._woke_ns = now_mono_ns
        self.last_mono_ns = now_mono_ns
        self.starved_mono_ns = 0  # when it last was ready to run without a processor; 0: never
        self.num_signs = 0
        self.has_met = False  # whether it has had a connection to the store
        self.is_in_collective = False  # inside one, and otherwise inactive

    def look(self, num_printed_bytes: int, now_mono_ns: int) -> None:
        """Record the worker's activity since the previous call."""
        ticks = self._cpu_ticks()
        elapsed_s = (now_mono_ns - self._since_ns) / 1e9
        self.is_in_collective = False
        busy = ticks - self._ticks > max(_MIN_TICKS, _NO_SHARE * elapsed_s * _TICKS_PER_S)
        works = busy or num_printed_bytes != self._printed or self._has_sent(now_mono_ns)
        if works:
            self._worked_ns = now_mono_ns
        starves = self._starves(now_mono_ns)
        if starves:
            self.starved_mono_ns = now_mono_ns
        if works or starves:
            self.num_signs += 1
            self.last_mono_ns = now_mono_ns
            self.rest(num_printed_bytes, now_mono_ns, ticks)
        elif self._looks_inside and now_mono_ns - self.last_mono_ns >= self._quiet_ns:
            pid = program_of(self._pid)
            num_waiting = sum(thread.is_in_collective for thread in threads(pid, []))
            self.is_in_collective = num_waiting > self._num_polling(pid, now_mono_ns)

    def rest(self, num_printed_bytes: int, now_mono_ns: int, ticks: int | None = None) -> None:
        """Disregard all activity before this call."""
        self._ticks = self._cpu_ticks() if ticks is None else ticks
        self._waited = self._waited_for_cpu_ns()
        self._since_ns = now_mono_ns
        self._printed = num_printed_bytes
        self._carried = None

    def _starves(self, now_mono_ns: int) -> bool:
        """Return whether the worker or a descendant is short of processor time."""
        elapsed_ns = now_mono_ns - self._since_ns
        if elapsed_ns < _STARVED_LEAST_NS or now_mono_ns - self._worked_ns > _STARVED_NS:
            return False
        return self._waited_for_cpu_ns() - self._waited > _STARVED_SHARE * elapsed_ns

    def _waited_for_cpu_ns(self) -> int:
        return sum(_waited_ns(pid) for pid in (self._pid, *descendants(self._pid)))

    def _num_polling(self, pid: int, now_mono_ns: int) -> int:
        """Return how many Gloo threads have been polling since the previous call."""
        before, self._wakes = self._wakes, _gloo_wakes(pid)
        elapsed_s = (now_mono_ns - self._woke_ns) / 1e9
        self._woke_ns = now_mono_ns
        limit = max(1.0, _POLLS_PER_S * elapsed_s)
        return sum(num - before.get(thread, num) > limit for thread, num in self._wakes.items())

    def _has_sent(self, now_mono_ns: int) -> bool:
        if now_mono_ns - self.last_mono_ns < self._quiet_ns:
            return False
        carried = 0
        for pid in (self._pid, *descendants(self._pid)):
            for one in sockets(pid, []):
                if one.peer.endswith(self._store_port):
                    self.has_met = True
                elif one.sent_bytes >= 0:
                    carried += one.sent_bytes + one.received_bytes
        before, self._carried = self._carried, carried
        return before is not None and carried != before

    def _cpu_ticks(self) -> int:
        """Return the processor time of the worker and its descendants, in ticks.

        Descendants that have ended are included.
        """
        return sum(_cpu_ticks(pid) for pid in (self._pid, *descendants(self._pid)))


def _gloo_wakes(pid: int) -> dict[int, int]:
    """Return how many times each Gloo thread has waited, keyed by thread ID."""
    found: dict[int, int] = {}
    for thread in numbers(f"/proc/{pid}/task"):
        folder = f"/proc/{pid}/task/{thread}"
        if read_text(f"{folder}/comm", "comm", []).strip() == GLOO_THREAD:
            status = read_text(f"{folder}/status", "status", [])
            num = status.partition("\nvoluntary_ctxt_switches:")[2].partition("\n")[0].strip()
            if num.isdigit():
                found[thread] = int(num)
    return found


def _cpu_ticks(pid: int) -> int:
    fields = stat_fields(pid)
    return sum(int(field) for field in fields[11:15]) if len(fields) > 14 else 0


def _waited_ns(pid: int) -> int:
    """Return how long a process's main thread has waited for a processor, in ns."""
    fields = read_text(f"/proc/{pid}/schedstat", "schedstat", []).split()
    return int(fields[1]) if len(fields) > 1 else 0
