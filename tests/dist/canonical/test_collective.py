"""Sums over ranks in the tree's order: the reference's bits on every backend, at uneven runs."""

from __future__ import annotations

import importlib

import pytest
import torch

import echelon.dist as dist
from echelon.dist import canonical
from echelon.dist.backends.shm import native
from echelon.errors import CollectiveMismatchError
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def _leaf(number, numel, dtype):
    generator = torch.Generator().manual_seed(number + 1)
    return torch.randn(numel, generator=generator).mul(10.0 ** (number % 7 - 3)).to(dtype)


def _runs(total, size, kind):
    if kind == "even":
        return canonical.even_runs(total, size)
    if kind == "last":  # all but the last rank have nothing
        starts = [0] * size + [total]
    else:
        starts = [0, *(min(total, 3 * rank - 2) for rank in range(1, size)), total]
    return [canonical.Run(starts[i], starts[i + 1], total) for i in range(size)]


def _sums(run, numel, dtype):
    sums = canonical.TreeSums(run, numel, canonical.sum_dtype(dtype))
    for number in run.numbers:
        sums.add(number, _leaf(number, numel, dtype))
    return sums


def _same_bits(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _check_all(group):
    cases = [(8, 50, "even"), (7, 1000, "uneven"), (1, 5, "even"), (5, 33, "last"), (6, 0, "even")]
    scratch = canonical.Scratch()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for total, numel, kind in cases:
            leaves = [_leaf(n, numel, dtype) for n in range(total)]
            wide = [leaf.to(canonical.sum_dtype(dtype)) for leaf in leaves]
            expected = canonical.tree_sum(wide, torch.add)
            run = _runs(total, group.size, kind)[group.rank]
            runs = canonical.agree_runs(group, run)
            found = canonical.all_reduce(group, _sums(run, numel, dtype), runs)
            assert _same_bits(found, expected), (dtype, total, numel, kind)
            block = numel // group.size
            splits = [numel - block * (group.size - 1)] + [block] * (group.size - 1)
            part = expected.split(splits)[group.rank] if numel else expected
            for kept in (None, scratch):
                sums = _sums(run, numel, dtype)
                mine = canonical.reduce_scatter(group, sums, runs, splits, scratch=kept)
                assert _same_bits(mine.total(), part), (dtype, total, numel, kind, kept)


def _check_two_levels(group):
    """Reduce within pairs, then across: the sums of a union are reduced further."""
    near = group.split(group.rank // 2, group.rank, "near")
    far = group.split(group.rank % 2, group.rank, "far")
    run = _runs(11, group.size, "even")[group.rank]
    within = canonical.reduce_scatter(near, _sums(run, 32, torch.float32),
                                      canonical.agree_runs(near, run))  # fmt: skip
    total = canonical.all_reduce(far, within, canonical.agree_runs(far, within.run))
    expected = canonical.tree_sum([_leaf(n, 32, torch.float32) for n in range(11)], torch.add)
    assert _same_bits(total, expected.split(16)[near.rank])


def _on(rank, size, backend):
    group = dist.init(backend, timeout_s=60)
    _check_all(group)
    if size == 4:
        _check_two_levels(group)
    dist.shutdown()


@pytest.mark.parametrize("engine", ["native", "python"])
def test_on_shm(engine):
    if engine == "native" and not native.available():
        pytest.skip("the C core was not built here")
    run_ranks(_on, 4, "shm", environ={"ECHELON_SHM": engine}, timeout_s=120)


def test_on_gloo():
    run_ranks(_on, 3, "gloo", timeout_s=120)


def _on_hosts(rank, size, hosts):
    hierarchy = importlib.import_module("echelon.dist.backends.two_level")
    hierarchy.host_identity = lambda: {"boot": f"host {hosts[rank]}"}
    _on(rank, size, "shm+gloo")


def test_on_two_hosts():
    run_ranks(_on_hosts, 3, (0, 0, 1), timeout_s=120)


def test_one_rank():
    run_ranks(_on, 1, "shm", timeout_s=120)


def _with_a_gap(rank, size):
    group = dist.init("shm", timeout_s=60)
    run = canonical.Run(0, 2, 6) if rank == 0 else canonical.Run(3, 6, 6)
    with pytest.raises(CollectiveMismatchError, match="rank 1 has Run") as caught:
        canonical.agree_runs(group, run)
    assert caught.value.ranks == (1,)
    run = canonical.Run(2 * rank, 2 * rank + 2, 6)  # two ranks of three
    runs = canonical.agree_runs(group, run)
    with pytest.raises(ValueError, match="do not cover micro-batches 0 to 5"):
        canonical.all_reduce(group, _sums(run, 4, torch.float32), runs)
    with pytest.raises(ValueError, match="add up to 4"):
        canonical.reduce_scatter(group, _sums(run, 4, torch.float32), runs, [1, 1])
    dist.shutdown()


def test_runs_that_are_not_neighbors_are_an_error_with_the_rank():
    run_ranks(_with_a_gap, 2, timeout_s=60)
