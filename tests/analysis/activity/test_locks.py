"""Locks that other threads or processes hold, in stacks of real programs (torch 2.13, Gloo)."""

from __future__ import annotations

import pytest

from echelon.analysis.activity import Doing, read_activity
from echelon.analysis.activity.c_stack import num_inside
from echelon.host.stacks import HOLDS_LOCK
from echelon.recorder.format.schema import HostThread, Socket
from tests.analysis.activity.recorded import recorded
from tests.analysis.imagined_job import Job

_PACKAGES = "/venv/lib/python3.11/site-packages"
_BUSY = HostThread(name="pt_gloo_runloop", call="futex", timed=True)
_IDLE = HostThread(name="pt_gloo_runloop", call="futex")
_TAKES_LOCK = """\
Thread 21182 python:
  clock_nanosleep (libc.so.6)
  ? sleep (libc.so.6)
Thread 21286 pt_gloo_runloop:
  libc.so.6+0x85f16
  ? pthread_cond_wait (libc.so.6)
  ? libtorch_cpu.so+0x6712501
Thread 21287 pt_gloo_runloop:
  libc.so.6+0x85f16
  ? pthread_cond_timedwait (libc.so.6)
  ? take_gil (libpython3.11.so.1.0)
  ? PyEval_AcquireThread (libpython3.11.so.1.0)
  ? _ZN8pybind1118gil_scoped_acquireC1Ev (libtorch_python.so)
  ? libtorch_cpu.so+0x195b272
"""
_SAVES = f"""\
Thread 0x00007fcad2fc9b80 {HOLDS_LOCK} (most recent call first):
  File "{_PACKAGES}/torch/serialization.py", line 828 in __init__
  File "{_PACKAGES}/torch/serialization.py", line 1002 in save
  File "/home/me/train.py", line 24 in <module>
"""
_SLEEPS = f"""\
Thread 0x00007fcad2fc9b80 {HOLDS_LOCK} (most recent call first):
  File "/home/me/train.py", line 119 in work
  File "/home/me/train.py", line 22 in <module>
"""
_BUILDS = f"""\
Thread 0x00007fcc2f5eab80 (most recent call first):
  File "{_PACKAGES}/torch/utils/file_baton.py", line 50 in wait
  File "{_PACKAGES}/torch/utils/cpp_extension.py", line 2400 in _jit_compile
  File "{_PACKAGES}/torch/utils/cpp_extension.py", line 1927 in load
  File "{_PACKAGES}/deepspeed/ops/op_builder/builder.py", line 566 in load
  File "{_PACKAGES}/deepspeed/comm/torch.py", line 51 in build_shm_op
  File "{_PACKAGES}/deepspeed/comm/comm.py", line 910 in init_distributed
  File "/home/me/train.py", line 10 in <module>
"""


def _job(stacks: str, *, native: str = "", threads: tuple[HostThread, ...]) -> Job:
    """Rank 0 is in DDP's backward pass, which waits for rank 1."""
    made = Job(2)
    for rank in made.ranks:
        rank.has_ring = False
        rank.host.update(recorded("ddp").facts(), sockets=(Socket(state="ESTABLISHED"),))
    made[0].host["threads"] = (*made[0].host["threads"], _BUSY)
    main = HostThread(name="python", call="clock_nanosleep")
    made[1].host.update(
        stacks=stacks, later_stacks=stacks, later_gap_s=4.0, native_stacks=native,
        threads=(main, *threads), process_state="S",
    )  # fmt: skip
    return made


def test_a_gloo_thread_that_waits_for_the_interpreters_lock_is_in_no_collective():
    assert num_inside((_IDLE, _BUSY), _TAKES_LOCK) == 0
    assert num_inside((_BUSY, _BUSY), _TAKES_LOCK) == 1
    assert num_inside((_IDLE, _BUSY), "") == 1
    verdict = _job(_SLEEPS, native=_TAKES_LOCK, threads=(_IDLE, _BUSY)).report().verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("gil_hang", (1,)), verdict
    assert "train.py:119 in work" in verdict.summary


@pytest.mark.parametrize(("stacks", "cause"), [(_SAVES, "storage_stall"), (_SLEEPS, "gil_hang")])
def test_a_checkpoint_that_hangs_with_the_lock_held_is_a_checkpoint(stacks, cause):
    verdict = _job(stacks, threads=(_IDLE,)).report().verdict
    assert (verdict.cause, verdict.culprit_ranks) == (cause, (1,)), verdict


def test_a_build_within_a_library_of_collectives_is_no_collective():
    activity = read_activity(_BUILDS)
    assert (activity.doing, str(activity.line)) == (Doing.COMPILING, "train.py:10 in <module>")
    job = _job(_BUILDS, threads=())
    job[0].host.update(job[1].host)
    verdict = job.report().verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("compile_stall", (0, 1)), verdict
    assert "remove the lock file below TORCH_EXTENSIONS_DIR" in verdict.next_action
