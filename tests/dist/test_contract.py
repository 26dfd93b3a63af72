"""The contract suite, on every backend that is there."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

import echelon.dist as dist
from echelon.dist.backends import registry
from echelon.dist.backends.shm import native
from tests.dist import contract, oracle
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def _keep_contract(rank: int, world_size: int, backend: str, traits: contract.Traits) -> str:
    group = dist.init(backend, timeout_s=60)
    for check in contract.CHECKS:
        check(group, traits)
    dist.shutdown()
    core = native.core()
    assert core is None or core.lost_wakes() == 0
    return group.backend


# One run of each engine, with every dtype or a few that stand for all, is for each change. Other
# numbers of ranks, and all dtypes everywhere, are `slow`: they take minutes together.
_slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("engine", "world_size", "is_slow"),
    [
        ("native", 1, True),
        ("native", 2, True),
        ("native", 4, False),
        ("python", 3, True),
        *(pytest.param("native", size, False, marks=_slow) for size in (2, 3, 5)),
        *(pytest.param("python", size, False, marks=_slow) for size in (1, 2, 4, 5)),
    ],
)
def test_shm_keeps_the_contract(engine, world_size, is_slow):
    ends = run_ranks(
        _keep_contract,
        world_size,
        "shm",
        contract.Traits(is_slow=is_slow),
        timeout_s=600,
        environ={"ECHELON_SHM": engine},
    )
    assert ends == ["shm"] * world_size


@pytest.mark.parametrize(
    ("world_size", "is_slow"),
    [
        (3, True),
        *(pytest.param(size, True, marks=_slow) for size in (1, 5)),
        *(pytest.param(size, False, marks=_slow) for size in (2, 4)),
    ],
)
def test_gloo_keeps_the_contract(world_size, is_slow):
    pytest.importorskip("torch")
    traits = contract.Traits(ordered=False, is_slow=is_slow)
    assert run_ranks(_keep_contract, world_size, "gloo", traits, timeout_s=600) == (
        ["gloo"] * world_size
    )


@pytest.mark.parametrize(
    ("world_size", "is_slow"),
    [(2, True), *(pytest.param(size, size == 5, marks=_slow) for size in (3, 4, 5))],
)
def test_xccl_keeps_the_contract(world_size, is_slow):
    reason = next(status.reason for status in registry.statuses() if status.name == "xccl")
    if reason:
        pytest.skip(reason)
    traits = contract.Traits(ordered=False, is_slow=is_slow)
    assert run_ranks(_keep_contract, world_size, "xccl", traits, timeout_s=600) == (
        ["xccl"] * world_size
    )


def _keep_contract_on_hosts(
    rank: int, world_size: int, hosts: tuple[int, ...], is_slow: bool
) -> str:
    """Ranks that believe to be on several hosts: the logic of two levels, without networks."""
    hierarchy = importlib.import_module("echelon.dist.backends.two_level")
    hierarchy.host_identity = lambda: {"boot": f"host {hosts[rank]}"}
    hierarchy._CHUNK_BYTES = 100_000  # so that arrays of a few MB are cut into many
    traits = contract.Traits(ordered=False, is_slow=is_slow)
    return _keep_contract(rank, world_size, "shm+gloo", traits)


@pytest.mark.parametrize(
    ("hosts", "is_slow"),
    [
        ((0, 1, 0, 1), True),
        pytest.param((0, 0, 1, 1), False, marks=_slow),
        pytest.param((0, 0, 1), True, marks=_slow),
        pytest.param((0, 0, 1, 1, 1), True, marks=_slow),
        pytest.param((0, 1, 2, 0, 1, 2), True, marks=_slow),  # three hosts: a ring between them
    ],
)
def test_shm_gloo_keeps_the_contract(hosts, is_slow):
    pytest.importorskip("torch")
    ends = run_ranks(_keep_contract_on_hosts, len(hosts), hosts, is_slow, timeout_s=600)
    assert ends == ["shm+gloo"] * len(hosts)


def _sum_on_hosts(rank: int, world_size: int, hosts: tuple[int, ...]) -> None:
    hierarchy = importlib.import_module("echelon.dist.backends.two_level")
    hierarchy.host_identity = lambda: {"boot": f"host {hosts[rank]}"}
    hierarchy._CHUNK_BYTES = 100_000
    group = dist.init("shm+gloo", timeout_s=60)
    traits = contract.Traits(ordered=False, is_slow=True)
    for dtype in ("float32", "bfloat16"):
        parts = [oracle.data(dtype, (150_001,), other) for other in range(world_size)]
        x = parts[rank].copy()
        group.all_reduce(x)
        oracle.assert_reduced(x, oracle.reduced(parts, "sum"), dtype, "sum", ordered=False)
    contract.check_messages(group, traits)
    contract.check_objects(group, traits)
    dist.shutdown()


@pytest.mark.parametrize("hosts", [(0, 0, 1), (0, 1, 2, 0, 1, 2)])
def test_shm_gloo_sums_on_uneven_hosts_and_in_a_ring_of_three(hosts):
    pytest.importorskip("torch")
    run_ranks(_sum_on_hosts, len(hosts), hosts, timeout_s=600)


def _keep_order(rank: int, world_size: int, backend: str) -> None:
    hierarchy = importlib.import_module("echelon.dist.backends.two_level")
    hierarchy.host_identity = lambda: {"boot": f"host {rank // 2}"}
    group = dist.init(backend, timeout_s=60, reduction="rank_ordered")
    traits = contract.Traits(ordered=True, is_slow=True)
    contract.check_large(group, traits)
    contract.check_reduce(group, traits)
    contract.check_all_reduce(group, traits)
    contract.check_reduce_scatter(group, traits)
    dist.shutdown()


@pytest.mark.parametrize(
    ("backend", "world_size"),
    [("gloo", 3), ("shm+gloo", 4), pytest.param("xccl", 3, marks=_slow)],
)
def test_rank_ordered_sums_are_the_same_bits_on_every_backend(backend, world_size):
    reason = next(status.reason for status in registry.statuses() if status.name == backend)
    if reason:
        pytest.skip(reason)
    run_ranks(_keep_order, world_size, backend, timeout_s=400)


def _carry_over_two_gib(rank: int, world_size: int) -> None:
    world = dist.init("shm", timeout_s=240)
    size = (2 << 30) + 5
    x = np.full(size, rank + 1, np.uint8)
    x[-1] = 7
    world.all_reduce(x)
    assert (x[0], x[size // 2], x[-2], x[-1]) == (3, 3, 3, 14)
    if rank == 0:
        world.send(x, 1)
    else:
        x[:] = 0
        world.recv(x, 0)
        assert (x[0], x[size // 2], x[-1]) == (3, 3, 14)
    dist.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "python"])
def test_arrays_of_more_than_2_gib_are_carried(engine):
    run_ranks(_carry_over_two_gib, 2, timeout_s=600, environ={"ECHELON_SHM": engine})
