"""A job leaves nothing behind: no process, no shared memory, no socket, in a machine of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.machine import needs_machine, run_there

_BREAK_IT = Path(__file__).parents[1] / "examples/break_it.py"

pytestmark = [pytest.mark.netns, needs_machine]

# Loading torch takes seconds of processor time per rank, so only one of the three jobs loads it.
_WITHOUT_TORCH = """
import sys, threading
import numpy as np
import echelon.dist as dist
from echelon import recorder

world = dist.init()
for step in range(20):
    recorder.step(step)
    if sys.argv[1] == "hang" and world.rank == 1 and step == 3:
        threading.Event().wait()
    world.all_reduce(np.ones(1 << 16, np.float32))
dist.shutdown()
"""


def _run_job(folder, num_ranks, stall_timeout_s, code, *program):
    job = [
        sys.executable, "-m", "echelon", "run", "--nproc-per-node", str(num_ranks),
        "--stall-timeout", str(stall_timeout_s), "--on-stall", "stop",
        "--run-dir", str(folder / "run"), *program,
    ]  # fmt: skip
    done, left = run_there(job, timeout_s=600, environ={"TMPDIR": str(folder)})
    assert done.returncode == code, done.stderr
    assert left == []
    assert not any(path.is_socket() or path.is_fifo() for path in folder.rglob("*"))


@pytest.mark.parametrize(("fault", "stall_timeout_s", "code"), [("none", 60, 0), ("hang", 5, 3)])
def test_a_job_leaves_nothing(fault, stall_timeout_s, code, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    program = tmp_path / "program.py"
    program.write_text(_WITHOUT_TORCH)
    _run_job(folder, 2, stall_timeout_s, code, str(program), fault)
    assert {path.name for path in folder.iterdir()} == {"run"}


@pytest.mark.skipif(not _BREAK_IT.exists(), reason="the examples are not here")
def test_a_torch_job_whose_rank_is_killed_leaves_nothing(tmp_path):
    pytest.importorskip("torch")
    fault = ["--fault", "kill", "--rank", "1", "--at-step", "3", "--steps", "20"]
    # the third rank is there so that the killed one leaves two that wait for it
    _run_job(tmp_path, 3, 60, 137, str(_BREAK_IT), *fault)
    own = {path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")}
    assert own == {"run"}  # torch makes a cache folder of its own


def test_the_search_waits_for_nothing_where_nothing_is_left():
    """It would find itself, and use up its patience, which is longer than the command may take."""
    _, left = run_there(["true"], timeout_s=120, patience_s=1200)
    assert left == []


@pytest.mark.parametrize("then", ["os.setsid()", "os.setsid(); os.fork()"])
def test_the_search_itself_finds_leftovers(then):
    leave = f"""
import os, signal, socket
open('/dev/shm/left', 'w').close()
s = socket.socket(socket.AF_UNIX); s.bind('\\0left'); s.listen()
if os.fork() == 0:
    {then}
    os.closerange(0, 3)
    signal.pause()
"""
    _, left = run_there([sys.executable, "-c", leave], timeout_s=300, patience_s=1.0)
    assert "segment /dev/shm/left" in left
    assert any(line.startswith("unix socket ") and line.endswith("@left") for line in left)
    assert any(line.startswith("process ") for line in left)
