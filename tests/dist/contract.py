"""The contract of a process group, run by every backend on all its ranks.

Each `check_*` takes a group and is called by all its members. `Traits` says what a backend's
library cannot do, so that a gap is written down and not skipped over in silence.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.dist import oracle

SIZES = (0, 1, 5, 40, 1023, 70_001)  # 40: travels with the comparison of calls
LARGE = 700_001  # elements: several slots of every engine, and no multiple of anything


@dataclass(frozen=True)
class Traits:
    """What a backend's library leaves out."""

    ordered: bool = True  # sums in rank order: results match the oracle bit for bit
    no_dtypes: tuple[str, ...] = ()  # refused for reductions
    no_ops: tuple[str, ...] = ()
    is_slow: bool = False  # the library polls: a few dtypes stand for all


def _compare(seen: Any, expected: Any, op: str, traits: Traits, what: str) -> None:
    oracle.assert_reduced(seen, expected, what, op, ordered=traits.ordered)


def _inputs(group: Any, dtype: str, shape: tuple[int, ...], seed: int = 0) -> list[Any]:
    return [oracle.data(dtype, shape, rank, seed) for rank in range(group.size)]


def dtypes(traits: Traits) -> tuple[str, ...]:
    return ("float32", "bfloat16", "uint16", "bool") if traits.is_slow else oracle.DTYPES


def reductions(traits: Traits) -> list[tuple[str, str]]:
    return [
        (dtype, op)
        for dtype in dtypes(traits)
        if dtype not in traits.no_dtypes
        for op in oracle.reduce_ops(dtype)
        if op not in traits.no_ops
    ]


def store_of_world() -> Any:
    """Return the world's store: a way between the ranks beside the group."""
    return importlib.import_module("echelon.dist.runtime")._need().store


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Poll a condition; raise after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never held"
        threading.Event().wait(0.001)


def check_all_reduce(group: Any, traits: Traits) -> None:
    for dtype, op in reductions(traits):
        for size in SIZES if op in ("sum", "avg") else (5, 40, 70_001):
            parts = _inputs(group, dtype, (size,))
            x = parts[group.rank].copy()
            group.all_reduce(x, op)
            what = f"all_reduce {op} {dtype}[{size}]"
            _compare(x, oracle.reduced(parts, op), op, traits, what)


def check_large(group: Any, traits: Traits) -> None:
    for dtype in ("float32", "bfloat16"):
        parts = _inputs(group, dtype, (LARGE,))
        expected = oracle.reduced(parts, "sum")
        x = parts[group.rank].copy()
        group.all_reduce(x)
        _compare(x, expected, "sum", traits, f"large all_reduce {dtype}")
        out = np.empty((group.size, LARGE), x.dtype)
        group.all_gather(out, parts[group.rank])
        oracle.assert_same_bits(out, np.stack(parts), f"large all_gather {dtype}")
        wide = _inputs(group, dtype, (group.size, LARGE))
        mine = np.empty(LARGE, x.dtype)
        group.reduce_scatter(mine, wide[group.rank])
        expected = oracle.reduced(wide, "sum")[group.rank]
        _compare(mine, expected, "sum", traits, f"large reduce_scatter {dtype}")


def check_movement(group: Any, traits: Traits) -> None:
    for dtype in dtypes(traits):
        for size in SIZES:
            parts = _inputs(group, dtype, (size, 2))
            out = np.empty((group.size * size, 2), parts[0].dtype)
            group.all_gather(out, parts[group.rank])
            oracle.assert_same_bits(out, np.concatenate(parts), f"all_gather {dtype}[{size}]")
        for root in range(group.size):
            x = parts[group.rank].copy()
            group.broadcast(x, root)
            oracle.assert_same_bits(x, parts[root], f"broadcast {dtype} from {root}")


