"""What a torch program sees from a sub-group is the same with Gloo below it and with echelon.

Every case runs on one set of ranks over two groups of the same members, one of each backend, so
Gloo is the oracle. Ranks within the group differ from global ranks.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

_WORLD = 4
_MEMBERS = [0, 2, 3]
_SIZE = len(_MEMBERS)


def _filled(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape or (3,), float(value))


def _send_recv(group: Any, me: int) -> Any:
    """Blocking messages, named by group rank and by global rank."""
    got = []
    for sender in range(_SIZE):
        to = (sender + 1) % _SIZE
        x = _filled(10 + me)
        if me == sender:
            dist.send(x, group=group, group_dst=to, tag=4)
            dist.send(x * 2, _MEMBERS[to], group=group)
        if me == to:
            got.append(dist.recv(x, group=group, group_src=sender, tag=4))
            got.append(x.clone())
            got.append(dist.recv(x, _MEMBERS[sender], group=group))
            got.append(x)
    return got


def _isend_irecv(group: Any, me: int) -> Any:
    """Many tags of a pair in flight, received in another order than they were sent."""
    right, left = (me + 1) % _SIZE, (me - 1) % _SIZE
    tags = range(20)
    sent = [
        dist.isend(_filled(100 * me + tag), group=group, group_dst=right, tag=tag) for tag in tags
    ]
    got = {tag: torch.zeros(3) for tag in tags}
    received = [
        dist.irecv(got[tag], group=group, group_src=left, tag=tag) for tag in reversed(tags)
    ]
    for work in [*received, *sent]:
        work.wait()
    return list(got.values())


def _from_any(group: Any, me: int) -> Any:
    """A receive that names no source gets each message once, and says whose it was."""
    if me:
        dist.send(_filled(me), group=group, group_dst=0, tag=9)
        dist.send(_filled(10 * me), group=group, group_dst=0, tag=8)
        return None
    got = []
    for _ in range(1, _SIZE):
        x = torch.zeros(3)
        got.append((dist.recv(x, group=group, tag=9), x.tolist()))
    late = [torch.zeros(3) for _ in range(1, _SIZE)]
    works = [dist.irecv(x, group=group, tag=8) for x in late]
    for work, x in zip(works, late, strict=True):
        work.wait()
        got.append((work._source_rank(), x.tolist()))
    return sorted(got)


def _batched(group: Any, me: int) -> Any:
    """Each rank exchanges several messages with every other; sends and receives mixed."""
    peers = [peer for peer in range(_SIZE) if peer != me]
    got = {(peer, turn): torch.zeros(5) for peer in peers for turn in range(3)}
    ops = []
    for turn in range(3):
        for peer in peers:
            x = _filled(100 * me + 10 * peer + turn, 5)
            pair = [
                dist.P2POp(dist.isend, x, group=group, group_peer=peer),
                dist.P2POp(dist.irecv, got[peer, turn], group=group, group_peer=peer),
            ]
            ops += pair if (me + turn) % 2 else reversed(pair)
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return list(got.values())


def _broadcast(group: Any, me: int) -> Any:
    x, y = _filled(me), _filled(me)
    dist.broadcast(x, group=group, group_src=2)
    dist.broadcast(y, _MEMBERS[1], group=group)
    work = dist.broadcast(z := _filled(me), group=group, group_src=0, async_op=True)
    work.wait()
    return x, y, z


def _reduce(group: Any, me: int) -> Any:
    x, y = _filled(me + 1), _filled(me + 1)
    dist.reduce(x, group=group, group_dst=1)
    dist.reduce(y, _MEMBERS[2], dist.ReduceOp.MAX, group=group)
    return [x if me == 1 else None, y if me == 2 else None]


def _reductions(group: Any, me: int) -> Any:
    got = []
    for dtype in (torch.float32, torch.float16, torch.int32, torch.uint8, torch.bool):
        for name in ("SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR", "AVG"):
            if dtype.is_floating_point and name[0] == "B":
                continue
            if not dtype.is_floating_point and name == "AVG":
                continue  # not with Gloo
            x = torch.tensor([me + 1, 3, 0, me == 1, me != 1]).to(dtype)
            dist.all_reduce(x, getattr(dist.ReduceOp, name), group=group)
            got.append(x)
    return got


def _gather_scatter(group: Any, me: int) -> Any:
    got: list[Any] = []
    for root in range(_SIZE):
        outs = [torch.zeros(3) for _ in range(_SIZE)] if me == root else None
        dist.gather(_filled(me), outs, group=group, group_dst=root)
        ins = [_filled(10 * root + n) for n in range(_SIZE)] if me == root else None
        x = torch.zeros(3)
        dist.scatter(x, ins, group=group, group_src=root)
        got += [outs, x]
    return got


def _all_to_all(group: Any, me: int) -> Any:
    x = torch.arange(6.0) + 10 * me
    out = torch.zeros(6)
    dist.all_to_all_single(out, x, group=group)
    sizes = [n + 1 for n in range(_SIZE)]
    uneven = torch.zeros((me + 1) * _SIZE)
    dist.all_to_all_single(uneven, x, [me + 1] * _SIZE, sizes, group=group)
    outs = [torch.zeros(2) for _ in range(_SIZE)]
    dist.all_to_all(outs, list(x.split(2)), group=group)
    return out, uneven, outs


def _gathers(group: Any, me: int) -> Any:
    outs = [torch.zeros(2, 2) for _ in range(_SIZE)]
    dist.all_gather(outs, _filled(me, 2, 2), group=group)
    out = torch.zeros(2 * _SIZE)
    dist.all_gather_into_tensor(out, _filled(me, 2), group=group)
    part, x = torch.zeros(2), torch.arange(2.0 * _SIZE) * (me + 1)
    dist.reduce_scatter_tensor(part, x, group=group)
    listed = torch.zeros(2)
    dist.reduce_scatter(listed, list(x.split(2)), dist.ReduceOp.MAX, group=group)
    return outs, out, part, listed


def _uneven_reduce_scatter(group: Any, me: int) -> Any:
    parts = [_filled(me + n, n + 1) for n in range(_SIZE)]
    out = torch.zeros(me + 1)
    dist.reduce_scatter(out, parts, group=group)
    return out


def _objects(group: Any, me: int) -> Any:
    thing = {"from": me, "what": ("a tuple", {1, 2})}
    everything: list[Any] = [None] * _SIZE
    dist.all_gather_object(everything, thing, group=group)
    sent = [thing, me] if me == 1 else [None, None]
    dist.broadcast_object_list(sent, group=group, group_src=1)
    gathered = [None] * _SIZE if me == 2 else None
    dist.gather_object(thing, gathered, group=group, group_dst=2)
    mine = [None]
    dist.scatter_object_list(mine, [0, "one", [2]] if me == 0 else None, group=group, group_src=0)
    passed = [thing] if me == 0 else [None]
    if me == 0:
        dist.send_object_list(passed, group=group, group_dst=2)
    if me == 2:
        dist.recv_object_list(passed, group=group, group_src=0)
    return everything, sent, gathered, mine, passed


def _works(group: Any, me: int) -> Any:
    work = dist.all_reduce(x := _filled(me), group=group, async_op=True)
    work.wait(timedelta(seconds=20))
    chained = dist.all_reduce(y := _filled(me), group=group, async_op=True).get_future()
    future = chained.then(lambda done: done.value()[0] + 1).wait()
    return x, y, future, work.is_completed(), work.is_success(), work.exception()


def _barriers(group: Any, me: int) -> Any:
    dist.barrier(group=group)
    group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)
    return dist.get_process_group_ranks(group), dist.get_group_rank(group, _MEMBERS[me])


def _numbers(group: Any, me: int) -> Any:
    """Every collective counts one, on all ranks alike."""
    before = group._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(_filled(me), group=group)
    return group._get_sequence_number_for_group() - before


_CASES = (
    _send_recv, _isend_irecv, _from_any, _batched, _broadcast, _reduce, _reductions,
    _gather_scatter, _all_to_all, _gathers, _uneven_reduce_scatter, _objects, _works, _barriers,
    _numbers,
)  # fmt: skip


def _plain(value: Any) -> Any:
    """Results in a form that can be compared."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _both(rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    theirs = dist.new_group(_MEMBERS, backend="gloo")
    ours = dist.new_group(_MEMBERS, backend="echelon")
    if rank in _MEMBERS:
        me = _MEMBERS.index(rank)
        assert dist.get_backend(ours) == "echelon"
        for case in _CASES:
            expected, got = _plain(case(theirs, me)), _plain(case(ours, me))
            assert got == expected, f"{case.__name__}: {got} with echelon, {expected} with Gloo"
    dist.barrier()
    dist.destroy_process_group()


def test_a_sub_group_acts_as_gloos_does():
    run_ranks(_both, _WORLD, timeout_s=60)
