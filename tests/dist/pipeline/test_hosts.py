"""A pipeline over two hosts of two ranks: shared memory within, Gloo between."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import hosts, needs_hosts

_ROOT = Path(__file__).parents[3]
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
    with hosts(2) as (first, second):
        env = {
            **os.environ, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": first.address, "MASTER_PORT": "29400", "PYTHONPATH": str(_ROOT),
        }  # fmt: skip
        ranks = [
            subprocess.Popen(
                (first, second)[rank // 2].command(sys.executable, "-c", _RANK),
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)},
                stderr=subprocess.PIPE, text=True,
            )
            for rank in range(4)
        ]  # fmt: skip
        try:
            ends = [(rank.communicate(timeout=120)[1], rank.returncode) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    assert [code for _, code in ends] == [0] * 4, "\n".join(text for text, _ in ends)
