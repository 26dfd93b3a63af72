"""Classify a rank's child processes by role and activity.

The outermost frames of a forked worker are inherited from its parent. Only the frames called from
the worker's loop show what the worker is doing.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import Enum

from echelon.analysis.activity.doing import Activity, Doing
from echelon.analysis.activity.reader import read_frames
from echelon.analysis.evidence.stacks.frames import Frame, main_thread
from echelon.recorder.format.schema import HostChild

_LOADER = re.compile(r"torch[/\\]utils[/\\]data[/\\]_utils[/\\](worker|fetch)\.py$")
_LOOP = re.compile(r"(?:multiprocessing[/\\](?:process|pool|spawn|forkserver)|compile_worker)")
_IDLE = re.compile(r"multiprocessing[/\\](?:queues|connection|pool)\.py$|selectors\.py$|queue\.py$")
_COMPILERS = re.compile(
    r"(?:^|[/ ])(?:\w+-)*(?:g\+\+|gcc|clang\+*|cc1plus|cc1|nvcc|ptxas|cicc|ninja|ld|as)"
    r"(?:-\d+)?(?= |$)"
    r"|compile_worker"
)
_SHORT = 60


class Role(Enum):
    """The role of a child process within its rank."""

    LOADER = "data-loader worker"
    COMPILER = "compiler"
    PYTHON = "worker process"
    PROGRAM = "child process"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """A rank's child process, with its role and its activity."""

    child: HostChild
    role: Role
    activity: Activity
    is_idle: bool = False  # idle, waiting for work

    @property
    def trouble(self) -> int:
        """The severity of the process's state, from 0 (idle) to 5 (dead)."""
        if self.child.state in ("Z", "X"):
            return 5
        if self.child.state in ("T", "t", "D"):
            return 4
        if self.is_idle:
            return 0
        return 3 if self.activity.doing in (Doing.USER, Doing.LOCK, Doing.NETWORK) else 2

    def words(self) -> str:
        """Describe the process and its activity in a phrase that completes "waits for ..."."""
        child = self.child
        name = f"its {self.role.value} (pid {child.pid})"
        if self.role is Role.PROGRAM:
            name = f"its child process (pid {child.pid}, {child.command[:_SHORT].strip()})"
        at = f" at {self.activity.line}" if self.activity.line else ""
        return f"{name}, which {self._does()}{at}"

    def _does(self) -> str:
        child = self.child
        if child.state in ("Z", "X"):
            return _death(child.exit_code)
        if child.state in ("T", "t"):
            return "is stopped (process state T)"
        if child.state == "D":
            where = f" in {child.wait_channel}" if child.wait_channel else ""
            return f"is in uninterruptible sleep{where}"
        if self.is_idle:
            return "waits for work"
        if "sleep" in child.call:
            return "sleeps"
        if child.state == "R":
            return "runs"
        return self.activity.doing.value if self.activity.line else "is alive"


def read_worker(child: HostChild) -> WorkerState:
    """Classify one child process of a rank by role and activity."""
    thread = main_thread(child.stacks)
    frames = thread.frames if thread else ()
    loop = next((n for n, one in enumerate(frames) if _LOADER.search(one.file)), None)
    if loop is not None and any("worker.py" in one.file for one in frames):
        return _in_loop(child, Role.LOADER, frames[:loop])
    if _COMPILERS.search(child.command):
        return WorkerState(child=child, role=Role.COMPILER, activity=read_frames(frames))
    loop = next((n for n, one in enumerate(frames) if _LOOP.search(one.file)), None)
    if loop is not None:
        return _in_loop(child, Role.PYTHON, frames[:loop])
    role = Role.PYTHON if frames else Role.PROGRAM
    return WorkerState(child=child, role=role, activity=read_frames(frames))


def _in_loop(child: HostChild, role: Role, own: tuple[Frame, ...]) -> WorkerState:
    idle = bool(own) and not any(one.is_users for one in own) and bool(_IDLE.search(own[-1].file))
    return WorkerState(child=child, role=role, activity=read_frames(own), is_idle=idle)


def _death(code: int | None) -> str:
    if code is None:
        return "is dead"
    try:
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    except ValueError:
        how = f"by signal {-code}"
    return f"was killed {how}" if code < 0 else f"ended {how}"
