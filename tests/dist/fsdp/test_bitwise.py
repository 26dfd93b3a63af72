"""Sharded training gives the bits of one process that adds micro-batches in rank order."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import echelon.dist as dist  # noqa: E402
from tests.dist.fsdp import models  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks


def _shard(model, **settings):
    from echelon.dist.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def _train(rank, size, steps=5, micro=1, early_optimizer=False, **settings):
    from echelon.dist.fsdp import full_state_dict, gradient_sync

    model = models.make()
    optimizer = models.make_optimizer(model) if early_optimizer else None
    _shard(model, **settings)
    optimizer = optimizer or models.make_optimizer(model)
    for step in range(steps):
        first = (step * size + rank) * micro
        with gradient_sync(model, enabled=False):
            for one in range(micro - 1):
                models.loss_of(model, first + one).backward()
        models.loss_of(model, first + micro - 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state_dict(model)


CASES = [
    {},
    {"early_optimizer": True, "prefetch": 2},
    {"reshard_after_forward": False},
    {"micro": 3},
    {"prefetch": 0, "micro": 2, "reshard_after_forward": False},
]


def _same(state, expected) -> list[str]:
    assert state.keys() == expected.keys()
    return [name for name in expected if not torch.equal(state[name], expected[name])]


def _rank(rank, size, cases):
    models.join()
    different = []
    for case in cases:
        expected = models.train_alone(size, 5, case.get("micro", 1))
        different.append((case, _same(_train(rank, size, **case), expected)))
    dist.shutdown()
    return different


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_one_process(size):
    cases = list(CASES)
    if size == 4:
        cases.insert(0, {"reshard_after_forward": 2})
    for different in run_ranks(_rank, size, cases, timeout_s=120):
        assert different == [(case, []) for case in cases]
