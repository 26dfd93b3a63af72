"""Start launchers and ranks with torch already loaded, so that trainings do not wait for imports.

Loading torch takes 5 s of CPU time per rank, six times as much as the training itself. Therefore,
the launchers are forked from a process that has loaded it. They differ from `echelon run` in one
respect: when a launcher starts its guard, or the guard starts a rank, the new process continues in
the forked interpreter instead of a new one. This module imitates the other effects of `exec`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import multiprocessing.process
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from echelon.cli import main as echelon
from echelon.launcher.node import guard
from echelon.launcher.node.workers import Workers
from tests.support.programs import _enter
from tests.support.ranks import _context, _die_with_the_test

_POLL_S = 0.01
_PRELOADED = [
    "tests.support.preloaded",
    "echelon.dist.resilient",
    "echelon.train.same_bits",
    "echelon.cli",
]
_context.set_forkserver_preload(_PRELOADED)
_of_launcher: list[Callable[..., Any]] = []  # what it does at exit, and its forks must not
_register = atexit.register


def also(*modules: str) -> None:
    """Load more modules. Call this before starting any process."""
    _context.set_forkserver_preload([*_PRELOADED, *modules])


def start(
    argv: Sequence[str], environ: Mapping[str, str], log: Path, namespace: str = ""
) -> multiprocessing.process.BaseProcess:
    """Start `echelon ARGV`; return its process, whose pid is the launcher's.

    Args:
        log: the file for the launcher's output.
        namespace: the network namespace in which it runs; "" means the current one.
    """
    process = _context.Process(
        target=_become_launcher, args=([*argv], {**environ}, str(log), namespace)
    )
    process.start()
    return process


def _become_launcher(argv: list[str], environ: dict[str, str], log: str, namespace: str) -> None:
    _die_with_the_test()
    os.setsid()
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    if namespace:
        _enter(namespace)
    atexit.register = _note_and_register
    Workers._start = staticmethod(_Guard)  # type: ignore[method-assign, assignment]
    _become_program(lambda: echelon(argv), ["echelon", *argv], environ)


def _note_and_register(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    _of_launcher.append(function)
    return _register(function, *args, **options)


class _Guard:
    """A guard that runs in a fork of its launcher, with the interface that `Workers` uses."""

    def __init__(self, fd: int) -> None:
        self.pid = os.fork()
        if not self.pid:
            _become_guard(fd)

    def wait(self, timeout: float | None = None) -> None:
        due_s = time.monotonic() + (float("inf") if timeout is None else timeout)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > due_s:
                    raise subprocess.TimeoutExpired("guard", timeout or 0.0)
                time.sleep(_POLL_S)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _become_guard(fd: int) -> NoReturn:
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.set_inheritable(fd, True)
    os.execvpe = _become_rank
    atexit.register = _register
    for function in _of_launcher:
        atexit.unregister(function)
    _become_program(guard.main, ["guard.py", str(fd)], dict(os.environ))


def _become_rank(_: str, argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    place = next(place for place, arg in enumerate(argv) if arg.endswith(".py"))
    script = argv[place]
    _become_program(lambda: runpy.run_path(script, run_name="__main__"), argv[place:], env)


def _become_program(
    program: Callable[[], Any], argv: Sequence[str], environ: Mapping[str, str]
) -> NoReturn:
    """Run a program in this process, as if `exec` had started it; never returns."""
    _close_on_exec()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [*argv]
    for name, fd in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        setattr(sys, name, open(fd, "w" if fd else "r", buffering=1, closefd=False))  # noqa: SIM115
    # A program of its own, not a helper of the benchmark's process: a rank may record.
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    code = _code_of(program)
    threading._shutdown()  # type: ignore[attr-defined] # as Python ends a program
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _code_of(program: Callable[[], Any]) -> int:
    try:
        found = program()
    except SystemExit as end:
        found = end.code
    except BaseException:  # noqa: BLE001 -- as the interpreter does
        traceback.print_exc()
        return 1
    return found if isinstance(found, int) else 0


def _close_on_exec() -> None:
    """Close the descriptors that `exec` closes; their owners stay alive on the stack."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 -- a generator has one of its own
        with contextlib.suppress(OSError):
            if fcntl.fcntl(int(name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                os.close(int(name))
