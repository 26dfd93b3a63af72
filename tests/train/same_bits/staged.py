"""A small model of five layers, trained whole or as a pipeline of replicas or shards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import echelon.dist as dist
from echelon.dist.canonical import even_runs
from echelon.dist.checkpoint import load, save
from echelon.dist.fsdp import fully_shard
from echelon.dist.mesh import DeviceMesh
from echelon.dist.pipeline import Pipeline, Stage, split
from echelon.train.same_bits import SameBits, SameBitsPipeline, fingerprint
from tests.train.same_bits.model import VOCABULARY, WIDTH, Block


class Uneven(Block):
    """A block with a parameter that has a gradient in some micro-batches alone."""

    def __init__(self):
        super().__init__()
        self.seldom = nn.Parameter(torch.full((7,), 0.1))
        self.unused = nn.Parameter(torch.ones(5))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        x = super().forward(x)
        return x + self.seldom.sum() if bool(x.detach().mean() > 0) else x


def layers():
    """The whole model, with the same values on every rank."""
    torch.manual_seed(3)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block(), Uneven(), Block(), head)


def batch(step, number):
    generator = torch.Generator().manual_seed(1000 * step + number)
    ids = torch.randint(0, VOCABULARY, (2, 9), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_fn(output, targets):
    dropped = F.dropout(output, 0.1, training=True)  # random numbers after the last stage's own
    return F.cross_entropy(dropped.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Layout:
    """How the model is divided: `dp` is "replicated", "sharded" or "hsdp" among a stage's ranks."""

    dp: str
    num_stages: int = 0  # 0: not a pipeline
    schedule: str = "1f1b"

    @property
    def depth(self):
        return self.num_stages // self.num_chunks

    @property
    def num_chunks(self):
        return 2 if self.schedule in ("zbv", "interleaved_1f1b") else 1


WHOLE = Layout("replicated")


def train(rank, size, layout, backend, steps, micro_batches, folder=None, checkpoint=None):
    """Train some steps, from a checkpoint unless they begin with 0, and save one after them.

    Returns losses, norms and the fingerprint.
    """
    torch.set_num_threads(1)
    dist.init(backend, timeout_s=240)
    settings = {"micro_batches": micro_batches, "seed": 7, "fingerprints": folder}
    make = make_staged if layout.num_stages else _make_whole
    model, optimizer, same, compute = make(size, layout, settings)
    state = {"model": model, "optimizer": optimizer}
    if steps[0]:
        load(f"{checkpoint}/{steps[0]}", state)
    losses, norms = [], []
    for step in range(*steps):
        losses.append(same.backward(step, compute(step)))
        norms.append(same.clip_grad_norm_(0.5))
        optimizer.step()
    if checkpoint is not None:
        save(f"{checkpoint}/{steps[1]}", state)
    ends = (losses, norms, fingerprint(model, optimizer))
    dist.shutdown()
    return ends


def _make_whole(size, layout, settings):
    model = layers()
    if layout.dp != "replicated":
        where = {}
        if layout.dp == "hsdp":
            where["mesh"] = DeviceMesh(_grid(size), ("replicate", "shard"))
        for block in model[1:4]:
            fully_shard(block, **where)
        fully_shard(model, **where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def compute(step):
        def of(number):
            inputs, targets = batch(step, number)
            return loss_fn(model(inputs), targets)

        return of

    return model, optimizer, SameBits(model, optimizer, **settings), compute


def _grid(size):
    """Replicas and shards of HSDP: pairs of shards if the number of ranks is even."""
    return (size // 2, 2) if size % 2 == 0 else (size, 1)


def make_staged(size, layout, settings):
    depth = layout.depth
    mesh = DeviceMesh((depth, size // depth), ("pp", "dp"))
    pp, dp = mesh.group("pp"), mesh.group("dp")
    places = [pp.rank]
    if layout.num_chunks == 2:
        last = layout.num_stages - 1
        places += [last - pp.rank if layout.schedule == "zbv" else pp.rank + depth]
    parts = split(layers(), layout.num_stages, costs=[1] * 5)
    stages = [Stage(parts[place], index=place, num_stages=layout.num_stages) for place in places]
    if layout.dp != "replicated":
        where = {"group": dp}
        if layout.dp == "hsdp":
            grid = DeviceMesh((depth, *_grid(dp.size)), ("pp", "replicate", "shard"))
            where = {"mesh": grid["replicate", "shard"]}
        for stage in stages:
            fully_shard(stage.module, **where)
    run = even_runs(settings["micro_batches"], dp.size)[dp.rank]
    pipe = Pipeline(
        stages, group=pp, replicas=dp, schedule=layout.schedule, num_microbatches=len(run),
        loss_fn=loss_fn,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    same = SameBitsPipeline(pipe, optimizer, **settings)
    return pipe, optimizer, same, lambda step: lambda number: batch(step, number)
