"""Processes below a rank, on stacks of real ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.analysis.activity import read_worker
from echelon.analysis.activity.worker import Role
from echelon.recorder.format.schema import HostChild
from tests.analysis.activity.recorded import recorded

_STUCK, _IDLE = recorded("loader2").children


def test_a_loaders_worker_is_named_with_its_own_line_and_not_its_parents():
    state = read_worker(_STUCK)
    assert (state.role, state.is_idle) == (Role.LOADER, False)
    assert state.words() == (
        f"its data-loader worker (pid {_STUCK.pid}), which sleeps at situations.py:97 in fetch"
    )


def test_a_worker_that_waits_for_work_is_no_suspect():
    state = read_worker(_IDLE)
    assert (state.role, state.is_idle, state.trouble) == (Role.LOADER, True, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": "D", "wait_channel": "nfs_wait"}, "is in uninterruptible sleep in nfs_wait"),
        ({"state": "T"}, "is stopped (process state T)"),
        ({"state": "R", "call": ""}, "runs"),
        ({"state": "Z", "stacks": "", "exit_code": -9}, "was killed by SIGKILL"),
        ({"state": "Z", "stacks": "", "exit_code": 3}, "ended with exit code 3"),
        ({"state": "Z", "stacks": "", "exit_code": None}, "is dead"),
    ],
)
def test_what_its_process_shows_comes_before_its_line(change, words):
    assert f"which {words}" in read_worker(replace(_STUCK, **change)).words()


def test_the_dead_come_first_and_the_idle_last():
    dead = read_worker(replace(_STUCK, state="Z", stacks="", exit_code=-9))
    blocked = read_worker(replace(_STUCK, state="D"))
    order = [dead, blocked, read_worker(_STUCK), read_worker(_IDLE)]
    assert [one.trouble for one in order] == sorted((one.trouble for one in order), reverse=True)


@pytest.mark.parametrize(
    "command",
    [
        "/usr/bin/g++ -O3 x.cpp",
        "x86_64-linux-gnu-g++-12 -c a.cpp",
        "/usr/local/cuda/bin/ptxas --gpu-name sm_90",
        "/usr/lib/gcc/x86_64-linux-gnu/12/cc1plus -quiet",
        "python /venv/lib/python3.11/site-packages/torch/_inductor/compile_worker/__main__.py",
    ],
)
def test_compilers_are_known(command):
    assert read_worker(HostChild(pid=7, command=command, state="R")).role is Role.COMPILER


def test_another_program_is_named_by_its_command():
    child = HostChild(pid=7, command="aws s3 cp big s3://bucket", state="S", call="poll")
    assert "its child process (pid 7, aws s3 cp big" in read_worker(child).words()
