"""Run a function on N ranks in N new processes, and raise an error if any rank fails.

`run_ranks` returns the ranks' results only if every rank ended as expected: with exit code 0, or
with the code in `exit_codes` for a rank that the test breaks on purpose. Otherwise, it raises
`RanksFailedError` with one line per rank, and with the traceback of each failed rank or the stacks
of each hung rank.

The ranks are forked from a fork server that has the large modules preloaded. When the test process
ends for any reason, the fork server and the ranks end too. Starting depends on the machine's load
and has its own generous limit; `timeout_s` begins only when all ranks are ready.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.process
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.store import StoreServer

_START_TIMEOUT_S = 300.0
_STACKS_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.preloaded"])


class RanksFailedError(AssertionError):
    """Raised when a rank did not end as the test expected."""


@dataclass(frozen=True)
class _End:
    rank: int
    expected: int
    code: int | None  # None: still running at the deadline
    error: str
    stacks: str
    log: str

    @property
    def ok(self) -> bool:
        return self.code == self.expected and (not self.error or self.expected != 0)

    def line(self) -> str:
        how = "still running" if self.code is None else f"exit code {self.code}"
        said = f": {self.error.strip().splitlines()[-1]}" if self.error else ""
        return f"rank {self.rank}: {how}, expected {self.expected}{said}"


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    exit_codes: Mapping[int, int] | None = None,
    environ: Mapping[str, str] | None = None,
    ranks: list[int] | None = None,
    store_port: int | None = None,
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on each rank, with a store server for the rendezvous.

    Args:
        exit_codes: the expected exit code of each rank that the test breaks on purpose.
        environ: variables to add to every rank's environment.
        ranks: the ranks to start; the others never join. None means all ranks.
        store_port: the port of the store server; None means a server that lives during this call.

    Returns:
        The results in the order of `ranks`; None for a rank that was expected to break.
    """
    chosen = list(range(world_size)) if ranks is None else ranks
    expected = {rank: (exit_codes or {}).get(rank, 0) for rank in chosen}
    with contextlib.ExitStack() as stack:
        tmp = stack.enter_context(tempfile.TemporaryDirectory())
        if store_port is None:
            server = StoreServer("127.0.0.1", 0)
            server.start()
            stack.callback(server.close)
            store_port = server.port
        env = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
        } | dict(environ or {})
        ends = _run(tmp, fn, world_size, args, chosen, expected, env, timeout_s)
        if not all(end.ok for end in ends):
            raise RanksFailedError(_story(ends))
        return [_payload(tmp, rank).get("result") for rank in chosen]


def _run(
    tmp: str,
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    chosen: list[int],
    expected: dict[int, int],
    env: dict[str, str],
    timeout_s: float,
) -> list[_End]:
    processes = {}
    gates = {}
    for rank in chosen:
        gates[rank], theirs = _context.Pipe()
        process = _context.Process(
            target=_main, args=(tmp, theirs, fn, rank, world_size, args, env)
        )
        process.start()
        theirs.close()
        processes[rank] = process
    try:
        _wait_until_ready(gates)
        for gate in gates.values():
            gate.send("go")
        hung = _wait_until_ended(processes, expected, timeout_s)
        for rank in hung:
            _ask_for_stacks(tmp, rank, processes[rank].pid)
    finally:
        for process in processes.values():
            _end(process)
        for gate in gates.values():
            gate.close()
    ends = []
    for rank, process in processes.items():
        code = None if rank in hung else process.exitcode
        error = str(_payload(tmp, rank).get("error", ""))
        texts = [_text(Path(tmp, f"{rank}.{kind}")) for kind in ("stacks", "log")]
        ends.append(_End(rank, expected[rank], code, error, *texts))
    return ends


