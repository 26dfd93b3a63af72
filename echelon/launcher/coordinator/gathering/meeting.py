"""Run the job's store server as a child process of the agent.

The server is a separate process, so that a busy agent cannot delay the ranks' rendezvous. Its
standard input is a pipe from the agent, which carries the agent's requests. When the agent exits,
the pipe closes and the server exits too. The server ignores SIGTERM: if the whole node receives a
SIGTERM, the ranks might still need the store to save their state.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from echelon.errors import LaunchError
from echelon.launcher.coordinator.decide import describe_code

_START_S = 120.0  # on a machine with far too much to do; a death is noticed at once
_ANSWER_S = 5.0
_CLOSE_S = 5.0
_MOST_KEYS = 64  # of a question, which must fit into PIPE_BUF


class MeetingPlace(Protocol):
    """The coordinator's interface to the job's store, through which the ranks rendezvous."""

    host: str  # as ranks dial it
    port: int

    def admit(self, address: str) -> None:
        """Accept clients from an address even if they do not authenticate themselves."""

    def publish(self, key: str, value: str) -> None:
        """Store a value for the ranks to read. The key and value must not contain whitespace."""

    def post(self, folder: str, value: str) -> None:
        """Store a value under the first free key among `folder`/0, `folder`/1, and so on.

        The folder and the value must not contain whitespace.
        """

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Return, for each key, whether it is set. Keys must not contain whitespace."""

    def renew(self) -> None:
        """Delete all keys and disconnect all clients."""

    def how_it_died(self) -> str:
        """Return why the server is not serving; "" while it is serving."""


class StoreProcess:
    """A store server on a free port.

    Args:
        bind: the address that the server binds to.
        host: the address that ranks connect to.

    Raises:
        LaunchError: the server did not start.
    """

    def __init__(self, bind: str, host: str, secret: str) -> None:
        self.host = host
        self._bind, self._secret = bind, secret
        self._admitted: dict[str, None] = {}
        self._is_late = False  # with an answer
        self._process = self._start()
        self.port = self._read_port()

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            process = self._start_server()
        except OSError as err:
            raise LaunchError(f"cannot start the store server: {err.strerror or err}") from err
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def _start_server(self) -> subprocess.Popen[bytes]:
        read_end, write_end = os.pipe()
        command = [sys.executable, "-m", "echelon.store", "--host", self._bind, "--port", "0"]
        try:
            process = subprocess.Popen(
                [*command, "--parent-only", "--secret-file", f"/dev/fd/{read_end}"],
                pass_fds=[read_end],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is the agent's to handle
            )
            os.write(write_end, self._secret.encode())
        finally:
            os.close(read_end)
            os.close(write_end)
        return process

    def admit(self, address: str) -> None:
        """Let torch's store clients connect from a given numeric IP address. Does not block.

        Raises:
            LaunchError: the server cannot be reached.
        """
        self._admitted[address] = None
        self._tell(f"admit {address}")

    def publish(self, key: str, value: str) -> None:
        """Store a value for the ranks to read. Does not block. See `MeetingPlace.publish`.

        Raises:
            LaunchError: the server cannot be reached.
        """
        self._tell(f"publish {key} {value}")

    def post(self, folder: str, value: str) -> None:
        """Store a value under the first free key. Does not block. See `MeetingPlace.post`.

        Raises:
            LaunchError: the server cannot be reached.
        """
        self._tell(f"post {folder} {value}")

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Return, for each key, whether it is set. Blocks for up to 5 s per batch of 64 keys.

        Raises:
            LaunchError: the server cannot be reached, or did not answer in time. All later calls
                then fail until `renew` is called.
        """
        found: list[bool] = []
        for first in range(0, len(keys), _MOST_KEYS):
            asked = keys[first : first + _MOST_KEYS]
            told = self._ask(f"has {' '.join(asked)}").split()
            if len(told) != 1 + len(asked):
                self._is_late = True
                raise LaunchError("the store server did not report which keys it holds")
            found += [word == b"1" for word in told[1:]]
        return found

    def _ask(self, line: str) -> bytes:
        """Send one request and return the server's answer; b"" if none arrives within 5 s."""
        if self._is_late:
            return b""  # the answer to an earlier question may still arrive
        self._tell(line)
        out = self._process.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], _ANSWER_S)
        return out.readline() if ready else b""

    def how_it_died(self) -> str:
        """Return why the server is not serving; "" while it is serving."""
        code = self._process.poll()
        if code is None:
            return "is stopped by a signal" if self._is_stopped() else ""
        return describe_code(code)

    def _is_stopped(self) -> bool:
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_bytes()
        except OSError:
            return False
        return stat.rpartition(b")")[2].split()[0] == b"T"  # but not if it is traced

    def renew(self) -> None:
        """Delete all keys and disconnect all clients; replace the server if it does not respond.

        The call waits up to 5 s for the server to confirm, and then up to 2 min for a new server to
        start. A new server listens on another port.

        Raises:
            LaunchError: no server can be started.
        """
        if not self._is_stopped() and self._is_renewed():
            return
        self._process.kill()
        self.close()
        self._process = self._start()
        self._is_late = False
        self.port = self._read_port()
        for address in self._admitted:
            self._tell(f"admit {address}")

    def _is_renewed(self) -> bool:
        try:
            return self._ask("renew") == b"renew\n"
        except LaunchError:
            return False

    def _tell(self, line: str) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            os.write(pipe.fileno(), line.encode() + b"\n")
        except OSError as err:  # the server has ended, or has not read for very long
            raise LaunchError(f"cannot send {line!r} to the store server: {err}") from err

    def close(self) -> None:
        """Stop the server, waiting up to 5 s for it to exit. Safe to call twice."""
        if self._is_stopped():
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read_port(self) -> int:
        out = self._process.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], _START_S)
        line = out.readline() if ready else b""
        try:
            return int(line)
        except ValueError:
            if ready:  # end of file: the server has ended, or is about to
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_CLOSE_S)
            why = self.how_it_died() or f"no answer in {_START_S:g} s"
            self._process.kill()
            self.close()
            raise LaunchError(f"the store server did not start: {why}") from None
