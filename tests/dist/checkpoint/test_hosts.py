"""Two hosts: a folder that both see works as on one host; one that they do not share is told."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("torch")

from tests.support.hosts import hosts, needs_hosts, run_on

pytestmark = [pytest.mark.netns, needs_hosts]
_RANK = """
import sys, torch
import echelon.dist as dist
from echelon.dist.checkpoint import load, save, saving
saving._SHARED_S = 0.5
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
    # the second host sees a folder of its own
    place = f'[ "$RANK" = 0 ] || mount -t tmpfs none {private} || exit; exec "$@"'
    script = (sys.executable, "-c", _RANK, str(shared), str(private))
    with hosts(2) as machines:
        first, second = run_on(
            machines, "unshare", "-m", "sh", "-c", place, "sh", *script, ranks_per_host=1
        )
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "all hosts must share this file system" in first.stdout
    assert "rank 1 failed" in first.stdout
    assert "rank 0 created this folder, but it is not visible to this rank" in second.stdout
    assert sorted(file.name for file in (shared / "000002").glob("*.bin")) == [
        "rank_00000.bin",
        "rank_00001.bin",
    ]
