"""Errors under torch arrive as errors: they name the rank, hang nothing and crash nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import echelon.dist
from echelon.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)
from tests.support.moments import lived_s
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def _begin(**options: object) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("echelon", **options)


def _raised(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except Exception as err:  # noqa: BLE001 -- what it is, is what the test asks
        return err
    raise AssertionError("nothing was raised")


def _killed_under_ddp(rank: int, world_size: int) -> tuple[str, str]:
    _begin()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50)))
    for step in range(5):
        if (rank, step) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            model(torch.ones(4, 50)).sum().backward()
        except Exception as err:  # noqa: BLE001
            assert step == 2
            later = _raised(lambda: dist.all_reduce(torch.ones(1)))
            assert isinstance(later, PeerLostError)
            assert later.ranks == (1,)
            return type(err).__name__, str(err)
    raise AssertionError("no step failed")


def test_a_killed_rank_is_named_by_the_ddp_step_of_the_others():
    for name, text in filter(None, run_ranks(_killed_under_ddp, 3, exit_codes={1: -9})):
        # C++ waits for DDP's futures: what it hands on is a RuntimeError with our error's text.
        assert name in ("RuntimeError", "PeerLostError")
        assert "PeerLostError" in text or name == "PeerLostError"
        assert "rank 1 died or left" in text


def _killed_under_fsdp2(rank: int, world_size: int) -> tuple[int, ...]:
    _begin()
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for step in range(5):
        if (rank, step) == (0, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            model(torch.ones(4, 50)).sum().backward()
        except PeerLostError as err:
            return err.ranks
    raise AssertionError("no step failed")


def test_a_killed_rank_is_named_by_the_fsdp2_step_of_the_others():
    assert run_ranks(_killed_under_fsdp2, 3, exit_codes={0: -9}) == [None, (0,), (0,)]


def _asynchronous(rank: int, world_size: int) -> None:
    _begin(timeout=timedelta(seconds=30))
    group = dist.new_group(timeout=timedelta(seconds=1))
    x = torch.ones(3)
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        future = work.get_future().then(lambda done: done.value()[0] * 2)
        late = _raised(lambda: work.wait(timedelta(milliseconds=100)))
        assert isinstance(late, CollectiveTimeoutError), late  # only this wait
        error = _raised(work.wait)
        assert isinstance(error, CollectiveTimeoutError), error
        assert error.ranks == (1,)
        assert work.is_completed()
        assert not work.is_success()
        assert work.exception() is error
        said = str(_raised(future.wait))
        assert "CollectiveTimeoutError" in said
        assert "missing: 1" in said
    dist.barrier()  # the default group goes on
    dist.destroy_process_group()


def test_an_asynchronous_failure_raises_from_wait_and_from_its_future():
    run_ranks(_asynchronous, 2)


def _mismatch(rank: int, world_size: int) -> None:
    _begin()
    error = _raised(lambda: dist.all_reduce(torch.ones(3 if rank == 2 else 4)))
    assert isinstance(error, CollectiveMismatchError), error
    assert error.ranks == (2,)
    assert "test_failures.py" in str(error)  # the user's line, not torch's


def test_a_mismatch_names_the_odd_rank_and_the_users_line():
    run_ranks(_mismatch, 3)


def _monitored(rank: int, world_size: int) -> None:
    _begin()
    pair = dist.new_group([0, 1])
    if rank == 0:
        error = _raised(lambda: pair.monitored_barrier(timedelta(seconds=0.5)))
        assert isinstance(error, CollectiveTimeoutError)
        assert error.ranks == (1,)
    again = dist.new_group([0, 1])
    if rank == 0:
        assert isinstance(
            _raised(lambda: again.monitored_barrier(timedelta(0))), CollectiveTimeoutError
        )
    dist.barrier()


def test_monitored_barrier_names_who_did_not_come():
    run_ranks(_monitored, 2)


def _limited(rank: int, world_size: int) -> None:
    """A timeout in torch's options bounds that call alone."""
    _begin(timeout=timedelta(seconds=60))
    groups = [dist.new_group() for _ in range(3)]
    if rank == 0:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=0.3)
        x = torch.ones(2)
        begun = time.monotonic()
        for error in (
            _raised(lambda: groups[0].allreduce([x], options).wait()),
            _raised(lambda: groups[1].allreduce([x], None, timedelta(seconds=0.3)).wait()),
            _raised(lambda: dist.barrier(groups[2], timeout=timedelta(seconds=0.3))),
        ):
            assert isinstance(error, CollectiveTimeoutError), error
            assert error.ranks == (1,)
        assert time.monotonic() - begun < 30
    dist.barrier()


