"""What torch and NCCL say as they end: whose fault it is, or only what another rank did."""

from __future__ import annotations

from echelon.recorder.format.schema import HostThread
from tests.analysis.imagined_job import Job
from tests.analysis.stories.story import story

WATCHDOG = (
    "[rank{rank}]:[E1121 ProcessGroupNCCL.cpp:683] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=64, NumelOut=64, "
    "Timeout(ms)=600000) ran for 600029 milliseconds before timing out.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
)
REMOTE = (
    "Traceback (most recent call last):\n"
    '  File "/u/train.py", line 9, in step\n'
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/ProcessGroupNCCL.cpp:3356, "
    "remote process exited or there was a network error, NCCL version 2.27.3\n"
)


def _ringless(size: int) -> Job:
    job = Job(size)
    for rank in job.ranks:
        rank.has_ring = False
    return job


@story("data_starvation", [2], "failure", "certain")
def watchdogs_abort_the_victims_of_a_hung_rank() -> Job:
    job = Job(4).train(3)
    for order, rank in enumerate(job.others(2)):
        rank.step().all_reduce(inside=True)
        rank.wait(600.0).exited(-6, order=order, stderr_tail=WATCHDOG.format(rank=rank.rank))
    job[2].step().span("data_wait").stands("data.py", 12, "read")
    return job


@story("host_hang", [2], "failure", "certain")
def victims_without_a_word_have_waited_for_long_before_they_died() -> Job:
    """Their stderr is lost: that they waited ten minutes for rank 2 before they aborted is not."""
    job = Job(4).train(3)
    for order, rank in enumerate(job.others(2)):
        rank.step().all_reduce(inside=True)
        rank.wait(600.0).exited(-6, order=order)
    job[2].step().stands("data.py", 12, "read")
    return job


@story("host_hang", [2], "failure", "likely")
def watchdogs_abort_where_nobody_records() -> Job:
    """Neither rings nor dumps: the one rank that no watchdog gave up in is left."""
    job = _ringless(4)
    for order, rank in enumerate(job.others(2)):
        rank.exited(-6, order=order, stderr_tail=WATCHDOG.format(rank=rank.rank))
    job[2].stands("data.py", 12, "read")
    return job


GLOO_TIMEOUT = (
    "Traceback (most recent call last):\n"
    '  File "/u/train.py", line 9, in step\n'
    '  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3252, in all_reduce\n'
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] "
    "Timed out waiting 6000ms for recv operation to complete\n"
)
GLOO_CLOSED = GLOO_TIMEOUT.partition("RuntimeError")[0] + (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] "
    "Connection closed by peer [127.0.0.1]:1234\n"
)


def _given_up_by_gloo() -> Job:
    job = _ringless(4)
    job[0].exited(1, order=0, stderr_tail=GLOO_TIMEOUT)
    job[1].exited(1, order=1, stderr_tail=GLOO_CLOSED)
    job[3].exited(1, order=2, stderr_tail=GLOO_CLOSED)
    return job


@story("host_hang", [2], "failure", "likely")
def gloo_gives_up_where_nobody_records() -> Job:
    job = _given_up_by_gloo()
    job[2].stands("data.py", 12, "read")
    return job


@story("frozen_process", [2], "failure", "likely")
def gloo_gives_up_on_a_frozen_rank() -> Job:
    job = _given_up_by_gloo()
    job[2].host.update(process_state="T")
    return job


@story("unknown", [], "failure", "possible")
def gloo_gives_up_while_the_one_that_lives_waits_too() -> Job:
    """Its own timeout has not come yet: it is no suspect, and none is left."""
    job = _given_up_by_gloo()
    job[2].host["threads"] = (HostThread(name="pt_gloo_runloop", call="futex", timed=True),)
    return job


@story("exception", [0], "failure", "certain", (("exception", (1,)),))
def two_ranks_on_one_gpu() -> Job:
    job = _ringless(2)
    text = (
        "Traceback (most recent call last):\n"
        '  File "/u/train.py", line 7, in main\n'
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/NCCLUtils.cpp:77, invalid "
        "usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.3\n"
        "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000\n"
    )
    job[0].exited(1, stderr_tail=text)
    job[1].exited(1, order=1, stderr_tail=text)
    return job


