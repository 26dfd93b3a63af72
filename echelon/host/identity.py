"""Identify this host and this process in a form that other processes can compare.

A pid is meaningless in another PID namespace, and can be reused in its own namespace. Therefore, a
process is identified by (inode of its PID namespace, pid, start ticks). Two network namespaces on
one machine share a boot ID but are treated as two hosts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Process = tuple[int, int, int]  # inode of its PID namespace, pid, start ticks
_START_TICKS = 19  # index among the fields of /proc/PID/stat that follow the name


def boot_id() -> str:
    """Return the ID of the current boot, or "" if it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def clock_id() -> str:
    """Return the ID of this process's monotonic clock. Equal IDs mean the same clock.

    The ID consists of the boot ID and, if the kernel supports time namespaces, the inode of the
    process's time namespace. The ID is "" if the boot ID cannot be read.
    """
    boot, inode = boot_id(), _namespace("time")
    return f"{boot}/{inode}" if boot and inode else boot  # a kernel without time namespaces


def pid_namespace() -> int:
    """Return the inode of this process's PID namespace, or 0 if it cannot be read."""
    return _namespace("pid")


def start_ticks(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot, or None if the process has ended."""
    fields = stat_fields(pid)
    return None if not fields or fields[0] in "ZX" else int(fields[_START_TICKS])


def find_process(own_pid: int, ticks: int) -> int | None:
    """Convert a process's pid in its own PID namespace to its pid in this process's namespace.

    The two pids differ if the process runs in a nested PID namespace, such as a container's.

    Args:
        own_pid: the pid of the process in its own PID namespace.
        ticks: the process's `start_ticks`, which are the same in all PID namespaces.

    Returns:
        The pid, or None if no such process is visible in this namespace.
    """
    if start_ticks(own_pid) == ticks:
        return own_pid
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 -- names
    except OSError:
        return None
    for pid in pids:
        if start_ticks(pid) == ticks and pid_inside(pid) == own_pid:
            return pid
    return None


def pid_inside(pid: int) -> int:
    """Return a process's pid in its own PID namespace; if it cannot be read, return `pid`."""
    try:
        text = Path(f"/proc/{pid}/status").read_text("utf-8", "replace")
    except OSError:
        return pid
    numbers = text.partition("\nNSpid:")[2].partition("\n")[0].split()
    return int(numbers[-1]) if numbers else pid


def network_of(pid: int) -> int:
    """Return the inode of a process's network namespace, or 0 if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return 0


def stat_fields(pid: int) -> list[str]:
    """Return the fields that follow a process's name in /proc/PID/stat.

    The result is [] if the process does not exist. The name can contain spaces and parentheses, so
    the fields start after the last closing parenthesis.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def host_identity() -> dict[str, Any]:
    """Return this host's identity.

    Two processes run on the same host if their "boot" and "net" values are equal.
    """
    return {"boot": boot_id(), "net": _namespace("net"), "pids": pid_namespace()}


def process_identity() -> dict[str, Any]:
    """Return this process's identity, including the identity of its host."""
    return host_identity() | {"pid": os.getpid(), "start": start_ticks(os.getpid()) or 0}


def is_same_host(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two processes run on the same host, and can therefore share memory."""
    return all(one.get(key) == other.get(key) for key in ("boot", "net"))


def process_of(fact: Mapping[str, Any]) -> Process:
    """Return the (PID namespace, pid, start ticks) tuple of a process's identity."""
    return (fact.get("pids", 0), fact.get("pid", 0), fact.get("start", 0))


def _namespace(kind: str) -> int:
    try:
        return Path(f"/proc/self/ns/{kind}").stat().st_ino
    except OSError:
        return 0
