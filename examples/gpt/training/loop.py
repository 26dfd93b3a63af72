"""Data-parallel training, one small method for each part of a step.

A step is: fetch the batch, forward and backward on this rank's share, average the gradients, clip,
update, average the loss. Every rank makes the same collective calls in the same order; that is the
whole contract of data parallelism. `break_it.py` shows what happens if a rank breaks it: it
overrides one of these methods and nothing else. `parallel.py` decides whether ranks are replicas or
hold parts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echelon import recorder
from echelon.dist.checkpoint import RandomState, load
from echelon.train.activations import checkpoint_activations
from echelon.train.ema import ExponentialMovingAverage
from echelon.train.finite import FiniteGuard
from echelon.train.models import ModelConfig, Transformer
from echelon.train.models.hugging_face import load_weights
from echelon.train.optimizers import Muon
from gpt.model.transformer import GPT, GPTConfig
from gpt.text.data import NOT_COUNTED, Batch, BatchSource, evaluation_batches, share
from gpt.training.loss import summed_loss, token_losses
from gpt.training.machine import choose_device, move
from gpt.training.parallel import Divided, Replicas
from gpt.training.settings import TrainingSettings

if TYPE_CHECKING:
    from pathlib import Path

    from echelon.dist.group import ProcessGroup
    from gpt.text.corpus import Corpus
    from gpt.text.data import Windows

BETAS = (0.9, 0.95)  # GPT-3's; the default 0.999 is slow to forget in short runs
WEIGHT_DECAY = 0.1
EVALUATION_SEQUENCES = 32


def build_optimizer(parallel: Replicas | Divided, name: str, lr: float) -> torch.optim.Optimizer:
    """Return an optimizer that decays the matrices but not the gains and biases."""
    if name == "muon":
        return Muon(parallel.trained, lr=lr, weight_decay=WEIGHT_DECAY, betas=BETAS)
    parameters = list(parallel.model.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() == 1]
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
    """Return the data of one of the ranks that divide a batch."""
    return BatchSource.open(
        corpus,
        num_sequences=settings.batch,
        context=config.context,
        seed=settings.seed,
        rank=rank,
        world_size=world_size,
        mask_documents=settings.mask_documents,
        pack_documents=settings.pack_documents,
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
        parallel: how the ranks divide the work.
        buckets: the same object; its `flats` are the gradients that are averaged over the ranks.
        model: the part of the model that this rank trains.
        gradient_norm: of the last step, before clipping.
        learning_rate: of the last step.
    """

    def __init__(
        self,
        parallel: Replicas | Divided,
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
        self.schedule = settings.make_schedule()
        self.optimizer = build_optimizer(parallel, settings.optimizer, settings.lr)
        self.average = (
            None if settings.ema is None else ExponentialMovingAverage(self.model, settings.ema)
        )
        self.guard = FiniteGuard(
            self.model, max_in_a_row=settings.max_skipped, over=world, norm=parallel.norm
        )
        self.scaler = parallel.scaler
        self.fair_share = 1.0  # tokens of a step, by which a term of the loss is divided

    @property
    def samples(self) -> int:
        """Number of sequences trained on, over all ranks: the number of the next one."""
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
        """Create this rank's part of the model from rank 0's weights, and its share of the data."""
        device = choose_device(settings.device)
        model = cls.make_model(config, settings, device)
        parallel = (Divided if settings.is_divided else Replicas)(model, world, settings)
        rank, size = parallel.data
        source = open_source(corpus, config, settings, rank=rank, world_size=size)
        return cls(parallel, source, settings, world=world, device=device)

    @staticmethod
    def make_model(
        config: GPTConfig | ModelConfig, settings: TrainingSettings, device: torch.device
    ) -> GPT | Transformer:
        """Create the model that the seed or the folder determines."""
        torch.manual_seed(settings.seed)
        kind = Transformer if isinstance(config, ModelConfig) else GPT
        model = kind(config)
        if settings.init_from is not None:
            load_weights(settings.init_from, model)
        model.to(device)
        checkpoint_activations(model.blocks, settings.activations, every=settings.activations_every)
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
        """Run a step without its effects, so that compiling is over; return the seconds it took.

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
        """Wait for this step's batch, and record the wait as a span."""
        with recorder.span("data_wait"):
            batch = self.fetch_batch()
        return move_batch(batch, self.device)

    def fetch_batch(self) -> Batch:
        """Get this step's batch from the source."""
        return self.source.next_batch()

    def backward(self, batch: Batch) -> Tensor:
        """Run forward and backward, part by part; return this rank's term of the loss."""
        self.fair_share = self.count_fair_share(batch)
        if isinstance(self.parallel, Divided):
            return self.parallel.step(batch, self.fair_share)
        total = torch.zeros((), device=self.device)
        for part in split(batch, self.settings.num_parts):
            loss = self.compute_loss(part)
            self.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def count_fair_share(self, batch: Batch) -> float:
        """Return the divisor of a term of the loss: a rank's average number of tokens to train on.

        Collective with masked documents, whose first tokens are not targets: each rank knows only
        its own number.
        """
        if not self.settings.mask_documents:
            return self.settings.batch * batch.targets.shape[1] / self.source.world_size
        count = (batch.targets != NOT_COUNTED).sum(dtype=torch.float64)
        self.world.all_reduce(count, op="avg")
        return max(1.0 / self.source.world_size, count.item())  # no token: 0 / 1, not NaN

    def compute_loss(self, batch: Batch) -> Tensor:
        """Return this rank's term of the loss; the average of the terms is the global mean.

        Dividing by the fair share rather than the actual number of tokens keeps this true if the
        tokens do not divide evenly among the ranks.
        """
        return self.summed_loss(batch) / self.fair_share

    def summed_loss(self, batch: Batch) -> Tensor:
        """Return the cross entropy summed over all tokens, in nats. No gradients if divided."""
        if isinstance(self.parallel, Divided):
            return self.parallel.evaluate(batch)
        half, settings = self.settings.half, self.settings
        documents = (batch.documents,) if settings.mask_documents else ()
        with torch.autocast(self.device.type, half or torch.bfloat16, enabled=half is not None):
            if settings.chunked_loss:
                features = self.model.hidden(batch.tokens, *documents)
                return summed_loss(self.model, features, batch.targets)
            logits = self.model(batch.tokens, *documents)
        return token_losses(logits, batch.targets)

    def average_gradients(self) -> None:
        """Average over the ranks, in place, the gradients that backward has not averaged itself."""
        for flat in self.parallel.flats:
            self.average_bucket(flat)

    def average_bucket(self, flat: Tensor) -> None:
        """Average one bucket of gradients over the ranks, in place."""
        self.world.all_reduce(flat, op="avg")

    def update(self) -> None:
        """Clip the gradients and let the optimizer take its step.

        A step whose gradients are not finite is skipped on all ranks alike, because their norm is
        the same on all. In float16, the scaler does this, since overflows are part of its search.

        Raises:
            NonFiniteGradientError: too many steps in a row were skipped.
        """
        self.learning_rate = self.settings.lr * self.schedule(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        if self.scaler.unscale_(self.optimizer):
            self.gradient_norm = self.guard.clip_grad_norm_(self.settings.clip)
            if self.guard.step(self.optimizer) and self.average is not None:
                self.average.update()
        self.scaler.update()

    def average_loss(self, loss: Tensor) -> float:
        """Average the terms of the loss over the ranks: the mean over the global batch."""
        mean = loss.detach().float()
        self.world.all_reduce(mean, op="avg")
        return mean.item()

    def averaged(self) -> AbstractContextManager[None]:
        """Put the averaged weights in the place of the trained ones while the context lasts."""
        return nullcontext() if self.average is None else self.average.applied()

    def validate(self, windows: Windows) -> float:
        """Return the mean loss over all targets; each rank evaluates its share."""
        with torch.no_grad(), self.averaged():
            return self._validate(windows)

    def _validate(self, windows: Windows) -> float:
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        batches = evaluation_batches(
            windows,
            rank=self.source.rank,
            world_size=self.source.world_size,
            num_sequences=EVALUATION_SEQUENCES,
            at_least=self.settings.num_parts,
            mask_documents=self.settings.mask_documents,
        )
        for batch in batches:
            total += self.summed_loss(move_batch(batch, self.device))
        self.world.all_reduce(total, op="sum")
        return total.item() / windows.num_targets(self.settings.mask_documents)

    def whole(self) -> GPT | Transformer:
        """Return the whole model for evaluation and export. Collective."""
        with self.averaged():
            return self.parallel.whole()

    def state(self) -> dict[str, Any]:
        """Return everything that training changes, for a checkpoint."""
        average = {} if self.average is None else {"average": self.average}
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            **average,
            "random": RandomState(),
            "step": self.step,
            "scaler": self.scaler.state_dict(),
            "data": self.source.state_dict(),
        }

    def resume(self, path: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint of any number of ranks; return its state. Collective.

        Raises:
            CheckpointError: it cannot be read.
            ValueError: it does not fit.
        """
        state = load(path, self.state())
        self.step = state["step"]
        self.source.load_state_dict(state["data"])
        self.scaler.load_state_dict(state["scaler"])
        return state
