"""Launched jobs that fail again and again: which are started again, and what the report says."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import pytest

from tests.launcher.background import Node
from tests.launcher.cluster import Cluster
from tests.support.ranks import read_json, run_echelon

pytestmark = pytest.mark.ranks

_JOB = """
import os, signal, sys, time
import numpy as np
import echelon.dist as dist
from pathlib import Path
from echelon import recorder
from echelon.recorder.checkpoints import note_checkpoint

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
world = dist.init(timeout_s=60)
x = np.ones(4, np.float32)
if world.rank == 0:
    print("resume", os.environ.get("ECHELON_RESUME"), recorder.last_step(), flush=True)
    saved = Path("saved").absolute() / f"step_{{attempt}}"
    (saved / "000001").mkdir(parents=True)
    (saved / "000001" / "commit").touch()
    note_checkpoint(saved, None)
for step in range(10):
    recorder.step(step)
    if step == 5 and world.rank == 1:
        {fault}
    world.all_reduce(x)
dist.shutdown()
"""


def _run(tmp_path: Path, fault: str, *options: str):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(_JOB).format(fault=fault))
    run_dir = tmp_path / "run"
    done = run_echelon(
        "run", "--nproc-per-node", "2", "--max-restarts", "5", "--run-dir", str(run_dir),
        *options, str(script), cwd=tmp_path,
    )  # fmt: skip
    return done, read_json(run_dir / "report.json")


def test_a_killed_rank_is_started_again_and_an_error_at_the_same_line_twice_is_not(tmp_path):
    hook = "echo $ECHELON_CAUSE of $ECHELON_CULPRIT_RANKS; exit 3"
    done, report = _run(
        tmp_path,
        'attempt or os.kill(os.getpid(), signal.SIGKILL); raise ValueError(f"bad {attempt}")',
        "--before-restart",
        hook,
    )
    assert done.returncode == 1, done.stderr
    first, second, last = report["decisions"]
    assert (first["action"], first["cause"], first["last_step"]) == ("restart", "dead_process", 5)
    assert "restart 1 of 5: rank 1 " in done.stderr
    assert "before-restart: dead_process of 1\n" in done.stderr
    assert done.stderr.count("--before-restart exited with code 3") == 2
    assert (second["action"], second["cause"], second["culprit_ranks"]) == (
        "restart",
        "exception",
        [1],
    )
    assert (last["action"], last["last_step"]) == ("stop", 5), done.stderr
    assert last["site"].startswith("ValueError at train.py:")
    saved = tmp_path / "saved"
    assert [line for line in done.stdout.splitlines() if "resume" in line] == [
        "0| resume None None",
        f"0| resume {saved / 'step_0'} 5",
        f"0| resume {saved / 'step_1'} 5",
    ]
    assert "no restart: rank 1 raised ValueError" in done.stderr
    assert "2 times without progress at step 5" in done.stderr


_PREEMPTED = """
import sys, time
from pathlib import Path
import echelon.dist as dist
from echelon import recorder
from echelon.recorder.checkpoints import note_checkpoint

world = dist.init(timeout_s=60)
step = 0
while True:
    recorder.step(step)
    if dist.should_stop():
        break
    if step == 3:
        print("ready", flush=True)
    time.sleep(0.01)
    step += 1
print("stopped", step, flush=True)
if world.rank == 0 and sys.argv[1] == "save":
    note_checkpoint(Path("saved").absolute(), recorder.last_step())
dist.shutdown()
"""


def test_a_preempted_job_says_at_which_step_it_was_saved(tmp_path):
    """The scheduler signals the launcher; all ranks stop at one step, and save within the grace."""
    script = tmp_path / "train.py"
    script.write_text(_PREEMPTED)
    node = Node(tmp_path / "run", ["--nproc-per-node", "2", str(script), "save"])
    try:
        node.wait_for("ready", 2)
        node.process.send_signal(signal.SIGTERM)
        assert node.end() == 143, node.lines
    finally:
        node.close()
    steps = {int(line.rpartition(" ")[2]) for line in node.lines if "| stopped" in line}
    (step,) = steps
    report = read_json(tmp_path / "run" / "report.json")
    assert (report["ended_by"], report["decisions"], report["incidents"]) == ("signal", [], [])
    assert report["stopped"]["last_step"] == report["stopped"]["saved_at_step"] == step
    assert any(f"saved at step {step} in " in line for line in node.lines), node.lines


@pytest.mark.slow
def test_ranks_that_call_different_collectives_are_not_started_again(tmp_path):
    done, report = _run(tmp_path, "world.all_reduce(np.ones(5, np.float32))")
    assert done.returncode == 1, done.stderr
    (only,) = report["decisions"]
    assert (only["action"], only["cause"]) == ("stop", "shape_mismatch"), done.stderr
    assert report["attempts"] == 1


@pytest.mark.slow
def test_a_stall_is_restarted_where_that_is_asked_for(tmp_path):
    options = ("--stall-timeout", "2", "--on-stall", "restart")
    done, report = _run(tmp_path, "attempt or time.sleep(600)", *options)
    assert done.returncode == 0, done.stderr
    (only,) = report["decisions"]
    assert (only["action"], only["cause"], only["culprit_ranks"]) == ("restart", "host_hang", [1])
    assert report["incidents"][0]["kind"] == "stall"


@pytest.mark.slow
@pytest.mark.parametrize("bad", [0, 1], ids=["the hosting node", "another node"])
def test_a_spare_takes_the_place_of_a_node_whose_ranks_are_killed_again_and_again(tmp_path, bad):
    script = """
        import os, signal
        import echelon.dist as dist
        from echelon import recorder
        world = dist.init(timeout_s=60)
        print("began", flush=True)
        recorder.step(0)
        world.barrier()
        if os.environ["ECHELON_TEST_BAD"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()
        dist.shutdown()
        """
    job = Cluster(tmp_path, script)
    try:
        for rank in range(3):
            environ = {"ECHELON_TEST_BAD": str(int(rank == bad))}
            options = ("--nnodes", "2", "--spares", "1", "--max-restarts", "5")
            job.start(*options, rank=rank, nproc=1, environ=environ)
            if rank == 0:
                job.nodes[0].wait_for("run directory")
            if rank == 1:
                job.nodes[1].wait_for("began")
        assert [node.end() for node in job.nodes] == [0, 0, 0], job.told()
    finally:
        job.close()
    report = read_json(job.nodes[0].run_dir / "report.json")
    assert [one["action"] for one in report["decisions"]] == ["restart", "restart"], job.told()
    assert [len(one["excluded"]) for one in report["decisions"]] == [0, 1], job.told()
