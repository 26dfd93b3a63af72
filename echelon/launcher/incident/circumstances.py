"""Read the facts about a failure that the restart policy needs.

The facts come from one rank's dump. The analysis process returns them together with the verdict. If
the verdict is late, the launcher reads the facts itself.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from echelon.analysis.evidence.stacks.frames import Raised, last_traceback, site_frame
from echelon.analysis.rules.endings.errors import Meaning, meaning_of
from echelon.errors import DumpFormatError
from echelon.recorder.format.schema import Live, Record
from echelon.recorder.read import read

_CAUSES = {
    Meaning.OWN: "exception",
    Meaning.MEMORY: "out_of_memory",
    Meaning.DEVICE: "device_stuck",
    Meaning.CONSEQUENCE: "",
}
# Errors of clients whose server or path failed, in the standard library and in common clients.
_OUTSIDE_TYPES = frozenset(
    {
        "ConnectionError",
        "ConnectionResetError",
        "ConnectionRefusedError",
        "ConnectionAbortedError",
        "BrokenPipeError",
        "TimeoutError",
        "gaierror",
        "URLError",
        "RemoteDisconnected",
        "IncompleteRead",
        "ConnectTimeout",
        "ReadTimeout",
        "ReadTimeoutError",
        "EndpointConnectionError",
    }
)
_OUTSIDE_ERRNOS = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.ETIMEDOUT,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EREMOTEIO,
        errno.ENOTCONN,
    }
)
_ERRNO = re.compile(r"\[Errno (\d{1,4})\]")
_SIZE = r"(\d{1,7}(?:\.\d{1,4})?) ([KMGT]iB)"
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_CAPACITY = re.compile(rf"total capacity of {_SIZE} of which {_SIZE} is free")
_OWN_USE = re.compile(rf"this process has {_SIZE} memory in use")
_TRIED = re.compile(rf"Tried to allocate {_SIZE}")
_FOREIGN_SHARE = 0.1  # of a device's memory, used by others: with more, the job is not at fault
_NO_LIMIT = 1 << 60  # bytes; cgroup version 1 shows a number if there is no limit
_SAVING = ("checkpoint", "checkpoint_write")  # the latter on the thread of a background save
_IDLE_SHARE = 0.05  # of a core: threads that wait with a timeout need less
_MAX_IDLE = 64  # ranks
_MAX_LOOKED_AT = 4  # ranks, if no verdict names one


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """The facts about a rank's failure, read from the rank's dump.

    Attributes:
        cause: the cause according to the error that the rank raised; "" if the rank raised no error
            or raised an error about another rank.
        site: the type and location of the error; "" if no error was raised.
        is_outside: whether the error is a network or file-system error.
        owns_memory: whether the job itself used up the memory; None if unknown.
        last_step: the last step that the rank began; -1 if it recorded no steps.
        saving_s: how long, in seconds, the rank had been writing or reading a checkpoint when it
            was examined; 0 if it was doing neither.
        idle_ranks: the ranks that used almost no processor time during the examination.
    """

    rank: int
    cause: str = ""
    site: str = ""
    is_outside: bool = False
    owns_memory: bool | None = None
    last_step: int = -1
    saving_s: float = 0.0
    idle_ranks: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON-serializable dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Circumstances:
        """Restore an object from the result of `to_json`; unknown keys are ignored."""
        return cls(**{one.name: values[one.name] for one in fields(cls) if one.name in values})


def circumstances(incident: Path, ranks: Sequence[int]) -> Circumstances | None:
    """Return the facts about the first rank that failed because of its own error.

    If no such rank is found, return the facts about the first rank with a readable dump. Return
    None if no dump is readable.

    Args:
        ranks: the culprits or, if there is no verdict, all ranks in the order in which they ended.
    """
    first = None
    for rank in ranks[:_MAX_LOOKED_AT]:
        try:
            found = circumstances_of(read(incident / f"rank_{int(rank)}"), rank)
        except (DumpFormatError, OSError):
            continue
        if found.cause:
            return found
        first = first or found
    return first


def idle_ranks(incident: Path, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that used almost no processor time, according to their dumps."""
    found = []
    for rank in ranks[:_MAX_IDLE]:
        with contextlib.suppress(DumpFormatError, OSError):
            host = read(incident / f"rank_{int(rank)}").host
            share = host.cpu_share
            if share is not None and share < _IDLE_SHARE and host.process_state != "R":
                found.append(rank)
    return tuple(found)


