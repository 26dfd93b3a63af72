"""Two hosts of two ranks, as network namespaces: torch's wrappers over shared memory and Gloo."""

from __future__ import annotations

import signal

import pytest

from tests.support.hosts import hosts, needs_hosts, run_text_on

_RANK = """
import os, signal, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from echelon.dist import Options
from echelon.errors import PeerLostError
from tests.dist.torch_backend.model import Gpt, loss_of, optimizer_of, train_alone

torch.set_num_threads(1)
dist.init_process_group("echelon", pg_options=Options(reduction=sys.argv[1]))
rank, world_size = dist.get_rank(), dist.get_world_size()
assert "shm+gloo" in repr(dist.group.WORLD), dist.group.WORLD
model = DistributedDataParallel(Gpt(), bucket_cap_mb=0.01)
optimizer = optimizer_of(model)
for step in range(4):
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    optimizer.step()
alone = train_alone(world_size, 4, lambda g: g * (1.0 / world_size), lambda total: total)
pairs = zip(model.parameters(), alone.parameters(), strict=True)
print("same bits" if all(torch.equal(a, b) for a, b in pairs) else "other bits", flush=True)
dist.barrier()
if rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(torch.ones(4))
except PeerLostError as err:
    assert err.ranks == (3,), err
else:
    raise AssertionError("nothing was raised")
"""


@pytest.mark.netns
@needs_hosts
def test_ranks_of_two_hosts_add_in_rank_order_and_name_a_lost_one():
    with hosts(2) as machines:
        ends = run_text_on(machines, _RANK, "rank_ordered")
    texts = "\n".join(end.stderr for end in ends)
    assert [end.returncode for end in ends] == [0, 0, 0, -signal.SIGKILL], texts
    assert [end.stdout.split("\n")[0] for end in ends] == ["same bits"] * 4, texts


# As a program that MPI or `mp.spawn` started: everything is passed, the environment says nothing.
_NAMELESS_RANK = """
import os
import torch, torch.distributed as dist

where = f"tcp://{os.environ.pop('MASTER_ADDR')}:{os.environ.pop('MASTER_PORT')}"
rank, world_size = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    os.environ.pop(name)
dist.init_process_group("echelon", init_method=where, rank=rank, world_size=world_size)
x = torch.full((4,), float(rank + 1))
dist.all_reduce(x)
print(x.tolist(), flush=True)
dist.barrier(group=dist.new_group([0, 1]))
dist.destroy_process_group()
"""


@pytest.mark.netns
@needs_hosts
def test_ranks_of_two_hosts_meet_without_an_environment():
    with hosts(2) as machines:
        ends = run_text_on(machines, _NAMELESS_RANK, ranks_per_host=1)
    texts = "\n".join(end.stderr for end in ends)
    assert [end.returncode for end in ends] == [0, 0], texts
    assert [end.stdout for end in ends] == ["[3.0, 3.0, 3.0, 3.0]\n"] * 2
