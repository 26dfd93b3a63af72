"""Detect when the processes of other ranks end.

Processes are watched through pidfds, which are immune to pid reuse and report a zombie as dead. If
the kernel or a sandbox does not allow pidfds, the pid and the process's start time in /proc are
used. A pid is meaningless in another PID namespace, such as another container's. A process in
another namespace is watched only after it has sent a pidfd for itself (see `shm/handover.py`). One
descriptor per process serves all groups, and one epoll instance watches all descriptors, so
checking hundreds of peers takes one system call.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterable, Mapping

from echelon.host.identity import Process, pid_namespace, start_ticks


class _Descriptors:
    """This process's pidfds, each shared by all groups that watch the same process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: dict[Process, tuple[int, int]] = {}  # pidfd, number of users
        self._poll: select.epoll | None = None  # while any is open
        self._ended: set[int] = set()  # pidfds

    def adopt(self, process: Process, fd: int) -> None:
        """Store a pidfd that a process in another PID namespace sent."""
        with self._lock:
            if process in self._open:
                os.close(fd)
            else:
                self._watch(fd)
                self._open[process] = (fd, 0)

    def take(self, process: Process) -> int | None:
        """Return a process's pidfd and increment its use count; None if there is no pidfd."""
        with self._lock:
            fd, users = self._open.get(process, (-1, 0))
            if fd < 0:
                if process[0] != pid_namespace():
                    return None
                try:
                    fd = os.pidfd_open(process[1])
                except (OSError, AttributeError):
                    return None
                self._watch(fd)
            self._open[process] = (fd, users + 1)
            return fd

    def ended(self) -> set[int]:
        """Return the pidfds whose processes have ended. Does not block."""
        with self._lock:
            if self._poll is not None:
                for fd, _ in self._poll.poll(0):
                    if fd not in self._ended:  # a signal handler may have looked in between
                        self._ended.add(fd)
                        self._poll.unregister(fd)
            return self._ended

    def release(self, process: Process) -> None:
        """Release one reference to a process's pidfd, and close the pidfd if none remain."""
        with self._lock:
            fd, users = self._open.pop(process)
            if users > 1:
                self._open[process] = (fd, users - 1)
                return
            if fd in self._ended:
                self._ended.remove(fd)
            elif self._poll is not None:
                self._poll.unregister(fd)  # closing is not enough: a forked child may have it
            os.close(fd)
            if not self._open and self._poll is not None:
                self._poll.close()
                self._poll = None

    def _watch(self, fd: int) -> None:
        if self._poll is None:
            self._poll = select.epoll()
        self._poll.register(fd, select.EPOLLIN)


_descriptors = _Descriptors()


def _forget() -> None:
    """Replace the descriptors in a forked child, because their lock might be unusable there.

    If another thread held the lock during the fork, the lock is never released in the child.
    """
    global _descriptors
    _descriptors = _Descriptors()


os.register_at_fork(after_in_child=_forget)


def adopt(process: Process, fd: int) -> None:
    """Watch a process in another PID namespace through a pidfd that the process sent."""
    _descriptors.adopt(process, fd)


class Peers:
    """The processes of the other members on this host, keyed by group rank.

    `close` can be called from another thread or a signal handler while another method runs. A
    closed object does not report any process as dead, and does not hold any descriptors.
    """

    def __init__(self, processes: Mapping[int, Process]) -> None:
        self._processes = dict(processes)
        self._is_closed = False
        self._namespace = pid_namespace()
        self._pidfds: dict[int, int] = {}
        for rank in self._processes:
            self._take(rank)
        self._reused = {  # by another process before it was opened: the peer is dead
            rank
            for rank in self._pidfds
            if self._is_near(rank)
            and start_ticks(self._processes[rank][1]) not in (self._processes[rank][2], None)
        }

    @property
    def watched(self) -> set[int]:
        """The group ranks whose deaths can be detected."""
        if self._is_closed:
            return set()
        return {rank for rank in self._processes if rank in self._pidfds or self._is_near(rank)}

    def dead(self, ranks: Iterable[int]) -> list[int]:
        """Return those of the given group ranks whose processes have ended. Does not block."""
        if self._is_closed:
            return []
        ended = _descriptors.ended()
        if not ended and not self._reused and len(self._pidfds) == len(self._processes):
            return []
        found = [rank for rank in ranks if rank in self._processes and self._is_dead(rank, ended)]
        return [] if self._is_closed else found

    def table(self, size: int) -> list[tuple[int, int, int]]:
        """Return (pid, pidfd or -1, start ticks) for each group rank; zeros for unwatched ranks."""
        rows = []
        for rank in range(size):
            _, pid, ticks = self._processes.get(rank, (0, 0, 0))
            fd = self._pidfds.get(rank, -1)
            if rank in self._reused:
                rows.append((pid, -1, 0))
            elif rank in self._processes and not self._is_near(rank):
                rows.append((-1 if fd >= 0 else 0, fd, 0))
            else:
                rows.append((pid, fd, ticks))
        return rows

    def close(self) -> None:
        """Release the descriptors. Safe to call twice."""
        self._is_closed = True
        for rank in list(self._pidfds):
            self._release(rank)

    def _is_near(self, rank: int) -> bool:
        return self._processes[rank][0] == self._namespace

    def _take(self, rank: int) -> int | None:
        fd = self._pidfds.get(rank)
        if fd is None:
            fd = _descriptors.take(self._processes[rank])
            if fd is not None:
                self._pidfds[rank] = fd
                if self._is_closed:  # since `dead` began, and without this descriptor
                    self._release(rank)
        return fd

    def _release(self, rank: int) -> None:
        if self._pidfds.pop(rank, None) is not None:  # by one of two that release at once
            _descriptors.release(self._processes[rank])

    def _is_dead(self, rank: int, ended: set[int]) -> bool:
        if rank in self._reused:
            return True
        is_new = rank not in self._pidfds
        fd = self._take(rank)
        if fd is not None:
            return fd in (_descriptors.ended() if is_new else ended)
        _, pid, ticks = self._processes[rank]
        return self._is_near(rank) and start_ticks(pid) != ticks
