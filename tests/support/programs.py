"""Run programs as ranks on emulated hosts, in processes that have torch preloaded.

Starting Python on a host costs each rank seconds of CPU time for the imports alone. Here, each rank
is forked from the fork server of `ranks.py`, enters the host's network namespace, and runs the
program's text as `__main__`, followed by the interpreter's exit handlers.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing.process
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.ranks import _context, _die_with_the_test, _end

_CLONE_NEWNET = 0x40000000
_NAMESPACES = Path("/run/netns")


def run_programs(
    namespaces: Sequence[str | None],
    text: str,
    *args: str,
    environ: Mapping[str, str],
    timeout_s: float = 120.0,
) -> list[subprocess.CompletedProcess[str]]:
    """Run one program as one rank per network namespace.

    All ranks have exited when this function returns. A failed rank does not raise an error; the
    caller must check the exit codes.

    Args:
        namespaces: the namespace of each rank, in rank order; None means the test's own namespace.
        text: the text of the program.
        args: the program's arguments, `sys.argv[1:]`.
        environ: variables to add to every rank's environment, in addition to `RANK` and
            `LOCAL_RANK`. Each group of `LOCAL_WORLD_SIZE` consecutive ranks shares a host.
        timeout_s: how long the ranks may take.

    Returns:
        The exit code and the output of each rank, in rank order.

    Raises:
        subprocess.TimeoutExpired: a rank did not exit within `timeout_s`.
    """
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    with tempfile.TemporaryDirectory() as folder:
        with _started(folder, namespaces, text, args, environ) as ranks:
            deadline_s = time.monotonic() + timeout_s
            for number, rank in enumerate(ranks):
                rank.join(max(0.0, deadline_s - time.monotonic()))
                if rank.exitcode is None:
                    told = (_written(folder, number, "err") for number in range(len(ranks)))
                    raise subprocess.TimeoutExpired(f"rank {number}", timeout_s, "\n".join(told))
        return [
            subprocess.CompletedProcess(
                args, rank.exitcode, *(_written(folder, number, kind) for kind in ("out", "err"))
            )
            for number, rank in enumerate(ranks)
        ]


@contextlib.contextmanager
def _started(
    folder: str,
    namespaces: Sequence[str | None],
    text: str,
    args: Sequence[str],
    environ: Mapping[str, str],
) -> Iterator[list[Any]]:
    """Start the ranks; on exit, kill the remaining ranks and all processes that they started."""
    ranks: list[Any] = []
    num_local = int(environ["LOCAL_WORLD_SIZE"])
    try:
        for number, namespace in enumerate(namespaces):
            place = str(number % num_local)
            names = {**environ, "RANK": str(number), "LOCAL_RANK": place}
            given = (folder, number, namespace, text, [*args], names)
            ranks.append(_context.Process(target=_main, args=given))
            ranks[-1].start()
        yield ranks
    finally:
        for rank in ranks:
            if rank.pid is not None:
                _end(rank)


def _written(folder: str, rank: int, kind: str) -> str:
    path = Path(folder, f"{rank}.{kind}")
    return path.read_text(errors="replace") if path.exists() else ""


def _main(
    folder: str,
    rank: int,
    namespace: str | None,
    text: str,
    args: list[str],
    environ: dict[str, str],
) -> None:
    _die_with_the_test()
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, kind in ((1, "out"), (2, "err")):
        file = os.open(Path(folder, f"{rank}.{kind}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    if namespace is not None:
        _enter(namespace)
    os.environ.clear()
    os.environ.update(environ)
    # A rank is a program of its own, not a helper of the test's process: it may record.
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    sys.argv = ["-c", *args]
    code = _run(text)
    threading._shutdown()  # type: ignore[attr-defined] # as Python ends a program
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _enter(namespace: str) -> None:
    """Move this single-threaded process into a network namespace."""
    file = os.open(_NAMESPACES / namespace, os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns({namespace})")
    os.close(file)


def _run(text: str) -> int:
    """Run a program's text as `__main__`; return its exit code."""
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    try:
        exec(compile(text, "<string>", "exec"), program.__dict__)
    except SystemExit as err:
        if err.code is None or isinstance(err.code, int):
            return err.code or 0
        sys.stderr.write(f"{err.code}\n")
        return 1
    except BaseException:  # noqa: BLE001 -- as the interpreter does
        traceback.print_exc()
        return 1
    return 0
