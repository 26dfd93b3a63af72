"""Read the limits of a process's cgroups (v1 and v2) and the host's pressure stall information.

The limits of ancestor cgroups, such as a pod's or a Slurm job's, apply as well. Only the limit that
is closest to being reached is reported, together with the usage of its cgroup.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from echelon.host.procfs import read_text

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number of this size
_CGROUPS = "/sys/fs/cgroup"


def usable_cores(root: Path = Path(_CGROUPS), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the number of cores that this process is allowed to use. The result is at least 1.

    Args:
        root: the folder where the cgroups are mounted.
        own: the file that lists this process's cgroups.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(round(quota) for quota in _quotas(root, own))]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits and usage of a process's cgroups at one moment.

    None means unlimited or unknown.
    """

    throttled_ns: int | None = None  # since the cgroup was made
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    reclaimable_bytes: int = 0  # of memory_bytes: cached files, which the kernel drops when needed
    num_processes: int | None = None  # threads count too
    max_processes: int | None = None
    oom_kills: int | None = None
    frozen: bool | None = None


def limits(pid: int, denied: list[str]) -> Limits:
    """Read the limits of a process's cgroups; append the names of unreadable files to `denied`."""
    groups = [_read_group(folder, version, denied) for version, folder in _folders(pid, denied)]
    memory_bytes, memory_limit = _tightest(groups, "memory_bytes", "memory_limit_bytes")
    num_processes, max_processes = _tightest(groups, "num_processes", "max_processes")
    frozen = _nearest(groups, "frozen")
    return Limits(
        throttled_ns=max((g["throttled_ns"] for g in groups if "throttled_ns" in g), default=None),
        memory_bytes=memory_bytes,
        memory_limit_bytes=memory_limit,
        reclaimable_bytes=_reclaimable(groups, memory_bytes, memory_limit),
        num_processes=num_processes,
        max_processes=max_processes,
        oom_kills=_nearest(groups, "oom_kills"),
        frozen=None if frozen is None else bool(frozen),
    )


def pressure(denied: list[str]) -> dict[str, float]:
    """Return how long tasks were stalled on each resource, as a fraction of the last 10 s.

    The keys are "cpu", "io" and "memory". The values come from the "some" lines in /proc/pressure,
    which count the time during which at least one task was stalled.
    """
    shares = {}
    for kind in ("cpu", "io", "memory"):
        for line in read_text(f"/proc/pressure/{kind}", "pressure", denied).splitlines():
            words = line.split()
            if words[:1] == ["some"] and words[1].startswith("avg10="):
                shares[kind] = float(words[1].removeprefix("avg10=")) / 100
    return shares


# By cgroup version: field, file, row in the file ("" if the file is one number), unit.
_SOURCES: dict[int, tuple[tuple[str, str, str, int], ...]] = {
    1: (
        ("throttled_ns", "cpu.stat", "throttled_time", 1),
        ("memory_bytes", "memory.usage_in_bytes", "", 1),
        ("memory_limit_bytes", "memory.limit_in_bytes", "", 1),
        ("inactive_file", "memory.stat", "total_inactive_file", 1),
        ("active_file", "memory.stat", "total_active_file", 1),
        ("oom_kills", "memory.oom_control", "oom_kill", 1),
        ("num_processes", "pids.current", "", 1),
        ("max_processes", "pids.max", "", 1),
    ),
    2: (
        ("throttled_ns", "cpu.stat", "throttled_usec", 1000),
        ("memory_bytes", "memory.current", "", 1),
        ("memory_limit_bytes", "memory.max", "", 1),
        ("inactive_file", "memory.stat", "inactive_file", 1),
        ("active_file", "memory.stat", "active_file", 1),
        ("oom_kills", "memory.events", "oom_kill", 1),
        ("frozen", "cgroup.events", "frozen", 1),
        ("num_processes", "pids.current", "", 1),
        ("max_processes", "pids.max", "", 1),
    ),
}


def _read_group(folder: str, version: int, denied: list[str]) -> dict[str, int]:
    """Read one cgroup's limits and usage, keyed by field; omit missing and unlimited values."""
    found: dict[str, int] = {}
    for field, file, row, unit in _SOURCES[version]:
        text = read_text(f"{folder}/{file}", "cgroup", denied)
        value = _row(text, row) if row else _number(text.strip())
        if value is not None and value < _UNLIMITED:
            found[field] = value * unit
    return found


def _nearest(groups: list[dict[str, int]], field: str) -> int | None:
    """Return a field from the innermost cgroup that has this field, or None."""
    return next((group[field] for group in groups if field in group), None)


def _tightest(groups: list[dict[str, int]], used: str, limit: str) -> tuple[int | None, int | None]:
    """Return the usage and the limit of the cgroup in `groups` that is closest to its limit.

    If no cgroup has a limit, return the usage of the innermost cgroup, and None.
    """
    limited = [(group[used], group[limit]) for group in groups if used in group and limit in group]
    if not limited:
        return _nearest(groups, used), None
    return max(limited, key=lambda one: one[0] / max(one[1], 1))


def _reclaimable(groups: list[dict[str, int]], used: int | None, limit: int | None) -> int:
    """Return the page cache size, in bytes, of the first cgroup with this memory usage and limit.

    Return 0 if there is no such cgroup, or if its page cache size is unknown.
    """
    for group in groups:
        if (group.get("memory_bytes"), group.get("memory_limit_bytes")) == (used, limit):
            return group.get("inactive_file", 0) + group.get("active_file", 0)
    return 0


def _folders(pid: int, denied: list[str]) -> Iterator[tuple[int, str]]:
    """Yield (version, folder) for a process's cgroups and their ancestors, innermost first."""
    for line in read_text(f"/proc/{pid}/cgroup", "cgroup", denied).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for group in _upwards(path):
                yield 2, _CGROUPS + group
        for controller in ("cpu", "memory", "pids"):
            if controller in controllers.split(","):
                for group in _upwards(path):
                    yield 1, f"{_CGROUPS}/{controller}{group}"


def _upwards(path: str) -> Iterator[str]:
    """Yield the paths of a cgroup and its ancestors, ending with "" for the root."""
    group = path.rstrip("/")
    while group:
        yield group
        group = group.rpartition("/")[0]
    yield ""


def _row(text: str, name: str) -> int | None:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value)
    return None


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None  # "max" means no limit


def _quotas(root: Path, own: Path) -> Iterator[float]:
    """Yield the CPU quotas, in cores, of this process's cgroups and their ancestors."""
    for line in read_text(str(own), "cgroup", []).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        mount = root / "cpu" if "cpu" in controllers.split(",") else root
        if controllers and mount == root:
            continue
        group = mount / path.strip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(mount) and (quota := _quota(folder)):
                yield quota


def _quota(folder: Path) -> float:
    """Return a cgroup's CPU quota in cores, or 0 if the quota is unlimited or unknown."""
    words = read_text(f"{folder}/cpu.max", "cgroup", []).split() or [
        read_text(f"{folder}/cpu.{name}", "cgroup", []).strip()
        for name in ("cfs_quota_us", "cfs_period_us")
    ]
    try:
        return max(0.0, float(words[0]) / float(words[1]))
    except (IndexError, ValueError, ZeroDivisionError):
        return 0.0  # the top has no such file; "max" or -1 means no limit