def test_a_call_may_have_a_timeout_of_its_own():
    run_ranks(_limited, 2)


def _abort(rank: int, world_size: int) -> None:
    _begin()
    group = dist.new_group()
    if rank == 0:
        ends = time.monotonic() + 20
        waiting = threading.Thread(
            target=lambda: errors.append(_raised(lambda: dist.barrier(group)))
        )
        errors: list[BaseException] = []
        waiting.start()
        while group._get_sequence_number_for_group() == 0 and time.monotonic() < ends:
            time.sleep(0.01)
        group.abort()
        waiting.join(20)
        assert isinstance(errors[0], CollectiveError)
    dist.barrier()


def test_abort_ends_what_waits():
    run_ranks(_abort, 2)


def _destroyed(rank: int, world_size: int) -> None:
    """Destroy groups while operations wait for a rank that does not take part."""
    _begin()
    store = dist.distributed_c10d._get_default_store()
    pair = dist.new_group()
    dist.barrier()
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=pair, async_op=True)
        message = dist.irecv(torch.ones(3), 1)
        futures = [
            work.get_future(),
            message.get_future(),
            work.get_future().then(lambda f: f.value()),
        ]
        begun_s = lived_s()
        dist.destroy_process_group()
        took_s = lived_s() - begun_s
        store.set("destroyed", "")
        assert took_s < 5, took_s
        for one in (work, message):
            assert isinstance(_raised(one.wait), CollectiveError)
            assert one.is_completed()
            assert not one.is_success()
            assert isinstance(one.exception(), CollectiveError)
        for future in futures:
            assert "CollectiveError" in str(_raised(future.wait))
        assert not [t.name for t in threading.enumerate() if t.name.startswith("echelon-torch")]
    store.wait(["destroyed"])


def test_destroying_a_group_ends_what_waits_within_seconds():
    run_ranks(_destroyed, 2)


def _aborted(rank: int, world_size: int) -> None:
    """Abort every group, as a handler of a failure does, and start again."""
    _begin()
    pair = dist.new_group()
    work = None if rank else dist.all_reduce(torch.ones(3), group=pair, async_op=True)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"started/{rank}", "")
    store.wait(["started/0", "started/1"])
    begun_s = lived_s()
    dist.distributed_c10d._abort_process_group()
    assert lived_s() - begun_s < 5
    if work is not None:
        assert isinstance(_raised(work.wait), CollectiveError)
    store.set(f"aborted/{rank}", "")
    store.wait(["aborted/0", "aborted/1"])


def test_aborting_all_groups_ends_what_waits_within_seconds():
    run_ranks(_aborted, 2)


def _left_alone(rank: int, world_size: int) -> None:
    """End with work in flight, futures that nobody waits for, and nothing destroyed."""
    _begin()
    pair = dist.new_group()
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(5)]
    works[-1].get_future().then(lambda _: None)
    if rank == 0:
        dist.all_reduce(torch.ones(3), group=pair, async_op=True).get_future()  # rank 1 never comes


def test_a_program_may_end_with_work_in_flight():
    run_ranks(_left_alone, 2)


def _both_worlds(rank: int, world_size: int) -> None:
    """Our world and torch's in one program, and each left and joined again."""
    for _ in range(2):
        ours = echelon.dist.init()
        _begin()
        x = torch.full((2,), float(rank))
        ours.all_reduce(x)
        dist.all_reduce(x)
        assert x.tolist() == [9.0, 9.0]
        dist.destroy_process_group()
        ours.all_reduce(x)
        assert x.tolist() == [27.0, 27.0]
        echelon.dist.shutdown()


def test_our_world_and_torchs_live_in_one_program():
    run_ranks(_both_worlds, 3)


def _late(rank: int, world_size: int) -> None:
    error = _raised(lambda: _begin(timeout=timedelta(seconds=2)))
    assert isinstance(error, CollectiveTimeoutError), error
    assert error.ranks == (1,)


def test_a_rank_that_never_joins_is_named():
    run_ranks(_late, 3, ranks=[0, 2], environ={"TORCH_DIST_INIT_BARRIER": "0"})
