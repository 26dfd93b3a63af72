"""What a worker does, seen from outside: for programs that record nothing.

Processor time of the worker and of all that it started, output, and bytes on its connections. The
store's connection does not count: clients ask it about time-outs for as long as they hang.

A worker that does nothing inside a collective of torch's Gloo backend has an operation pending, as
a ring would say.

Threads that only look at a clock use a little processor time for ever, so less than a fiftieth of a
core is none. Connections are looked at only once a worker has done nothing for a while.
"""

from __future__ import annotations

import os

from echelon.host.identity import stat_fields
from echelon.host.sockets import sockets
from echelon.host.threads import descendants, program_of, threads

_NO_SHARE = 0.02  # of a core
_MIN_TICKS = 2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Activity:
    """One worker that has no ring. Stamps are monotonic ns."""

    def __init__(self, pid: int, store_port: int, quiet_s: float, now_mono_ns: int) -> None:
        self._pid = pid
        self._store_port = f":{store_port}"
        self._quiet_ns = int(quiet_s * 1e9)
        self._ticks, self._since_ns = self._cpu_ticks(), now_mono_ns
        self._printed = 0
        self._carried: int | None = None
        self.last_mono_ns = now_mono_ns
        self.num_signs = 0
        self.has_met = False  # it has a connection to the store
        self.is_in_collective = False  # and does nothing else

    def look(self, num_printed_bytes: int, now_mono_ns: int) -> None:
        """Note what it has done since the last look."""
        ticks = self._cpu_ticks()
        elapsed_s = (now_mono_ns - self._since_ns) / 1e9
        self.is_in_collective = False
        busy = ticks - self._ticks > max(_MIN_TICKS, _NO_SHARE * elapsed_s * _TICKS_PER_S)
        if busy or num_printed_bytes != self._printed or self._has_sent(now_mono_ns):
            self.num_signs += 1
            self.last_mono_ns = now_mono_ns
            self.rest(num_printed_bytes, now_mono_ns, ticks)
        elif now_mono_ns - self.last_mono_ns >= self._quiet_ns:
            seen = threads(program_of(self._pid), [])
            self.is_in_collective = any(thread.is_in_collective for thread in seen)

    def rest(self, num_printed_bytes: int, now_mono_ns: int, ticks: int | None = None) -> None:
        """Count from now: what it has done so far was noted, or asked for by us."""
        self._ticks = self._cpu_ticks() if ticks is None else ticks
        self._since_ns = now_mono_ns
        self._printed = num_printed_bytes
        self._carried = None

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
        """Count the processor time of the worker and of all below it, dead ones included."""
        return sum(_cpu_ticks(pid) for pid in (self._pid, *descendants(self._pid)))


def _cpu_ticks(pid: int) -> int:
    fields = stat_fields(pid)
    return sum(int(field) for field in fields[11:15]) if len(fields) > 14 else 0
