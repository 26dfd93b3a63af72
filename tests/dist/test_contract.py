"""The contract suite, on every backend that is there."""

from __future__ import annotations

import pytest

import echelon.dist as dist
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
        timeout_s=120,
        environ={"ECHELON_SHM": engine},
    )
    assert ends == ["shm"] * world_size
