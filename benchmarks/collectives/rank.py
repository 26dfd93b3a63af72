"""Run as one rank of benchmarks/collectives/run.py: take the requested samples, check every result.

The driver sends one line of JSON per sample and receives one line with the seconds per call. A
library is an object with the methods of echelon's groups, so that cases are written once. Arrays
contain small integers, which every dtype here adds exactly.
"""

# ruff: noqa: D102, D103 -- three libraries answer to the same names; main() reads top-down
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all",
    "all_reduce_max", "reduce_scatter_max",
)  # fmt: skip
LATENCY = ("all_reduce", "all_reduce_async", "barrier")
_PERIOD = 7  # of the numbers in an array


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One operation to measure.

    Attributes:
        fill: sets the arrays before the call that is checked.
        call: makes one call.
        check: raises AssertionError if the result is wrong.
        calm: sets the arrays before the repeated calls, if these would change the values.
    """

    call: Callable[[], Any]
    fill: Callable[[], None] = lambda: None
    check: Callable[[], None] = lambda: None
    calm: Callable[[], None] | None = None


class Cases:
    """The operations on arrays of one size; `num_bytes` is the size of the larger array."""

    def __init__(self, group: Any, rank: int, size: int, num_bytes: int, dtype: str) -> None:
        import ml_dtypes

        kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
        count = max(1, num_bytes // kind.itemsize)
        part = max(1, count // size)
        self._group, self._rank, self._size = group, rank, size
        self._numbers = np.resize(np.arange(_PERIOD).astype(kind), max(count, part * size))
        self._count, self._part_count = count, part * size
        self._whole, self._other = np.zeros_like(self._numbers), np.zeros_like(self._numbers)
        self._part = np.zeros(part, kind)

    def make(self, operation: str) -> Case:
        """Return the case with the given name."""
        made: Case = getattr(self, f"_{operation}")()
        return made

    def _all_reduce(self, *, is_async: bool = False, op: str = "sum") -> Case:
        x, numbers = self._whole[: self._count], self._numbers[: self._count]
        ranks = range(self._size)
        expected = sum(ranks) if op == "sum" else max(ranks)
        scale = self._size if op == "sum" else 1
        call = self._group.start_all_reduce if is_async else self._group.all_reduce
        return Case(
            fill=lambda: _fill(x, numbers, self._rank),
            call=(lambda: call(x, op).wait()) if is_async else (lambda: call(x, op)),
            check=lambda: _same(x, numbers, scale, expected),
            calm=(lambda: x.fill(0)) if op == "sum" else None,  # sums would grow without bound
        )

    def _all_reduce_max(self) -> Case:
        return self._all_reduce(op="max")

    def _all_reduce_async(self) -> Case:
        return self._all_reduce(is_async=True)

    def _barrier(self) -> Case:
        return Case(call=self._group.barrier)

    def _all_gather(self) -> Case:
        out, x = self._whole[: self._part_count], self._part
        numbers = self._numbers[: x.size]

        def check() -> None:
            for rank, got in enumerate(out.reshape(self._size, -1)):
                _same(got, numbers, 1, rank)

        return Case(
            fill=lambda: _fill(x, numbers, self._rank),
            call=lambda: self._group.all_gather(out, x),
            check=check,
        )

    def _reduce_scatter(self, op: str = "sum") -> Case:
        x, numbers = self._whole[: self._part_count], self._numbers[: self._part_count]
        own = numbers.reshape(self._size, -1)[self._rank]
        ranks = range(self._size)
        expected, scale = (sum(ranks), self._size) if op == "sum" else (max(ranks), 1)
        return Case(
            fill=lambda: _fill(x, numbers, self._rank),
            call=lambda: self._group.reduce_scatter(self._part, x, op),
            check=lambda: _same(self._part, own, scale, expected),
        )

    def _reduce_scatter_max(self) -> Case:
        return self._reduce_scatter("max")

    def _broadcast(self) -> Case:
        x, numbers = self._whole[: self._count], self._numbers[: self._count]
        return Case(
            fill=lambda: _fill(x, numbers, self._rank),
            call=lambda: self._group.broadcast(x, 0),
            check=lambda: _same(x, numbers, 1, 0),
        )

    def _all_to_all(self) -> Case:
        out, x = self._other[: self._part_count], self._whole[: self._part_count]
        numbers = self._numbers[: self._part_count]
        own = numbers.reshape(self._size, -1)[self._rank]

        def check() -> None:
            for rank, got in enumerate(out.reshape(self._size, -1)):
                _same(got, own, 1, rank)

        return Case(
            fill=lambda: _fill(x, numbers, self._rank),
            call=lambda: self._group.all_to_all(out, x),
            check=check,
        )


def _fill(x: Any, numbers: Any, rank: int) -> None:
    np.add(numbers, x.dtype.type(rank), out=x)


def _same(got: Any, numbers: Any, scale: int, added: int) -> None:
    expected = numbers * got.dtype.type(scale) + got.dtype.type(added)
    wrong = np.flatnonzero(got != expected)
    assert not wrong.size, f"{wrong.size} of {got.size} wrong, first at {wrong[0]}"


def measure(case: Case, barrier: Callable[[], Any], repeats: int) -> float:
    """Check one call; then return the seconds per call of `repeats` calls after a barrier."""
    case.fill()
    case.call()
    case.check()
    if case.calm is not None:
        case.calm()
    took = sample(case.call, barrier, repeats)
    if case.calm is None:
        case.check()  # these calls give the same result each time
    return took


def sample(call: Callable[[], Any], barrier: Callable[[], Any], repeats: int) -> float:
    barrier()
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begun) / repeats


def repeats_of(num_bytes: int) -> int:
    return max(2, min(200, (8 << 20) // max(num_bytes, 1)))


def touch_seconds(num_bytes: int, barrier: Callable[[], Any]) -> float:
    """Return the time to read and write `num_bytes` once, on all ranks at the same time.

    The result is the faster of a copy and an update in place. A copy writes to cache lines that it
    has not read, which costs another read unless the copy bypasses the cache. An update in place
    does not. Collectives may do either.
    """
    a, b = np.ones(max(num_bytes // 4, 2), np.float32), np.ones(max(num_bytes // 4, 2), np.float32)
    repeats = repeats_of(num_bytes)
    copied = sample(lambda: np.copyto(b, a), barrier, repeats)
    updated = sample(lambda: np.negative(a, out=a), barrier, repeats)
    return min(copied, updated)


class Mpi:
    """MPI with a group's methods; buffers are passed by pointer, without copies."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        self._types = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE}

    @property
    def rank(self) -> int:
        return int(self._world.Get_rank())

    def _typed(self, x: Any) -> Any:
        return [x, self._types[x.dtype.name]]

    def _op(self, op: str) -> Any:
        return getattr(self._mpi, op.upper())

    def all_reduce(self, x: Any, op: str) -> None:
        self._world.Allreduce(self._mpi.IN_PLACE, self._typed(x), self._op(op))

    def start_all_reduce(self, x: Any, op: str) -> Any:
        return self._world.Iallreduce(self._mpi.IN_PLACE, self._typed(x), self._op(op))

    def all_gather(self, out: Any, x: Any) -> None:
        self._world.Allgather(self._typed(x), self._typed(out))

    def reduce_scatter(self, out: Any, x: Any, op: str) -> None:
        self._world.Reduce_scatter_block(self._typed(x), self._typed(out), self._op(op))

    def broadcast(self, x: Any, root: int) -> None:
        self._world.Bcast(self._typed(x), root)

    def all_to_all(self, out: Any, x: Any) -> None:
        self._world.Alltoall(self._typed(x), self._typed(out))

    def barrier(self) -> None:
        self._world.Barrier()


