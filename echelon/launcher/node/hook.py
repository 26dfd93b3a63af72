"""Run `--before-restart CMD`: a shell command that this node runs before its workers restart.

Like the workers, the command runs under the guard. Environment variables give the reason for the
restart. If the command fails or takes too long, the failure is reported in one line and the workers
start anyway.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from echelon.launcher.control import messages as m
from echelon.launcher.node.workers import Workers

FIRST_INDEX = 1 << 20  # plus the attempt's number: the hook's index at the guard, never a worker's
_UNKILLABLE_S = 5.0
_SHELL = ("/bin/sh", "-c")
_BLOCK_BYTES = 1 << 14
_MAX_LINE_BYTES = 4096


class Hook:
    """One run of the user's command before a restart.

    Raises:
        LaunchError: the guard has died, or no descriptors are left.
    """

    def __init__(
        self,
        command: str,
        start: m.Start,
        limit_s: float,
        guard: Workers,
        selector: selectors.BaseSelector,
        say: Callable[[str], None],
    ) -> None:
        self.start = start
        self.index = FIRST_INDEX + start.attempt
        self._limit_s = limit_s
        self._guard = guard
        self._selector = selector
        self._say = say
        self._is_late = False
        self._rest: dict[int, bytes] = {}
        self.due_s = time.monotonic() + limit_s  # when `tick` must be called
        env = environment(os.environ, start)
        for pipe in guard.spawn(self.index, (*_SHELL, command), env, os.getcwd()):  # noqa: PTH109
            os.set_blocking(pipe, False)
            self._rest[pipe] = b""
            selector.register(pipe, selectors.EVENT_READ, lambda pipe=pipe: self._pass_on(pipe))

    def tick(self, now_s: float) -> bool:
        """Kill the command once its time limit has passed.

        Return True if the command is still running five seconds after it was killed.
        """
        if now_s < self.due_s:
            return False
        if self._is_late:
            return True
        self._is_late = True
        self.due_s = now_s + _UNKILLABLE_S
        self.kill()
        return False

    def kill(self) -> None:
        """Kill the command. The guard still reports its exit."""
        self._guard.signal(self.index, signal.SIGKILL)

    def note_end(self, code: int | None, error: str = "") -> None:
        """Print the rest of the command's output and, if the command failed, the reason.

        Args:
            code: the command's exit code; None if the command could not be started.
        """
        for pipe in list(self._rest):
            self._pass_on(pipe)
        self.close()
        how = "" if code == 0 else error or _how_it_ended(code or 0)
        if self._is_late:
            how = f"took longer than {self._limit_s:g} s and was killed"
        if how:
            self._say(f"--before-restart {how}; the workers start anyway")

    def close(self) -> None:
        """Close the command's pipes."""
        for pipe in list(self._rest):
            self._drop(pipe)

    def _pass_on(self, pipe: int) -> None:
        """Print the output that has arrived through one of the command's pipes."""
        if pipe not in self._rest:
            return
        with contextlib.suppress(BlockingIOError):
            while data := os.read(pipe, _BLOCK_BYTES):
                *lines, rest = (self._rest[pipe] + data).split(b"\n")
                self._rest[pipe] = rest[-_MAX_LINE_BYTES:]
                for line in lines:
                    self._show(line)
            self._drop(pipe)

    def _show(self, line: bytes) -> None:
        self._say(f"before-restart: {line[:_MAX_LINE_BYTES].decode(errors='replace').rstrip()}")

    def _drop(self, pipe: int) -> None:
        rest = self._rest.pop(pipe)
        if rest:
            self._show(rest)
        self._selector.unregister(pipe)
        os.close(pipe)


def environment(base: Mapping[str, str], start: m.Start) -> dict[str, str]:
    """Return the launcher's environment without the secret, plus facts about the restart."""
    env = {name: value for name, value in base.items() if name != "ECHELON_SECRET"}
    last = _last_decision(start.history)
    env.update(
        ECHELON_CAUSE=str(last.get("cause") or ""),
        ECHELON_REASON=str(last.get("reason") or ""),
        ECHELON_CULPRIT_RANKS=",".join(map(str, last.get("culprit_ranks") or [])),
        ECHELON_CULPRIT_HOSTS=",".join(map(str, last.get("hosts") or [])),
        ECHELON_ATTEMPT=str(start.attempt),
        ECHELON_JOB_ID=start.job_id,
        GROUP_RANK=str(start.node_rank),
    )
    if start.resume:
        env["ECHELON_RESUME"] = start.resume
    return env


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _last_decision(history: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
        last = json.loads(history)["attempts"][-1]
        if isinstance(last, dict):
            return last
    return {}
