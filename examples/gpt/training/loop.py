"""Data-parallel training, one small method for each part of a step.

A step is: fetch the batch, forward and backward on this rank's share, average the gradients, clip,
update, average the loss. Every rank makes the same collective calls in the same order; that is
the whole contract of data parallelism, and `break_it.py` shows what happens to those who break it:
it overrides one of these methods and nothing else. Whether ranks are replicas or hold shards is
decided in `parallel.py`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 -- the name the field uses
from torch import Tensor

from echelon import recorder
from echelon.dist.checkpoint import PendingSave, RandomState, load, save
from gpt.model.transformer import GPT, GPTConfig
from gpt.text.data import Batch, BatchSource, evaluation_batches, share
from gpt.training.gradients import FOUR_MIB
from gpt.training.machine import choose_device, move
from gpt.training.parallel import Replicas, Shards
from gpt.training.schedule import learning_rate

if TYPE_CHECKING:
    from pathlib import Path

    from echelon.dist.group import ProcessGroup
    from gpt.text.corpus import Corpus
    from gpt.text.data import Windows
    from gpt.training.pipeline import Stages

BETAS = (0.9, 0.95)  # GPT-3's; the default 0.999 is slow to forget in short runs
WEIGHT_DECAY = 0.1
EVALUATION_SEQUENCES = 32


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How a model is trained; its sizes are in `GPTConfig`."""

    steps: int
    batch: int  # sequences a step, over all ranks together
    lr: float
    warmup: int
    clip: float
    seed: int
    device: str = "auto"  # "cpu", "cuda", or a GPU where there is one
    bf16: bool = False  # compute in bfloat16; weights and their sums stay float32
    fp16: bool = False  # compute in float16, with a scaled loss
    shard: bool = False  # divide the model among the ranks, rather than copy it
    compile: bool = False  # each block, by torch.compile
    pipeline: int = 1  # stages, one after the other
    microbatches: int = 1  # into which a rank's share of the batch is split, in a pipeline
    bucket_bytes: int = FOUR_MIB

    @property
    def half(self) -> torch.dtype | None:
        """The 16-bit type to compute in, if any."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else None


def build_optimizer(model: torch.nn.Module, lr: float) -> torch.optim.AdamW:
    """Return AdamW that decays the matrices, and leaves gains and biases alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)


