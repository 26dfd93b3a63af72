"""Tell whether the other ranks' processes still live.

By pidfd, which cannot be fooled by a reused pid and sees a zombie as dead; where the kernel or a
sandbox denies it, by pid and start time in /proc.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable, Mapping
from pathlib import Path


class Peers:
    """The processes of the other members, by group rank."""

    def __init__(self, processes: Mapping[int, tuple[int, int]]) -> None:
        """Watch `{group rank: (pid, start ticks)}`."""
        self._processes = dict(processes)
        self._pidfds: dict[int, int] = {}
        for rank, (pid, ticks) in self._processes.items():
            fd = _open(pid)
            if fd is not None:
                self._pidfds[rank] = fd
                if start_ticks(pid) not in (ticks, None):  # reused before we looked: it is dead
                    self._processes[rank] = (pid, -1)

    def dead(self, ranks: Iterable[int]) -> list[int]:
        """Return those of the group ranks whose process has ended. Does not block."""
        return [rank for rank in ranks if rank in self._processes and self._is_dead(rank)]

    def table(self, size: int) -> list[tuple[int, int, int]]:
        """Return (pid, pidfd or -1, start ticks) for each group rank; zeros where none is known."""
        rows = []
        for rank in range(size):
            pid, ticks = self._processes.get(rank, (0, 0))
            dead = ticks == -1
            rows.append((pid, -1 if dead else self._pidfds.get(rank, -1), 0 if dead else ticks))
        return rows

    def close(self) -> None:
        """Close the descriptors. Safe to call twice."""
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])

    def _is_dead(self, rank: int) -> bool:
        pid, ticks = self._processes[rank]
        fd = self._pidfds.get(rank)
        if fd is None or ticks == -1:
            return ticks == -1 or start_ticks(pid) != ticks
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None: it is gone, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None
