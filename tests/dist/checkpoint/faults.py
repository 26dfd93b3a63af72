"""A fault at a chosen call of a save, on a chosen rank; and what must hold whatever happened.

A case is a job of two ranks: save 1, save 2 with a fault in it, save 3 if the ranks still can. It
runs in forks, one pair per case. Every save that returned is noted; `audit` then takes the place of
the job that is started after the failure.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

import echelon.dist as dist
from echelon.dist.checkpoint import load, save
from echelon.dist.checkpoint.disk.folder import marked, versions
from echelon.dist.checkpoint.disk.source import Version
from echelon.dist.checkpoint.ranks import peers, pending
from echelon.errors import EchelonError

CHANGES = ("open", "write", "fsync", "close", "rename", "mkdir", "unlink", "rmdir", "listdir")
NEEDS_SPACE = ("open", "write", "fsync", "close", "rename", "mkdir")
TIMEOUT_S, HANG_S = 0.4, 0.7
KILLED_S = 1.0  # a survivor waits so long for the files of a killed rank, in the background
_write = os.write  # not counted: it is the test's own
KINDS = ("kill", "no space", "hang")


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        kind: kill (SIGKILL), no space (ENOSPC), or hang (past the timeout).
        victim: the rank.
        background: whether save 2 is.
        layout: "replicas", or "parts": each rank has tensors of its own.
        moment: the number of the call, from 0, among those that can be hit.
    """

    kind: str
    victim: int
    background: bool
    layout: str
    moment: int


def state_of(case, rank, step):
    """A state whose every tensor tells the step that it belongs to."""
    model = torch.nn.ModuleDict({"common": torch.nn.Linear(3, 4)})
    if case.layout == "parts":
        model[f"own{rank}"] = torch.nn.Linear(5, 6)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float(step))
    return {"model": model, "step": step}


def arm(case, report):
    """Have this process meet its fault at its `moment`-th call; `report` the calls counted."""
    counter = itertools.count()
    originals = {name: getattr(os, name) for name in CHANGES}
    gather = peers.World.all_gather
    close_file = os.close

    def act(call, args):
        _write(report, b"fired\n")
        if case.kind == "kill":
            if call is _write:
                call(args[0], bytes(args[1])[:3])  # in the middle of it
            os.kill(os.getpid(), signal.SIGKILL)
        elif case.kind == "no space":
            if call is close_file:
                call(*args)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        else:
            time.sleep(HANG_S)  # the disk that stands still

    def wrap(call):
        def counted(*args, **kwargs):
            if next(counter) == case.moment:
                act(call, args)
            return call(*args, **kwargs)

        return counted

    for name in CHANGES if case.kind != "no space" else NEEDS_SPACE:
        setattr(os, name, wrap(originals[name]))
    if case.kind != "no space":
        peers.World.all_gather = wrap(gather)

    def disarm():
        for name, call in originals.items():
            setattr(os, name, call)
        peers.World.all_gather = gather
        return next(counter)

    return disarm


def _save(case, rank, folder, step, done, *, background=False, timeout_s=None):
    state = state_of(case, rank, step)
    try:
        under_way = save(folder / "c", state, async_op=background, timeout_s=timeout_s)
        if under_way:
            under_way.wait()
    except (EchelonError, OSError, ValueError):
        return
    _write(done, f"{step}\n".encode())


def _job(case, rank, folder):
    world = dist.init(timeout_s=60.0)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    done = os.open(folder / f"done_{rank}", flags)
    report = os.open(folder / f"fired_{rank}", flags)
    _save(case, rank, folder, 1, done)
    world.barrier()
    limit_s = {"hang": TIMEOUT_S, "kill": KILLED_S}.get(case.kind, 30.0)
    if case.kind == "hang":
        pending._GRACE_S = 0.0
        world.timeout_s = TIMEOUT_S
    disarm = arm(case, report) if rank == case.victim else int
    _save(case, rank, folder, 2, done, background=case.background, timeout_s=limit_s)
    num_calls = disarm()
    if rank == case.victim:
        _write(report, f"{num_calls}\n".encode())
    _save(case, rank, folder, 3, done)


def run_cases(rank, world_size, folder, cases):
    """Run this rank's part of all cases; return how each part ended: its exit code."""
    codes = []
    for number, case in enumerate(cases):
        place = Path(folder, str(number))
        place.mkdir(exist_ok=True)
        fork = os.fork()
        if fork == 0:
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
            code = 1
            try:
                _job(case, rank, place)
                code = 0
            finally:
                os._exit(code)
        codes.append(_wait(fork))
        (place / f"ended_{rank}").touch()
        _wait_for(place / f"ended_{1 - rank}")  # the next case begins on both
    return codes


def _wait_for(path, limit_s=180.0):
    deadline = time.monotonic() + limit_s
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.002)


def _wait(fork, limit_s=90.0):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(fork, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(fork, signal.SIGKILL)
    os.waitpid(fork, 0)
    return None


def audit(case, place):
    """Check that nothing committed is lost or damaged; return whether the fault was met.

    Raises:
        AssertionError: something is.
    """
    done = [int(step) for rank in (0, 1) for step in _lines(place / f"done_{rank}")]
    path = place / "c"
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a fallback: a version was damaged
        assert list(versions(path)) == list(marked(path)), case
        for version in versions(path):
            source = Version(version)
            source.verify()
            source.close()
            _step_of(version, case)
        found = _step_of(path, case)
        assert found >= max(done), (case, found, done)
        save(path, {"step": 9, "x": torch.ones(5)}, keep=3)
        assert load(path, {"x": None})["step"] == 9, case
        assert found in [_step_of(version, case) for version in versions(path)[:-1]], case
    assert sorted(path.iterdir()) == list(versions(path)), case  # nothing is left over
    return "fired" in _lines(place / f"fired_{case.victim}")


def _step_of(path, case):
    """Load both ranks' tensors; all tell the same step."""
    steps = set()
    for rank in (0, 1):
        state = state_of(case, rank, -1)
        model = state["model"]
        if case.layout == "parts":
            model.update(state_of(case, 1 - rank, -1)["model"])
        load(path, state)
        steps |= {float(v) for p in model.parameters() for v in p.detach().reshape(-1)}
        steps.add(float(state["step"]))
    assert len(steps) == 1, (case, path, steps)
    return steps.pop()


def _lines(path):
    return path.read_text().split() if path.exists() else []


def num_moments(place, victim):
    """Return how many calls a case without a fault counted."""
    return int(_lines(place / f"fired_{victim}")[-1])
