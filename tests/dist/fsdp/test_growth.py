"""Memory over many steps: what a step takes, it gives back."""

from __future__ import annotations

import gc
import itertools
import resource
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import echelon.dist as dist  # noqa: E402
from echelon.dist.fsdp import MixedPrecisionPolicy, fully_shard, gradient_sync  # noqa: E402
from tests.dist.fsdp import models  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks
SIZES = (256, 64, 320, 128)  # units of 64 KiB to 160 KiB
BEFORE = 20  # steps
SMALLEST = 64 << 10


def _resident():
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _steps(rank, size, num_steps):
    models.join()
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(SIZES)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, SIZES[0])
    before = 0
    for step in range(num_steps):
        if step == BEFORE:
            before = _resident()
        with gradient_sync(model, enabled=step % 2 == 1):
            model(x).square().mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    after = _resident()
    dist.shutdown()
    return after - before


@pytest.mark.parametrize("num_steps", [120, pytest.param(1200, marks=pytest.mark.slow)])
def test_a_process_does_not_grow_with_its_steps(num_steps):
    """By less than half of what it would if each step kept the smallest unit's memory."""
    for growth in run_ranks(_steps, 2, num_steps, timeout_s=300):
        assert growth < SMALLEST * (num_steps - BEFORE) / 2
