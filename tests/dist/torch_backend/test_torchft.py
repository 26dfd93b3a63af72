"""Our process group under torchft: its contract, its manager, and replicas that are killed."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from echelon.errors import CollectiveError, PeerLostError
from tests.support.ranks import run_ranks

_EXAMPLE = Path(__file__).parents[3] / "examples" / "torchft_replica.py"
_LIMIT_S = 300.0


def test_without_torchft_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchft", None)
    monkeypatch.setitem(sys.modules, "torchft.process_group", None)
    monkeypatch.delitem(sys.modules, "echelon.dist.torchft", raising=False)
    with pytest.raises(ImportError, match=r"needs torchft .*pip install 'echelon\[torchft\]'"):
        importlib.import_module("echelon.dist.torchft")


def _contract(rank: int, world_size: int) -> None:
    """Call what torchft's contract names, as it names it, in two configurations."""
    from echelon.dist.torchft import ProcessGroupEchelon

    torch.set_num_threads(1)
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    group = ProcessGroupEchelon(timedelta(seconds=_LIMIT_S))
    with pytest.raises(CollectiveError, match="not configured; call configure first"):
        group.allreduce([torch.ones(1)], dist.ReduceOp.SUM)
    size = world_size
    for quorum in range(2):
        group.configure(
            f"{place}/torchft/{quorum}/0", f"replica_{rank}", rank, size, quorum, 0, 1, [0] * size
        )
        assert (group.rank(), group.size()) == (rank, size)
        assert group.getBackendName() == "torchft-echelon"
        mine = torch.tensor([rank + 1.0])
        x = mine.clone()
        group.allreduce([x], dist.ReduceOp.SUM).wait()
        assert x.item() == 6.0
        pair = [mine.clone(), mine + 1]
        group.allreduce_coalesced(pair, c10d.AllreduceCoalescedOptions()).wait()
        assert [one.item() for one in pair] == [6.0, 9.0]
        outs = [torch.zeros(1) for _ in range(size)]
        group.allgather([outs], [mine], c10d.AllgatherOptions()).wait()
        assert [one.item() for one in outs] == [1.0, 2.0, 3.0]
        both = [torch.zeros(size), torch.zeros(size)]
        options = c10d.AllgatherOptions()
        group.allgather_into_tensor_coalesced(both, [mine, mine + 9], options).wait()
        assert [one.tolist() for one in both] == [[1.0, 2.0, 3.0], [10.0, 11.0, 12.0]]
        sent, got = torch.arange(3.0) + 10 * rank, torch.zeros(3)
        ones = [1] * size
        group.alltoall_base(got, sent, ones, ones, c10d.AllToAllOptions()).wait()
        assert got.tolist() == [rank, 10.0 + rank, 20.0 + rank]
        out = torch.zeros(1)
        parts = [torch.tensor([float(one)]) for one in range(size)]
        group.reduce_scatter([out], [parts], c10d.ReduceScatterOptions()).wait()
        assert out.item() == 3.0 * rank
        whole = [torch.arange(3.0)]
        options = c10d.ReduceScatterOptions()
        group.reduce_scatter_tensor_coalesced([out], whole, options).wait()
        assert out.item() == 3.0 * rank
        x = mine.clone()
        group.broadcast_one(x, 2).wait()
        assert x.item() == 3.0
        if rank == 0:
            group.send([mine], 1, 7).wait()
        elif rank == 1:
            group.recv([x], 0, 7).wait()
            assert x.item() == 1.0
        group.barrier(c10d.BarrierOptions()).wait()
        assert group.errored() is None
    group.set_timeout(timedelta(seconds=_LIMIT_S / 2))
    model = torch.nn.Linear(2, 2)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    wrapped(torch.full((1, 2), float(rank))).sum().backward()
    assert model.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]  # the mean of 0, 1 and 2
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError):
        group.allreduce([mine], dist.ReduceOp.SUM).wait()
    assert isinstance(group.errored(), PeerLostError)
    group.abort()
    group.configure(f"{place}/torchft/2/0", f"replica_{rank}", rank, 2)
    x = mine.clone()
    group.allreduce([x], dist.ReduceOp.SUM).wait()
    assert x.item() == 3.0
    assert group.errored() is None
    group.shutdown()


@pytest.mark.ranks
def test_the_contracts_calls_work_in_each_configuration():
    pytest.importorskip("torchft", reason="it needs torchft: pip install 'echelon[torchft]'")
    run_ranks(_contract, 3, exit_codes={2: -9})


def _start(lighthouse: str, name: str, steps: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(_EXAMPLE), "--lighthouse", lighthouse, "--name", name]
    return subprocess.Popen(
        [*command, "--steps", str(steps), *options],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.ranks
@pytest.mark.skipif(not _EXAMPLE.exists(), reason="the examples are not here")
def test_a_killed_replica_that_is_started_again_ends_with_the_others_weights():
    reason = "it needs torchft: pip install 'echelon[torchft]'"
    coordination = pytest.importorskip("torchft.coordination", reason=reason)
    lighthouse = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=2, join_timeout_ms=60_000, heartbeat_timeout_ms=1000
    )
    replicas = []
    try:
        where = lighthouse.address()
        replicas = [_start(where, "replica_0", 30), _start(where, "replica_1", 30, "--die-at", "9")]
        assert replicas[1].wait(_LIMIT_S) == -signal.SIGKILL
        # With at least two replicas per step, the other one trains on only when this one is back.
        replicas.append(_start(where, "replica_1", 30))
        ends = [
            replicas[0].communicate(timeout=_LIMIT_S),
            replicas[2].communicate(timeout=_LIMIT_S),
        ]
        assert [replicas[0].returncode, replicas[2].returncode] == [0, 0], ends
        texts = [end[0].splitlines() for end in ends]
        assert texts[0][-1] == texts[1][-1]
        assert texts[0][-1].startswith("finished 30 steps, weights ")
        assert any("PeerLostError" in line and "replica_0" in line for line in texts[0]), texts
    finally:
        for replica in replicas:
            replica.kill()
            replica.communicate()
        lighthouse.shutdown()
