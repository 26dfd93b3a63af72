"""Run one case of `benchmarks.unmodified`: a script, a fault, a launcher, and the result.

Under `echelon run`, the launcher gives the verdict. Under plain torchrun, `fr-analyze --attach`
gives it, after the fault has occurred. If a rank exits there, no job remains to attach to.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

from benchmarks.runner.place import ROOT
from echelon.host.threads import descendants
from echelon.launcher.attach.ranks import ranks_below

EXAMPLES = ROOT / "examples" / "unmodified"
# The causes that are right for each fault.
CAUSES = {
    "loader": {"data_starvation"},
    "worker": {"data_starvation"},
    "worker_exception": {"exception"},
    "user": {"host_hang"},
    "lock": {"host_hang"},
    "spin": {"host_hang"},
    "checkpoint": {"storage_stall"},
    "compile": {"compile_stall"},
    "gil": {"gil_hang"},
    "frozen": {"frozen_process"},
    "kill": {"dead_process"},
    "exception": {"exception"},
    "leave": {"skipped_collective"},
    "uneven": {"skipped_collective"},
    "store": {"store_wait"},
    "shape": {"shape_mismatch"},
}
ENDS_A_JOB = ("worker_exception", "kill", "exception")
HEALTHY = ("none", "evaluation", "compile_pause", "saves", "uneven_work")
CASE_S = 300.0
_MARK = re.compile(r"# culprit: (.*)$")
STALL_S = float(os.environ.get("UNMODIFIED_STALL_S", "5"))  # a busy machine needs more
_STEP = 5
_SETTLE_S, _WAIT_S = 4.0, 4.0

Case = dict[str, Any]


class NotReachedError(Exception):
    """A job did not reach its fault in time, so its verdict cannot be judged."""


def culprit_lines() -> dict[str, int]:
    """Return the line number of each fault in `faults.py`."""
    found = {}
    for number, text in enumerate((EXAMPLES / "faults.py").read_text().splitlines(), 1):
        match = _MARK.search(text)
        if match:
            found |= dict.fromkeys(match[1].split(", "), number)
    return found


def launch_case(script: str, fault: str, ranks: int, keep: Path | None = None) -> Case:
    """Run one case under `echelon run` and judge its verdict.

    Args:
        keep: a folder for the run directories of wrong verdicts.

    Raises:
        NotReachedError: the fault was not reached within `CASE_S`, and no stall was reported.
        subprocess.TimeoutExpired: the job neither ended nor was stopped within `CASE_S`.
    """
    with tempfile.TemporaryDirectory(prefix="unmodified_") as folder:
        argv = [
            sys.executable, "-m", "echelon", "run", f"--nproc-per-node={ranks}",
            f"--stall-timeout={STALL_S}", "--on-stall=stop", f"--run-dir={folder}/run",
            *_program(script, fault, ranks, folder),
        ]  # fmt: skip
        began_s = time.monotonic()
        try:
            with Path(folder, "out").open("w") as out:
                code = _run(argv, out)
        except subprocess.TimeoutExpired:
            if keep is not None:
                _keep(Path(folder), keep / f"{script}_{fault}_{ranks}")
            said = Path(folder, "out").read_text(errors="replace")
            if f"fault {fault} on rank" in said or "stall:" in said:
                raise
            raise NotReachedError(f"{fault} was not reached within {CASE_S:.0f} s") from None
        seconds = time.monotonic() - began_s
        path = Path(folder, "run", "dump", "latest", "verdict.json")
        verdict = json.loads(path.read_text()).get("verdict") if path.exists() else None
        said = Path(folder, "out").read_text(errors="replace")
        case: Case = {"script": script, "fault": fault, "ranks": ranks, "rc": code}
        case |= {"seconds": round(seconds, 1), "alarm": verdict is not None or "stall:" in said}
        if verdict is None:
            is_right = fault in HEALTHY and code == 0 and not case["alarm"]
            case |= {"right": is_right, "tail": said[-1500:]}
        else:
            case |= _judged(verdict, fault, ranks)
        if keep is not None and not case["right"]:
            _keep(Path(folder), keep / f"{script}_{fault}_{ranks}")
    return case


def attach_case(script: str, fault: str, ranks: int, keep: Path | None = None) -> Case:
    """Run one case under plain torchrun, attach to it, and judge the verdict.

    Args:
        keep: a folder for the observations of wrong verdicts.

    Raises:
        NotReachedError: the fault was not reached within `CASE_S`.
        subprocess.TimeoutExpired: `fr-analyze --attach` took longer than `CASE_S`.
    """
    with tempfile.TemporaryDirectory(prefix="unmodified_") as folder:
        argv = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0", f"--nproc-per-node={ranks}",
            *_program(script, fault, ranks, folder),
        ]  # fmt: skip
        out = Path(folder, "out")
        with out.open("w") as file:
            job = subprocess.Popen(argv, stdout=file, stderr=file, env=_environ(), cwd=folder)
        try:
            stands = _wait_for_fault(job, out, fault)
            code, report = _attach(job.pid, Path(folder, "seen")) if stands else (None, {})
            # One that ended during the look shows no hang; the rank that left it may be gone.
            stands = stands and job.poll() is None and _num_ranks(job.pid) >= ranks - 1
        finally:
            _end(job)
        said = out.read_text(errors="replace")
        stands = stands and "Traceback (most recent call last)" not in said  # a rank is failing
        case: Case = {"script": script, "fault": fault, "ranks": ranks, "rc": code, "attach": True}
        case["alarm"] = bool(code)
        verdict = report.get("verdict")
        if verdict is None:
            tail = json.dumps(report) if stands else said
            case |= {"right": False, "tail": tail[-1500:]}
        else:
            case |= _judged(verdict, fault, ranks)
        case["ended"] = not stands
        if keep is not None and not case["right"]:
            _keep(Path(folder), keep / f"attach_{script}_{fault}_{ranks}")
    return case


def _keep(folder: Path, to: Path) -> None:
    """Copy a case's folder, except its checkpoints and pipes."""
    left_out = shutil.ignore_patterns("*.pt", "checkpoint_*")
    shutil.copytree(folder, to, dirs_exist_ok=True, ignore=left_out)


