"""The job's store server: a child process that ends with the agent.

It is a process of its own so that neither a flood of output nor an analysis in the agent ever
delays a rank's rendezvous. Its standard input is a pipe from the agent: when the agent ends,
however it ends, the pipe closes and the server goes.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys

from echelon.errors import LaunchError

_START_S = 30.0
_CLOSE_S = 5.0


class StoreProcess:
    """A store server on `host`, at a port of its own choice.

    Raises:
        LaunchError: it did not start.
    """

    def __init__(self, host: str, secret: str) -> None:
        read_end, write_end = os.pipe()
        command = [sys.executable, "-m", "echelon.store", "--host", host, "--port", "0"]
        try:
            self._process = subprocess.Popen(
                [*command, "--secret-file", f"/dev/fd/{read_end}"],
                pass_fds=[read_end],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is the agent's to handle
            )
            os.write(write_end, secret.encode())
        finally:
            os.close(read_end)
            os.close(write_end)
        self.host = host
        self.port = self._read_port()

    def close(self) -> None:
        """End the server; waits at most 5 s. Safe to call twice."""
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
            self._process.kill()
            self.close()
            raise LaunchError("the store server did not start; its message is above") from None