def check_reduce_scatter(group: Any, traits: Traits) -> None:
    for dtype, op in reductions(traits):
        for size in (0, 1, 7, 20_001):
            parts = _inputs(group, dtype, (group.size * size,))
            out = np.empty(size, parts[0].dtype)
            group.reduce_scatter(out, parts[group.rank], op)
            mine = slice(group.rank * size, (group.rank + 1) * size)
            what = f"reduce_scatter {op} {dtype}[{size}]"
            _compare(out, oracle.reduced(parts, op)[mine], op, traits, what)


def check_uneven_parts(group: Any, traits: Traits) -> None:
    """all_gather and reduce_scatter of parts that differ in size, some of them empty."""
    for scale in (1, 30_001):
        rows = [(rank * 2 + 1) % (group.size + 1) * scale for rank in range(group.size)]
        starts = np.cumsum([0, *rows])
        mine = slice(starts[group.rank], starts[group.rank + 1])
        for dtype in dtypes(traits):
            parts = [oracle.data(dtype, (rows[rank], 2), rank) for rank in range(group.size)]
            out = np.empty((starts[-1], 2), parts[0].dtype)
            work = group.all_gather(out, parts[group.rank], async_op=True, output_splits=rows)
            work.wait(timeout_s=60)
            what = f"{dtype} in parts of {rows}"
            oracle.assert_same_bits(out, np.concatenate(parts), f"all_gather {what}")
            out[:] = 0
            out[mine] = parts[group.rank]
            group.all_gather(out, out[mine], output_splits=np.array(rows))
            oracle.assert_same_bits(out, np.concatenate(parts), f"all_gather {what} in place")
        for dtype, op in reductions(traits):
            if op not in ("sum", "avg", "max", "prod"):
                continue
            wide = _inputs(group, dtype, (int(starts[-1]), 2))
            x = wide[group.rank].copy()
            group.reduce_scatter(x[mine], x, op, input_splits=rows)
            expected = oracle.reduced(wide, op)[mine]
            _compare(x[mine], expected, op, traits, f"reduce_scatter {op} {dtype} {rows}")


