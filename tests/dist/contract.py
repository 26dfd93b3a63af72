"""The contract of a process group, run by every backend on all its ranks.

Each `check_*` takes a group and is called by all its members. `Traits` says what a backend's
library cannot do, so that a gap is written down and not skipped over in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.dist import oracle

SIZES = (0, 1, 5, 1023, 70_001)
LARGE = 700_001  # elements: several slots of every engine, and no multiple of anything


@dataclass(frozen=True)
class Traits:
    """What a backend's library leaves out."""

    ordered: bool = True  # sums in rank order: results match the oracle bit for bit
    no_dtypes: tuple[str, ...] = ()  # refused for reductions
    no_ops: tuple[str, ...] = ()


def _compare(traits: Traits) -> Any:
    return oracle.assert_same_bits if traits.ordered else oracle.assert_close


def _inputs(group: Any, dtype: str, shape: tuple[int, ...], seed: int = 0) -> list[Any]:
    return [oracle.data(dtype, shape, rank, seed) for rank in range(group.size)]


def reductions(traits: Traits) -> list[tuple[str, str]]:
    return [
        (dtype, op)
        for dtype in oracle.DTYPES
        if dtype not in traits.no_dtypes
        for op in oracle.reduce_ops(dtype)
        if op not in traits.no_ops
    ]


def check_all_reduce(group: Any, traits: Traits) -> None:
    for dtype, op in reductions(traits):
        for size in SIZES if op in ("sum", "avg") else (5, 70_001):
            parts = _inputs(group, dtype, (size,))
            x = parts[group.rank].copy()
            group.all_reduce(x, op)
            _compare(traits)(x, oracle.reduced(parts, op), f"all_reduce {op} {dtype}[{size}]")


def check_large(group: Any, traits: Traits) -> None:
    for dtype in ("float32", "bfloat16"):
        parts = _inputs(group, dtype, (LARGE,))
        expected = oracle.reduced(parts, "sum")
        x = parts[group.rank].copy()
        group.all_reduce(x)
        _compare(traits)(x, expected, f"large all_reduce {dtype}")
        out = np.empty((group.size, LARGE), x.dtype)
        group.all_gather(out, parts[group.rank])
        oracle.assert_same_bits(out, np.stack(parts), f"large all_gather {dtype}")
        wide = _inputs(group, dtype, (group.size, LARGE))
        mine = np.empty(LARGE, x.dtype)
        group.reduce_scatter(mine, wide[group.rank])
        _compare(traits)(
            mine, oracle.reduced(wide, "sum")[group.rank], f"large reduce_scatter {dtype}"
        )


def check_movement(group: Any, traits: Traits) -> None:
    for dtype in oracle.DTYPES:
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
            _compare(traits)(
                out, oracle.reduced(parts, op)[mine], f"reduce_scatter {op} {dtype}[{size}]"
            )


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
    for _ in range(20):
        group.barrier()


def check_bad_arguments(group: Any, traits: Traits) -> None:
    """Refused before anything is sent: the group works on, in step."""
    x = np.zeros(4, np.float32)
    calls = [
        lambda: group.all_reduce(np.zeros((4, 4))[:, ::2]),
        lambda: group.all_reduce(x, "median"),
        lambda: group.all_reduce(np.zeros(3, int), "avg"),
        lambda: group.all_reduce(x, "bxor"),
        lambda: group.all_reduce(np.zeros(3, bool), "sum"),
        lambda: group.all_reduce([1.0]),
        lambda: group.all_gather(np.zeros(4 * group.size + 1, np.float32), x),
        lambda: group.all_gather(np.zeros(4 * group.size), x),
        lambda: group.reduce_scatter(x, np.zeros(4 * group.size + 1, np.float32)),
        lambda: group.broadcast(x, group.size),
        lambda: group.broadcast(x, -1),
        lambda: group.broadcast(x, "0"),
    ]
    for number, call in enumerate(calls):
        try:
            call()
        except ValueError:
            continue
        raise AssertionError(f"bad call {number} was taken")
    group.all_reduce(x)


def check_facts(group: Any, traits: Traits) -> None:
    assert 0 <= group.rank < group.size == len(group.ranks)
    assert group.name
    assert group.backend in repr(group)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
