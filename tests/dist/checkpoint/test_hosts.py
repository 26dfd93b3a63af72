"""Two hosts: a folder that both see works as on one host; one that they do not share is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.hosts import hosts, needs_hosts

pytestmark = [pytest.mark.netns, needs_hosts]
_ROOT = Path(__file__).parents[3]
_RANK = """
import sys, torch
import echelon.dist as dist
from echelon.dist.checkpoint import load, save
save_module = sys.modules["echelon.dist.checkpoint.save"]
save_module._SHARED_S = 0.5
shared, private = sys.argv[1:]
world = dist.init(timeout_s=60)
assert world.backend == "shm+gloo", world.backend
weight = torch.arange(1000.0)
save(shared, {"weight": weight, "step": 1})
save(shared, {"weight": weight, "step": 2}, async_op=True).wait()
state = load(shared, {"weight": torch.zeros(1000)})
assert torch.equal(state["weight"], weight) and state["step"] == 2
try:
    save(private, {"weight": weight})
except Exception as error:
    print(error)
dist.shutdown()
"""


def test_hosts_save_to_a_folder_they_share_and_say_so_if_they_do_not(tmp_path):
    shared, private = tmp_path / "shared", tmp_path / "private"
    private.mkdir()
    alone = f"mount -t tmpfs none {private} && exec"  # the second host sees a folder of its own
    with hosts(2) as machines:
        env = {
            **os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0",
            "MASTER_ADDR": machines[0].address, "MASTER_PORT": "29500",
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT),
        }  # fmt: skip
        script = [sys.executable, "-c", _RANK, str(shared), str(private)]
        ranks = [
            subprocess.Popen(
                host.command("unshare", "-m", "sh", "-c", f'{"" if rank == 0 else alone} "$@"',
                             "sh", *script),
                env={**env, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(machines)
        ]  # fmt: skip
        try:
            texts = [rank.communicate(timeout=100) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    assert "all hosts must share this file system" in texts[0][0]
    assert "rank 1 failed" in texts[0][0]
    assert "made by rank 0, not seen here" in texts[1][0]
    assert sorted(file.name for file in (shared / "000002").glob("*.bin")) == [
        "rank_00000.bin",
        "rank_00001.bin",
    ]
