"""Data-parallel training, one small method for each part of a step.

A step is: fetch the batch, forward and backward on this rank's share, average the gradients, clip,
update, average the loss. Every rank makes the same collective calls in the same order; that is
the whole contract of data parallelism, and `break_it.py` shows what happens to those who break it:
it overrides one of these methods and nothing else. Whether ranks are replicas or hold shards is
decided in `parallel.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 -- the name the field uses
from torch import Tensor

from echelon import recorder
from echelon.dist.checkpoint import PendingSave, RandomState, load, save
from echelon.train.activations import checkpoint_activations
from echelon.train.models import ModelConfig, Transformer
from echelon.train.optimizers import Muon
from echelon.train.schedules import Schedule, make_schedule
from gpt.model.transformer import GPT, GPTConfig
from gpt.text.data import NOT_COUNTED, Batch, BatchSource, evaluation_batches, share
from gpt.training.gradients import FOUR_MIB
from gpt.training.machine import choose_device, move
from gpt.training.parallel import Replicas, Shards

if TYPE_CHECKING:
    from pathlib import Path

    from echelon.dist.group import ProcessGroup
    from gpt.text.corpus import Corpus
    from gpt.text.data import Windows
    from gpt.training.pipeline import Stages

BETAS = (0.9, 0.95)  # GPT-3's; the default 0.999 is slow to forget in short runs
WEIGHT_DECAY = 0.1
EVALUATION_SEQUENCES = 32
FLOOR = 0.1  # of the peak rate; a rate of 0 would waste the last steps


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
    optimizer: str = "adamw"  # or "muon": of hidden matrices, AdamW for the rest
    schedule: str = "cosine"  # of the learning rate: "cosine", "wsd" or "constant"
    accumulate: int = 1  # forward and backward passes, of a part of the batch each, per step
    max_skipped: int = 10  # steps in a row whose gradients were not finite, before it is an error
    activations: str = "none"  # which to compute again: "none", "full" or "selective"
    activations_every: int = 1  # of every n-th block
    mask_documents: bool = False  # neither attention nor loss crosses from document to document
    workers: int = 1  # threads that read ahead
    bucket_bytes: int = FOUR_MIB

    def make_schedule(self) -> Schedule:
        """Return the factor of the learning rate as a function of the step."""
        if self.schedule == "constant":
            return make_schedule("constant", num_warmup=self.warmup)
        # a run that is shorter than its warm-up only rises
        num_steps = max(self.steps, self.warmup)
        return make_schedule(
            self.schedule, num_steps=num_steps, num_warmup=self.warmup, floor=FLOOR
        )

    @property
    def half(self) -> torch.dtype | None:
        """The 16-bit type to compute in, if any."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else None


class Wishes(NamedTuple):
    """What a rank wants all ranks to do after a step; it travels with the loss, at no cost."""

    save: bool = False


def build_optimizer(model: torch.nn.Module, name: str, lr: float) -> torch.optim.Optimizer:
    """Return an optimizer that decays the matrices, and leaves gains and biases alone."""
    if name == "muon":
        return Muon(model, lr=lr, weight_decay=WEIGHT_DECAY, betas=BETAS)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)


def open_source(
    corpus: Corpus,
    config: GPTConfig | ModelConfig,
    settings: TrainingSettings,
    *,
    rank: int,
    world_size: int,
) -> BatchSource:
    """Return the data of one rank among those that divide a batch."""
    return BatchSource.open(
        corpus,
        num_sequences=settings.batch,
        context=config.context,
        seed=settings.seed,
        rank=rank,
        world_size=world_size,
        mask_documents=settings.mask_documents,
        num_workers=settings.workers,
    )


