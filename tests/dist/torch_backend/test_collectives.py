"""Every call of torch.distributed over our groups gives what torch's documentation says."""

from __future__ import annotations

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

_N = 3


def _same(got: torch.Tensor, expected: object) -> None:
    assert torch.equal(got, torch.as_tensor(expected).to(got.dtype)), (got, expected)


def _reductions(rank: int) -> None:
    ops = dist.ReduceOp
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
        for op, expected in (
            (ops.SUM, 6), (ops.MIN, 1), (ops.MAX, 3), (ops.PRODUCT, 6),
        ):  # fmt: skip
            x = torch.full((2, 3), rank + 1, dtype=dtype)
            dist.all_reduce(x, op)
            _same(x, torch.full((2, 3), expected))
    x = torch.full((4,), rank + 1.0)
    dist.all_reduce(x, ops.AVG)
    _same(x, [2.0] * 4)
    counts = torch.tensor([rank, 10 * rank, -rank, 7])
    dist.all_reduce(counts, ops.AVG)  # as with NCCL: the sum, divided, toward zero
    _same(counts, [1, 10, -1, 7])
    part = torch.empty(1, dtype=torch.int32)
    dist.reduce_scatter_tensor(part, torch.full((_N,), rank, dtype=torch.int32), ops.AVG)
    _same(part, [1])
    x = torch.full((4,), rank + 1.0)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    _same(x, [3.0] * 4)
    for op, expected in ((ops.BAND, 0), (ops.BOR, 7), (ops.BXOR, 7)):
        x = torch.tensor([1 << rank])
        dist.all_reduce(x, op)
        _same(x, [expected])
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags)  # on booleans a sum is an or, as with NCCL
    _same(flags, [True, True, False])
    for op, expected in (
        (ops.BOR, [True, True]),
        (ops.BAND, [False, True]),
        (ops.BXOR, [True] * 2),
    ):
        flags = torch.tensor([rank == 0, True])
        dist.all_reduce(flags, op)
        _same(flags, expected)
    z = torch.full((2,), complex(rank, 1))
    dist.all_reduce(z)
    _same(z, [complex(3, 3)] * 2)
    gaps = torch.full((4, 3), float(rank)).t()  # not contiguous: comes back through a buffer
    dist.all_reduce(gaps)
    _same(gaps, torch.full((3, 4), 3.0))
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    dist.all_reduce(parameter.data)
    _same(parameter.data, [3.0, 3.0])
    x = torch.full((2,), rank + 1.0)
    dist.reduce(x, 1)
    _same(x, [6.0, 6.0] if rank == 1 else [rank + 1.0] * 2)


def _sparse(rank: int) -> None:
    x = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, float(rank)], (5,))
    dist.all_reduce(x)
    _same(x.to_dense(), [3.0, 0.0, 1.0, 2.0, 0.0])


