"""Read what /proc shows about a process. Only the launcher's agent uses this module.

A container can deny access to some of these files. The name of a denied file is added to
`not_permitted`, and the values from this file are left empty.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.host.cgroup import limits, pressure
from echelon.host.facts import HostFacts
from echelon.host.procfs import read_text
from echelon.host.sockets import moved, sockets
from echelon.host.threads import descendants


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The state of a process at one moment."""

    state: str = ""  # /proc state letter; "" if the process has ended
    start_ticks: int = 0
    cpu_ticks: int = 0  # of the process and all its descendants, including those that have ended
    rss_bytes: int | None = None
    wait_channel: str = ""
    caught_signals: int = 0
    not_permitted: tuple[str, ...] = ()


def sample(pid: int) -> Sample:
    """Read the state of a process once; return an empty sample if the process has ended."""
    denied: list[str] = []
    stat = read_text(f"/proc/{pid}/stat", "stat", denied)
    status = read_text(f"/proc/{pid}/status", "status", denied)
    wait_channel = read_text(f"/proc/{pid}/wchan", "wchan", denied)
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 22:
        return Sample(not_permitted=tuple(denied))
    return Sample(
        state=fields[0],
        start_ticks=int(fields[19]),
        cpu_ticks=_ticks(fields) + _ticks_below(pid),
        rss_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        wait_channel=wait_channel.strip("0\n"),
        caught_signals=int(status.partition("\nSigCgt:")[2].partition("\n")[0] or "0", 16),
        not_permitted=tuple(denied),
    )


def _ticks(fields: list[str]) -> int:
    """Return the CPU time, in ticks, of a process and of the children that it has reaped."""
    return sum(int(field) for field in fields[11:15])


def _ticks_below(pid: int) -> int:
    """Return the total CPU time, in ticks, of a process's live descendants."""
    stats = [read_text(f"/proc/{child}/stat", "stat", []) for child in descendants(pid)]
    rows = [stat.rpartition(")")[2].split() for stat in stats]
    return sum(_ticks(fields) for fields in rows if len(fields) >= 22)


def send(pid: int, start_ticks: int, number: int) -> bool:
    """Send a signal to a process that handles it; return whether the signal was sent.

    The signal is not sent to a process without a handler, because the signal would kill the
    process. If the kernel supports pidfds, the signal cannot reach another process that has reused
    the pid.
    """
    try:
        fd = os.pidfd_open(pid)
    except (OSError, AttributeError):
        return _send_by_pid(pid, start_ticks, number)
    try:
        if not _may_send(pid, start_ticks, number):
            return False
        signal.pidfd_send_signal(fd, number)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def cpu_share(before: Sample, after: Sample, elapsed_s: float) -> float | None:
    """Return the CPU use of a process and its descendants between two samples, in cores."""
    if not before.state or not after.state or elapsed_s <= 0:
        return None
    ticks = max(0, after.cpu_ticks - before.cpu_ticks)  # negative if a child left its parent
    return ticks / os.sysconf("SC_CLK_TCK") / elapsed_s


def oom_kills(pid: int) -> int | None:
    """Return the number of OOM kills in a process's cgroup, or None if the number is unknown."""
    return limits(pid, []).oom_kills


class Surroundings:
    """The cgroup limits and TCP sockets of a process, read twice to measure changes.

    The constructor reads them once; `add_to` reads them again and computes the differences.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._limits, self._sockets = limits(pid, []), sockets(pid, [])
        self._looked_ns = time.monotonic_ns()

    def add_to(self, host: HostFacts) -> HostFacts:
        """Return a copy of `host` with the current facts added.

        The names of the files that this process is not permitted to read are added as well.
        """
        denied = list(host.not_permitted)
        elapsed_ns = time.monotonic_ns() - self._looked_ns
        now = limits(self._pid, denied)
        throttled = None
        if now.throttled_ns is not None and self._limits.throttled_ns is not None and elapsed_ns:
            throttled = max(now.throttled_ns - self._limits.throttled_ns, 0) / elapsed_ns
        return replace(
            host,
            num_threads=_num_threads(self._pid, denied),
            frozen=now.frozen,
            throttled_share=throttled,
            memory_bytes=now.memory_bytes,
            memory_limit_bytes=now.memory_limit_bytes,
            pressure=pressure(denied),
            sockets=moved(self._sockets, sockets(self._pid, denied)),
            not_permitted=tuple(dict.fromkeys(denied)),
        )


def _num_threads(pid: int, denied: list[str]) -> int | None:
    text = read_text(f"/proc/{pid}/status", "status", denied)
    _, found, rest = text.partition("\nThreads:")
    return int(rest.split()[0]) if found else None


def tail(path: Path, num_bytes: int) -> str:
    """Return the last lines of a text file, or "" if the file cannot be read.

    The result is at most `num_bytes` bytes of the file, without an incomplete first line.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            text = file.read(num_bytes).decode("utf-8", "replace")
    except OSError:
        return ""
    return text.partition("\n")[2] if size > num_bytes else text


def _may_send(pid: int, start_ticks: int, number: int) -> bool:
    now = sample(pid)
    return now.start_ticks == start_ticks and bool(now.caught_signals >> (number - 1) & 1)


def _send_by_pid(pid: int, start_ticks: int, number: int) -> bool:
    if not _may_send(pid, start_ticks, number):
        return False
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True