@story("device_stuck", [1], "failure", "certain")
def an_uncorrectable_error_of_a_gpus_memory() -> Job:
    job = _ringless(3)
    text = (
        "Traceback (most recent call last):\n"
        '  File "/u/train.py", line 7, in main\n'
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/NCCLUtils.cpp:94, unhandled "
        "cuda error, NCCL version 2.27.3\nLast error:\n"
        "Cuda failure 214 'uncorrectable ECC error encountered'\n"
    )
    job[1].exited(1, stderr_tail=text)
    for order, rank in enumerate(job.others(1), 1):
        rank.exited(1, order=order, stderr_tail=REMOTE)
    return job


@story("device_stuck", [0], "failure", "certain")
def a_gpu_that_fell_off_the_bus() -> Job:
    job = Job(2).train(2)
    job[0].raised(
        "torch.AcceleratorError", "CUDA error: unspecified launch failure\nXid 79: GPU has fallen "
        "off the bus", bases=("builtins.RuntimeError",),
    )  # fmt: skip
    job[1].all_reduce(inside=True)
    return job


@story("dead_process", [1], "failure", "certain")
def remote_errors_report_a_rank_that_was_killed() -> Job:
    job = _ringless(3)
    job[1].exited(-9)
    for order, rank in enumerate(job.others(1), 1):
        rank.exited(1, order=order, stderr_tail=REMOTE)
    return job


@story("exception", [1], "failure", "certain")
def a_connection_of_the_users_own_is_no_peers() -> Job:
    job = Job(3).train(2)
    job[1].raised(
        "botocore.ConnectionResetError", "Connection reset by peer", site="s3.py:4 read",
        bases=("builtins.ConnectionError", "builtins.OSError"),
    )  # fmt: skip
    for rank in job.others(1):
        rank.all_reduce(inside=True)
    return job


@story("exception", [0], "failure", "certain")
def a_users_own_timeout_in_a_runtime_error() -> Job:
    job = Job(2).train(2)
    job[0].raised(
        "builtins.RuntimeError", "timed out waiting for the license server",
        bases=("builtins.Exception",),
    )  # fmt: skip
    job[1].all_reduce(inside=True)
    return job


@story("exception", [0], "failure", "certain")
def what_is_raised_while_python_shuts_down_is_not_the_cause() -> Job:
    job = _ringless(2)
    job[0].exited(
        1,
        stderr_tail=(
            "Traceback (most recent call last):\n"
            "  File \"/u/train.py\", line 3, in main\nKeyError: 'lr'\n"
            "Exception ignored in: <function Pool.__del__ at 0x7f>\n"
            "Traceback (most recent call last):\n"
            '  File "/u/pool.py", line 9, in __del__\n'
            "TypeError: 'NoneType' object is not callable\n"
        ),
    )
    return job


@story("exception", [1], "failure", "certain")
def the_exception_of_a_loader_worker_is_shown_where_it_was_raised() -> Job:
    job = Job(2).train(2)
    message = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
        'last):\n  File "/v/site-packages/torch/utils/data/worker.py", line 1, in loop\n'
        '  File "/home/user/job/rows.py", line 20, in __getitem__\nValueError: row 20 is corrupt\n'
    )
    job[1].raised("builtins.ValueError", message, site="train.py:31 main")
    job[0].all_reduce(inside=True)
    return job


@story("out_of_memory", [1], "failure", "certain", (("dead_process", (0,)),))
def memory_explains_the_kill_beside_it() -> Job:
    job = Job(2).train(1)
    job[0].exited(-9, order=0)
    job[1].raised("builtins.MemoryError", "", bases=("builtins.Exception",), order=1)
    return job


@story("exception", [0], "failure", "certain", (("out_of_memory", (1,)),))
def an_earlier_exception_is_not_outranked_by_memory() -> Job:
    job = Job(2).train(1)
    job[0].raised("builtins.ValueError", "bad batch", order=0)
    job[1].wait(5).raised("builtins.MemoryError", "", bases=("builtins.Exception",), order=1)
    return job
