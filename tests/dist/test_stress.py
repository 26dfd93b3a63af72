"""Random operations, sizes, groups and orders against an oracle; then the same with a rank broken.

All ranks draw the same plan from one seed. The short version runs with every suite; `-m slow` runs
it for a minute.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import time

import numpy as np
import pytest

import echelon.dist as dist
from echelon.dist.backends import registry
from echelon.dist.backends.shm import native
from echelon.errors import CollectiveError, CollectiveTimeoutError, PeerLostError
from tests.dist import oracle
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

KINDS = (
    "all_reduce", "reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "gather",
    "scatter", "exchange",
)  # fmt: skip
SIZES = (0, 1, 3, 64, 1000, 4097, 40_000, 300_000)


class Case:
    """One operation of the plan: how to call it, and what must come out."""

    def __init__(self, draw: random.Random, group, number: int) -> None:
        self.group = group
        self.kind = draw.choice(KINDS)
        self.dtype = draw.choice(oracle.DTYPES)
        self.op = draw.choice(oracle.reduce_ops(self.dtype))
        self.root = draw.randrange(group.size)
        self.size = draw.choice(SIZES)
        self.number = number
        wide = self.kind in ("reduce_scatter", "all_to_all", "scatter")
        rows = group.size * self.size if wide else self.size
        self.parts = [oracle.data(self.dtype, (rows,), r, number) for r in range(group.size)]
        self.x = self.parts[group.rank].copy()
        self.out = self.x

    def start(self):
        group, x = self.group, self.x
        me, size = group.rank, group.size
        self.out = x
        if self.kind == "all_reduce":
            return group.all_reduce(x, self.op, async_op=True)
        if self.kind == "reduce":
            return group.reduce(x, self.root, self.op, async_op=True)
        if self.kind == "broadcast":
            return group.broadcast(x, self.root, async_op=True)
        self.out = np.empty(self.size * (1 if self.kind in ("reduce_scatter", "scatter") else size),
                            x.dtype)  # fmt: skip
        if self.kind == "all_gather":
            return group.all_gather(self.out, x, async_op=True)
        if self.kind == "reduce_scatter":
            return group.reduce_scatter(self.out, x, self.op, async_op=True)
        if self.kind == "all_to_all":
            return group.all_to_all(self.out, x, async_op=True)
        if self.kind == "gather":
            return group.gather(self.out if me == self.root else None, x, self.root, async_op=True)
        if self.kind == "scatter":
            given = x if me == self.root else None
            return group.scatter(self.out, given, self.root, async_op=True)
        return self._exchange()

    def _exchange(self):
        group, tag = self.group, self.number
        self.out = np.empty_like(self.x)
        if group.size == 1:
            self.out[:] = self.x
            return group.barrier(async_op=True)
        self.sent = group.send(self.x, (group.rank + 1) % group.size, tag, async_op=True)
        return group.recv(self.out, (group.rank - 1) % group.size, tag, async_op=True)

    def expected(self):
        me, parts = self.group.rank, self.parts
        mine = slice(me * self.size, (me + 1) * self.size)
        if self.kind == "all_reduce" or (self.kind == "reduce" and me == self.root):
            return oracle.reduced(parts, self.op)
        if self.kind == "broadcast":
            return parts[self.root]
        if self.kind in ("all_gather", "gather"):
            return np.concatenate(parts) if self.kind != "gather" or me == self.root else None
        if self.kind == "reduce_scatter":
            return oracle.reduced(parts, self.op)[mine]
        if self.kind == "all_to_all":
            return np.concatenate([part[mine] for part in parts])
        if self.kind == "scatter":
            return parts[self.root][mine]
        if self.kind == "exchange":
            return parts[(me - 1) % self.group.size]
        return parts[me]

    def check(self, *, is_ordered: bool = True) -> None:
        expected = self.expected()
        if expected is not None:
            what = f"#{self.number} {self.kind} {self.op} {self.dtype}[{self.size}]"
            what += f" in {self.group.name}"
            if self.kind in ("all_reduce", "reduce", "reduce_scatter"):
                oracle.assert_reduced(self.out, expected, what, self.op, ordered=is_ordered)
            else:
                oracle.assert_same_bits(self.out, expected, what)


def _all_groups(world):
    halves = world.split(world.rank % 2)
    turned = dist.new_group(list(reversed(range(world.size))), name="turned")
    return [world, halves, turned]


def _run(
    world, groups, seed: int, num_steps: int, seconds: float, at_step, *, is_ordered: bool = True
) -> int:
    draw = random.Random(seed)
    begun, done = time.monotonic(), 0
    for step in range(num_steps):
        at_step(step)
        cases = [
            Case(random.Random(draw.random()), groups[draw.randrange(len(groups))], step * 8 + i)
            for i in range(draw.randint(1, 6))
        ]
        works = [case.start() for case in cases]
        order = list(range(len(works)))
        random.Random(step * 31 + world.rank).shuffle(order)  # each rank waits in its own order
        for i in order:
            works[i].wait()
            if cases[i].kind == "exchange" and cases[i].group.size > 1:
                cases[i].sent.wait()
            cases[i].check(is_ordered=is_ordered)
        done += len(cases)
        enough = np.array([time.monotonic() - begun > seconds], np.int8)
        world.broadcast(enough, 0)
        if enough[0]:
            break
    return done


def _init(rank: int, world_size: int, backend: str):
    if backend == "shm+gloo":
        two_level = importlib.import_module("echelon.dist.backends.two_level")
        two_level.host_identity = lambda: {"boot": f"host {rank * 2 // world_size}"}
    return dist.init(backend, timeout_s=60)


def _stress(
    rank: int, world_size: int, backend: str, seed: int, num_steps: int, seconds: float
) -> int:
    world = _init(rank, world_size, backend)
    groups = _all_groups(world)
    is_ordered = backend == "shm"
    done = _run(world, groups, seed, num_steps, seconds, lambda _: None, is_ordered=is_ordered)
    world.barrier()
    dist.shutdown()
    core = native.core()
    assert core is None or core.lost_wakes() == 0
    return done


_BACKENDS = [("shm", "native"), ("shm", "python"), ("gloo", ""), ("shm+gloo", ""), ("xccl", "")]


def _skip_unless_ready(backend: str) -> None:
    reason = next(status.reason for status in registry.statuses() if status.name == backend)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("engine", ["native", "python"])
def test_random_operations_give_no_wrong_byte(engine):
    environ = {"ECHELON_SHM": engine}
    done = run_ranks(_stress, 4, "shm", 7, 60, 20.0, timeout_s=180, environ=environ)
    assert min(done) > 60


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("backend", "engine"), _BACKENDS)
def test_a_minute_of_random_operations_gives_no_wrong_byte(backend, engine, seed):
    _skip_unless_ready(backend)
    environ = {"ECHELON_SHM": engine} if engine else {}
    done = run_ranks(_stress, 4, backend, seed, 10**6, 60.0, timeout_s=240, environ=environ)
    print(f"{backend} {engine}, seed {seed}: {min(done)} operations")


# One schedule, whatever the delays: every engine must give the same results for all of them.
_SCHEDULE_SEED = 3
_NUM_SCHEDULED = 14


def _delayed(rank: int, world_size: int, backend: str, seeds: list[int]) -> None:
    world = _init(rank, world_size, backend)
    halves = world.split(world.rank % 2)
    for seed in seeds:
        draw, delays = random.Random(_SCHEDULE_SEED), random.Random(seed * 1000 + rank)
        cases = []
        for number in range(_NUM_SCHEDULED):
            group = (world, halves)[draw.randrange(2)]
            case = Case(random.Random(draw.random()), group, seed * 1000 + number)
            time.sleep(delays.choice((0, 0, 0, 0.0002, 0.001, 0.004)))
            cases.append((case, case.start()))
            if draw.random() < 0.3:
                _end_all(cases, delays, is_ordered=backend == "shm")
        _end_all(cases, delays, is_ordered=backend == "shm")
    world.barrier()
    dist.shutdown()


def _end_all(cases: list, delays: random.Random, *, is_ordered: bool) -> None:
    delays.shuffle(cases)
    for case, work in cases:
        work.wait()
        if case.kind == "exchange" and case.group.size > 1:
            case.sent.wait()
        case.check(is_ordered=is_ordered)
    cases.clear()


@pytest.mark.parametrize(("backend", "engine"), _BACKENDS)
@pytest.mark.parametrize(
    ("world_size", "seeds"),
    [
        (4, [0]),
        *(
            pytest.param(size, list(range(1, 10)), marks=pytest.mark.slow, id=f"{size}-nine")
            for size in (2, 3, 4, 5)
        ),
    ],
)
def test_one_schedule_gives_the_same_results_under_any_delays(backend, engine, world_size, seeds):
    _skip_unless_ready(backend)
    environ = {"ECHELON_SHM": engine} if engine else {}
    run_ranks(_delayed, world_size, backend, seeds, environ=environ, timeout_s=240)


def _broken(rank: int, world_size: int, seed: int, how: int) -> None:
    world = dist.init(timeout_s=60 if how == signal.SIGKILL else 3)
    draw = random.Random(seed)
    victim, when = draw.randrange(world_size), draw.randrange(3, 20)
    pids = world.all_gather_object(os.getpid())
    error = PeerLostError if how == signal.SIGKILL else CollectiveTimeoutError

    def at_step(step: int) -> None:
        if step == when and rank == victim:
            os.kill(os.getpid(), how)

    groups = _all_groups(world)
    if rank == victim and how == signal.SIGSTOP:
        with contextlib.suppress(CollectiveError):  # woken at the end by the others
            _run(world, groups, seed, 1000, 60.0, at_step)
        return
    with pytest.raises(error) as caught:
        _run(world, groups, seed, 1000, 60.0, at_step)
    try:
        assert victim in caught.value.ranks, (victim, caught.value)
    finally:
        if how == signal.SIGSTOP:
            with contextlib.suppress(ProcessLookupError):
                _wait_for_others_then_wake(rank, world_size, victim, pids[victim])
    dist.shutdown()


def _wait_for_others_then_wake(rank: int, world_size: int, victim: int, pid: int) -> None:
    store = importlib.import_module("echelon.dist.runtime")._need().store
    store.set(f"saw-{rank}", "1")
    store.wait([f"saw-{r}" for r in range(world_size) if r != victim], timeout=60)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_broken_at_a_random_moment_is_named_by_all(engine, how):
    seed = 11
    victim = random.Random(seed).randrange(4)
    codes = {victim: -signal.SIGKILL} if how == signal.SIGKILL else {}
    environ = {"ECHELON_SHM": engine}
    run_ranks(_broken, 4, seed, how, timeout_s=90, exit_codes=codes, environ=environ)