def check_16_bit_floats_are_rounded_once(group: Any, traits: Traits) -> None:
    """Summed in float32: neither an overflow on the way nor a rounding at each level shows."""
    for dtype, op, first, others in (
        ("float16", "avg", 40_000.0, 40_000.0),
        ("float16", "sum", 2048.0, 1.0),
        ("bfloat16", "sum", 256.0, 1.0),
        ("bfloat16", "avg", 256.0, 1.0),
        ("float16", "prod", 4096.0, 0.5),
    ):
        kind = oracle.numpy_dtype(dtype)
        for size in (1, 100, 1000, 70_001, LARGE):
            parts = [np.full(size, others if r else first, kind) for r in range(group.size)]
            x = parts[group.rank].copy()
            group.all_reduce(x, op)
            what = f"{op} of {dtype}[{size}]"
            oracle.assert_same_bits(x, oracle.reduced(parts, op), f"all_reduce {what}")
            wide = [np.repeat(part[:100], group.size * 10) for part in parts]
            mine = np.empty(len(wide[0]) // group.size, kind)
            group.reduce_scatter(mine, wide[group.rank], op)
            expected = oracle.reduced(wide, op)[: len(mine)]
            oracle.assert_same_bits(mine, expected, f"reduce_scatter {what}")


def check_reductions_of_bool(group: Any, traits: Traits) -> None:
    """Sum and max are "or", prod and min are "and"."""
    for size in (4, 70_001):
        x = np.zeros(size, bool)
        x[0], x[1:3] = group.rank == 0, True
        x[2] = group.rank != 0
        for op in ("sum", "max", "bor", "prod", "min", "band"):
            y = x.copy()
            group.all_reduce(y, op)
            one = group.size == 1
            is_or = op in ("sum", "max", "bor")
            expected = [True, True, is_or and not one] if is_or else [one, True, False]
            assert y[:3].tolist() == expected, (op, y[:3])


def check_inputs_are_left_alone(group: Any, traits: Traits) -> None:
    x = oracle.data("float32", (group.size * 3,), group.rank)
    kept = x.copy()
    x.flags.writeable = False
    group.all_gather(np.empty(group.size * x.size, x.dtype), x)
    group.reduce_scatter(np.empty(3, x.dtype), x)
    oracle.assert_same_bits(x, kept, "input")


def check_torch(group: Any, traits: Traits) -> None:
    import torch

    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
        x = torch.arange(6, dtype=dtype).reshape(2, 3) + group.rank
        group.all_reduce(x)
        total = group.size * (group.size - 1) // 2
        expected = torch.arange(6, dtype=dtype).reshape(2, 3) * group.size + total
        assert torch.equal(x, expected), (dtype, x)
        out = torch.empty(group.size, 2, dtype=dtype)
        group.all_gather(out, torch.full((2,), group.rank, dtype=dtype))
        assert out[:, 1].tolist() == list(range(group.size))
    parameter = torch.nn.Parameter(torch.full((3,), float(group.rank)))
    group.broadcast(parameter, group.size - 1)
    assert parameter.tolist() == [group.size - 1.0] * 3


def check_async(group: Any, traits: Traits) -> None:
    arrays = [np.full(size, group.rank + 1.0, np.float32) for size in (1, 30_000, 5, 300_000, 0)]
    works = [group.all_reduce(x, async_op=True) for x in arrays]
    sync = np.ones(3)
    group.all_reduce(sync)  # a blocking one between asynchronous ones keeps the order
    works.append(group.barrier(async_op=True))
    for work in reversed(works):
        work.wait(timeout_s=30)
        assert work.done
        work.wait()  # again does no harm
    total = group.size * (group.size + 1) / 2
    assert all((x == total).all() for x in arrays)
    assert (sync == group.size).all()


def check_barrier(group: Any, traits: Traits) -> None:
    """No rank leaves before the last one has arrived: what that rank wrote before can be read."""
    store, calls = store_of_world(), [group.barrier, group.monitored_barrier]
    calls.append(lambda: group.barrier(async_op=True).wait(timeout_s=60))
    for number, call in enumerate(calls):
        for late in range(group.size):
            key = f"barrier/{group.name}/{group.size}/{number}/{late}"
            if group.rank == late:
                others = [f"{key}/{rank}" for rank in range(group.size) if rank != late]
                store.wait(others, timeout=60)  # they are about to call, or wait in the call
                store.set_confirmed(f"{key}/here", "1")
            else:
                store.set(f"{key}/{group.rank}", "1")
            call()
            assert store.check([f"{key}/here"]), f"{call} returned before rank {late} called it"
    for _ in range(20):
        group.barrier()


def check_done_is_truthful(group: Any, traits: Traits) -> None:
    """`Work.done` is False while a rank is missing, and True once the result is there."""
    if group.size == 1:
        return
    store, late = store_of_world(), group.size - 1
    for number, size in enumerate((1, 70_001)):
        x = np.ones(size)
        names = [f"done/{group.name}/{group.size}/{number}/{rank}" for rank in range(late)]
        if group.rank == late:
            store.wait(names, timeout=60)
        work = group.all_reduce(x, async_op=True)
        if group.rank != late:
            assert not work.done
            store.set(names[group.rank], "1")
        wait_until(lambda work=work: work.done, 60)
        assert (x == group.size).all()
        work.wait()


def check_bad_arguments(group: Any, traits: Traits) -> None:
    """Refused before anything is sent: the group works on, in step."""
    import torch

    x = np.zeros(4, np.float32)
    memory = np.zeros(4 * group.size + 4, np.float32)
    wide = memory[:-4]
    calls = [
        lambda: group.all_reduce(np.zeros((4, 4))[:, ::2]),
        lambda: group.all_reduce(x, "median"),
        lambda: group.all_reduce(x, "bxor"),
        lambda: group.all_reduce(np.zeros(3, bool), "avg"),
        lambda: group.all_reduce([1.0]),
        lambda: group.all_gather(np.zeros(4 * group.size + 1, np.float32), x),
        lambda: group.all_gather(np.zeros(4 * group.size), x),
        lambda: group.reduce_scatter(x, np.zeros(4 * group.size + 1, np.float32)),
        lambda: group.broadcast(x, group.size),
        lambda: group.broadcast(x, -1),
        lambda: group.broadcast(x, "0"),
        lambda: group.reduce(x, group.size),
        lambda: group.all_to_all(x, np.zeros(4)),
        lambda: group.all_to_all(x, x, input_splits=[4] * (group.size + 1)),
        lambda: group.all_to_all(x, x, output_splits=[-1] + [0] * (group.size - 1)),
        lambda: group.gather(None, x, group.rank),
        lambda: group.gather(np.zeros(4 * group.size + 1, np.float32), x, group.rank),
        lambda: group.scatter(x, None, group.rank),
        lambda: group.send(x, group.rank),
        lambda: group.recv(x, group.size),
        lambda: group.send(x, (group.rank + 1) % group.size, tag=-1),
        lambda: group.broadcast(x, 0.0),
        lambda: group.broadcast(x, True),
        lambda: group.all_to_all(x, x.copy(), input_splits=[4.0] + [0.0] * (group.size - 1)),
        lambda: group.all_to_all(x, x),
        lambda: group.all_gather(wide, memory[1:5]),
        lambda: group.all_gather(wide, torch.from_numpy(memory)[2:6]),
        lambda: group.reduce_scatter(memory[2:6], wide),
        lambda: group.gather(wide, memory[3:7], group.rank),
        lambda: group.scatter(memory[3:7], wide, group.rank),
        lambda: group.all_reduce(np.ma.masked_array(x)),
        lambda: group.all_gather(wide, x, output_splits=[4] * (group.size - 1) + [5]),
        lambda: group.all_gather(wide, x[:3], output_splits=[4] * group.size),
        lambda: group.all_gather(wide, memory[1:5], output_splits=[4] * group.size),
        lambda: group.all_gather(wide, x, output_splits=[4.0] * group.size),
        lambda: group.reduce_scatter(x[:3], wide, input_splits=[4] * group.size),
        lambda: group.reduce_scatter(x, wide, input_splits=[4] * (group.size + 1)),
        lambda: group.reduce_scatter(memory[1:5], wide, input_splits=[4] * group.size),
    ]
    for number, call in enumerate(calls):
        try:
            call()
        except ValueError:
            continue
        raise AssertionError(f"bad call {number} was taken")
    group.all_reduce(x)


def check_in_place(group: Any, traits: Traits) -> None:
    """The small array may be exactly this rank's part of the large one."""
    for size in (3, 50, 70_001):
        parts = _inputs(group, "float32", (size,))
        mine = slice(group.rank * size, (group.rank + 1) * size)
        whole = np.zeros(group.size * size, np.float32)
        whole[mine] = parts[group.rank]
        group.all_gather(whole, whole[mine])
        oracle.assert_same_bits(whole, np.concatenate(parts), f"all_gather [{size}] in place")
        wide = _inputs(group, "float32", (group.size * size,))
        x = wide[group.rank].copy()
        group.reduce_scatter(x[mine], x)
        expected = oracle.reduced(wide, "sum")[mine]
        _compare(x[mine], expected, "sum", traits, f"reduce_scatter [{size}] in place")
        for root in range(group.size):
            out = np.zeros_like(whole) if group.rank == root else None
            x = parts[group.rank].copy()
            if out is not None:
                out[mine] = x
                x = out[mine]
            group.gather(out, x, root)
            if out is not None:
                oracle.assert_same_bits(out, np.concatenate(parts), f"gather [{size}] in place")
            given = wide[root].copy() if group.rank == root else None
            seen = np.empty(size, np.float32) if given is None else given[mine]
            group.scatter(seen, given, root)
            oracle.assert_same_bits(seen, wide[root][mine], f"scatter [{size}] in place")


def check_integers_of_other_libraries(group: Any, traits: Traits) -> None:
    import torch

    root = group.size - 1
    for number in (np.int64(root), np.uint8(root), torch.tensor(root)):
        x = np.full(3, group.rank)
        group.broadcast(x, number)
        assert x[0] == root
    splits = np.ones(group.size, np.int32)
    out = np.empty(group.size, np.int64)
    group.all_to_all(out, np.full(group.size, group.rank), splits, splits)
    assert out.tolist() == list(range(group.size))


def check_facts(group: Any, traits: Traits) -> None:
    assert 0 <= group.rank < group.size == len(group.ranks)
    assert group.name
    assert group.backend in repr(group)


def check_reduce(group: Any, traits: Traits) -> None:
    for dtype, op in reductions(traits):
        for root in range(group.size):
            size = 40_001 if op == "sum" else 9
            parts = _inputs(group, dtype, (size,), seed=root)
            x = parts[group.rank].copy()
            group.reduce(x, root, op)
            expected = oracle.reduced(parts, op) if group.rank == root else parts[group.rank]
            _compare(x, expected, op, traits, f"reduce {op} {dtype} to {root}")


def check_all_to_all(group: Any, traits: Traits) -> None:
    for dtype in dtypes(traits):
        for rows in (0, 1, 3, 5_001):
            parts = _inputs(group, dtype, (group.size * rows, 2))
            out = np.empty_like(parts[0])
            group.all_to_all(out, parts[group.rank])
            mine = slice(group.rank * rows, (group.rank + 1) * rows)
            expected = np.concatenate([part[mine] for part in parts])
            oracle.assert_same_bits(out, expected, f"all_to_all {dtype}[{rows}]")


def check_all_to_all_with_splits(group: Any, traits: Traits) -> None:
    for scale in (1, 30_000):
        table = np.random.default_rng(scale).integers(0, 4, (group.size, group.size)) * scale
        parts = [
            oracle.data("float32", (int(table[rank].sum()), 3), rank) for rank in range(group.size)
        ]
        out = np.empty((int(table[:, group.rank].sum()), 3), np.float32)
        group.all_to_all(
            out,
            parts[group.rank],
            output_splits=table[:, group.rank].tolist(),
            input_splits=table[group.rank].tolist(),
        )
        starts = np.concatenate([np.zeros((group.size, 1), int), table.cumsum(1)], 1)
        pieces = [
            parts[rank][starts[rank, group.rank] : starts[rank, group.rank + 1]]
            for rank in range(group.size)
        ]
        oracle.assert_same_bits(out, np.concatenate(pieces), f"all_to_all splits x{scale}")


def check_gather_and_scatter(group: Any, traits: Traits) -> None:
    for dtype in dtypes(traits):
        for root in range(group.size):
            for size in (0, 3, 90_001) if dtype == "float32" else (3,):
                parts = _inputs(group, dtype, (size,), seed=root)
                out = np.empty((group.size, size), parts[0].dtype) if group.rank == root else None
                group.gather(out, parts[group.rank], root)
                if out is not None:
                    oracle.assert_same_bits(out, np.stack(parts), f"gather {dtype} to {root}")
                wide = oracle.data(dtype, (group.size, size), root)
                mine = np.empty(size, wide.dtype)
                group.scatter(mine, wide if group.rank == root else None, root)
                oracle.assert_same_bits(mine, wide[group.rank], f"scatter {dtype} from {root}")


def check_messages(group: Any, traits: Traits) -> None:
    if group.size == 1:
        return
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for dtype in dtypes(traits):
        for size in (0, 1, 1000) if dtype != "float32" else (0, 1, 1000, 300_001):
            x = oracle.data(dtype, (size,), group.rank)
            out = np.empty_like(x)
            work = group.send(x, after, async_op=True)
            group.recv(out, before)
            work.wait()
            oracle.assert_same_bits(out, oracle.data(dtype, (size,), before), f"message {dtype}")


def check_message_tags(group: Any, traits: Traits) -> None:
    """Tags choose the message, in order within a tag; receives may be posted in any order."""
    if group.size == 1:
        return
    if group.rank == 0:
        for tag, value in ((7, 1.0), (8, 2.0), (7, 3.0)):
            group.send(np.full(50, value), 1, tag=tag)
        answer = np.zeros(1)
        group.recv(answer, 1, tag=1)
        assert answer[0] == 6
    elif group.rank == 1:
        first, second, third = np.zeros(50), np.zeros(50), np.zeros(50)
        late = group.recv(first, 0, tag=8, async_op=True)
        group.recv(second, 0, tag=7)
        group.recv(third, 0, tag=7)
        late.wait(timeout_s=30)
        assert (first[0], second[0], third[0]) == (2, 1, 3)
        group.send(first[:1] + second[:1] + third[:1], 0, tag=1)
    group.barrier()


def check_message_order(group: Any, traits: Traits) -> None:
    """Messages of a pair and tag arrive in order, while receives of another tag are pending."""
    if group.size == 1:
        return
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    count = 60 if traits.is_slow else 600
    late, seen = np.zeros(1), np.full((count, 2), -1)
    pending = group.recv(late, before, tag=40, async_op=True)
    works, unasked = [], []
    for number in range(count):
        sent = np.full(2, number)
        works.append(group.send(sent, after, tag=41, async_op=True))
        if number % 7 == 0:
            unasked.append(group.send(sent[:1], after, tag=42, async_op=True))
        works.append(group.recv(seen[number], before, tag=41, async_op=True))
    for work in works:
        work.wait(timeout_s=60)
    assert seen[:, 0].tolist() == list(range(count))
    aside = np.zeros(1, int)
    for number in range(0, count, 7):  # they were put aside: nothing had asked for them
        group.recv(aside, before, tag=42)
        assert aside[0] == number
    for work in unasked:
        work.wait(timeout_s=60)
    assert not pending.done
    group.barrier()  # no rank sends before its receiver has looked
    group.send(np.ones(1), after, tag=40)
    pending.wait(timeout_s=60)
    assert late[0] == 1


def check_exchange_both_ways(group: Any, traits: Traits) -> None:
    """Receives posted first, larger than any buffer, between all pairs at once."""
    size = 200_000
    others = [rank for rank in range(group.size) if rank != group.rank]
    outs = {rank: np.empty(size, np.float32) for rank in others}
    works = [group.recv(outs[rank], rank, async_op=True) for rank in others]
    x = np.full(size, group.rank + 1, np.float32)
    works += [group.send(x, rank, async_op=True) for rank in others]
    total = np.ones(10)
    works.append(group.all_reduce(total, async_op=True))
    for work in works:
        work.wait(timeout_s=60)
    assert all((outs[rank] == rank + 1).all() for rank in others)
    assert total[0] == group.size


def check_objects(group: Any, traits: Traits) -> None:
    mine = {"rank": group.rank, "list": [1, 2.5, None, True], "bytes": b"x" * group.rank * 1000}
    everyone = group.all_gather_object(mine)
    assert [one["rank"] for one in everyone] == list(range(group.size))
    assert [len(one["bytes"]) for one in everyone] == [r * 1000 for r in range(group.size)]
    for root in range(group.size):
        assert group.broadcast_object({"from": group.rank}, root) == {"from": root}
    assert group.broadcast_object("text" if group.rank == 0 else object, 0) == "text"
    with pytest.raises(TypeError, match="plain data"):
        group.all_gather_object(object())


def check_coalesce(group: Any, traits: Traits) -> None:
    a, b = np.ones(5), np.full(3, group.rank)
    out = np.zeros(group.size)
    with group.coalesce():
        group.all_reduce(a)
        group.broadcast(b, group.size - 1)
        work = group.all_gather(out, np.array([group.rank * 2.0]), async_op=True)
        if group.size > 1:
            mine, theirs = np.array([float(group.rank)]), np.zeros(1)
            group.send(mine, (group.rank + 1) % group.size)
            group.recv(theirs, (group.rank - 1) % group.size)
    assert work.done
    assert (a == group.size).all()
    assert (b == group.size - 1).all()
    assert out.tolist() == [rank * 2.0 for rank in range(group.size)]
    if group.size > 1:
        assert theirs[0] == (group.rank - 1) % group.size


def check_split(group: Any, traits: Traits) -> None:
    part = group.split(group.rank % 2, key=-group.rank)
    alike = [r for r in reversed(range(group.size)) if r % 2 == group.rank % 2]
    assert part.ranks == tuple(group.ranks[r] for r in alike)
    x = np.array([float(group.rank)])
    y = np.ones(2)
    works = [part.all_reduce(x, async_op=True), group.all_reduce(y, async_op=True)]
    for work in works:
        work.wait(timeout_s=30)
    assert (x[0], y[0]) == (sum(alike), group.size)
    assert group.split(None if group.rank else 0) is None or group.rank == 0


def check_monitored_barrier(group: Any, traits: Traits) -> None:
    group.monitored_barrier(30)
    group.monitored_barrier()
    for bad in (0, -1):
        with pytest.raises(ValueError, match="above 0"):
            group.monitored_barrier(bad)


def check_every_dtype_moves(group: Any, traits: Traits) -> None:
    """Bits arrive as they were, whatever they mean: NaN payloads, padding, odd bytes of a bool."""
    import ml_dtypes

    kinds = [np.complex64, np.dtype("M8[ns]"), np.dtype("S3"), np.float16, bool, np.longdouble]
    kinds += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
    kinds += [ml_dtypes.float8_e4m3b11fnuz]
    root = group.size - 1
    for kind in map(np.dtype, kinds):
        rng = np.random.default_rng(kind.itemsize)
        num_bytes = 12 * group.size * kind.itemsize
        raw = rng.integers(0, 256, (group.size, num_bytes), np.uint8)
        x = raw[group.rank].copy().view(kind)
        row, me = num_bytes // group.size, group.rank
        out = np.empty((group.size, len(x)), kind)
        group.all_gather(out, x)
        assert out.tobytes() == raw.tobytes(), f"all_gather {kind}"
        swapped = np.empty_like(x)
        group.all_to_all(swapped, x)
        expected = b"".join(one[me * row : (me + 1) * row].tobytes() for one in raw)
        assert swapped.tobytes() == expected, f"all_to_all {kind}"
        out[:] = x[0]
        group.gather(out if me == root else None, x, root)
        assert me != root or out.tobytes() == raw.tobytes(), f"gather {kind}"
        part = np.empty(12, kind)
        group.scatter(part, x if me == root else None, root)
        mine = raw[root][me * row : (me + 1) * row]
        assert part.tobytes() == mine.tobytes(), f"scatter {kind}"
        if group.size > 1 and len(kind.name) <= 16:
            work = group.send(x, (me + 1) % group.size, async_op=True)
            group.recv(swapped, (me - 1) % group.size)
            work.wait()
            assert swapped.tobytes() == raw[me - 1].tobytes(), f"message {kind}"
        group.broadcast(x, 0)
        assert x.tobytes() == raw[0].tobytes(), f"broadcast {kind}"
        if kind.name not in oracle.DTYPES:
            with pytest.raises(ValueError, match="moved but not reduced"):
                group.all_reduce(x)


def check_messages_of_a_dtype_with_a_long_name(group: Any, traits: Traits) -> None:
    import ml_dtypes

    if group.size == 1:
        return
    x = np.full(5, group.rank).astype(ml_dtypes.float8_e4m3b11fnuz)
    seen = np.zeros_like(x)
    work = group.send(x, (group.rank + 1) % group.size, async_op=True)
    group.recv(seen, (group.rank - 1) % group.size)
    work.wait()
    assert seen.tolist() == [(group.rank - 1) % group.size] * 5


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
