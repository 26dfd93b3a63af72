"""Explain why a killed process still exists."""

from __future__ import annotations

import os
from pathlib import Path

from echelon.host.process import sample


def why_it_lives(pid: int) -> str:
    """Return why a killed process still exists, based on its state and wait channel."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "it has ended, but its parent has not noticed yet"
    except PermissionError:
        return f"this launcher may not signal it: it runs as user {_user_of(pid)}"
    seen = sample(pid)
    if seen.state == "D":
        where = f" in {seen.wait_channel}" if seen.wait_channel not in ("", "0") else ""
        return f"uninterruptible sleep{where}"
    return "the kernel has not ended it"


def _user_of(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}").stat().st_uid)
    except OSError:
        return "?"