def _gathers(rank: int) -> None:
    outs = [torch.empty(2) for _ in range(_N)]
    dist.all_gather(outs, torch.full((2,), float(rank)))
    _same(torch.stack(outs), [[0.0] * 2, [1.0] * 2, [2.0] * 2])
    columns = list(torch.zeros(2, _N).t().unbind())  # tensors with gaps
    dist.all_gather(columns, torch.full((2,), float(rank)))
    _same(torch.stack(columns), [[0.0] * 2, [1.0] * 2, [2.0] * 2])
    scalars = [torch.tensor(0) for _ in range(_N)]
    dist.all_gather(scalars, torch.tensor(rank))
    _same(torch.stack(scalars), [0, 1, 2])
    out = torch.empty(2 * _N)
    dist.all_gather_into_tensor(out, torch.full((2,), float(rank)))
    _same(out, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0])
    out = torch.empty(2)
    dist.reduce_scatter_tensor(out, torch.arange(2.0 * _N))
    _same(out, [_N * 2.0 * rank, _N * (2.0 * rank + 1)])
    dist.reduce_scatter(out, [torch.full((2,), float(r)) for r in range(_N)], dist.ReduceOp.AVG)
    _same(out, [float(rank)] * 2)
    collected = [torch.empty(2) for _ in range(_N)] if rank == 1 else None
    dist.gather(torch.full((2,), float(rank)), collected, dst=1)
    if collected is not None:
        _same(torch.stack(collected), [[0.0] * 2, [1.0] * 2, [2.0] * 2])
    part = torch.empty(2)
    dist.scatter(
        part, [torch.full((2,), float(r)) for r in range(_N)] if rank == 2 else None, src=2
    )
    _same(part, [float(rank)] * 2)
    uneven = [torch.zeros(n, 2) for n in range(_N)]  # one of them empty
    dist.all_gather(uneven, torch.full((rank, 2), float(rank)))
    _same(torch.cat(uneven), [[1.0] * 2, [2.0] * 2, [2.0] * 2])
    works = [dist.all_gather(uneven, torch.full((rank, 2), 3.0 + k), async_op=True) for k in (0, 1)]
    works[1].wait()
    _same(torch.cat(uneven), torch.full((3, 2), 4.0))
    part = torch.empty(rank, dtype=torch.complex64)
    parts = [torch.full((n,), complex(n, rank)) for n in range(_N)]
    dist.reduce_scatter(part, parts)
    _same(part, torch.full((rank,), complex(3 * rank, 3)))
    with pytest.raises(ValueError, match="own tensor has 7"):
        dist.all_gather(uneven, torch.empty(7))
    with pytest.raises(ValueError, match="a list of 3 tensors, one per rank"):
        dist.all_gather(uneven[1:], torch.empty(2, 2))


def _exchanges(rank: int) -> None:
    out = torch.empty(_N, dtype=torch.int64)
    dist.all_to_all_single(out, torch.arange(_N) + 10 * rank)
    _same(out, [rank + 10 * r for r in range(_N)])
    sizes = [r + 1 for r in range(_N)]
    out = torch.empty((rank + 1) * _N)
    dist.all_to_all_single(out, torch.full((sum(sizes),), float(rank)), [rank + 1] * _N, sizes)
    _same(out, torch.arange(float(_N)).repeat_interleave(rank + 1))
    outs = [torch.empty(rank + 1) for _ in range(_N)]
    dist.all_to_all(outs, [torch.full((r + 1,), float(rank)) for r in range(_N)])
    _same(torch.cat(outs), torch.arange(float(_N)).repeat_interleave(rank + 1))
    x = torch.full((3,), float(rank))
    dist.broadcast(x.reshape(3, 1) if rank else x, 1)  # equal in number, not in shape
    _same(x, [1.0] * 3)