def _wait_until_ready(gates: dict[int, Any]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    for rank, gate in gates.items():
        if not gate.poll(max(0.0, deadline - time.monotonic())):
            raise RanksFailedError(f"rank {rank} did not start within {_START_TIMEOUT_S} s")
        try:
            gate.recv()
        except EOFError:
            raise RanksFailedError(f"rank {rank} died while starting") from None


def _wait_until_ended(
    processes: dict[int, Any], expected: dict[int, int], timeout_s: float
) -> list[int]:
    """Wait for the ranks to end; return those still running at the deadline.

    If a rank ends unexpectedly, the deadline is at most 3 s later.
    """
    deadline = time.monotonic() + timeout_s
    running = dict(processes)
    while running and time.monotonic() < deadline:
        sentinels = [process.sentinel for process in running.values()]
        multiprocessing.connection.wait(sentinels, max(0.0, deadline - time.monotonic()))
        ended = {r: p.exitcode for r, p in running.items() if p.exitcode is not None}
        running = {r: p for r, p in running.items() if r not in ended}
        if any(code != expected[rank] for rank, code in ended.items()):
            deadline = min(deadline, time.monotonic() + 3.0)  # let the peers say what they saw
    return list(running)


def _ask_for_stacks(tmp: str, rank: int, pid: int) -> None:
    path = Path(tmp, f"{rank}.stacks")
    try:
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGUSR1)
    except ProcessLookupError:
        return  # it ended just now, and its log says how
    deadline = time.monotonic() + _STACKS_TIMEOUT_S
    while time.monotonic() < deadline and "most recent call first" not in _text(path):
        multiprocessing.connection.wait([], 0.02)


def _end(process: Any) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)  # and whatever the rank left behind
    except ProcessLookupError:
        process.kill()  # it never led a session, or has ended
    process.join()


def _story(ends: list[_End]) -> str:
    lines = [end.line() for end in ends]
    for end in ends:
        if not end.ok:
            lines += [f"---- rank {end.rank} ----", end.error or end.stacks, end.log]
    return "\n".join(lines)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _payload(tmp: str, rank: int) -> dict[str, Any]:
    path = Path(tmp, f"{rank}.result")
    return pickle.loads(path.read_bytes()) if path.exists() else {}


def _main(
    tmp: str,
    gate: Any,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    env: dict[str, str],
) -> None:
    _die_with_the_test()
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run under nohup
    log = os.open(Path(tmp, f"{rank}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stacks = Path(tmp, f"{rank}.stacks").open("w")  # noqa: SIM115 -- faulthandler keeps it
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    # A rank is a program of its own, not a helper of the test's process: it may record.
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    gate.send("ready")
    gate.recv()
    code = 0
    try:
        payload = {"result": fn(rank, world_size, *args)}
    except BaseException as err:  # noqa: BLE001 -- SystemExit too: every way out is reported
        payload = {"error": traceback.format_exc()}
        code = err.code if isinstance(err, SystemExit) and isinstance(err.code, int) else 1
    part = Path(tmp, f"{rank}.part")
    part.write_bytes(pickle.dumps(payload))
    part.rename(Path(tmp, f"{rank}.result"))
    sys.stdout.flush()
    if code:
        os._exit(code)


def _die_with_the_test() -> None:
    """Make the kernel kill this rank when the fork server exits, and do not keep the server alive.

    A rank inherits the pipe that keeps the fork server alive, and passes it to its own children. If
    the rank did not close the pipe, the server would wait for a hung rank, and the rank would
    outlive a test that was killed.
    """
    server = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def run_echelon(*argv: str, timeout_s: float = 600.0, **options: Any) -> Any:
    """Run `python -m echelon ...`; return the completed process with its output."""
    import subprocess

    options.setdefault("env", {**os.environ, "OMP_NUM_THREADS": "1"})
    return subprocess.run(
        [sys.executable, "-m", "echelon", *argv],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        stdin=subprocess.DEVNULL,
        **options,
    )


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file."""
    return json.loads(path.read_text())
