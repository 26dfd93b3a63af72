"""What a signal handler may do while its own thread waits inside a collective.

Lightning broadcasts in its SIGTERM handler: that broadcast comes after the interrupted collective,
on every rank.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def _preempted(rank: int, world_size: int) -> list[float]:
    """Ranks 0 and 1 wait inside an all_reduce when the signal comes; rank 2 is late on purpose."""
    torch.set_num_threads(1)
    dist.init_process_group("echelon", timeout=timedelta(seconds=40))
    store = dist.distributed_c10d._get_default_store()
    group = dist.group.WORLD
    got: list[float] = []

    def handler(*_: object) -> None:
        store.set(f"handling/{rank}", "")
        flag = torch.full((1,), 7.0 + rank)
        dist.broadcast(flag, src=1)
        got.append(flag.item())

    signal.signal(signal.SIGTERM, handler)
    pids: list[int] = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    x, before = torch.full((200_000,), rank + 1.0), group._get_sequence_number_for_group()
    if rank == 2:
        store.wait(["inside/0", "inside/1"])
        for pid in pids[:2]:
            os.kill(pid, signal.SIGTERM)
        store.wait(["handling/0", "handling/1"])
        dist.all_reduce(x)
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        watching = threading.Thread(target=_say_when_inside, args=(store, group, before, rank))
        watching.start()
        dist.all_reduce(x)
        watching.join()
    assert x.eq(6.0).all()
    dist.all_reduce(x)  # the group goes on
    dist.destroy_process_group()
    return got


def _say_when_inside(store: object, group: object, before: int, rank: int) -> None:
    ends = time.monotonic() + 30
    while group._get_sequence_number_for_group() == before and time.monotonic() < ends:
        time.sleep(0.005)
    store.set(f"inside/{rank}", "")


@pytest.mark.parametrize("engine", ["native", "python"])
def test_a_collective_in_a_signal_handler_follows_the_interrupted_one(engine):
    ends = run_ranks(_preempted, 3, timeout_s=60, environ={"ECHELON_SHM": engine})
    assert ends == [[8.0]] * 3


def _ended(rank: int, world_size: int) -> None:
    """A handler that destroys the groups and exits, while its thread waits in a collective."""
    torch.set_num_threads(1)
    dist.init_process_group("echelon", timeout=timedelta(seconds=60))
    store = dist.distributed_c10d._get_default_store()
    group = dist.group.WORLD

    def handler(*_: object) -> None:
        store.set("handling", "")
        dist.destroy_process_group()
        raise SystemExit(5)

    signal.signal(signal.SIGTERM, handler)
    dist.barrier()
    if rank == 0:
        before = group._get_sequence_number_for_group()
        threading.Thread(target=_kill_when_inside, args=(group, before)).start()
        dist.all_reduce(torch.ones(3))  # in which rank 1 does not take part
    store.wait(["handling"])


def _kill_when_inside(group: object, before: int) -> None:
    ends = time.monotonic() + 30
    while group._get_sequence_number_for_group() == before and time.monotonic() < ends:
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_handler_may_destroy_the_groups_and_exit():
    run_ranks(_ended, 2, exit_codes={0: 5}, timeout_s=30)
