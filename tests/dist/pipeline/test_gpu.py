"""Pipelines and messages on devices: several ranks on one card, over the host's engine.

`init()` stages a device's arrays through the host where ranks share a card, so one card is enough
for every schedule. Where there are two cards, the same runs over nccl.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import echelon.dist as dist  # noqa: E402
from echelon.dist.pipeline import Pipeline, Stage, schedule  # noqa: E402
from tests.dist.pipeline.models import (  # noqa: E402
    Reference,
    loss_fn,
    make_batch,
    make_stage,
    tie_of,
)
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]
NAMES = (
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv",
    "dualpipev",
)  # fmt: skip


def _schedules(rank, world_size, backend):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.set_default_device("cuda")  # the models' positions are made in their forward
    dist.init(backend, timeout_s=120)
    for name in NAMES:
        plan = schedule(name, world_size, 4)
        last = plan.num_stages - 1
        stages = [
            Stage(make_stage(index, plan.num_stages), index=index, num_stages=plan.num_stages)
            for index in plan.stages_of(rank)
        ]
        pipe = Pipeline(stages, schedule=plan, loss_fn=loss_fn, ties=[tie_of(plan.num_stages)])
        reference = Reference(plan.num_stages, tied=True)
        for step, size in enumerate((4, 8, 4)):  # outputs grow and shrink
            with torch.device("cpu"):
                inputs, targets = (one.cuda() for one in make_batch(step, size))
            wanted = reference.train([(inputs, targets)], 4)[0]
            torch.cuda.synchronize()
            # Staging copies wait for the device; over nccl nothing in a step does.
            is_strict = backend == "nccl" and step > 0
            torch.cuda.set_sync_debug_mode("error" if is_strict else "default")
            losses = pipe.step(inputs, targets)
            torch.cuda.set_sync_debug_mode("default")
            if last in plan.stages_of(rank):
                for mine, theirs in zip(losses, wanted, strict=True):
                    assert mine.item() == pytest.approx(theirs.item(), rel=1e-4), name
            for stage in stages:
                others = reference.stages[stage.index].parameters()
                for mine, theirs in zip(stage.module.parameters(), others, strict=True):
                    assert torch.allclose(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5), name
                    mine.grad = None
    dist.shutdown()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_schedule_on_one_card(num_ranks):
    run_ranks(_schedules, num_ranks, None, timeout_s=300)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_every_schedule_over_nccl():
    run_ranks(_schedules, 2, "nccl", timeout_s=300)


def _messages(rank, world_size):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    world = dist.init(timeout_s=60)
    world.all_reduce(torch.zeros(1, device="cuda"))  # a group's first operation on a device
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    to, source = world.channel(after, "ring"), world.channel(before, "ring")
    for size in (1, 1000, 1 << 20):
        mine = torch.full((size,), float(rank), device="cuda")
        got = torch.empty(size, device="cuda")
        work = to.send(mine, async_op=True)  # all send first
        source.recv(got)
        work.wait()
        assert bool((got == before).all())
    world.barrier()
    dist.shutdown()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_messages_on_one_card(num_ranks):
    run_ranks(_messages, num_ranks, timeout_s=120)
