"""Which of the other ranks' processes have ended.

By pidfd, which cannot be fooled by a reused pid and reports a zombie as dead; where the kernel or a
sandbox denies it, by pid and start time in /proc. One descriptor per process serves all groups.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

Process = tuple[int, int]  # pid, start ticks


class _Descriptors:
    """The pidfds of this process, each shared by all groups that watch the same process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: dict[Process, tuple[int, int]] = {}  # pidfd, number of users

    def take(self, process: Process) -> int | None:
        """Return the pidfd of a process, or None if it cannot be had."""
        with self._lock:
            fd, users = self._open.get(process, (-1, 0))
            if not users:
                try:
                    fd = os.pidfd_open(process[0])
                except (OSError, AttributeError):
                    return None
            self._open[process] = (fd, users + 1)
            return fd

    def release(self, process: Process) -> None:
        """Close a pidfd with its last user."""
        with self._lock:
            fd, users = self._open.pop(process)
            if users > 1:
                self._open[process] = (fd, users - 1)
            else:
                os.close(fd)


_descriptors = _Descriptors()


class Peers:
    """The processes of other members, by group rank.

    Args:
        processes: {group rank: (pid, start ticks)}, of this PID namespace.
        received: {group rank: pidfd} of processes of other PID namespaces; closed with this.
    """

    def __init__(
        self, processes: Mapping[int, Process], received: Mapping[int, int] | None = None
    ) -> None:
        self._processes = dict(processes)
        self._received = dict(received or {})
        self._pidfds: dict[int, int] = {}
        for rank, process in self._processes.items():
            fd = _descriptors.take(process)
            if fd is not None:
                self._pidfds[rank] = fd
        self._reused = {  # by another process before it was opened: the peer is dead
            rank
            for rank in self._pidfds
            if start_ticks(self._processes[rank][0]) not in (self._processes[rank][1], None)
        }

    @property
    def watched(self) -> set[int]:
        """The group ranks whose deaths are seen."""
        return set(self._processes) | set(self._received)

    def dead(self, ranks: Iterable[int]) -> list[int]:
        """Return those of the group ranks whose process has ended. Does not block."""
        return [rank for rank in ranks if self._is_dead(rank)]

    def table(self, size: int) -> list[tuple[int, int, int]]:
        """Return (pid, pidfd or -1, start ticks) per group rank; zeros where none is known."""
        rows = []
        for rank in range(size):
            pid, ticks = self._processes.get(rank, (0, 0))
            if rank in self._received:
                rows.append((-1, self._received[rank], 0))
            elif rank in self._reused:
                rows.append((pid, -1, 0))
            else:
                rows.append((pid, self._pidfds.get(rank, -1), ticks))
        return rows

    def close(self) -> None:
        """Release the descriptors. Safe to call twice."""
        while self._pidfds:
            rank, _ = self._pidfds.popitem()
            _descriptors.release(self._processes[rank])
        while self._received:
            os.close(self._received.popitem()[1])
        self._processes.clear()

    def _is_dead(self, rank: int) -> bool:
        fd = self._received.get(rank, self._pidfds.get(rank, -1))
        if rank in self._reused:
            return True
        if fd >= 0:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            return bool(poll.poll(0))
        process = self._processes.get(rank)
        return process is not None and start_ticks(process[0]) != process[1]


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
