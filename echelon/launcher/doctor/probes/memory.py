"""Check how much memory is still available to a job, given the limits of its cgroup."""

from __future__ import annotations

import os
from pathlib import Path

from echelon.host.cgroup import limits
from echelon.launcher.doctor.probes.finding import MEMORY, Finding, State

LEAST_BYTES = 256 << 20  # about what a rank needs to import torch
_MEMINFO = Path("/proc/meminfo")


def probe_memory() -> Finding:
    """Check how much memory is available to this process."""
    try:
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        available, total = (_bytes(fields[name]) for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError) as err:
        why = f"{_MEMINFO} cannot be read ({type(err).__name__})"
        return Finding(probe=MEMORY, state=State.SKIPPED, text=why)
    denied: list[str] = []
    found = limits(os.getpid(), denied)
    if found.memory_limit_bytes is not None:
        used = (found.memory_bytes or 0) - found.reclaimable_bytes
        left = found.memory_limit_bytes - used
        available, total = min(available, left), min(total, found.memory_limit_bytes)
    return judge(available, total)


def judge(available: int, total: int) -> Finding:
    """Return a finding on whether the available memory is enough for a rank.

    Both arguments are in bytes.
    """
    figures = {"available_bytes": float(available), "total_bytes": float(total)}
    text = f"{available / 1e9:.2f} of {total / 1e9:.2f} GB of memory available"
    state = State.WHOLE
    if available < min(LEAST_BYTES, total // 10):
        state, text = State.BROKEN, f"{text}: too little to start a rank"
    return Finding(probe=MEMORY, state=state, text=text, figures=figures)


def _bytes(text: str) -> int:
    return int(text.split()[0]) << 10
