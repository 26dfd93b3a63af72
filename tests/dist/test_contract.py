"""The contract suite, on every backend that is there."""

from __future__ import annotations

import importlib

import pytest

import echelon.dist as dist
from echelon.dist.backends import registry
from tests.dist import contract
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


def _keep_contract(rank: int, world_size: int, backend: str, traits: contract.Traits) -> str:
    group = dist.init(backend, timeout_s=60)
    for check in contract.CHECKS:
        check(group, traits)
    dist.shutdown()
    return group.backend


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_shm_keeps_the_contract(world_size, engine):
    ends = run_ranks(
        _keep_contract,
        world_size,
        "shm",
        contract.Traits(),
        timeout_s=240,
        environ={"ECHELON_SHM": engine},
    )
    assert ends == ["shm"] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gloo_keeps_the_contract(world_size):
    pytest.importorskip("torch")
    traits = contract.Traits(ordered=False)
    assert run_ranks(_keep_contract, world_size, "gloo", traits, timeout_s=240) == (
        ["gloo"] * world_size
    )


@pytest.mark.parametrize(
    ("world_size", "is_slow"),
    [(2, True), pytest.param(4, False, marks=pytest.mark.slow)],
)
def test_xccl_keeps_the_contract(world_size, is_slow):
    reason = next(status.reason for status in registry.statuses() if status.name == "xccl")
    if reason:
        pytest.skip(reason)
    traits = contract.Traits(ordered=False, has_messages=False, is_slow=is_slow)
    assert run_ranks(_keep_contract, world_size, "xccl", traits, timeout_s=600) == (
        ["xccl"] * world_size
    )


def _keep_contract_on_hosts(rank: int, world_size: int, hosts: tuple[int, ...]) -> str:
    """Ranks that believe to be on several hosts: the logic of two levels, without networks."""
    hierarchy = importlib.import_module("echelon.dist.backends.hierarchy")
    hierarchy.host_identity = lambda: {"boot": f"host {hosts[rank]}"}
    return _keep_contract(rank, world_size, "shm+gloo", contract.Traits(ordered=False))


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1)])
def test_shm_gloo_keeps_the_contract(hosts):
    pytest.importorskip("torch")
    ends = run_ranks(_keep_contract_on_hosts, len(hosts), hosts, timeout_s=240)
    assert ends == ["shm+gloo"] * len(hosts)


def _keep_order(rank: int, world_size: int, backend: str) -> None:
    hierarchy = importlib.import_module("echelon.dist.backends.hierarchy")
    hierarchy.host_identity = lambda: {"boot": f"host {rank // 2}"}
    group = dist.init(backend, timeout_s=60, reduction="rank_ordered")
    traits = contract.Traits(ordered=True)
    for check in (contract.check_large, contract.check_reduce_scatter, contract.check_reduce):
        check(group, traits)
    dist.shutdown()


@pytest.mark.parametrize("backend", ["gloo", "shm+gloo"])
def test_rank_ordered_sums_are_the_same_bits_on_every_backend(backend):
    pytest.importorskip("torch")
    run_ranks(_keep_order, 4, backend, timeout_s=240)
