"""The agent's side of the guard: start workers, signal them, learn of their ends.

Nothing here waits for long: `events()` returns what has come; the agent's loop watches `fileno()`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.errors import LaunchError

_GUARD = Path(__file__).with_name("guard.py")
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Started:
    """A worker runs."""

    index: int
    pid: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker's program could not be started."""

    index: int
    error: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker has ended; `code` as in `subprocess`: -9 is SIGKILL."""

    index: int
    code: int
    mono_ns: int


@dataclass(frozen=True, slots=True)
class Swept:
    """Processes that workers had left behind were signalled."""

    count: int


Event = Started | Failed | Exited | Swept
_KINDS: dict[str, type[Any]] = {
    "started": Started,
    "failed": Failed,
    "exited": Exited,
    "swept": Swept,
}


class Workers:
    """The workers of this node, through their guard."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the agent's to handle
            )
        self._input = b""

    def fileno(self) -> int:
        """Readable when events may have come."""
        return self._socket.fileno()

    def spawn(
        self,
        index: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        processors: Collection[int] | None = None,
    ) -> tuple[int, int]:
        """Ask for a worker; return the read ends of its stdout and stderr, owned by the caller.

        It may use the given processors only; None: all that the launcher may.
        """
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        try:
            message = {"do": "spawn", "index": index, "argv": list(argv), "env": dict(env)}
            bound = None if processors is None else sorted(processors)
            self._send(message | {"cwd": cwd, "processors": bound}, [out_write, err_write])
        except BaseException:
            os.close(out_read)
            os.close(err_read)
            raise
        finally:
            os.close(out_write)
            os.close(err_write)
        return out_read, err_read

    def hold(self, folder: str) -> None:
        """Have the guard keep a folder for rings, and remove it if the agent is killed."""
        self._send({"do": "hold", "folder": folder})

    def signal(self, index: int, number: int) -> None:
        """Signal a worker's process group; nothing happens if it has ended."""
        self._send({"do": "signal", "index": index, "signal": int(number)})

    def sweep(self, number: int) -> None:
        """Signal what ended workers left behind; answered by `Swept`."""
        self._send({"do": "sweep", "signal": int(number)})

    def events(self) -> list[Event]:
        """Return the events that have come; blocks only if none has.

        Raises:
            LaunchError: the guard is gone, and by its death signal the workers with it.
        """
        data = self._socket.recv(65536)
        if not data:
            raise LaunchError("the guard process is gone; its workers were killed with it")
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
        """Kill whatever is left and end the guard; waits at most 5 s. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        try:
            self._guard.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()

    def _send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        data = json.dumps(message).encode()
        data = len(data).to_bytes(4, "little") + data
        try:
            sent = socket.send_fds(self._socket, [data], list(descriptors))
            self._socket.sendall(data[sent:])
        except OSError as err:
            raise LaunchError(f"the guard process is gone: {err}") from err