class Gloo:
    """Gloo as torch users call it, without the extras of echelon's group."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as torch_dist

        self._torch, self._dist = torch, torch_dist

    def _tensor(self, x: Any) -> Any:
        if x.dtype.name == "bfloat16":
            return self._torch.from_numpy(x.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(x)

    def _op(self, op: str) -> Any:
        return getattr(self._dist.ReduceOp, op.upper())

    def all_reduce(self, x: Any, op: str) -> None:
        self._dist.all_reduce(self._tensor(x), self._op(op))

    def start_all_reduce(self, x: Any, op: str) -> Any:
        return self._dist.all_reduce(self._tensor(x), self._op(op), async_op=True)

    def all_gather(self, out: Any, x: Any) -> None:
        self._dist.all_gather_into_tensor(self._tensor(out), self._tensor(x))

    def reduce_scatter(self, out: Any, x: Any, op: str) -> None:
        self._dist.reduce_scatter_tensor(self._tensor(out), self._tensor(x), self._op(op))

    def broadcast(self, x: Any, root: int) -> None:
        self._dist.broadcast(self._tensor(x), root)

    def all_to_all(self, out: Any, x: Any) -> None:
        self._dist.all_to_all_single(self._tensor(out), self._tensor(x))

    def barrier(self) -> None:
        self._dist.barrier()


class Ours:
    """An echelon group, with an additional method for `--overlap`."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def start_all_reduce(self, x: Any, op: str) -> Any:
        return self._group.all_reduce(x, op, async_op=True)


