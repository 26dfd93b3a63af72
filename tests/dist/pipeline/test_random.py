"""Random small pipelines against one process: stages, schedules, micro-batches, ties, frozen parts.

Each seed draws a model, a division and a schedule; after each of a few steps losses and gradients
are those of the whole model in one process, which really shares what the pipeline ties.
"""

import random

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import echelon.dist as dist  # noqa: E402
from echelon.dist.fsdp import fully_shard, shards  # noqa: E402
from echelon.dist.pipeline import Pipeline, Stage, schedule, split  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks
NAMES = (
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv",
    "dualpipev",
)  # fmt: skip
WIDTH = 4
NUM_STEPS = 3


class Two(nn.Module):
    """Adds a second tensor to what passes, or uses it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, other=None):
        y = torch.tanh(self.layer(x))
        return (y, x) if other is None else y + other


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x, *rest):
        y = checkpoint(self.inner, x, use_reentrant=False)
        return (x + y, *rest) if rest else x + y


class Pass(nn.Module):
    """A layer that knows only the first of the tensors that pass."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, *rest):
        y = self.layer(x)
        return (y, *rest) if rest else y


class Case:
    """What one seed draws; the same on all ranks."""

    def __init__(self, seed, num_ranks):
        draw = random.Random(seed)
        self.name = draw.choice(NAMES)
        self.num_microbatches = draw.randint(1, 6)
        chunks = draw.randint(1, 3) if "looped" in self.name or "interleaved" in self.name else None
        self.plan = schedule(self.name, num_ranks, self.num_microbatches, chunks)
        num_layers = self.plan.num_stages + draw.randint(0, 4)
        self.layers = self._layers(draw, num_layers)
        self.costs = [draw.uniform(0.2, 3) for _ in self.layers]
        self.tied = draw.random() < 0.5 and self.plan.num_stages > 1
        self.frozen = {n for n in range(1, num_layers - 1) if draw.random() < 0.25}
        self.sharded = draw.random() < 0.25
        self.sizes = [draw.randint(self.num_microbatches, 12) for _ in range(NUM_STEPS)]
        self.accumulates = draw.random() < 0.3
        self.seed = seed

    def _layers(self, draw, num_layers):
        makers = [
            lambda: Pass(nn.Linear(WIDTH, WIDTH)),
            lambda: Pass(nn.LayerNorm(WIDTH)),
            lambda: Pass(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))),
            lambda: Pass(nn.Identity()),
            Recomputed,
        ]
        chosen = [draw.choice(makers) for _ in range(num_layers)]
        chosen[0] = chosen[-1] = makers[0]
        if num_layers > 4 and draw.random() < 0.5:  # two tensors pass between these
            first, last = sorted(draw.sample(range(1, num_layers - 1), 2))
            chosen[first] = chosen[last] = Two
        return chosen

    def model(self):
        torch.manual_seed(self.seed)
        layers = [make() for make in self.layers]
        for number in self.frozen:
            layers[number].requires_grad_(False)
        return nn.Sequential(*layers)

    def ends(self):
        """Return the names of the tied parameters: of the first layer and the last."""
        return "0.layer.weight", f"{len(self.layers) - 1}.layer.weight"

    def batch(self, step):
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        shape = (self.sizes[step], WIDTH)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    def __repr__(self):
        facts = {key: value for key, value in vars(self).items() if key not in ("plan", "layers")}
        return f"{facts}, {self.plan.num_stages} stages of {self.plan.num_ranks} ranks"


def _call(layers, x):
    values = (x,)
    for layer in layers:
        values = layer(*values)
        values = values if isinstance(values, tuple) else (values,)
    return values[0] if len(values) == 1 else values


class Parts(nn.Module):
    """Layers in a row of which several tensors may pass, under the model's names."""

    def __init__(self, stage):
        super().__init__()
        for name, layer in stage.named_children():
            self.add_module(name, layer)

    def forward(self, *values):
        for layer in self.children():
            values = layer(*values)
            values = values if isinstance(values, tuple) else (values,)
        return values[0] if len(values) == 1 else values


def _loss(output, targets):
    return nn.functional.mse_loss(output, targets)


def _pipeline(case, group, alone):
    parts = [Parts(stage) for stage in split(case.model(), case.plan.num_stages, case.costs)]
    stages = []
    for index in case.plan.stages_of(group.rank):
        if case.sharded and any(p.requires_grad for p in parts[index].parameters()):
            fully_shard(parts[index], group=alone)
        stages.append(Stage(parts[index], index=index, num_stages=case.plan.num_stages))
    last = case.plan.num_stages - 1
    ties = [[f"0:{case.ends()[0]}", f"{last}:{case.ends()[1]}"]] if case.tied else []
    return Pipeline(stages, group=group, schedule=case.plan, loss_fn=_loss, ties=ties)


class Whole:
    """The whole model in one process; gradients add up over steps where the case says so."""

    def __init__(self, case):
        self._case = case
        self.model = case.model()
        if case.tied:
            self.model[-1].layer.weight = self.model[0].layer.weight

    def gradients(self, step):
        x, y = self._case.batch(step)
        losses = []
        num = self._case.num_microbatches
        for part, wanted in zip(x.tensor_split(num), y.tensor_split(num), strict=True):
            loss = _loss(_call(self.model, part), wanted)
            losses.append(loss.item())
            (loss / num).backward()
        named = self.model.named_parameters(remove_duplicate=False)
        return losses, {name: p.grad for name, p in named}


def _check(case, group, alone):
    pipe, whole = _pipeline(case, group, alone), Whole(case)
    for step in range(NUM_STEPS):
        x, y = case.batch(step)
        losses = pipe.step(x, y)
        wanted_losses, wanted = whole.gradients(step)
        if pipe.has_last:
            assert [one.item() for one in losses] == pytest.approx(wanted_losses, rel=1e-5), case
        for stage in pipe.stages:
            parts = shards(stage.module)
            for name, parameter in stage.module.named_parameters():
                mine, right = parameter.grad, wanted[name]
                if name in parts:
                    mine = parts[name].parameter.grad
                    mine = None if mine is None else mine.reshape(parts[name].shape)
                if right is None:
                    assert mine is None or not mine.any(), (case, step, name)
                    continue
                assert mine is not None, (case, step, name)
                assert torch.allclose(mine, right, rtol=1e-4, atol=1e-6), (case, step, name)
        if not case.accumulates:
            for stage in pipe.stages:
                stage.module.zero_grad()
            whole.model.zero_grad()


def _seeds(rank, world_size, first, num):
    torch.set_num_threads(1)
    world = dist.init(timeout_s=120)
    alone = world.split(rank)
    two = world.split(rank // 2)
    for seed in range(first, first + num):
        case = Case(seed, world_size if seed % 2 else 2)
        _check(case, world if seed % 2 else two, alone)
    dist.shutdown()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("num_ranks", "first", "num"),
    [(4, 0, 10), *(pytest.param(4, s, 50, marks=pytest.mark.slow) for s in (0, 50, 100, 150))],
)
def test_random_pipelines_give_the_gradients_of_one_process(num_ranks, first, num):
    run_ranks(_seeds, num_ranks, first, num, timeout_s=600)
