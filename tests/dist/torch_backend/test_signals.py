"""What a signal handler may do while its own thread waits inside a collective."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


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
