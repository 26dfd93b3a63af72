"""Which host and which process this is, as facts that other ranks can compare."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from echelon.dist.membership.peers import start_ticks


def host_identity() -> dict[str, Any]:
    """Say which host this is: equal on two ranks only if they may share memory."""
    return {
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "net": _inode("/proc/self/ns/net"),
        "pids": _inode("/proc/self/ns/pid"),
    }


def process_identity() -> dict[str, Any]:
    """Say which process of which host this is, to whoever watches it from there."""
    identity = host_identity()
    host = f"{identity['boot']}/{identity['net']}/{identity['pids']}"
    return {"host": host, "pid": os.getpid(), "start": start_ticks(os.getpid()) or 0}


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _inode(path: str) -> int:
    try:
        return Path(path).stat().st_ino
    except OSError:
        return 0