def circumstances_of(record: Record, rank: int) -> Circumstances:
    """Extract the facts about a rank's failure from the rank's record."""
    raised = _raised(record)
    step = int(record.live[Live.STEP]) - 1
    if raised is None:
        return Circumstances(
            rank=rank,
            owns_memory=_owns_host_memory(record),
            last_step=step,
            saving_s=_saving_s(record),
        )
    words = record.last_words
    bases = words.bases if words is not None else ()
    files = "\n".join(frame.file for frame in raised.frames)
    text = f"{raised.message}\n{raised.rest}"
    meaning = meaning_of(raised.type, text, bases, files)
    name = raised.type.rpartition(".")[2]
    frame = raised.frame or (raised.frames[0] if raised.frames else None)
    return Circumstances(
        rank=rank,
        cause=_CAUSES[meaning],
        site=f"{name} at {frame}" if frame is not None else name,
        is_outside=_is_outside(name, bases, raised.message),
        owns_memory=_owns_device_memory(text) if meaning is Meaning.MEMORY else None,
        last_step=step,
    )


def _saving_s(record: Record) -> float:
    """Return the age in seconds of the oldest open checkpoint span on any thread; 0 if none."""
    seen_ns = record.host.snapshot_mono_ns or record.dumped_mono_ns
    begun_ns = [
        int(row["started_mono_ns"])
        for row in record.open_spans
        if record.strings[int(row["name"])] in _SAVING
    ]
    return max(0.0, (seen_ns - min(begun_ns)) / 1e9) if begun_ns else 0.0


def _raised(record: Record) -> Raised | None:
    words, host = record.last_words, record.host
    if words is not None and not words.thread:
        told = last_traceback(f"{words.traceback}\n")
        frames = told.frames if told is not None else ()
        return Raised(words.type, words.message, site_frame(words.site), frames)
    if not host.exit_code or host.exit_code < 0:
        return None
    for text in (host.error_file, host.stderr_tail):
        raised = last_traceback(text)
        if raised is not None and raised.type != "SystemExit":
            return raised
    return None


def _is_outside(name: str, bases: Sequence[str], message: str) -> bool:
    names = {name, *(base.rpartition(".")[2] for base in bases)}
    if names & _OUTSIDE_TYPES:
        return True
    found = _ERRNO.search(message)
    return found is not None and int(found[1]) in _OUTSIDE_ERRNOS


def _owns_host_memory(record: Record) -> bool | None:
    """Return True if a rank was killed for exceeding its cgroup's memory limit, else None."""
    host = record.host
    if not host.oom_kill:
        return None
    limit = host.memory_limit_bytes
    return True if limit and limit < _NO_LIMIT else None


def _owns_device_memory(text: str) -> bool | None:
    """Return whether the job itself used up a device's memory, according to torch's error.

    Return None if the error does not contain the amounts of memory.
    """
    capacity, own = _CAPACITY.search(text), _OWN_USE.search(text)
    if capacity is None or own is None:
        return None
    total, free = _bytes(capacity[1], capacity[2]), _bytes(capacity[3], capacity[4])
    used = _bytes(own[1], own[2])
    tried = _TRIED.search(text)
    wanted = used + (_bytes(tried[1], tried[2]) if tried is not None else 0.0)
    foreign = total - free - used
    return not (foreign > _FOREIGN_SHARE * total and wanted <= total)


def _bytes(number: str, unit: str) -> float:
    return float(number) * _UNITS[unit]