def _program(script: str, fault: str, ranks: int, folder: str) -> list[str]:
    return [
        str(EXAMPLES / f"{script}.py"), f"--fault={fault}", f"--rank={ranks - 1}",
        f"--step={_STEP}", f"--folder={folder}", f"--pause={1.5 * STALL_S}",
    ]  # fmt: skip


def _environ() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def _run(argv: list[str], out: TextIO) -> int:
    """Run a launcher to its end; kill it and its ranks if it exceeds the limit."""
    job = subprocess.Popen(argv, stdout=out, stderr=out, env=_environ())
    try:
        return job.wait(CASE_S)
    finally:
        _end(job)


def _end(job: subprocess.Popen[bytes]) -> None:
    below = descendants(job.pid) if job.poll() is None else []
    job.kill()
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.wait()


def _wait_for_fault(job: subprocess.Popen[bytes], out: Path, fault: str) -> bool:
    """Wait until a rank has reached the fault; return whether the job then hangs."""
    end_s = time.monotonic() + CASE_S
    words = f"fault {fault} on rank"
    while words not in out.read_text(errors="replace"):
        if job.poll() is not None:
            return False
        if time.monotonic() > end_s:
            raise NotReachedError(f"no rank printed {words!r} within {CASE_S:.0f} s")
        time.sleep(0.1)
    time.sleep(_SETTLE_S)
    return job.poll() is None


def _num_ranks(launcher: int) -> int:
    return len([one for one in ranks_below(launcher).ranks if not one.is_guessed])


def _attach(pid: int, seen: Path) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from echelon.cli import analyze; sys.exit(analyze())",
         "--attach", str(pid), "--json", "--wait", str(_WAIT_S), "--out", str(seen)],
        capture_output=True, text=True, check=False, timeout=CASE_S,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout) if done.stdout else {"error": done.stderr}


def _judged(verdict: dict[str, Any], fault: str, ranks: int) -> Case:
    """Compare a verdict with the injected fault; return the case's result."""
    culprit, named = ranks - 1, set(verdict["culprit_ranks"])
    allowed = [{culprit}]
    if fault == "shape" and ranks == 2:  # of two shapes, nothing shows which one is wrong
        allowed.append({0, 1})
    line = culprit_lines().get(fault)
    return {
        "cause": verdict["cause"],
        "culprits": sorted(named),
        "confidence": verdict["confidence"],
        "summary": verdict["summary"],
        "right": verdict["cause"] in CAUSES.get(fault, set()) and named in allowed,
        "line": None if line is None else f"faults.py:{line}" in json.dumps(verdict),
    }
