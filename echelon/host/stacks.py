"""Read the Python stacks of another process with `py-spy`.

py-spy reads the process's memory without stopping it, so no system call is interrupted. Native
frames are left out, because py-spy would have to stop the process to read them. py-spy needs
permission to trace the process, which containers often lack.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from echelon.host.facts import TRACING

TIMEOUT_S = 3.0
_REFUSED = re.compile(rb"(?i)permission denied|not permitted")
HOLDS_LOCK = "[holds the interpreter's lock]"  # after a thread's number


def can_spy() -> bool:
    """Return whether py-spy is installed. Permission to trace a process is not checked."""
    return _program() is not None


def _program() -> str | None:
    """Search PATH and this interpreter's folder for py-spy; return its path, or None."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("py-spy") or shutil.which("py-spy", path=beside)


def spy_stacks(pid: int, timeout_s: float = TIMEOUT_S, denied: list[str] | None = None) -> str:
    """Return the Python stacks of a process in faulthandler's format, or "" if unavailable.

    Args:
        denied: a list to which `TRACING` is added if py-spy is not permitted to trace the process.
    """
    program = _program()
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "dump", "--json", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode != 0:
            if denied is not None and _REFUSED.search(done.stderr):
                denied.append(TRACING)
            return ""
        threads = json.loads(done.stdout)
        return "\n".join(line for thread in threads for line in _lines(thread))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, KeyError):
        return ""


def _lines(thread: dict[str, Any]) -> Iterator[str]:
    number = int(thread["thread_id"])
    mark = f" {HOLDS_LOCK}" if thread.get("owns_gil") is True else ""
    yield f"Thread 0x{number:016x}{mark} (most recent call first):"
    for frame in thread["frames"]:
        name = str(frame["name"]).rpartition(".")[2]  # faulthandler names no class
        yield f'  File "{frame["filename"]}", line {int(frame["line"])} in {name}'
    yield ""
