"""Another implementation as the judge: torch's pipelining over gloo, with the same seeds and data.

Both train for a few steps in the same processes, in the same micro-batches; losses and parameters
agree step by step. Stages are uneven and one may be frozen, blocks may be checkpointed, gradients
may accumulate over two batches, first and last stage may share a weight.
"""

import datetime
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as torch_dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import echelon.dist as dist  # noqa: E402
from echelon.dist.pipeline import Pipeline, Stage, schedule  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks
WIDTH, CLASSES, MICROBATCHES = 8, 5, 4
TORCHS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
}
SETTINGS = {
    "plain": {},
    "accumulated": {"num_batches": 2},
    "frozen": {"frozen": 1},
    "checkpointed": {"checkpointed": True},
    "tied": {"tied": True},
}


class Block(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.checkpointed = checkpointed

    def inner(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x):
        return (
            checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        )


def make_stage(index, num_stages, *, frozen=-1, checkpointed=False):
    """Stage i has 1 + i % 2 blocks besides the embedding or the head."""
    torch.manual_seed(50 + index)
    layers = [Block(checkpointed) for _ in range(1 + index % 2)]
    if index == 0:
        layers.insert(0, nn.Embedding(CLASSES, WIDTH))
    if index == num_stages - 1:
        layers.append(nn.Linear(WIDTH, CLASSES, bias=False))
    module = nn.Sequential(*layers)
    if index == frozen:  # of the last stage all but the head
        for layer in layers[: 1 + index % 2]:
            layer.requires_grad_(False)
    return module


def loss_fn(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def batches(step, num):
    generator = torch.Generator().manual_seed(step)
    for _ in range(num):
        ids = torch.randint(CLASSES, (2 * MICROBATCHES, 4), generator=generator)
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Ours:
    def __init__(self, plan, modules, *, tied):
        last = plan.num_stages - 1
        place = len(make_stage(last, plan.num_stages)) - 1
        stages = [Stage(m, index=i, num_stages=plan.num_stages) for i, m in modules.items()]
        ties = [["0:0.weight", f"{last}:{place}.weight"]] if tied else []
        self.pipe = Pipeline(stages, schedule=plan, loss_fn=loss_fn, ties=ties)

    def step(self, inputs, targets):
        return self.pipe.step(inputs, targets) or []

    def end(self):
        """Nothing is left to do before the optimizer."""


class Theirs:
    def __init__(self, name, plan, modules, group, *, tied):
        from torch.distributed import pipelining

        stages = []
        for index, module in modules.items():
            stage = pipelining.PipelineStage(
                module, index, plan.num_stages, torch.device("cpu"), group=group
            )
            stage.stage_index_to_group_rank = dict(enumerate(plan.rank_of_stage))
            stages.append(stage)
        made = getattr(pipelining.schedules, TORCHS[name])
        # torch would scale the sum so far at the end of each batch
        options = {"loss_fn": loss_fn, "scale_grads": False}
        only = len(stages) == 1 and plan.num_chunks == 1
        self._schedule = made(stages[0] if only else stages, MICROBATCHES, **options)
        self._first, self._last = 0 in modules, plan.num_stages - 1 in modules
        self._group = group
        self._copies = []
        if tied:  # torch has no ties: what a user would write
            self._copies += [modules[0][0].weight] if self._first else []
            self._copies += [modules[plan.num_stages - 1][-1].weight] if self._last else []
            value = torch.zeros(CLASSES, WIDTH)
            if self._first:
                value.copy_(self._copies[0].detach())
            torch_dist.all_reduce(value, group=group)
            for copy in self._copies:
                copy.data.copy_(value)
        self._tied = tied
        self._modules = list(modules.values())

    def step(self, inputs, targets):
        losses = []
        options = {"losses": losses, "target": targets} if self._last else {}
        self._schedule.step(*([inputs] if self._first else []), **options)
        return losses

    def end(self):
        for parameter in (p for module in self._modules for p in module.parameters()):
            if parameter.grad is not None:
                parameter.grad /= MICROBATCHES
        if not self._tied:
            return
        total = torch.zeros(CLASSES, WIDTH)
        for copy in self._copies:
            total += copy.grad
        torch_dist.all_reduce(total, group=self._group)
        for copy in self._copies:
            copy.grad.copy_(total)


def _train(runner, modules, num_batches):
    parameters = [p for module in modules.values() for p in module.parameters()]
    optimizer = torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.3, momentum=0.9)
    for step in range(3):
        losses = []
        for inputs, targets in batches(step, num_batches):
            losses += [one.item() for one in runner.step(inputs, targets)]
        runner.end()
        optimizer.step()
        optimizer.zero_grad()
        yield losses, [p.detach().clone() for p in parameters]


def _compare(name, settings, group):
    num_batches, tied = settings.get("num_batches", 1), settings.get("tied", False)
    how = {key: settings[key] for key in ("frozen", "checkpointed") if key in settings}
    plan = schedule(name, group.size(), MICROBATCHES)
    ours, theirs = (
        {i: make_stage(i, plan.num_stages, **how) for i in plan.stages_of(group.rank())}
        for _ in range(2)
    )
    story = zip(
        _train(Ours(plan, ours, tied=tied), ours, num_batches),
        _train(Theirs(name, plan, theirs, group, tied=tied), theirs, num_batches),
        strict=True,
    )
    for step, ((losses, values), (their_losses, their_values)) in enumerate(story):
        assert losses == pytest.approx(their_losses, abs=1e-6), (name, settings, step)
        for mine, other in zip(values, their_values, strict=True):
            assert torch.allclose(mine, other, rtol=1e-6, atol=1e-6), (name, settings, step)


FEW = (
    ("gpipe", "accumulated"), ("1f1b", "plain"), ("1f1b", "tied"), ("interleaved_1f1b", "frozen"),
    ("zbv", "checkpointed"), ("zbv", "tied"),
)  # fmt: skip
ALL = tuple((name, setting) for name in TORCHS for setting in SETTINGS)


def _each(rank, world_size, folder, cases):
    torch.set_num_threads(1)
    dist.init(timeout_s=120)
    torch_dist.init_process_group(
        "gloo", store=torch_dist.FileStore(str(Path(folder, "store")), world_size),
        rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    try:
        for name, setting in cases:
            _compare(name, SETTINGS[setting], torch_dist.group.WORLD)
    finally:
        torch_dist.destroy_process_group()
    dist.shutdown()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cases", [FEW, pytest.param(ALL, marks=pytest.mark.slow)])
def test_torchs_pipelining_agrees_step_by_step(tmp_path, cases):
    run_ranks(_each, 2, str(tmp_path), cases, timeout_s=240)