def open_source(
    corpus: Corpus, config: GPTConfig, settings: TrainingSettings, *, rank: int, world_size: int
) -> BatchSource:
    """Return the data of one rank among those that divide a batch."""
    return BatchSource.open(
        corpus,
        num_sequences=settings.batch,
        context=config.context,
        seed=settings.seed,
        rank=rank,
        world_size=world_size,
    )


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on a device."""
    return Batch(*(move(part, device) for part in batch))


class Trainer:
    """One rank's part of the training of one model.

    Attributes:
        step: the number of finished steps.
        parallel: how the ranks divide the work: replicas, shards or stages.
        buckets: the same; its `flats` are the gradients that are averaged over the ranks.
        model: what of the model this rank trains.
    """

    def __init__(
        self,
        parallel: Replicas | Shards | Stages,
        source: BatchSource,
        settings: TrainingSettings,
        *,
        world: ProcessGroup,
        device: torch.device,
    ) -> None:
        self.parallel = self.buckets = parallel
        self.model = parallel.model
        self.source = source
        self.settings = settings
        self.world = world
        self.device = device
        self.step = 0
        self.optimizer = build_optimizer(self.model, settings.lr)
        self.scaler = parallel.scaler

    @property
    def samples(self) -> int:
        """Sequences trained on, over all ranks: the number of the next one."""
        return self.source.num_samples

    @classmethod
    def build(
        cls,
        config: GPTConfig,
        settings: TrainingSettings,
        corpus: Corpus,
        *,
        world: ProcessGroup,
    ) -> Trainer:
        """Make this rank's model and its share of the data, and start from rank 0's weights."""
        device = choose_device(settings.device)
        source = open_source(corpus, config, settings, rank=world.rank, world_size=world.size)
        model = cls.make_model(config, settings, device)
        parallel: Replicas | Shards
        if settings.shard:
            parallel = Shards(model, world, settings.half)
        else:
            parallel = Replicas(model, world, settings.bucket_bytes, settings.half)
        return cls(parallel, source, settings, world=world, device=device)

    @staticmethod
    def make_model(config: GPTConfig, settings: TrainingSettings, device: torch.device) -> GPT:
        """Make the model that the seed gives."""
        torch.manual_seed(settings.seed)
        model = GPT(config).to(device)
        if settings.compile:
            for block in model.blocks:  # equal blocks share one compilation
                block.compile()
        return model

    def train_step(self) -> float:
        """Train on one batch and return the loss, averaged over the global batch."""
        recorder.step(self.step)
        batch = self.next_batch()
        self.parallel.zero()
        loss = self.backward(batch)
        self.average_gradients()
        self.update()
        mean_loss = self.average_loss(loss)
        self.step += 1
        return mean_loss

    def warm_up(self) -> float:
        """Do what a step does, but change nothing, so that compiling is over; return the seconds.

        Collective.
        """
        began_s = time.perf_counter()
        mine = share(self.settings.batch, self.source.rank, self.source.world_size)
        shape = (mine.stop - mine.start, self.model.config.context)
        zeros = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self.backward(Batch(zeros, zeros, zeros))
        self.parallel.zero()
        self.world.barrier()
        return time.perf_counter() - began_s

    def next_batch(self) -> Batch:
        """Wait for this step's batch, and say so in the record while it lasts."""
        with recorder.span("data_wait"):
            batch = self.fetch_batch()
        return move_batch(batch, self.device)

    def fetch_batch(self) -> Batch:
        """Get this step's batch from the source."""
        return self.source.next_batch()

    def backward(self, batch: Batch) -> Tensor:
        """Run forward and backward; return this rank's term of the loss."""
        loss = self.compute_loss(batch)
        self.scaler.scale(loss).backward()
        return loss

    def compute_loss(self, batch: Batch) -> Tensor:
        """Return this rank's term of the loss; the average of the terms is the global mean.

        Dividing by the fair share, not by the tokens at hand, keeps that true where the batch does
        not divide evenly among the ranks.
        """
        fair_share = self.settings.batch * batch.targets.shape[1] / self.source.world_size
        return self.summed_loss(batch) / fair_share

    def summed_loss(self, batch: Batch) -> Tensor:
        """Return the cross entropy summed over all tokens, in nats."""
        half = self.settings.half
        autocast = half is not None and not self.settings.shard  # shards are cast when gathered
        with torch.autocast(self.device.type, half or torch.bfloat16, enabled=autocast):
            logits = self.model(batch.tokens)
        targets = batch.targets.flatten()
        return F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum")

    def average_gradients(self) -> None:
        """Average over the ranks, in place, what backward has not averaged itself."""
        for flat in self.parallel.flats:
            self.average_bucket(flat)

    def average_bucket(self, flat: Tensor) -> None:
        """Average one bucket of gradients over the ranks, in place."""
        self.world.all_reduce(flat, op="avg")

    def update(self) -> None:
        """Clip the gradients and let the optimizer take its step.

        In float16, a step whose gradients overflowed on any rank is skipped on all.
        """
        settings = self.settings
        if self.scaler.unscale_(self.optimizer):
            self.parallel.clip(settings.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(
                self.step,
                peak=settings.lr,
                num_warmup=settings.warmup,
                num_steps=settings.steps,
            )
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def average_loss(self, loss: Tensor) -> float:
        """Average the ranks' terms of the loss: the mean over the global batch."""
        mean_loss = loss.detach().reshape(1).clone()
        self.world.all_reduce(mean_loss, op="avg")
        return mean_loss.item()

    @torch.no_grad()
    def validate(self, windows: Windows) -> float:
        """Return the mean loss over all windows; each rank works through its share."""
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        batches = evaluation_batches(
            windows,
            rank=self.source.rank,
            world_size=self.source.world_size,
            num_sequences=EVALUATION_SEQUENCES,
            at_least=self.settings.microbatches,
        )
        for batch in batches:
            total += self.summed_loss(move_batch(batch, self.device))
        self.world.all_reduce(total, op="sum")
        return total.item() / (len(windows) * (windows.tokens.shape[1] - 1))

    def state(self) -> dict[str, Any]:
        """Return all that changes in training."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "random": RandomState(),
            "step": self.step,
        }

    def save(
        self, path: Path, identity: dict[str, int], *, in_background: bool
    ) -> PendingSave | None:
        """Save a checkpoint. Collective; in the background, training goes on at once."""
        plain = {
            "identity": identity,
            "scaler": self.scaler.state_dict(),
            "data": self.source.state_dict(),
        }
        return save(path, {**plain, **self.state()}, async_op=in_background)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint, whatever number of ranks saved it. Collective."""
        state = load(path, self.state())
        self.step = state["step"]
        self.source.load_state_dict(state["data"])
        self.scaler.load_state_dict(state["scaler"])