def overlapped(group: Any) -> float:
    """Return the seconds that four asynchronous 16 MB all_reduces add to a computation."""
    arrays = [np.zeros(4 << 20, np.float32) for _ in range(4)]
    left, right = np.ones((600, 600), np.float32), np.ones((600, 600), np.float32)

    def compute() -> float:
        group.barrier()
        begun = time.perf_counter()
        for _ in range(20):
            np.matmul(left, right)
        return begun

    alone = -compute() + time.perf_counter()
    for warm_up in (True, False):
        group.barrier()
        begun = time.perf_counter()
        works = [group.start_all_reduce(x, "sum") for x in arrays]
        for _ in range(20):
            np.matmul(left, right)
        for work in works:
            work.wait()
        took = time.perf_counter() - begun
        if warm_up:
            alone = min(alone, -compute() + time.perf_counter())
    return max(took - alone, 0.0)


def serve(group: Any, rank: int, size: int) -> None:
    """Take the requested samples until the driver closes standard input."""
    made: dict[tuple[int, str], Cases] = {}
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["operation"] == "touch":
            took = touch_seconds(ask["num_bytes"], group.barrier)
        elif ask["operation"] == "overlap":
            took = overlapped(group)
        else:
            key = (ask["num_bytes"], ask["dtype"])
            if key not in made:
                made.clear()
                made[key] = Cases(group, rank, size, *key)
            case = made[key].make(ask["operation"])
            took = measure(case, group.barrier, repeats_of(ask["num_bytes"]))
        print(json.dumps(took), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("size", type=int)
    parser.add_argument("--fifos")
    options = parser.parse_args()
    if options.library == "mpich":
        mpi = Mpi()
        sys.stdin = open(f"{options.fifos}/{mpi.rank}.in")  # noqa: SIM115, PTH123
        sys.stdout = open(f"{options.fifos}/{mpi.rank}.out", "w")  # noqa: SIM115, PTH123
        serve(mpi, mpi.rank, options.size)
        return
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries also print to the file descriptor
    rank = int(os.environ["RANK"])
    if options.library == "gloo":
        import torch.distributed as torch_dist

        torch_dist.init_process_group("gloo")
        serve(Gloo(), rank, options.size)
        return
    import echelon.dist as dist

    expected = os.environ.get("BENCHMARK_CHECKOUT")
    assert not expected or dist.__file__.startswith(expected), dist.__file__
    backend = {"native": "shm", "python": "shm", "flat": "gloo"}.get(options.library)
    group = dist.init(backend or options.library, timeout_s=120)
    serve(Ours(group), rank, options.size)
    dist.shutdown()


if __name__ == "__main__":
    main()
