"""Data-parallel training, one small method for each part of a step.

A step is: fetch the batch, run forward and backward on this rank's slice, average the gradients,
clip, update, average the loss. Every rank makes the same collective calls in the same order, which
is the whole contract of data parallelism. `break_it.py` shows what happens if a rank violates it:
each fault overrides one of these methods. `parallel.py` implements ranks that are replicas, and
ranks that have only a part of the model.
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
    """Return an optimizer that applies weight decay to matrices, but not to gains and biases."""
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
    """Return the data source of one data-parallel rank."""
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
    """Split a batch into parts of nearly equal sizes."""
    parts = (tensor.tensor_split(num_parts) for tensor in batch)
    return (Batch(*part) for part in zip(*parts, strict=True))


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to a device."""
    return Batch(*(move(part, device) for part in batch))


class Trainer:
    """One rank's trainer of a model.

    Attributes:
        step: the number of finished steps.
        parallel: the ranks' parallelism, `Replicas` or `Divided`.
        buckets: the same object; its `flats` are the gradients that are averaged over the ranks.
        model: the part of the model that this rank trains.
        gradient_norm: the gradient norm of the last step, before clipping.
        learning_rate: the learning rate of the last step.
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
        """The number of sequences trained on over all ranks, which is the next one's index."""
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
        """Create this rank's part of the model with rank 0's weights, and its data source."""
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
        """Create the model with weights drawn from the seed or loaded from a folder."""
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
        """Run forward and backward on zeros, to trigger compilation; return the seconds taken.

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
        """Return the ranks' average number of targets, the divisor of this rank's loss term.

        Collective with masked documents, whose first tokens are not targets, because each rank can
        count only its own targets.
        """
        if not self.settings.mask_documents:
            return self.settings.batch * batch.targets.shape[1] / self.source.world_size
        count = (batch.targets != NOT_COUNTED).sum(dtype=torch.float64)
        self.world.all_reduce(count, op="avg")
        return max(1.0 / self.source.world_size, count.item())  # no token: 0 / 1, not NaN

    def compute_loss(self, batch: Batch) -> Tensor:
        """Return this rank's term of the loss; the average of the terms is the global mean.

        The divisor is `fair_share` rather than this rank's number of targets, so that this holds
        even if the ranks have different numbers of targets.
        """
        return self.summed_loss(batch) / self.fair_share

    def summed_loss(self, batch: Batch) -> Tensor:
        """Return the cross entropy summed over all targets, in nats; no gradients if divided."""
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
        """Average in place, over the ranks, all gradients that backward has not yet averaged."""
        for flat in self.parallel.flats:
            self.average_bucket(flat)

    def average_bucket(self, flat: Tensor) -> None:
        """Average one bucket of gradients over the ranks, in place."""
        self.world.all_reduce(flat, op="avg")

    def update(self) -> None:
        """Clip the gradients and run the optimizer's step.

        A step with nonfinite gradients is skipped on all ranks, because their norm is the same on
        all ranks. In float16, the scaler skips it, since its search for a scale causes overflows.

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
        """Average the ranks' loss terms, which yields the mean over the global batch."""
        mean = loss.detach().float()
        self.world.all_reduce(mean, op="avg")
        return mean.item()

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which averaged weights (EMA), if any, replace the trained ones."""
        return nullcontext() if self.average is None else self.average.applied()

    def validate(self, windows: Windows) -> float:
        """Return the mean loss over all targets; each rank evaluates its slice. Collective."""
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
            CheckpointError: the checkpoint cannot be read.
            ValueError: the checkpoint does not fit the model or the data.
        """
        state = load(path, self.state())
        self.step = state["step"]
        self.source.load_state_dict(state["data"])
        self.scaler.load_state_dict(state["scaler"])
        return state
