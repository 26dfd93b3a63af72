"""The model in stages on a grid of ranks: each stage with its replicas, or with its shards.

    ranks of a world of four, --pipeline 2:      stage 0: ranks 0, 1      stage 1: ranks 2, 3

Ranks of one stage divide the batch among them. A stage keeps the whole model's names, so that a
checkpoint is the same whatever the grid was. The embedding is the output head, too: the first stage
and the last have a copy each, which the pipeline keeps equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 -- the name the field uses
from torch import Tensor, nn

import echelon.dist as dist
from echelon.dist.fsdp import clip_grad_norm_, full_state_dict, fully_shard
from echelon.dist.mesh import DeviceMesh
from echelon.dist.pipeline import Pipeline, Stage
from gpt.model.transformer import GPT, GPTConfig
from gpt.text.data import Batch, share
from gpt.training.loop import Trainer, TrainingSettings, open_source
from gpt.training.machine import choose_device
from gpt.training.parallel import make_policy, make_scaler

if TYPE_CHECKING:
    from echelon.dist.group import ProcessGroup
    from gpt.text.corpus import Corpus

EMBEDDING = "token.weight"


class GPTStage(nn.Module):
    """Some consecutive blocks of a model, with the embedding before and the head after them.

    Args:
        model: the whole model, whose modules are used and whose names are kept.
        index: which stage.
        num_stages: blocks are divided evenly among them.
        half: a 16-bit type to compute in, with float32 weights.
    """

    def __init__(
        self, model: GPT, index: int, num_stages: int, half: torch.dtype | None = None
    ) -> None:
        super().__init__()
        mine = share(len(model.blocks), index, num_stages)
        self.config = model.config
        self.half = half
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        if self.is_first or self.is_last:
            self.token = model.token
        self.blocks = nn.ModuleDict(
            {str(number): model.blocks[number] for number in range(mine.start, mine.stop)}
        )
        if self.is_last:
            self.final_norm = model.final_norm
        self.register_buffer("rotary", model.rotary, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Do this stage's part: int64 [B, T] in at the first, logits [B, T, V] out at the last."""
        half = self.half
        with torch.autocast(x.device.type, half or torch.bfloat16, enabled=half is not None):
            rotary = self.rotary[:, : x.shape[1]]
            if self.is_first:
                x = self.token(x)
            for block in self.blocks.values():
                x = block(x, rotary)
            return F.linear(self.final_norm(x), self.token.weight) if self.is_last else x


class Stages:
    """How the ranks divide the work: see `parallel.py` for the other ways.

    Attributes:
        model: this rank's stage.
        pipeline: runs the stages, in the order of one forward, one backward.
        scaler: of the loss; all stages decide together.
    """

    flats: list[Tensor] = []  # noqa: RUF012 -- the pipeline averages the gradients itself

    def __init__(
        self, model: GPT, settings: TrainingSettings, data_size: int, grid: DeviceMesh
    ) -> None:
        self.stages, self.data = grid.group("pp"), grid.group("dp")
        self.sharded = settings.shard
        index, num_stages = self.stages.rank, self.stages.size
        autocast = None if settings.shard else settings.half
        self.model = GPTStage(model, index, num_stages, autocast)
        self.scaler = make_scaler(settings.half, dist.world())
        # the mean of the micro-batches' losses is then this rank's term of the global mean
        num_microbatches = settings.microbatches
        self.fair_share = settings.batch * model.config.context / data_size / num_microbatches
        self._start_equal(settings)
        self.pipeline = Pipeline(
            [Stage(self.model, index=index, num_stages=num_stages)],
            group=self.stages,
            schedule="1f1b",
            num_microbatches=num_microbatches,
            loss_fn=self.loss,
            ties=[[f"0:{EMBEDDING}", f"{num_stages - 1}:{EMBEDDING}"]],
            replicas=None if settings.shard else self.data,
        )

    def _start_equal(self, settings: TrainingSettings) -> None:
        """Shard the stage, or give all ranks of it the first one's weights."""
        if not settings.shard:
            for parameter in self.model.parameters():
                self.data.broadcast(parameter.detach(), root=0)
            return
        precision = make_policy(settings.half)
        for block in self.model.blocks.values():
            fully_shard(block, group=self.data, mp_policy=precision)
        fully_shard(self.model, group=self.data, mp_policy=precision)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return a micro-batch's loss, scaled."""
        summed = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return self.scaler.scale(summed / self.fair_share)

    def zero(self) -> None:
        """Forget the gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def clip(self, max_norm: float) -> float:
        """Scale the gradients so that their joint norm is at most `max_norm`; return the norm.

        Collective. The embedding counts once, though two stages have it.
        """
        second = self.model.is_last and not self.model.is_first
        copies = [p for name, p in self.model.named_parameters() if second and name == EMBEDDING]
        replicas = None if self.sharded else self.data
        return clip_grad_norm_(
            self.model, max_norm, over=dist.world(), replicas=replicas, aliases=copies
        )

    def whole(self) -> GPT:
        """Return the whole model, in the host's memory. Collective."""
        mine = full_state_dict(self.model) if self.sharded else self.model.state_dict()
        model = GPT(self.model.config)
        names = [name for name, _ in model.named_parameters()]
        holders = self.stages.all_gather_object(sorted(set(names) & set(mine)))
        for name, parameter in model.named_parameters():
            root = next(rank for rank, held in enumerate(holders) if name in held)
            value = mine[name].cpu() if root == self.stages.rank else parameter.detach()
            self.stages.broadcast(value, root=root)
            parameter.data = value
        return model


class PipelineTrainer(Trainer):
    """One rank's part of the training of a model in stages."""

    parallel: Stages

    @classmethod
    def build(
        cls, config: GPTConfig, settings: TrainingSettings, corpus: Corpus, *, world: ProcessGroup
    ) -> PipelineTrainer:
        """Make the grid, this rank's stage and its share of the data."""
        grid = DeviceMesh((settings.pipeline, world.size // settings.pipeline), ("pp", "dp"))
        device = choose_device(settings.device)
        torch.manual_seed(settings.seed)
        data = grid.group("dp")
        source = open_source(corpus, config, settings, rank=data.rank, world_size=data.size)
        model = cls.make_model(config, settings, device)
        parallel = Stages(model, settings, data.size, grid)
        return cls(parallel, source, settings, world=world, device=device)

    def backward(self, batch: Batch) -> Tensor:
        """Run the pipeline; return this rank's term of the loss, which the last stage knows."""
        losses = self.parallel.pipeline.step(batch.tokens, batch.targets)
        if losses is None:
            return torch.zeros((), device=self.device)
        scale = self.scaler.get_scale()
        return torch.stack(losses).mean() * self.parallel.stages.size / scale

    def summed_loss(self, batch: Batch) -> Tensor:
        """Return the cross entropy summed over all tokens; 0 where the last stage is not."""
        losses = self.parallel.pipeline.evaluate(batch.tokens, batch.targets)
        if losses is None:
            return torch.zeros((), device=self.device)
        return torch.stack(losses).sum() * self.parallel.fair_share / self.scaler.get_scale()
