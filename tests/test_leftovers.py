"""A job leaves nothing behind: no process, no shared memory, no socket, in a machine of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.machine import needs_machine, run_there

_BREAK_IT = Path(__file__).parents[1] / "examples/break_it.py"

pytestmark = [
    pytest.mark.netns,
    needs_machine,
    pytest.mark.skipif(not _BREAK_IT.exists(), reason="the examples are not here"),
]


# Of the three, a third rank is there so that the killed one leaves two that wait for it.
@pytest.mark.parametrize(
    ("num_ranks", "fault", "code"),
    [(2, "none", 0), (3, "kill", 137), (2, "hang", 3)],
)
def test_a_job_leaves_nothing(num_ranks, fault, code, tmp_path):
    pytest.importorskip("torch")
    stall_timeout_s = 5 if fault == "hang" else 60
    job = [
        sys.executable, "-m", "echelon", "run", "--nproc-per-node", str(num_ranks),
        "--stall-timeout", str(stall_timeout_s), "--on-stall", "stop",
        "--run-dir", str(tmp_path / "run"),
        str(_BREAK_IT), "--fault", fault, "--rank", "1", "--at-step", "3", "--steps", "20",
    ]  # fmt: skip
    done, left = run_there(job, timeout_s=600, environ={"TMPDIR": str(tmp_path)})
    assert done.returncode == code, done.stderr
    assert left == []
    own = {path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")}
    assert own == {"run"}  # torch makes a cache folder of its own
    assert not any(path.is_socket() or path.is_fifo() for path in tmp_path.rglob("*"))


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
