"""Run each probe in a separate process, so that a hung disk blocks only the child process.

A child that does not answer in time is killed. The parent does not wait for the child to exit,
because the child might be stuck in the kernel. Killed children are reaped when the next child
starts, or when the parent exits.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence

from echelon.launcher.doctor.probes.finding import LISTEN, Finding, State, Task

COMMAND = (sys.executable, "-m", "echelon.launcher.doctor.probes")
_MOST_BYTES = 1 << 16
_REAP_S = 1.0
_left: list[subprocess.Popen[bytes]] = []  # killed but not reaped yet


class Child:
    """A probe that runs in a child process.

    Attributes:
        due_s: the `time.monotonic` time at which to call `poll` if no answer arrives earlier.
        pid: the child's pid; 0 if the child was not started or is closed.
    """

    def __init__(self, task: Task, command: Sequence[str] = COMMAND) -> None:
        _reap()
        self.task = task
        self.due_s = time.monotonic() + task.deadline_s
        self._answer = b""
        self._finding: Finding | None = None
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = self._start(command)
        except OSError as err:
            why = f"no process can be started: {err.strerror or err}"
            self._finding = Finding(probe=task.probe, state=State.BROKEN, text=why)

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the launcher's to handle
        )
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        with contextlib.suppress(OSError):  # it has ended, which its answer will show
            process.stdin.write(self.task.pack().encode() + b"\n")
            process.stdin.flush()
        if self.task.probe != LISTEN:
            with contextlib.suppress(OSError):
                process.stdin.close()
        return process

    @property
    def pid(self) -> int:
        """The child's pid; 0 if there is no child process."""
        return 0 if self._process is None else self._process.pid

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when output arrives; -1 if none is open."""
        process = self._process
        return -1 if process is None or process.stdout is None else process.stdout.fileno()

    def poll(self) -> Finding | None:
        """Return the finding; None if the child has not answered and its deadline has not passed.

        Never blocks.
        """
        if self._finding is None:
            self._finding = self._read()
        return self._finding

    def _read(self) -> Finding | None:
        has_ended = False
        with contextlib.suppress(BlockingIOError):
            while len(self._answer) < _MOST_BYTES:
                data = os.read(self.fileno(), 1 << 12)
                if not data:
                    has_ended = True
                    break
                self._answer += data
        line, newline, _ = self._answer.partition(b"\n")
        if newline:
            with contextlib.suppress(ValueError):
                return Finding.unpack(line.decode(errors="replace"))
        probe = self.task.probe
        if has_ended or newline:
            return Finding(probe=probe, state=State.BROKEN, text="the probe ended without a result")
        if time.monotonic() < self.due_s:
            return None
        text = f"no answer within {self.task.deadline_s:g} s"
        return Finding(probe=probe, state=State.BROKEN, text=text)

    def close(self) -> None:
        """Kill the child without waiting for it to exit. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.kill()
        if process.poll() is None:
            _left.append(process)


def _reap(wait_s: float = 0.0) -> None:
    """Reap killed children as they exit, waiting up to `wait_s` seconds in total."""
    deadline_s = time.monotonic() + wait_s
    for process in _left:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline_s - time.monotonic()))
    _left[:] = [one for one in _left if one.returncode is None]


# Python reports a child that nothing has reaped as still running.
atexit.register(_reap, _REAP_S)


def run_all(tasks: Sequence[Task], command: Sequence[str] = COMMAND) -> list[Finding]:
    """Run probes in parallel, each in its own process; return one finding per task.

    Blocks at most until the deadlines of all tasks have passed.
    """
    children = [Child(task, command) for task in tasks]
    try:
        with selectors.DefaultSelector() as selector:
            for child in children:
                if child.fileno() >= 0:
                    selector.register(child.fileno(), selectors.EVENT_READ, child)
            return _await_all(children, selector)
    finally:
        for child in children:
            child.close()


def _await_all(children: Sequence[Child], selector: selectors.BaseSelector) -> list[Finding]:
    while True:
        found = [child.poll() for child in children]
        for child, one in zip(children, found, strict=True):
            if one is not None and child.fileno() in selector.get_map():
                selector.unregister(child.fileno())
        waiting = [c for c, one in zip(children, found, strict=True) if one is None]
        if not waiting:
            return [one for one in found if one is not None]
        selector.select(max(0.0, min(child.due_s for child in waiting) - time.monotonic()))
