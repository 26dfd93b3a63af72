"""Messages of one pair and tag arrive in the order in which they were sent."""

from __future__ import annotations

import numpy as np
import pytest

import echelon.dist as dist
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

_FULL_FLOOD = 60_000


def _flood(rank: int, world_size: int, num: int, backend: str = "shm") -> int:
    """Flood one tag while a receive of another waits; count what came out of order."""
    world = dist.init(backend, timeout_s=300)
    numbers = np.arange(num, dtype=np.int64)
    answer = np.zeros(1, np.int64)
    out_of_order = 0
    if rank == 0:
        for i in range(num):
            world.send(numbers[i : i + 1], 1, tag=7)
        world.send(numbers[-1:], 1, tag=5)
    else:
        late = world.recv(answer, 0, tag=5, async_op=True)
        assert late is not None
        got = np.full(1, -1, np.int64)
        for i in range(num):
            work = world.recv(got, 0, tag=7, async_op=True)
            assert work is not None
            work.wait()
            out_of_order += int(got[0]) != i
        late.wait()
        assert answer[0] == num - 1
    world.barrier()
    dist.shutdown()
    return out_of_order


def test_a_flood_of_one_tag_stays_in_order_while_another_tag_is_awaited():
    for _ in range(2):
        found = run_ranks(_flood, 2, 10_000, timeout_s=120, environ={"ECHELON_SHM": "native"})
        assert found == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "python", "gloo"])
def test_twenty_full_floods_in_a_row_stay_in_order(engine):
    environ = {} if engine == "gloo" else {"ECHELON_SHM": engine}
    backend = "gloo" if engine == "gloo" else "shm"
    for turn in range(20):
        found = run_ranks(_flood, 2, _FULL_FLOOD, backend, timeout_s=600, environ=environ)
        assert found == [0, 0], f"flood {turn}"
