"""Random masks: the same ones in the recomputation and in both halves of a split backward.

The judge is one process that runs each rank's forwards in that rank's order, from the rank's own
generator, and whole backwards of the unsplit graph without any checkpointing.
"""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import echelon.dist as dist  # noqa: E402
from echelon.dist.pipeline import Pipeline, Stage, schedule  # noqa: E402
from echelon.dist.pipeline.execute.stage import Stage as OneStage  # noqa: E402
from echelon.dist.pipeline.plan.action import Kind, computations  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks
WIDTH, MICROBATCHES = 16, 4
HOW = ("plain", "checkpointed", "reentrant")


class Dropping(nn.Module):
    """A block with dropout on both branches; its activations may be recomputed."""

    def __init__(self, how):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.how = how

    def inner(self, x):
        hidden = nn.functional.dropout(torch.tanh(self.up(self.norm(x))), 0.5)
        return x + nn.functional.dropout(self.down(hidden), 0.25)

    def forward(self, x):
        if self.how == "plain":
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")


def make_stage(index, how):
    torch.manual_seed(70 + index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Dropping(how) for _ in range(1 + index % 2)])


def loss_fn(output, targets):
    return (output - targets).square().mean()


def make_batch():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, 2 * MICROBATCHES, WIDTH, generator=generator)


def reference(plan, num_steps):
    """Return the losses of all steps, and each stage's gradients, added up over the steps."""
    stages = [make_stage(index, "plain") for index in range(plan.num_stages)]
    generators = [_seeded(rank) for rank in range(plan.num_ranks)]
    losses = []
    inputs, targets = (one.tensor_split(MICROBATCHES) for one in make_batch())
    for _ in range(num_steps):
        outputs = {(-1, m): x for m, x in enumerate(inputs)}
        waiting = [[a for a in computations(row) if a.kind is Kind.FORWARD] for row in plan.rows]
        while any(waiting):
            for rank, row in enumerate(waiting):
                while row and (row[0].stage - 1, row[0].microbatch) in outputs:
                    action = row.pop(0)
                    torch.set_rng_state(generators[rank])
                    x = outputs[action.stage - 1, action.microbatch]
                    outputs[action.stage, action.microbatch] = stages[action.stage](x)
                    generators[rank] = torch.get_rng_state()
        last = plan.num_stages - 1
        each = [loss_fn(outputs[last, m], targets[m]) for m in range(MICROBATCHES)]
        for action in computations(plan.rows[plan.rank_of_stage[last]]):
            if action.stage == last and action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
                (each[action.microbatch] / MICROBATCHES).backward()
        losses += [one.item() for one in each]
    return losses, [[p.grad for p in stage.parameters()] for stage in stages]


def _seeded(rank):
    return torch.Generator().manual_seed(1000 + rank).get_state()


def _masks(rank, world_size, names):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # of the second recomputation
    dist.init()
    for name in names:
        plan = schedule(name, world_size, MICROBATCHES)
        wanted_losses, wanted = reference(plan, 2)
        for how in HOW:
            if how == "reentrant" and any(
                action.kind is Kind.INPUT_GRAD for row in plan.rows for action in computations(row)
            ):
                continue  # torch refuses reentrant checkpoints where inputs= is given
            modules = {index: make_stage(index, how) for index in plan.stages_of(rank)}
            stages = [Stage(m, index=i, num_stages=plan.num_stages) for i, m in modules.items()]
            pipe = Pipeline(stages, schedule=plan, loss_fn=loss_fn)
            inputs, targets = make_batch()
            torch.set_rng_state(_seeded(rank))
            losses = [loss.item() for _ in range(2) for loss in pipe.step(inputs, targets) or ()]
            assert not pipe.has_last or losses == wanted_losses, (name, how)
            for index, module in modules.items():
                for mine, theirs in zip(module.parameters(), wanted[index], strict=True):
                    torch.testing.assert_close(
                        mine.grad, theirs, rtol=1e-5, atol=1e-7, msg=f"{name}, {how}"
                    )
    dist.shutdown()


def test_stages_with_dropout_train_as_the_unsplit_model_with_the_same_masks():
    run_ranks(_masks, 2, ("1f1b", "zbv"), timeout_s=300)


@pytest.mark.parametrize("is_split", [False, True])
def test_a_recomputed_block_leaves_the_generator_where_it_was(is_split):
    """Else the masks of later micro-batches would depend on when backwards run."""
    warnings.simplefilter("ignore", RuntimeWarning)
    stage = OneStage(make_stage(1, "checkpointed"), index=1, num_stages=3)
    x = torch.randn(4, WIDTH, requires_grad=True)
    stage.keep(0, [x], outputs := stage.module(x))
    before = torch.get_rng_state()
    if is_split:
        stage.input_half(0, [torch.ones_like(outputs)])
        assert torch.equal(torch.get_rng_state(), before)
        stage.weight_half(0)
    else:
        stage.backward(0, [torch.ones_like(outputs)])
    assert torch.equal(torch.get_rng_state(), before)
