"""Record the conditions of a measurement, and choose its cores."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.runner.place import ROOT

CORES = sorted(os.sched_getaffinity(0))


class Conditions:
    """The machine, the peers' versions, and the load from the creation until `told`."""

    def __init__(self, peers: Sequence[str] = ()) -> None:
        self._load_before = os.getloadavg()[0]
        self._peers = {name: found for name in peers if (found := _version(name))}

    def told(self) -> dict[str, object]:
        """Return the conditions. Call this after the last measurement."""
        return {
            "date": time.strftime("%Y-%m-%d"),
            "command": shlex.join(["python", "-m", _module(sys.argv[0]), *sys.argv[1:]]),
            "processor": _processor(),
            "num_cores": len(CORES),
            "python": platform.python_version(),
            "peers": self._peers,
            "load_before": round(self._load_before, 1),
            "load_after": round(os.getloadavg()[0], 1),
        }


def sentence(conditions: dict[str, object]) -> str:
    """Format conditions as one line of text."""
    peers = conditions["peers"]
    assert isinstance(peers, dict)
    versions = [f"{name} {version}" for name, version in peers.items()]
    cores = f"{conditions['num_cores']} cores ({conditions['processor']})"
    parts = [str(conditions["date"]), cores, f"Python {conditions['python']}", *versions]
    load = f"load {conditions['load_before']} before, {conditions['load_after']} after"
    return f"{', '.join([*parts, load])}. `{conditions['command']}`"


def pin(pid: int, cores: Sequence[int]) -> None:
    """Pin all current threads of a process to some cores; a pid of 0 pins the calling thread.

    The placement of two communicating processes changes a round trip by a factor of 2 to 3.
    """
    tasks = [pid] if pid == 0 else [int(one.name) for one in Path(f"/proc/{pid}/task").iterdir()]
    for task in tasks:
        os.sched_setaffinity(task, cores)


def _version(name: str) -> str:
    if importlib.util.find_spec(name) is None:
        return ""
    return importlib.metadata.version(name)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _module(script: str) -> str:
    path = Path(script).resolve()
    if not path.is_relative_to(ROOT):
        return path.stem
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)