def _messages(rank: int) -> None:
    right, left = (rank + 1) % _N, (rank - 1) % _N
    x = torch.empty(4)
    ops = [
        dist.P2POp(dist.irecv, x, left),
        dist.P2POp(dist.isend, torch.full((4,), float(rank)), right),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    _same(x, [float(left)] * 4)
    if rank == 0:
        dist.send(torch.tensor([1, 2]), 1, tag=7)
        dist.send(torch.tensor([3, 4]).view(2, 1).t(), 1, tag=3)
    if rank == 1:
        first, second = torch.zeros(2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)[::2]
        assert dist.recv(first, 0, tag=7) == 0
        dist.recv(second, 0, tag=3)
        _same(torch.stack([first, second]), [[1, 2], [3, 4]])


def _asynchronous(rank: int) -> None:
    xs = [torch.full((1000,), rank + 1.0 + k) for k in range(20)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    futures = [work.get_future() for work in works[10:]]
    for future, x in zip(futures, xs[10:], strict=True):
        assert future.wait()[0] is x
    for work in works:
        work.wait(timedelta(seconds=20))
        assert work.is_completed()
        assert work.is_success()
    for k, x in enumerate(xs):
        _same(x, torch.full((1000,), 6.0 + 3 * k))
    gaps = torch.full((4, 3), float(rank)).t()
    chained = dist.all_reduce(gaps, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    _same(chained.wait(), torch.full((3, 4), 6.0))
    late = dist.all_reduce(gaps, async_op=True)
    dist.barrier()
    assert all(part.done for part in late.parts)  # before anybody asks for a future
    _same(late.get_future().wait()[0], torch.full((3, 4), 9.0))


def _coalesced(rank: int) -> None:
    xs = [torch.full((k + 1,), float(rank)) for k in range(4)]
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    with dist._coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    for x in xs:
        _same(x, torch.full_like(x, 9.0))
    outs = [torch.empty(_N) for _ in range(2)]
    with dist._coalescing_manager():
        for k, out in enumerate(outs):
            dist.all_gather_into_tensor(out, torch.tensor([float(rank + k)]))
    _same(torch.stack(outs), [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]])


def _objects(rank: int) -> None:
    mine = {"rank": rank, "shape": (1, 2)}
    all_of_them = [None] * _N
    dist.all_gather_object(all_of_them, mine)
    assert all_of_them == [{"rank": r, "shape": (1, 2)} for r in range(_N)]
    listed = [mine] if rank == 2 else [None]
    dist.broadcast_object_list(listed, src=2)
    assert listed[0]["rank"] == 2
    got = [None]
    dist.scatter_object_list(got, [f"for {r}" for r in range(_N)] if rank == 0 else None, src=0)
    assert got == [f"for {rank}"]
    gathered = [None] * _N if rank == 1 else None
    dist.gather_object(mine, gathered, dst=1)
    assert gathered is None or [one["rank"] for one in gathered] == [0, 1, 2]


def _functional(rank: int) -> None:
    group = dist.group.WORLD
    x = torch.full((_N,), rank + 1.0)
    _same(functional.all_reduce(x, "sum", group), [6.0] * _N)
    _same(functional.all_gather_tensor(x[:1], 0, group), [1.0, 2.0, 3.0])
    _same(functional.reduce_scatter_tensor(x, "sum", 0, group), [6.0])
    _same(functional.all_to_all_single(x, None, None, group), [1.0, 2.0, 3.0])
    _same(functional.broadcast(x, 1, group), [2.0] * _N)
    pair = functional.all_reduce_coalesced([x, 2 * x], "sum", group)
    _same(torch.stack([one + 0 for one in pair]), [[6.0] * _N, [12.0] * _N])


def _compiled(rank: int) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    _same(step(torch.full((3,), float(rank))), [7.0] * 3)


def _subgroups(rank: int) -> None:
    pair = dist.new_group([0, 2], group_desc="pair")
    alone = [dist.new_group([r]) for r in range(_N)][rank]
    x = torch.tensor([float(rank)])
    if rank != 1:
        dist.all_reduce(x, group=pair)
        _same(x, [2.0])
        assert dist.get_group_rank(pair, rank) == rank // 2
        dist.broadcast(x, 2, group=pair)
        pair.monitored_barrier(timedelta(seconds=20))
    y = torch.tensor([float(rank)])
    dist.all_reduce(y, group=alone)
    _same(y, [float(rank)])
    mesh = dist.init_device_mesh("cpu", (_N, 1), mesh_dim_names=("dp", "tp"))
    dist.all_reduce(y, group=mesh["dp"].get_group())
    _same(y, [3.0])
    dist.destroy_process_group(pair)
    dist.barrier(timeout=timedelta(seconds=20))
    assert dist.get_backend() == "echelon"


def _everything(rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("echelon", timeout=timedelta(seconds=30))
    for part in (
        _reductions, _sparse, _gathers, _exchanges, _messages, _asynchronous, _coalesced, _objects,
        _functional, _compiled, _subgroups,
    ):  # fmt: skip
        part(rank)
    dist.destroy_process_group()


def test_every_call_gives_what_torch_promises():
    run_ranks(_everything, _N, timeout_s=60)
