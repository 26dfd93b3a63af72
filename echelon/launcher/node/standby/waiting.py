"""The agent's view of one standby."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

# What differs between ranks or attempts. A standby is started with the values of a rank of the last
# attempt; where one differs for the rank that takes it, this matters only if an import has read it.
_LATE = frozenset(
    {
        "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_ERROR_FILE", "ECHELON_RANK_DIR", "ECHELON_ATTEMPT", "ECHELON_ATTEMPTS",
        "ECHELON_JOB_ID", "ECHELON_JOB_FILE", "ECHELON_MODULES_FILE", "ECHELON_RESUME",
        "ECHELON_RING_DIR", "ECHELON_JOIN_AFTER", "ECHELON_LIFE", "ECHELON_TERMINAL_COLUMNS",
        "TORCH_FR_DUMP_TEMP_FILE",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCHCOMM_FR_DUMP_TEMP_FILE",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DEBUG_INFO_PIPE_FILE",
    }
)  # fmt: skip
_HOOK = Path(__file__).with_name("hook")
_MAX_TOLD_BYTES = 1 << 20
_IDLE_S = 10.0  # after which a standby that still loads gets the usual priority
_AGAIN_S = 5.0


class Waiting:
    """A process that is loading its libraries, or has loaded them and is waiting to become a rank.

    Attributes:
        index: the number that the guard uses for this process.
        pipes: the read ends of the process's stdout and stderr. They are not read until a rank
            takes the standby.
        is_ready: whether a rank can take the standby.
        obstacle: why no standby can be used for this program; "" if there is no obstacle.
    """

    def __init__(
        self,
        index: int,
        environ: Mapping[str, str],
        processors: Collection[int] | None,
        control: socket.socket,
        pipes: tuple[int, int],
        began_s: float,
    ) -> None:
        self.index = index
        self.pipes = pipes
        self.control = control
        self.began_s = began_s
        self.pid = 0
        self.is_ready = False
        self.raise_at_s = began_s + _IDLE_S
        self.obstacle = ""
        self._environ = dict(environ)
        self._processors = processors
        self._read: Sequence[str] = ()
        self._tested: Sequence[str] = ()
        self._told = b""

    @property
    def rank(self) -> str | None:
        """The rank for which the standby was started."""
        return self._environ.get("RANK")

    def hear(self) -> bool:
        """Read the standby's report; return False if it is invalid or the standby has ended."""
        try:
            data = self.control.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._told += data
        if not data or len(self._told) > _MAX_TOLD_BYTES:
            return False
        if not self._told.endswith(b"\n"):
            return True
        try:
            told = json.loads(self._told)
            self._read = [str(name) for name in told["read"]]
            self._tested = [str(name) for name in told["tested"]]
            self.obstacle = _obstacle(str(told["hidden"]), str(told["set"]))
        except (ValueError, KeyError, TypeError):
            return False
        self.is_ready = True
        return True

    def fits(self, environ: Mapping[str, str], processors: Collection[int] | None) -> bool:
        """Return whether the standby can run a rank with the given environment and processors."""
        if not self.is_ready or processors != self._processors:
            return False
        own = self._environ
        differ = {
            name for name in own.keys() | environ.keys() if own.get(name) != environ.get(name)
        }
        if not differ <= _LATE or differ.intersection(self._read):
            return False
        return all((name in own) == (name in environ) for name in self._tested)

    def release(self, environ: Mapping[str, str], cwd: str, *, has_stdin: bool) -> None:
        """Let the standby run the program. If the standby has already ended, do nothing.

        Raises:
            OSError: the process has run out of file descriptors or memory.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self.control.close)
            file = os.memfd_create("echelon-standby", os.MFD_CLOEXEC)
            stack.callback(os.close, file)
            os.write(file, json.dumps(self._for_rank(environ) | {"cwd": cwd}).encode())
            descriptors = [file]
            if has_stdin:
                descriptors.append(os.dup(0))
                stack.callback(os.close, descriptors[1])
            with contextlib.suppress(OSError):
                socket.send_fds(self.control, [b"!"], descriptors, socket.MSG_DONTWAIT)

    def _for_rank(self, environ: Mapping[str, str]) -> dict[str, object]:
        """Return a rank's environment, and its differences from the standby's initial environment.

        Variables that the interpreter has added are not among the differences, so they are
        retained.
        """
        own = self._environ
        return {
            "environ": dict(environ),
            "gone": [name for name in own if name not in environ],
            "changed": [name for name, value in environ.items() if own.get(name) != value],
        }

    def close(self) -> None:
        """Close the standby's pipes and control socket, so that the standby exits."""
        self.control.close()
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                os.close(pipe)

    def private_bytes(self) -> int:
        """Return the size of the standby's unshared memory, in bytes; 0 if it cannot be read."""
        try:
            lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))

    def raise_priority(self) -> None:
        """Restore the usual priority of all threads, and schedule the next call.

        The call is repeated every five seconds, because a library might lower the priority again.
        """
        self.raise_at_s += _AGAIN_S
        if os.sched_getscheduler(0) == os.SCHED_IDLE:
            return  # it has inherited that, and has not lowered it
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{self.pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    number = int(thread.name)
                    if os.sched_getscheduler(number) == os.SCHED_IDLE:
                        os.sched_setscheduler(number, os.SCHED_OTHER, os.sched_param(0))


def _obstacle(hidden: str, variable: str) -> str:
    if hidden:
        return f"{hidden} hides a library that standbys load"
    if variable:
        return f"the program sets {variable}, which libraries read when they are loaded"
    return ""


def environment(environ: Mapping[str, str], modules: Path) -> dict[str, str]:
    """Return the environment in which a rank's standby starts.

    Args:
        environ: the rank's environment.
        modules: a file with the names of the modules to load. If the file does not exist, the
            standby loads the modules that the script imports.
    """
    given = {"pythonpath": environ.get("PYTHONPATH"), "modules": str(modules)}
    return {**_hooked(environ), "ECHELON_STANDBY": json.dumps(given)}


def check_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that checks whether Python runs the standbys' hook."""
    return {**_hooked(environ), "ECHELON_STANDBY": "check"}


def _hooked(environ: Mapping[str, str]) -> dict[str, str]:
    path = environ.get("PYTHONPATH")
    return {**environ, "PYTHONPATH": f"{_HOOK}{os.pathsep}{path}" if path else str(_HOOK)}
