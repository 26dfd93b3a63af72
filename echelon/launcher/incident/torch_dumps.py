"""Use torch's own flight recorder in the workers of unmodified torch programs.

Torch writes a rank's dump to `<prefix><rank>` when its watchdog detects that an operation has timed
out. With the NCCL or XCCL backend, torch also writes a dump when data arrives on the pipe
`<prefix><rank>.pipe`. The launcher chooses the prefixes of the dump and the pipe, unless the user
has set them. The Gloo backend records operations but never writes a dump.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path

MAX_DUMP_BYTES = 64 << 20
_DUMP_NAMES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # the older one last
_COMMS_DUMP = "TORCHCOMM_FR_DUMP_TEMP_FILE"  # torchcomms uses its own names
_PIPE_NAMES = ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DEBUG_INFO_PIPE_FILE")  # XCCL's last
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_ON_TIMEOUT = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")
_DYNAMIC_NAMES = ("TORCH_FR_DUMP_DYNAMIC_FILE_NAME", "TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME")
_SIZE = "2000"
_SINCE_FR_NAMES = (2, 9)
_SINCE_FR_TIMEOUT = (2, 15)
_SETTLED_S = 0.2  # a dump that has not grown for this long is complete


@functools.cache
def installed_torch() -> tuple[int, ...]:
    """Return the major and minor version of the installed torch; () if torch is not installed."""
    try:
        text = importlib.metadata.version("torch")
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError):
        return ()
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def torch_environment(
    environ: Mapping[str, str], folder: Path, version: tuple[int, ...] | None = None
) -> dict[str, str]:
    """Return the environment variables to set for a worker, without those that the user has set.

    Variables that the installed version of torch has deprecated are left out, to avoid warnings.

    Args:
        environ: the worker's environment.
        folder: the worker's folder, in which torch will write the dump.
        version: torch's major and minor version. None means the installed version, and () means an
            unknown version.
    """
    version = installed_torch() if version is None else version
    is_old = bool(version) and version < _SINCE_FR_NAMES
    chosen: dict[str, str] = {}
    prefix = f"{folder}/torch_dump_"
    if _is_dynamic(environ):
        prefix += environ.get("RANK", "")  # torch then uses the name without adding the rank
    if not any(name in environ for name in _DUMP_NAMES):
        chosen |= {_DUMP_NAMES[0]: prefix, _COMMS_DUMP: prefix}
        chosen |= {_DUMP_NAMES[1]: prefix} if is_old else {}
    if not any(name in environ for name in _SIZES):
        chosen[_SIZES[1] if is_old else _SIZES[0]] = _SIZE  # some backends record only if it is set
    if not any(name in environ for name in _ON_TIMEOUT):
        chosen[_ON_TIMEOUT[0] if version >= _SINCE_FR_TIMEOUT else _ON_TIMEOUT[1]] = "1"
    if _takes_pipes(
        folder
    ):  # without this check torch might not start: some network file systems have no pipes
        chosen |= dict.fromkeys(_PIPE_NAMES, f"{folder}/torch_pipe_")
    return {name: value for name, value in chosen.items() if name not in environ}


def dump_path(environ: Mapping[str, str], rank: int) -> Path | None:
    """Return the path of the dump that torch writes for a rank; None if it is unknown.

    If dynamic names are enabled, the program can change the prefix later. In that case, a path is
    returned only if it ends with this rank's number.
    """
    names = (*_DUMP_NAMES, _COMMS_DUMP)
    prefix = next((environ[name] for name in names if environ.get(name)), "")
    if not prefix:
        return None
    if not _is_dynamic(environ):
        return Path(f"{prefix}{rank}")
    own = re.search(r"(\d+)\Z", prefix)
    return Path(prefix) if own and int(own[1]) == rank else None


def _is_dynamic(environ: Mapping[str, str]) -> bool:
    values = (environ.get(name, "") for name in _DYNAMIC_NAMES)
    return any(value.lower() in ("1", "y", "t", "yes", "true") for value in values)


class TorchDump:
    """One worker's dump by torch's own flight recorder, with methods to request and read it."""

    def __init__(self, environ: Mapping[str, str], rank: int) -> None:
        pipe = next((environ[name] for name in _PIPE_NAMES if environ.get(name)), "")
        self._path = dump_path(environ, rank)
        self._pipe = Path(f"{pipe}{rank}.pipe") if pipe else None
        self._first = self._version()  # another job's dump, if the user chose the path
        self._noted = self._growing = self._asked = self._first
        self._seen = (self._first, time.monotonic())
        self._owes = False  # whether a requested dump is still missing
        self.num_own = 0  # how many dumps torch wrote without a request

    def look(self) -> None:
        """Register a new dump once its file has stopped changing between two calls."""
        version = self._version()
        if version[1] > 0 and version != self._noted and version == self._growing:
            self._noted = version
            self.num_own += not self._owes
            self._owes = False
        self._growing = version

    def ask(self) -> bool:
        """Request a dump from torch; return whether the request was sent."""
        self._asked = self._noted = self._version()
        self._seen = (self._asked, time.monotonic())
        if self._pipe is None:
            return False
        try:
            fd = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            return False  # no pipe, or no process has it open
        try:
            self._owes = stat.S_ISFIFO(os.fstat(fd).st_mode) and os.write(fd, b"1") == 1
            return self._owes
        except OSError:
            return False
        finally:
            os.close(fd)

    def has_come(self) -> bool:
        """Return whether the requested dump exists and is no longer growing."""
        version, now_s = self._version(), time.monotonic()
        if version != self._seen[0]:
            self._seen = (version, now_s)
        is_new = version[1] > 0 and version != self._asked
        if is_new and now_s - self._seen[1] > _SETTLED_S:
            self._noted, self._owes = version, False  # the requested dump, not the watchdog's
            return True
        return False

    def read(self) -> bytes:
        """Return this worker's newest dump; b"" if there is none or the dump is too large."""
        version = self._version()
        if self._path is None or version == self._first or version[1] > MAX_DUMP_BYTES:
            return b""
        with contextlib.suppress(OSError):
            return self._path.read_bytes()
        return b""

    def clear_up(self) -> None:
        """Remove the pipe that torch has left behind."""
        if self._pipe is not None and self._pipe.is_fifo():
            with contextlib.suppress(OSError):
                self._pipe.unlink()

    def _version(self) -> tuple[int, int]:
        """Return a value that changes with every dump; (0, 0) if no dump exists."""
        try:
            status = self._path.stat() if self._path is not None else None
        except OSError:
            status = None
        return (status.st_mtime_ns, status.st_size) if status is not None else (0, 0)


def _takes_pipes(folder: Path) -> bool:
    probe = folder / ".pipe"
    try:
        os.mkfifo(probe, 0o600)
        probe.unlink()
    except OSError:
        return False
    return True
