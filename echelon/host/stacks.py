"""Stacks of a process that cannot write them itself, by `py-spy`, where the user has installed it.

A process stopped by a signal, or without our handler, does not answer; py-spy reads its memory from
outside, without stopping it. It needs the right to trace the process, which containers often lack.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

TIMEOUT_S = 3.0


def can_spy() -> bool:
    """Whether py-spy is installed; it may still be denied."""
    return shutil.which("py-spy") is not None


def spy_stacks(pid: int, timeout_s: float = TIMEOUT_S) -> str:
    """Return the Python stacks of all threads in faulthandler's form, "" if they cannot be had."""
    program = shutil.which("py-spy")
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
        threads = json.loads(done.stdout) if done.returncode == 0 else []
        return "\n".join(line for thread in threads for line in _lines(thread))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, KeyError):
        return ""


def _lines(thread: dict[str, Any]) -> Iterator[str]:
    yield f"Thread 0x{int(thread['thread_id']):016x} (most recent call first):"
    for frame in thread["frames"]:
        name = str(frame["name"]).rpartition(".")[2]  # faulthandler names no class
        yield f'  File "{frame["filename"]}", line {int(frame["line"])} in {name}'
    yield ""
