"""Gradients of every schedule: bitwise those of one process that adds in the same order."""

import pytest
import torch

import echelon.dist as dist
from echelon.dist.fsdp import fully_shard, shards
from echelon.dist.fsdp.parameters.unit import State, units_of
from echelon.dist.mesh import DeviceMesh
from echelon.dist.pipeline import Pipeline, Stage, schedule
from echelon.dist.pipeline.plan.lower import add_sharding
from tests.dist.pipeline.models import (
    Reference,
    loss_fn,
    make_batch,
    make_stage,
    plain_gradients,
    tie_of,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks
NAMES = (
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv",
    "dualpipev",
)  # fmt: skip


def _pipeline(name, group, num_microbatches, *, tied, shard_over=None, replicas=None):
    plan = schedule(name, group.size, num_microbatches)
    stages = []
    for index in plan.stages_of(group.rank):
        module = make_stage(index, plan.num_stages)
        if shard_over is not None:
            for layer in module:
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, group=shard_over)
            if any(True for _ in module.parameters(recurse=False)):
                fully_shard(module, group=shard_over)
        stages.append(Stage(module, index=index, num_stages=plan.num_stages))
    return Pipeline(
        stages, group=group, num_microbatches=num_microbatches, loss_fn=loss_fn,
        # Given back whenever they can be: the hardest case.
        schedule=name if shard_over is None else add_sharding(plan, keep=0),
        ties=[tie_of(plan.num_stages)] if tied else [], replicas=replicas,
    )  # fmt: skip


def _check(pipe, reference, name, plain, *, first_step):
    """Compare this rank's gradients, whole or shards, with the reference's, bit by bit."""
    for stage in pipe.stages:
        theirs = dict(reference.stages[stage.index].named_parameters())
        parts = shards(stage.module)
        for key, parameter in stage.module.named_parameters():
            wanted, mine = theirs[key].grad, parameter.grad
            rough = plain[stage.index][key]
            if key in parts:
                shard = parts[key]
                cut = slice(shard.start, shard.start + shard.length)
                wanted, rough = wanted.reshape(-1)[cut], rough.reshape(-1)[cut]
                mine = shard.parameter.grad
                mine = torch.zeros(0) if mine is None else mine.reshape(-1)
            assert torch.equal(mine, wanted), (name, stage.index, key, (mine - wanted).abs().max())
            if first_step:  # afterwards the ways have parted by a rounding
                scale = plain_scale(plain, stage.index, key)
                assert (mine - rough).abs().max().item() <= 1e-6 * scale if len(mine) else True


def plain_scale(plain, index, key):
    return max(plain[index][key].abs().max().item(), 1e-3)


def _train(pipe, num_replicas, replica, name, *, tied, num_steps=2):
    """Train a few steps beside the reference; the second one has another shape."""
    m = pipe.num_microbatches
    reference = Reference(pipe.plan.num_stages, tied=tied)
    ours = torch.optim.SGD([p for s in pipe.stages for p in s.module.parameters()], lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(num_steps):
        batches = [make_batch(10 * step + d, (2 + step) * m) for d in range(num_replicas)]
        plain = plain_gradients(pipe.plan.num_stages, batches, tied=tied)
        inputs, targets = batches[replica]
        losses = pipe.step(inputs if pipe.has_first else None, targets if pipe.has_last else None)
        wanted = reference.train(batches, m)
        _check(pipe, reference, name, plain, first_step=step == 0)
        if pipe.has_last:
            assert len(losses) == m
            assert all(torch.equal(a, b) for a, b in zip(losses, wanted[replica], strict=True))
        else:
            assert losses is None
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()


def _every_schedule(rank, world_size, num_microbatches):
    world = dist.init(reduction="rank_ordered")
    torch.set_num_threads(1)
    for name in NAMES:
        for tied in (False, True):
            pipe = _pipeline(name, world, num_microbatches, tied=tied)
            _train(pipe, 1, 0, name, tied=tied, num_steps=2 if tied else 1)
    if world_size == 4:  # sharding at its hardest needs no other ranks to divide by
        alone = DeviceMesh((4, 1), ("pp", "dp"))
        for name in NAMES:
            pipe = _pipeline(name, alone.group("pp"), 4, tied=True, shard_over=alone.group("dp"))
            _train(pipe, 1, 0, name, tied=True)
    dist.shutdown()


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 6)])
def test_every_schedule_gives_the_gradients_of_one_process(num_ranks, num_microbatches):
    """Uneven stages, tied embeddings among them; six micro-batches lie outside most domains."""
    run_ranks(_every_schedule, num_ranks, num_microbatches, timeout_s=120)


def _with_replicas(rank, world_size, sharded, names):
    dist.init(reduction="rank_ordered")
    torch.set_num_threads(1)
    mesh = DeviceMesh((world_size // 2, 2), ("pp", "dp"))
    for name in names:
        how = {"shard_over": mesh.group("dp")} if sharded else {"replicas": mesh.group("dp")}
        pipe = _pipeline(name, mesh.group("pp"), 4, tied=True, **how)
        _train(pipe, 2, mesh.group("dp").rank, name, tied=True)
        _evaluate(pipe)
    dist.shutdown()


def _evaluate(pipe):
    """Evaluating twice gives the same, leaves no gradients, and gives all parameters back."""
    inputs, targets = make_batch(99, 8)
    first, second = pipe.evaluate(inputs, targets), pipe.evaluate(inputs, targets)
    if pipe.has_last:
        assert [one.item() for one in first] == [one.item() for one in second]
    parameters = [p for stage in pipe.stages for p in stage.module.parameters()]
    assert all(parameter.grad is None for parameter in parameters)
    for stage in pipe.stages:
        assert all(unit.state is State.SHARDED for unit in units_of(stage.module))


@pytest.mark.parametrize(
    ("num_ranks", "sharded", "names"),
    [
        (4, True, NAMES),
        (4, False, NAMES),
        (8, True, ("interleaved_zero_bubble", "dualpipev")),  # stages in a ring, and in a V
        pytest.param(8, True, NAMES, marks=pytest.mark.slow),
    ],
)
def test_every_schedule_with_data_parallelism(num_ranks, sharded, names):
    """Two or four stages' ranks times two replicas, parameters divided among these, or copied."""
    run_ranks(_with_replicas, num_ranks, sharded, names, timeout_s=60 * num_ranks)
