"""What holds a process back from outside: its cgroup's limits, and pressure on its machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from echelon.recorder.proc import read_text

_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" by a number of this size
_CGROUPS = "/sys/fs/cgroup"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """One look at a process's cgroup. None: not known, or no such limit."""

    throttled_ns: int | None = None  # since the cgroup was made
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    oom_kills: int | None = None
    frozen: bool | None = None


def limits(pid: int, denied: list[str]) -> Limits:
    """Look at the cgroup of a process. Denied files are named in `denied`."""
    found: dict[str, int] = {}
    for controllers, folder in _folders(pid, denied):
        for field, file, row, unit in _SOURCES[not controllers]:
            text = read_text(f"{folder}/{file}", "cgroup", denied)
            value = _row(text, row) if row else _number(text.strip())
            if value is not None:
                found.setdefault(field, value * unit)
    frozen = found.pop("frozen", None)
    known = {field: value for field, value in found.items() if value < _UNLIMITED}
    return Limits(**known, frozen=None if frozen is None else bool(frozen))


def pressure(denied: list[str]) -> dict[str, float]:
    """Return the share of the last 10 s in which some task of this machine waited for what."""
    shares = {}
    for kind in ("cpu", "io", "memory"):
        for line in read_text(f"/proc/pressure/{kind}", "pressure", denied).splitlines():
            words = line.split()
            if words[:1] == ["some"] and words[1].startswith("avg10="):
                shares[kind] = float(words[1].removeprefix("avg10=")) / 100
    return shares


# field, file, row in it ("": the file is the number), unit; for cgroup version 1 and version 2
_SOURCES: dict[bool, tuple[tuple[str, str, str, int], ...]] = {
    False: (
        ("throttled_ns", "cpu.stat", "throttled_time", 1),
        ("memory_bytes", "memory.usage_in_bytes", "", 1),
        ("memory_limit_bytes", "memory.limit_in_bytes", "", 1),
        ("oom_kills", "memory.oom_control", "oom_kill", 1),
    ),
    True: (
        ("throttled_ns", "cpu.stat", "throttled_usec", 1000),
        ("memory_bytes", "memory.current", "", 1),
        ("memory_limit_bytes", "memory.max", "", 1),
        ("oom_kills", "memory.events", "oom_kill", 1),
        ("frozen", "cgroup.events", "frozen", 1),
    ),
}


def _folders(pid: int, denied: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (controllers, folder); version 2 has no controllers there."""
    for line in read_text(f"/proc/{pid}/cgroup", "cgroup", denied).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield "", _CGROUPS + path.rstrip("/")
        for controller in {"cpu", "memory"} & set(controllers.split(",")):
            yield controller, f"{_CGROUPS}/{controller}{path.rstrip('/')}"


def _row(text: str, name: str) -> int | None:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value)
    return None


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None  # "max" is no limit
