"""What users of torch's pipelining report as hangs or failures, each as a program that runs here.

Every case runs over each backend: over gloo a send ends only when its receive is posted, and the
activations are larger than what shm holds in flight.
"""

import pytest
import torch
from torch import nn

import echelon.dist as dist
from echelon.dist.backends import registry
from echelon.dist.pipeline import Pipeline, Plan, Stage, schedule
from echelon.dist.pipeline.plan.action import computations
from tests.dist.pipeline.models import Reference, loss_fn, make_batch, make_stage, tie_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks
WIDE = 1 << 18  # 1 MiB a row


class Wide(nn.Module):
    """A large activation from few parameters."""

    def __init__(self, index):
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, 4) + index)

    def forward(self, x):
        return torch.tanh(x.view(len(x), 4, -1) * self.factor[:, None]).view_as(x)


def _wide_gradients(plan, num_rows):
    """Compute in one process what the pipeline is to give, added in each stage's own order."""
    modules = [Wide(index) for index in range(plan.num_stages)]
    shares = []
    for x in _wide_batch(num_rows).tensor_split(plan.num_microbatches):
        for module in modules:
            x = module(x)
        factors = [module.factor for module in modules]
        shares.append(torch.autograd.grad(x.mean() / plan.num_microbatches, factors))
    orders = [
        [a.microbatch for a in computations(row) if a.stage == stage and a.kind in ("B", "I")]
        for stage in range(plan.num_stages)
        for row in [plan.rows[plan.rank_of_stage[stage]]]
    ]
    return [sum(shares[m][stage] for m in order) for stage, order in enumerate(orders)]


def _wide_batch(num_rows):
    return torch.linspace(-1, 1, num_rows * WIDE).view(num_rows, WIDE)


def _run_wide(group, plan, num_rows):
    stages = [
        Stage(Wide(index), index=index, num_stages=plan.num_stages)
        for index in plan.stages_of(group.rank)
    ]
    pipe = Pipeline(stages, group=group, schedule=plan, loss_fn=lambda y, _: y.mean())
    batch = _wide_batch(num_rows)
    pipe.step(batch, batch)
    wanted = _wide_gradients(plan, num_rows)
    for stage in stages:
        assert torch.equal(stage.module.factor.grad, wanted[stage.index]), plan.name


def _swapped_sends(group):
    """pytorch#172668: with sends before receives on both ranks torch's batched messages deadlock.

    The same order of messages, and a plan whose two ranks favor opposite ways.
    """
    plan = Plan.from_csv(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n",
        "swapped",
    )
    _run_wide(group, plan, 2)
    backwards_first = Plan.from_csv("0F0,0F1,0F2,0B2,0B0,0B1\n1F2,1F0,1F1,1B1,1B2,1B0\n", "crossed")
    _run_wide(group, backwards_first, 3)
    # Rank 0 sends all of stage 0's outputs before the one that rank 1 needs next.
    rounds = [(f"2F{m},2B{m},0B{m}", f"1F{m},3F{m},3B{m},1B{m}") for m in range(4)]
    first, second = (",".join(row) for row in zip(*rounds, strict=True))
    _run_wide(group, Plan.from_csv(f"0F0,0F1,0F2,0F3,{first}\n{second}\n", "crowded"), 4)


def _interleaved(group):
    """pytorch#127332: torch's interleaved 1F1B hangs where sends block, and refuses odd numbers."""
    for num_chunks, num_microbatches in [(2, 4), (3, 3), (4, 5)]:
        plan = schedule("interleaved_1f1b", group.size, num_microbatches, num_chunks)
        _run_wide(group, plan, num_microbatches)


def _few_microbatches(group):
    """torchtitan#775: fewer micro-batches than stages hang there; zero-bubble ones are refused."""
    for name in ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"):
        _run_wide(group, schedule(name, group.size, 1), 1)


def _dynamic_shapes(group):
    """pytorch#159942: torch fixes the shapes of all steps to come in its first one."""
    plan = schedule("interleaved_1f1b", group.size, 2)
    modules = {index: make_stage(index, 4) for index in plan.stages_of(group.rank)}
    stages = [Stage(module, index=index, num_stages=4) for index, module in modules.items()]
    pipe = Pipeline(
        stages, group=group, schedule="interleaved_1f1b", num_microbatches=2, loss_fn=loss_fn
    )
    for step, (size, length) in enumerate([(4, 5), (6, 2), (3, 4), (2, 1)]):
        inputs, targets = (one[:, :length].contiguous() for one in make_batch(step, size))
        losses = pipe.step(inputs, targets)
        reference = Reference(4, tied=False)
        wanted = reference.train([(inputs, targets)], 2)
        if losses is not None:
            assert [one.item() for one in losses] == [one.item() for one in wanted[0]]
        for stage in stages:
            for mine, theirs in zip(
                stage.module.parameters(), reference.stages[stage.index].parameters(), strict=True
            ):
                assert torch.equal(mine.grad, theirs.grad)
                mine.grad = None


def _tied_layers(group):
    """pytorch#51931: a parameter shared by stages; copies drift apart there, silently."""
    plan = schedule("1f1b", group.size, 2)
    module = make_stage(group.rank, 2)
    first, last = tie_of(2)
    pipe = Pipeline(
        [Stage(module, index=group.rank, num_stages=2)],
        group=group, schedule=plan, loss_fn=loss_fn, ties=[[first, last]],
    )  # fmt: skip
    name = (first, last)[group.rank].partition(":")[2]
    own = dict(module.named_parameters())[name]
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    before = own.detach().clone()
    for step in range(3):
        pipe.step(*make_batch(step, 4))
        optimizer.step()
        optimizer.zero_grad()
    copies = torch.empty(2, *own.shape)
    group.all_gather(copies.view(-1, own.shape[1]), own.detach())
    assert torch.equal(copies[0], copies[1])
    assert not torch.equal(own, before)


CASES = (_swapped_sends, _interleaved, _few_microbatches, _dynamic_shapes, _tied_layers)


def _all(rank, world_size, backend):
    torch.set_num_threads(1)
    group = dist.init(backend=backend, timeout_s=60)
    for case in CASES:
        case(group)
    dist.shutdown()


@pytest.mark.parametrize("backend", ["shm", "gloo", "xccl"])
def test_what_hangs_elsewhere_runs_over_every_backend(backend):
    status = next(one for one in registry.statuses() if one.name == backend)
    if not status.ready:
        pytest.skip(f"{backend}: {status}")
    run_ranks(_all, 2, backend, timeout_s=120)
