"""Ranks that call different things: the same named error on every rank, and no garbage."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

import echelon.dist as dist
from echelon.dist.backends import registry
from echelon.errors import CollectiveError, CollectiveMismatchError
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def _call(world, kind: str, odd: bool) -> np.ndarray:
    x = np.full(6, 7.0, np.float32)
    if kind == "way":  # on two levels it is another one
        world.all_to_all(np.zeros(8), np.zeros(8)) if odd else world.all_reduce(x)
    elif kind == "operation":
        world.broadcast(x, 0) if odd else world.all_reduce(x)
    elif kind == "shape":
        world.all_reduce(x[:3] if odd else x)
    elif kind == "dims":
        world.all_reduce(x.reshape(2, 3) if odd else x.reshape(3, 2))
    elif kind == "dtype":
        world.all_reduce(x.astype(np.float64) if odd else x)
    elif kind == "reduce_op":
        world.all_reduce(x, "max" if odd else "sum")
    elif kind == "gather splits":
        splits = [0, 2, 3, 1] if odd else [2, 2, 1, 1]
        part = x[: splits[world.rank]]
        world.all_gather(np.zeros(6, np.float32), part, output_splits=splits)
    elif kind == "scatter splits":
        splits = [0, 2, 3, 1] if odd else [2, 2, 1, 1]
        world.reduce_scatter(np.zeros(splits[world.rank], np.float32), x, input_splits=splits)
    elif kind == "even or not":
        splits = None if odd else [1] * 4
        world.all_gather(np.zeros(4, np.float32), x[:1], output_splits=splits)
    elif kind == "root":
        world.broadcast(x, 1 if odd else 0)
    return x


_TEXTS = {
    "way": "all_to_all float64[*], the others all_reduce(sum) float32[6]",
    "operation": "broadcast(root 0) float32[6], the others all_reduce(sum) float32[6]",
    "shape": "all_reduce(sum) float32[3], the others all_reduce(sum) float32[6]",
    "dims": "all_reduce(sum) float32[2, 3], the others all_reduce(sum) float32[3, 2]",
    "dtype": "all_reduce(sum) float64[6], the others all_reduce(sum) float32[6]",
    "reduce_op": "all_reduce(max) float32[6], the others all_reduce(sum) float32[6]",
    "gather splits": "all_gather(splits [0, 2, 3, 1]) float32[6], "
    "the others all_gather(splits [2, 2, 1, 1]) float32[6]",
    "scatter splits": "reduce_scatter(sum, splits [0, 2, 3, 1]) float32[6], "
    "the others reduce_scatter(sum, splits [2, 2, 1, 1]) float32[6]",
    "even or not": "all_gather float32[1], the others all_gather(splits [1, 1, 1, 1]) float32[4]",
    "root": "broadcast(root 1) float32[6], the others broadcast(root 0) float32[6]",
}


def _differ(rank: int, world_size: int, backend: str, kind: str, odd: tuple[int, ...]) -> str:
    world = dist.init(backend, timeout_s=30)
    world.barrier()
    with pytest.raises(CollectiveMismatchError) as caught:
        _call(world, kind, rank in odd)
    error = caught.value
    assert error.ranks == odd, error.ranks
    assert (error.group, error.sequence) == ("world", 1)
    assert __file__ in str(error), "names the caller's line"
    with pytest.raises(CollectiveError, match="broken since") as again:
        world.barrier()
    assert again.value.ranks == odd
    if backend != "shm":  # which leaves no verdict in the store
        _no_rank_is_called_lost()
    dist.shutdown()
    return str(error).partition(". Called at")[0]


def _no_rank_is_called_lost() -> None:
    """Check that no rank, once all have failed, has published that another one is gone."""
    store = importlib.import_module("echelon.dist.runtime")._need().store
    store.barrier("ended", dist.world().size, timeout=60)
    assert [key for key in store.list_keys() if key.endswith("verdict")] == []


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("kind", _TEXTS)
def test_every_rank_names_the_one_that_differs(kind, engine):
    texts = run_ranks(_differ, 4, "shm", kind, (2,), environ={"ECHELON_SHM": engine})
    assert [text.partition(": ")[2] for text in texts] == [f"rank 2 called {_TEXTS[kind]}"] * 4


def _differ_in_everything(rank: int, world_size: int, backend: str) -> list[str]:
    """Differ in each way in turn, in a group of its own."""
    two_level = importlib.import_module("echelon.dist.backends.two_level")
    two_level.host_identity = lambda: {"boot": f"host {rank // 2}"}
    world = dist.init(backend, timeout_s=30)
    texts = []
    for kind in _TEXTS:
        group = dist.new_group(range(world_size), name=kind)
        with pytest.raises(CollectiveMismatchError) as caught:
            _call(group, kind, rank == 2)
        assert caught.value.ranks == (2,), caught.value
        assert (caught.value.group, caught.value.sequence) == (kind, 0)
        texts.append(str(caught.value).partition(". Called at")[0])
    group = dist.new_group(range(world_size), name="large")
    x = np.full(1_000_000 + (rank == 1), 1.0, np.float32)
    with pytest.raises(CollectiveMismatchError, match="rank 1 called"):
        group.all_reduce(x)
    assert (x == 1).all()
    group = dist.new_group(range(world_size), name="splits")
    counts = [1, 2, 0, 1] if rank == 2 else [1] * 4
    with pytest.raises(CollectiveMismatchError, match="what one rank sends") as caught:
        group.all_to_all(np.zeros(4), np.zeros(4), input_splits=counts)
    assert caught.value.ranks == (1, 2)
    _no_rank_is_called_lost()
    world.barrier()
    dist.shutdown()
    return texts


@pytest.mark.parametrize("backend", ["gloo", "shm+gloo", "xccl"])
def test_other_backends_name_every_difference_alike(backend):
    reason = next(status.reason for status in registry.statuses() if status.name == backend)
    if reason:
        pytest.skip(reason)
    everywhere = run_ranks(_differ_in_everything, 4, backend, timeout_s=150)
    for texts in everywhere:  # a rank that is late finds its group broken by this, and says so
        assert [text.rpartition("(4 ranks): ")[2] for text in texts] == [
            f"rank 2 called {text}" for text in _TEXTS.values()
        ]


def _differ_in_tie(rank: int, world_size: int) -> tuple[int, ...]:
    world = dist.init(timeout_s=30)
    with pytest.raises(CollectiveMismatchError) as caught:
        world.all_reduce(np.zeros(3 + rank))
    dist.shutdown()
    return caught.value.ranks


def test_a_tie_names_both_sides():
    assert run_ranks(_differ_in_tie, 2) == [(0, 1)] * 2


def _differ_large(rank: int, world_size: int) -> None:
    """Larger than every slot: nobody may take a piece of garbage before the check."""
    world = dist.init(timeout_s=30)
    x = np.full(1_000_000 + (rank == 1), 1.0, np.float32)
    with pytest.raises(CollectiveMismatchError, match="rank 1 called"):
        world.all_reduce(x)
    assert (x == 1).all()
    dist.shutdown()


def test_arrays_are_untouched_when_a_large_call_differs():
    run_ranks(_differ_large, 3)


def _differ_async(rank: int, world_size: int) -> None:
    world = dist.init(timeout_s=30)
    good = np.ones(4)
    first = world.all_reduce(good, async_op=True)
    bad = world.all_reduce(np.ones(4 + rank), async_op=True)
    with pytest.raises(CollectiveMismatchError) as caught:
        _sum_to_its_end(world)
    assert set(caught.value.ranks) == {0, 1}
    first.wait()
    assert (good == world_size).all()
    with pytest.raises(CollectiveMismatchError) as caught:
        bad.wait(timeout_s=20)
    assert set(caught.value.ranks) == {0, 1}
    assert bad.done
    dist.shutdown()


def _sum_to_its_end(world) -> None:
    """The call raises itself where the mismatch before it is known already."""
    world.all_reduce(np.ones(4), async_op=True).wait(timeout_s=20)


def test_async_work_carries_the_error_and_so_does_what_follows():
    run_ranks(_differ_async, 2)


def _differ_in_splits(rank: int, world_size: int) -> tuple[int, ...]:
    world = dist.init(timeout_s=30)
    counts = [1, 1, 1]
    if rank == 2:
        counts = [1, 2, 0]  # rank 1 expects one row of it
    with pytest.raises(CollectiveMismatchError, match="what one rank sends") as caught:
        world.all_to_all(np.zeros(3), np.zeros(3), input_splits=counts)
    dist.shutdown()
    return caught.value.ranks


@pytest.mark.parametrize("engine", ["native", "python"])
def test_splits_that_do_not_fit_together_name_both_ends(engine):
    ranks = run_ranks(_differ_in_splits, 3, environ={"ECHELON_SHM": engine})
    assert ranks == [(1, 2)] * 3


def _differ_in_message(rank: int, world_size: int) -> None:
    world = dist.init(timeout_s=30)
    if rank == 0:
        world.send(np.zeros(3, np.float32), 1, tag=4)
        with pytest.raises(CollectiveMismatchError, match="rank 0, rank 1"):
            world.recv(np.zeros(1), 1)
    else:
        with pytest.raises(CollectiveMismatchError, match=r"recv\(tag 4\) float64\[3\]") as caught:
            world.recv(np.zeros(3), 0, tag=4)
        assert caught.value.ranks == (0, 1)
    dist.shutdown()


@pytest.mark.parametrize("engine", ["native", "python"])
def test_a_message_of_another_dtype_is_named_on_both_ends(engine):
    run_ranks(_differ_in_message, 2, environ={"ECHELON_SHM": engine})