def split(batch: Batch, num_parts: int) -> Iterator[Batch]:
    """Divide a batch into parts of nearly equal sizes."""
    parts = (tensor.tensor_split(num_parts) for tensor in batch)
    return (Batch(*part) for part in zip(*parts, strict=True))


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
        gradient_norm: of the last step, before clipping.
        learning_rate: of the last step.
        wishes: what any rank wished in the last step.
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
        self.gradient_norm = 0.0  # of the last step, before clipping
        self.learning_rate = 0.0
        self.num_skipped = 0  # steps in a row, up to now
        self.wishes = Wishes()
        self.schedule = settings.make_schedule()
        self.optimizer = build_optimizer(self.model, settings.optimizer, settings.lr)
        self.scaler = parallel.scaler
        self.fair_share = 1.0  # of the tokens of a step, by which a term of the loss is divided

    @property
    def samples(self) -> int:
        """Sequences trained on, over all ranks: the number of the next one."""
        return self.source.num_samples

    @classmethod
    def build(
        cls,
        config: GPTConfig | ModelConfig,
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
    def make_model(
        config: GPTConfig | ModelConfig, settings: TrainingSettings, device: torch.device
    ) -> GPT | Transformer:
        """Make the model that the seed gives."""
        torch.manual_seed(settings.seed)
        kind = Transformer if isinstance(config, ModelConfig) else GPT
        model = kind(config).to(device)
        checkpoint_activations(model.blocks, settings.activations, every=settings.activations_every)
        if settings.compile:
            for block in model.blocks:  # equal blocks share one compilation
                block.compile()
        return model

    def train_step(self, wishes: Wishes | None = None) -> float:
        """Train on one batch and return the loss, averaged over the global batch.

        Args:
            wishes: this rank's; all ranks find those of all in `wishes`.
        """
        recorder.step(self.step)
        batch = self.next_batch()
        self.parallel.zero()
        loss = self.backward(batch)
        self.average_gradients()
        self.update()
        mean_loss = self.average_loss(loss, wishes or Wishes())
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
        """Run forward and backward, part by part; return this rank's term of the loss."""
        total = torch.zeros((), device=self.device)
        self.fair_share = self.count_targets(batch) / self.source.world_size
        num_parts = self.settings.accumulate
        for number, part in enumerate(split(batch, num_parts), 1):
            with self.parallel.gradient_sync(is_last=number == num_parts):
                loss = self.compute_loss(part)
                self.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def compute_loss(self, batch: Batch) -> Tensor:
        """Return this rank's term of the loss; the average of the terms is the global mean.

        Dividing by the fair share, not by the tokens at hand, keeps that true where the tokens that
        are trained on do not divide evenly among the ranks.
        """
        return self.summed_loss(batch) / self.fair_share

    def count_targets(self, batch: Batch) -> float:
        """Return how many tokens all ranks train on in this step.

        Collective with masked documents, whose first tokens are no targets: each rank knows its own
        number alone.
        """
        if not self.settings.mask_documents:
            return self.settings.batch * batch.targets.shape[1]
        count = (batch.targets != NOT_COUNTED).sum(dtype=torch.float64)
        self.world.all_reduce(count, op="sum")
        return max(1.0, count.item())  # no token: the loss is 0, not NaN

    def summed_loss(self, batch: Batch) -> Tensor:
        """Return the cross entropy summed over all tokens, in nats."""
        half = self.settings.half
        autocast = half is not None and not self.settings.shard  # shards are cast when gathered
        with torch.autocast(self.device.type, half or torch.bfloat16, enabled=autocast):
            documents = (batch.documents,) if self.settings.mask_documents else ()
            logits = self.model(batch.tokens, *documents)
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

        A step whose gradients are not finite is skipped, on all ranks alike: their norm is the
        same on all. In float16 the scaler sees to it, as overflows are part of its search.

        Raises:
            FloatingPointError: too many steps in a row were skipped.
        """
        settings = self.settings
        self.learning_rate = settings.lr * self.schedule(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        is_finite = self.scaler.unscale_(self.optimizer)
        if is_finite:
            self.gradient_norm = self.parallel.clip(settings.clip)
        if is_finite and not math.isfinite(self.gradient_norm):
            self.skip()
            return
        self.num_skipped = 0
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def skip(self) -> None:
        """Count a step that changes nothing.

        Raises:
            FloatingPointError: too many in a row.
        """
        self.num_skipped += 1
        self.scaler.update()
        if self.num_skipped >= self.settings.max_skipped:
            raise FloatingPointError(
                f"step {self.step}: the gradient norm is {self.gradient_norm}, and was not finite "
                f"in the {self.num_skipped - 1} steps before: lower the learning rate"
            )

    def average_loss(self, loss: Tensor, wishes: Wishes) -> float:
        """Average the terms of the loss, the mean over the global batch, and share wishes."""
        wished = torch.tensor(wishes, dtype=torch.float32, device=self.device)
        both = torch.cat((loss.detach().reshape(1).float(), wished))
        self.world.all_reduce(both, op="avg")
        mean_loss, *shared = both.tolist()
        self.wishes = Wishes(*(share > 0 for share in shared))
        return mean_loss

    @torch.no_grad()
    def validate(self, windows: Windows) -> float:
        """Return the mean loss over all targets; each rank works through its share."""
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        batches = evaluation_batches(
            windows,
            rank=self.source.rank,
            world_size=self.source.world_size,
            num_sequences=EVALUATION_SEQUENCES,
            at_least=self.settings.microbatches,
            mask_documents=self.settings.mask_documents,
        )
        for batch in batches:
            total += self.summed_loss(move_batch(batch, self.device))
        self.world.all_reduce(total, op="sum")
        return total.item() / windows.num_targets(self.settings.mask_documents)

    def state(self) -> dict[str, Any]:
        """Return all that changes in training."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "random": RandomState(),
            "step": self.step,
        }

    def save(
        self,
        path: Path,
        identity: dict[str, Any],
        *,
        in_background: bool,
        keep: int = 2,
        settings: dict[str, Any] | None = None,
    ) -> PendingSave | None:
        """Save a checkpoint. Collective; in the background, training goes on at once."""
        plain = {
            "identity": identity,
            "settings": settings or {},
            "scaler": self.scaler.state_dict(),
            "data": self.source.state_dict(),
        }
        if isinstance(config := self.model.config, ModelConfig):
            plain["model_config"] = config.to_dict()  # what `echelon.train.models export` asks for
        return save(path, {**plain, **self.state()}, async_op=in_background, keep=keep)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint, whatever number of ranks saved it. Collective."""
        state = load(path, self.state())
        self.step = state["step"]
        self.source.load_state_dict(state["data"])
        self.scaler.load_state_dict(state["scaler"])
