"""What a host knows of a process from outside: /proc, read by the agent, never by the rank.

Everything here may be denied in a container; what is denied is named in `not_permitted` and left
empty, never guessed.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

_STATUS_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One look at a process."""

    state: str = ""  # /proc state letter; "": it is gone
    start_ticks: int = 0
    cpu_ticks: int = 0
    rss_bytes: int | None = None
    wait_channel: str = ""
    caught_signals: int = 0
    not_permitted: tuple[str, ...] = ()


def sample(pid: int) -> Sample:
    """Look at a process once; an ended one gives an empty state."""
    denied: list[str] = []
    stat = _read(pid, "stat", denied)
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 22:
        return Sample(not_permitted=tuple(denied))
    status = dict(
        line.split(":\t", 1) for line in _read(pid, "status", denied).splitlines() if ":\t" in line
    )
    return Sample(
        state=fields[0],
        start_ticks=int(fields[19]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        rss_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        wait_channel=_read(pid, "wchan", denied).strip("0\n"),
        caught_signals=int(status.get("SigCgt", "0").strip(), 16),
        not_permitted=tuple(denied),
    )


def send(pid: int, start_ticks: int, number: int) -> bool:
    """Send a signal to exactly this process, if it catches it. Return whether it was sent.

    The process is held by a pidfd while its start time and signal mask are checked, so neither a
    reused pid nor a process without a handler (which would die of it) is ever hit.
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
    """Return the share of one core that a process used between two looks."""
    if not before.state or not after.state or elapsed_s <= 0:
        return None
    ticks = after.cpu_ticks - before.cpu_ticks
    return ticks / os.sysconf("SC_CLK_TCK") / elapsed_s


def oom_kills(pid: int) -> int | None:
    """Return how many processes the kernel killed for memory in a process's cgroup, or None.

    Read it before and after: a difference says that somebody in there was killed for memory.
    """
    for line in _read(pid, "cgroup", []).splitlines():
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            path = Path(f"/sys/fs/cgroup/memory{group}/memory.oom_control")  # version 1
        elif not controllers:
            path = Path(f"/sys/fs/cgroup{group}/memory.events")  # version 2
        else:
            continue
        count = _count(path, "oom_kill")
        if count is not None:
            return count
    return None


def _count(path: Path, name: str) -> int | None:
    try:
        rows = dict(row.split() for row in path.read_text().splitlines())
        return int(rows[name])
    except (OSError, ValueError, KeyError):
        return None


def tail(path: Path, num_bytes: int) -> str:
    """Return the last bytes of a text file, from the start of a line; "" if there is none."""
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


def _read(pid: int, name: str, denied: list[str]) -> str:
    try:
        with Path(f"/proc/{pid}/{name}").open("rb") as file:
            return file.read(_STATUS_BYTES).decode("utf-8", "replace")
    except PermissionError:
        denied.append(name)
        return ""
    except OSError:
        return ""  # it has ended
