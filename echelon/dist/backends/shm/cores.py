"""How many cores this process may use: what decides whether waiting ranks may spin."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def usable_cores(root: Path = _ROOT, own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the cores of this process's affinity, or of its cgroups' quotas where those are less.

    Args:
        root: where the control groups are mounted (version 2; others are not looked at).
        own: the file that names this process's group.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(round(quota) for quota in _quotas(root, own))]))


def _quotas(root: Path, own: Path) -> list[float]:
    """Return the quotas, in cores, of this process's group and of those above it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    path = next((line[3:] for line in lines if line.startswith("0::")), "/")
    group = root / path.strip("/")
    return [
        quota
        for folder in (group, *group.parents)
        if folder.is_relative_to(root) and (quota := _quota(folder / "cpu.max"))
    ]


def _quota(file: Path) -> float:
    """Return a group's limit in cores; 0 if it has none."""
    try:
        quota, period = file.read_text().split()
        return float(quota) / float(period)
    except (OSError, ValueError):
        return 0.0  # no such file at the top; "max" where there is no limit
