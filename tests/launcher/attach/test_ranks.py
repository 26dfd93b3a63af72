"""Ranks are found by the environment that their launcher gave them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.launcher.attach.ranks import _runs_watcher, find_ranks, rank_of, ranks_below
from tests.recorder.conftest import wait_until

_SLEEP = "import time; time.sleep(900)"
_TREE = """
import os, subprocess, sys
start = lambda **environ: subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(900)"], env={**os.environ, **environ}
)
ones = [start(**{word.split("=")[0]: word.split("=")[1] for word in text.split(",")})
        for text in sys.argv[1:]]
print(*[one.pid for one in ones], flush=True)
sys.stdin.read()
[one.kill() for one in ones]
"""
_CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("RANK", "WORLD", "SLURM", "OMPI", "PMI", "MASTER", "LOCAL_"))
}


@pytest.fixture
def start():
    """Start processes below one parent, each with an environment; return the parent and them."""
    parents: list[subprocess.Popen[str]] = []

    def begin(*environs: str, **parents_own: str) -> tuple[int, list[int]]:
        parent = subprocess.Popen(
            [sys.executable, "-c", _TREE, *environs],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**_CLEAN, **parents_own},
        )  # fmt: skip
        parents.append(parent)
        pids = [int(word) for word in parent.stdout.readline().split()]
        for pid in pids:  # a child shows its parent's environment until it runs its program
            wait_until(lambda pid=pid: b"time.sleep" in _command(pid), "it runs")
        return parent.pid, pids

    yield begin
    for parent in parents:
        parent.stdin.close()
        assert parent.wait(60) == 0
        parent.stdout.close()


def _command(pid: int) -> bytes:
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"" if b"sys.argv" in command else command


def test_torchs_environment_names_rank_world_and_job(start):
    meeting = "MASTER_ADDR=10.0.0.1,MASTER_PORT=29500,LOCAL_WORLD_SIZE=2"
    parent, pids = start(
        *[f"RANK={rank},WORLD_SIZE=2,LOCAL_RANK={rank},{meeting}" for rank in (0, 1)]
    )
    found = ranks_below(parent)
    assert [(one.rank, one.pid, one.local_rank) for one in found.ranks] == [
        (0, pids[0], 0),
        (1, pids[1], 1),
    ]
    assert len(found.jobs()) == 1
    assert all(one.is_whole_world_here and one.world_size == 2 for one in found.ranks)
    assert ranks_below(pids[1]).ranks == found.ranks, "a rank leads to all of its job"


@pytest.mark.parametrize(("address", "is_whole"), [("10.0.0.1", False), ("127.0.0.1", True)])
def test_the_ranks_of_a_world_that_grew_are_one_job(start, address, is_whole):
    job = f"MASTER_ADDR={address},MASTER_PORT=29500,ECHELON_JOB_ID=7,ECHELON_ON_LOSS=replace"
    old = f"RANK=0,WORLD_SIZE=1,LOCAL_WORLD_SIZE=1,{job}"
    new = f"RANK=1,WORLD_SIZE=2,LOCAL_WORLD_SIZE=1,{job}"
    parent, _ = start(old, new)
    found = ranks_below(parent)
    assert len(found.jobs()) == 1
    assert [one.rank for one in found.ranks] == [0, 1]
    assert any(one.is_whole_world_here for one in found.ranks) == is_whole


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ("OMPI_COMM_WORLD_RANK=3,OMPI_COMM_WORLD_SIZE=8,PMIX_NAMESPACE=7", "Open MPI"),
        ("PMI_RANK=3,PMI_SIZE=8", "MPI"),
        ("SLURM_PROCID=3,SLURM_NTASKS=8,SLURM_JOB_ID=77", "Slurm"),
    ],
)
def test_other_launchers_are_known(start, environ, launcher):
    _, (pid,) = start(environ)
    one = rank_of(pid)
    assert (one.rank, one.world_size, one.launcher) == (3, 8, launcher)
    assert not one.is_whole_world_here


def test_a_slurm_task_that_runs_torchrun_is_no_rank(start):
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "77"}
    parent, pids = start("RANK=0,WORLD_SIZE=2", "RANK=1,WORLD_SIZE=2", **slurm)
    found = find_ranks([parent, *pids]).ranks
    assert [(one.rank, one.pid) for one in found] == [(0, pids[0]), (1, pids[1])]


def test_what_a_rank_starts_is_a_helper_of_it(start):
    parent, pids = start("A=1", "B=1", RANK="0", WORLD_SIZE="1")
    found = find_ranks([*pids, parent]).ranks
    assert [one.pid for one in found] == [parent]


def test_two_jobs_are_told_apart(start):
    parent, _ = start("RANK=0,WORLD_SIZE=1,MASTER_PORT=1", "RANK=0,WORLD_SIZE=1,MASTER_PORT=2")
    assert len(ranks_below(parent).jobs()) == 2


def test_spawned_children_without_an_environment_are_numbered(start):
    parent, pids = start("A=1", "B=1")
    found = ranks_below(parent).ranks
    assert [(one.rank, one.pid, one.is_guessed) for one in found] == [
        (0, min(pids), True),
        (1, max(pids), True),
    ]


@pytest.mark.parametrize("environ", ["RANK=2,WORLD_SIZE=2", "RANK=x,WORLD_SIZE=2", "RANK=0"])
def test_nonsense_is_no_rank(start, environ):
    _, (pid,) = start(environ)
    assert rank_of(pid) is None


@pytest.mark.parametrize(
    ("argv", "watches"),
    [
        (["/usr/bin/python", "/home/me/.venv/bin/torchrun", "train.py"], True),
        (["python", "-m", "torch.distributed.run", "train.py"], True),
        (["python", "-u", "-m", "echelon", "run", "train.py"], True),
        (["/home/me/echelon/.venv/bin/python", "train.py"], False),
        (["mpirun", "-n", "2", "python", "/home/me/torchrun/train.py"], False),
        ([""], False),
    ],
)
def test_a_launcher_that_stops_at_a_failure_is_told_by_its_program(argv, watches):
    assert _runs_watcher(argv) == watches
