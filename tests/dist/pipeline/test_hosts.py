"""A pipeline over two hosts of two ranks: shared memory within, Gloo between."""

from __future__ import annotations

import pytest

from tests.support.hosts import hosts, needs_hosts, run_text_on

_RANK = """
import torch
import echelon.dist as dist
from tests.dist.pipeline.test_gradients import _pipeline, _train

torch.set_num_threads(1)
world = dist.init(reduction="rank_ordered", timeout_s=60)
assert world.backend == "shm+gloo", world.backend
for name in ("1f1b", "zbv"):
    _train(_pipeline(name, world, 4, tied=True), 1, 0, name, tied=True)
dist.shutdown()
"""


@pytest.mark.netns
@needs_hosts
def test_two_hosts_of_two_ranks_give_the_gradients_of_one_process():
    with hosts(2) as machines:
        ends = run_text_on(machines, _RANK)
    assert [end.returncode for end in ends] == [0] * 4, "\n".join(end.stderr for end in ends)
