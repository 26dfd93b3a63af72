"""Whatever ends or stops a rank: its last operations are in the incident, and the rank is named."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from echelon.recorder.read import read
from tests.support.ranks import read_json, run_echelon

pytestmark = pytest.mark.ranks

_JOB = """
import ctypes, os, re, signal, sys
import numpy as np
import echelon.dist as dist
from echelon import recorder

world = dist.init(timeout_s=60)
x = np.ones(4, np.float32)

def fail():
    fault = sys.argv[1]
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "segfault":
        ctypes.string_at(8)
    if fault == "exit":
        os._exit(5)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "gil":
        re.match("(a+)+$", "a" * 64 + "b")  # C code that keeps the GIL for years
    if fault == "memory":
        hog = [np.ones(1 << 20) for _ in range(1 << 10)]
    if fault == "memory error":
        np.ones(1 << 50)

for step in range(1000):
    recorder.step()
    if step == 7 and world.rank == 1:
        fail()
    world.all_reduce(x)
"""


_HANGS = ("--stall-timeout", "3", "--on-stall", "stop")  # the others end by themselves


def _run(tmp_path, fault, *options):
    script = tmp_path / "train.py"
    script.write_text(_JOB)
    run_dir = tmp_path / "run"
    done = run_echelon(
        "run", "--nproc-per-node", "3", "--run-dir", str(run_dir), *options, str(script), fault
    )
    return done, run_dir


@pytest.mark.parametrize(
    ("fault", "code", "cause"),
    [
        ("kill", 137, "dead_process"),
        ("segfault", 139, "dead_process"),
        ("exit", 5, "dead_process"),
        ("memory error", 1, "out_of_memory"),
        ("stop", 3, "frozen_process"),
        ("gil", 3, "gil_hang"),
    ],
)
def test_the_record_outlives_the_fault(tmp_path, fault, code, cause):
    done, run_dir = _run(tmp_path, fault, *(_HANGS if code == 3 else ()))
    assert done.returncode == code, done.stderr
    incident = run_dir / "dump/latest"
    verdict = read_json(incident / "verdict.json")["verdict"]
    assert (verdict["cause"], verdict["culprit_ranks"]) == (cause, [1])
    assert any("rank 1" in line for line in verdict["evidence"])
    operations = read(incident / "rank_1").operations
    assert operations["sequence"].tolist() == list(range(7))
    assert operations["step"].tolist() == list(range(7))


@contextlib.contextmanager
def _memory_limit(num_bytes: int):
    """A memory cgroup with a limit; yields its `cgroup.procs`. Skips where none can be made."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    fields = [line.split(":", 2) for line in lines]
    v1 = next((group for _, names, group in fields if "memory" in names.split(",")), None)
    v2 = next((group for _, names, group in fields if not names), "/")
    parent = Path(f"/sys/fs/cgroup{v2}") if v1 is None else Path(f"/sys/fs/cgroup/memory{v1}")
    group = parent / f"echelon-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        limits = ["memory.max"] if v1 is None else ["memory.limit_in_bytes"]
        for name in limits:
            (group / name).write_text(str(num_bytes))
    except OSError as err:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {err}")
    try:
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def test_a_rank_killed_for_memory_is_named_so(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_JOB)
    run_dir = tmp_path / "run"
    with _memory_limit(600 << 20) as procs:
        done = subprocess.run(
            ["sh", "-c", f'echo $$ > {procs} && exec "$@"', "sh", sys.executable, "-m", "echelon",
             "run", "--nproc-per-node", "3", "--run-dir", str(run_dir), str(script), "memory"],
            capture_output=True, text=True, check=False, timeout=600,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    assert done.returncode == 137, done.stderr
    verdict = read_json(run_dir / "dump/latest/verdict.json")["verdict"]
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("out_of_memory", [1])
    assert len(read(run_dir / "dump/latest/rank_1").operations) == 7


def test_a_program_that_aborts_at_its_exit_is_told_what_gloo_needs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import atexit, os, sys\n"
        "def abort():\n"
        "    os.write(2, b'terminate called without an active exception\\n')\n"
        "    os.abort()\n"
        "if os.environ['RANK'] == '1':\n"
        "    atexit.register(abort)\n"
    )
    done = run_echelon(
        "run", "--nproc-per-node", "2", "--run-dir", str(tmp_path / "run"), str(script)
    )
    assert done.returncode == 134, done.stderr
    assert "terminate called without an active exception" in done.stderr
    assert "destroy_process_group()" in done.stderr
    (incident,) = read_json(tmp_path / "run" / "report.json")["incidents"]
    assert incident["verdict"]["cause"] == "dead_process"
    assert incident["verdict"]["culprit_ranks"] == [1]
