"""Read another process's threads: their names, and the system calls in which they are waiting.

The system calls distinguish a rank that is waiting for its peers from a rank that is sleeping, even
if the rank's stacks cannot be read. Reading system calls requires permission to trace the process.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping

from echelon.host.facts import HostThread
from echelon.host.procfs import read_text

MAX_THREADS = 64
_FUTEX_TIMEOUT = 3  # index among a futex's arguments
_X86_64 = {
    0: "read", 1: "write", 7: "poll", 16: "ioctl", 17: "pread64", 19: "readv", 20: "writev",
    23: "select", 34: "pause", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto",
    45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 65: "semop", 70: "msgrcv",
    72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync", 128: "rt_sigtimedwait",
    130: "rt_sigsuspend", 202: "futex", 220: "semtimedop", 230: "clock_nanosleep",
    232: "epoll_wait", 247: "waitid", 257: "openat", 270: "pselect6", 271: "ppoll",
    281: "epoll_pwait", 288: "accept4", 441: "epoll_pwait2",
}  # fmt: skip
_GENERIC = {
    22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 56: "openat", 63: "read",
    64: "write", 65: "readv", 66: "writev", 67: "pread64", 72: "pselect6", 73: "ppoll",
    82: "fsync", 83: "fdatasync", 95: "waitid", 98: "futex", 101: "nanosleep",
    115: "clock_nanosleep", 133: "rt_sigsuspend", 137: "rt_sigtimedwait", 188: "msgrcv",
    192: "semtimedop", 193: "semop", 202: "accept", 203: "connect", 206: "sendto",
    207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 242: "accept4", 260: "wait4",
    441: "epoll_pwait2",
}  # fmt: skip
_BY_MACHINE = {"x86_64": _X86_64, "aarch64": _GENERIC, "riscv64": _GENERIC}
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "busybox"})
_CALL = re.compile(r"(-?\d{1,10})((?: 0x[0-9a-f]{1,16})*)")


def threads(pid: int, denied: list[str], limit: int = MAX_THREADS) -> tuple[HostThread, ...]:
    """Return up to `limit` threads of a process, main thread first.

    The names of files that this process may not read are added to `denied`.
    """
    others = sorted(number for number in numbers(f"/proc/{pid}/task") if number != pid)
    calls = _BY_MACHINE.get(platform.machine(), {})
    return tuple(
        _thread(f"/proc/{pid}/task/{thread}", calls, denied) for thread in [pid, *others][:limit]
    )


def program_of(pid: int) -> int:
    """Return the pid of the program that a command runs, skipping shells with a single child.

    Args:
        pid: the pid of the command's first process.
    """
    while read_text(f"/proc/{pid}/comm", "comm", []).strip() in _SHELLS:
        below = children(pid)
        if len(below) != 1:
            break
        (pid,) = below
    return pid


def descendants(pid: int) -> list[int]:
    """Return the pids of a process's descendants, or [] if the kernel does not list children."""
    found = list(children(pid))
    for child in found:
        found += children(child)
    return found


def children(pid: int) -> tuple[int, ...]:
    """Return the pids of a process's children."""
    below: list[int] = []
    for thread in numbers(f"/proc/{pid}/task"):
        text = read_text(f"/proc/{pid}/task/{thread}/children", "children", [])
        below += [int(word) for word in text.split()]
    return tuple(below)


def _thread(folder: str, calls: Mapping[int, str], denied: list[str]) -> HostThread:
    name = read_text(f"{folder}/comm", "comm", denied).strip()
    match = _CALL.match(read_text(f"{folder}/syscall", "syscall", denied))
    if match is None:  # it is running, or may not be examined
        return HostThread(name=name)
    number = int(match[1])
    if number < 0:
        return HostThread(name=name, call="a page fault or the scheduler")
    call = calls.get(number, f"call {number}")
    arguments = match[2].split()
    timed = call == "futex" and len(arguments) > _FUTEX_TIMEOUT
    return HostThread(name=name, call=call, timed=timed and int(arguments[_FUTEX_TIMEOUT], 16) != 0)


def numbers(folder: str) -> list[int]:
    """Return the numeric file names in a /proc folder, or [] if the folder cannot be read."""
    try:
        return [int(name) for name in os.listdir(folder) if name.isdigit()]  # noqa: PTH208 -- names
    except OSError:
        return []
