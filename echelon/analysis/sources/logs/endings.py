"""Determine, from the output of torchrun, srun and mpirun, how ranks ended."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

_TORCHRUN = re.compile(
    r"^\s*rank\s*:\s*(?P<rank>\d{1,7}) \(local_rank: \d{1,7}\)\s*\n"
    r"\s*exitcode\s*:\s*(?P<code>-?\d{1,5}) \(pid: (?P<pid>\d{1,10})\)",
    re.MULTILINE,
)
_TORCHRUN_ROOT = "Root Cause (first observed failure):"
_SRUN = re.compile(
    r"^srun: error: [\w.-]{1,255}: tasks? (?P<tasks>[\d,-]{1,200}): (?P<how>[^\n]{1,80})$",
    re.MULTILINE,
)
_MPIRUN = re.compile(
    r"process rank (?P<rank>\d{1,7}) with PID (?P<pid>\d{1,10}) on node [\w.-]{1,255} exited on"
    r"\s+signal (?P<signal>\d{1,2})"
)
_SIGNALS = {
    "Killed": signal.SIGKILL,
    "Out Of Memory": signal.SIGKILL,
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Terminated": signal.SIGTERM,
    "Floating point exception": signal.SIGFPE,
}
_EXIT_CODE = re.compile(r"Exited with exit code (\d{1,3})")
_MAX_TASKS = 4096


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank ended, according to a launcher. `code` is a return code as in `subprocess`."""

    rank: int
    code: int
    pid: int = 0
    is_memory: bool = False  # the scheduler counted an out-of-memory kill


def endings_in(text: str) -> tuple[list[Ending], int]:
    """Return how ranks ended according to a log, and the first rank that failed (-1 if unknown)."""
    found = [
        Ending(int(match["rank"]), int(match["code"]), int(match["pid"]))
        for match in _TORCHRUN.finditer(text)
    ]
    for match in _SRUN.finditer(text):
        code = _code(match["how"])
        if code:
            is_memory = match["how"].startswith("Out Of Memory")
            found += [Ending(rank, code, is_memory=is_memory) for rank in _numbers(match["tasks"])]
    found += [
        Ending(int(match["rank"]), -int(match["signal"]), int(match["pid"]))
        for match in _MPIRUN.finditer(text)
    ]
    return found, _first(text)


def _first(text: str) -> int:
    """Return the rank that failed first according to torchrun; -1 if it names none or several."""
    if text.count(_TORCHRUN_ROOT) != 1:
        return -1
    match = _TORCHRUN.search(text, text.index(_TORCHRUN_ROOT))
    return int(match["rank"]) if match else -1


def _code(how: str) -> int:
    for words, number in _SIGNALS.items():
        if how.startswith(words):
            return -int(number)
    match = _EXIT_CODE.match(how)
    return int(match[1]) if match else 0


def _numbers(tasks: str) -> list[int]:
    """Parse task numbers and ranges: `3`, `0,2`, `4-7`."""
    out: list[int] = []
    for part in tasks.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            end = int(last) if last.isdigit() else int(first)
            out += range(int(first), min(end, int(first) + _MAX_TASKS) + 1)
    return out[:_MAX_TASKS]
