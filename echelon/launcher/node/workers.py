"""Control the workers through the guard: start, signal and kill them, and report how they exit.

No method blocks for long. The agent's loop watches `fileno()` and calls `events()`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.errors import LaunchError
from echelon.launcher.node.guard import descendants

_GUARD = Path(__file__).with_name("guard.py")
_CLOSE_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36
_RING_PLACE = ("ECHELON_RANK_DIR", "ECHELON_RING_DIR")


@dataclass(frozen=True, slots=True)
class Started:
    """A report that a worker was started."""

    index: int
    pid: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A report that a worker's program could not be started."""

    index: int
    error: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A report that a worker has ended.

    `code` is the worker's return code; as in `subprocess`, -9 means SIGKILL.
    """

    index: int
    code: int
    mono_ns: int


@dataclass(frozen=True, slots=True)
class Swept:
    """A report that processes left behind by workers were signaled.

    `denied` lists the pids that could not be signaled.
    """

    count: int
    denied: list[int]


Event = Started | Failed | Exited | Swept
_KINDS: dict[str, type[Any]] = {
    "started": Started,
    "failed": Failed,
    "exited": Exited,
    "swept": Swept,
}


class Workers:
    """The workers of this node, managed through their guard.

    Raises:
        LaunchError: the guard cannot be started.
    """

    def __init__(self) -> None:
        _become_subreaper()
        try:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs, contextlib.ExitStack() as unused:
                unused.callback(self._socket.close)
                self._guard = self._start(theirs.fileno())
                unused.pop_all()
        except OSError as err:
            raise LaunchError(f"cannot start the guard process: {err.strerror or err}") from err
        self._input = b""

    @staticmethod
    def _start(fd: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARD), str(fd)],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the agent's to handle
        )

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when events might have arrived."""
        return self._socket.fileno()

    def spawn(
        self,
        index: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        processors: Collection[int] | None = None,
        *,
        group: str = "",
        has_stdin: bool = False,
        control: int = -1,
    ) -> tuple[int, int]:
        """Ask the guard to start a worker; return the read ends of the worker's stdout and stderr.

        The caller must close both ends.

        Args:
            processors: the processors that the worker is allowed to use; None means all processors
                of the launcher.
            group: the path of the worker's own cgroup; "" means none.
            has_stdin: whether the worker reads the launcher's stdin. If not, the worker's stdin is
                empty.
            control: a descriptor that a standby inherits and finds through ECHELON_STANDBY_FD; -1
                for a worker.

        Raises:
            LaunchError: the guard has died, or no descriptors are left.
        """
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as sent:
            try:
                ends = []
                for _ in range(2):
                    read_end, write_end = os.pipe2(os.O_CLOEXEC)
                    kept.callback(os.close, read_end)
                    sent.callback(os.close, write_end)
                    ends.append((read_end, write_end))
                stdin = os.dup(0) if has_stdin else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                sent.callback(os.close, stdin)
            except OSError as err:
                raise LaunchError(f"cannot start worker {index}: {err.strerror}") from err
            message = {"do": "spawn", "index": index, "argv": list(argv), "env": dict(env)}
            bound = None if processors is None else sorted(processors)
            message |= {"cwd": cwd, "processors": bound, "group": group, "waits": control >= 0}
            own = [] if control < 0 else [control]
            self._send(message, [ends[0][1], ends[1][1], stdin, *own])
            kept.pop_all()
        return ends[0][0], ends[1][0]

    def take(self, index: int, as_index: int, env: Mapping[str, str], *, group: str = "") -> None:
        """Turn a standby into a worker. The worker's next event is `Started` or `Failed`.

        Args:
            index: the standby's index.
            as_index: the index that the worker gets.
            env: the worker's environment, which names the location of its ring.
            group: the path of the worker's own cgroup; "" means none.
        """
        rings = {name: env[name] for name in _RING_PLACE if name in env}
        self._send({"do": "take", "index": index, "as": as_index, "env": rings, "group": group})

    def hold(self, folder: str) -> None:
        """Make the guard lock a folder of rings.

        If the agent is killed, the guard moves the rings to the run directory and removes the
        folder.
        """
        self._send({"do": "hold", "folder": folder})

    def signal(self, index: int, number: int, *, alone: bool = False) -> None:
        """Signal a worker. Unless `alone` is set, the worker's process group is signaled too.

        A worker that has ended is ignored.
        """
        self._send({"do": "signal", "index": index, "signal": int(number), "alone": alone})

    def fence(self, at_s: float) -> None:
        """Set the time, on CLOCK_BOOTTIME, at which the guard kills all workers.

        A later call replaces the time.
        """
        self._send({"do": "fence", "at_s": at_s})

    def sweep(self, number: int) -> None:
        """Signal the processes that workers left behind; the guard replies with `Swept`."""
        self._send({"do": "sweep", "signal": int(number)})

    def events(self) -> list[Event]:
        """Return the events that have arrived; block if there are none.

        Raises:
            LaunchError: the guard has died, and all workers have been killed.
        """
        try:
            data = self._socket.recv(65536)
        except OSError:  # the guard died with unread input
            data = b""
        if not data:
            _kill_descendants()
            raise LaunchError("the guard process died; all workers were killed")
        self._input += data
        events: list[Event] = []
        while len(self._input) >= 4:
            length = int.from_bytes(self._input[:4], "little")
            if len(self._input) < 4 + length:
                break
            message = json.loads(self._input[4 : 4 + length])
            self._input = self._input[4 + length :]
            events.append(_KINDS[message.pop("event")](**message))
        return events

    def close(self) -> None:
        """Kill all remaining processes and stop the guard. Waits up to 5 s. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._socket.send(_framed({"do": "end"}), socket.MSG_DONTWAIT)
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        try:
            self._guard.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()

    def _send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        data = _framed(message)
        try:
            sent = socket.send_fds(self._socket, [data], list(descriptors))
            self._socket.sendall(data[sent:])
        except OSError as err:
            _kill_descendants()
            raise LaunchError(f"the guard process died ({err}); all workers were killed") from err


def _framed(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return len(data).to_bytes(4, "little") + data


def _become_subreaper() -> None:
    """Make this process adopt the processes that a killed guard leaves behind."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_descendants() -> None:
    """Kill all descendants of this process after the guard has died."""
    deadline_s = time.monotonic() + _CLOSE_S
    while (left := descendants(os.getpid())) and time.monotonic() < deadline_s:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
