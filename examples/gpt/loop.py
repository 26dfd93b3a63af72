"""Data-parallel training, one small method for each part of a step.

A step is: fetch the batch, forward and backward on this rank's share, average the gradients, clip,
update, average the loss. Every rank makes the same collective calls in the same order; that is
the whole contract of data parallelism, and `break_it.py` shows what happens to those who break it:
it overrides one of these methods and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 -- the name the field uses
from torch import Tensor

from echelon import recorder
from gpt.data import BatchSource, share, tokens_and_targets
from gpt.gradients import FOUR_MIB, GradientBuckets
from gpt.machine import choose_device
from gpt.model import GPT, GPTConfig
from gpt.schedule import learning_rate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from echelon.dist.group import ProcessGroup

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
    bf16: bool = False
    bucket_bytes: int = FOUR_MIB


def build_optimizer(model: GPT, lr: float) -> torch.optim.AdamW:
    """Return AdamW that decays the matrices, and leaves gains and biases alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)


class Trainer:
    """One rank's part of the training of one model.

    Attributes:
        step: the number of finished steps, which is also the index of the next batch.
        buckets: the gradients, as the flat buffers that are averaged over the ranks.
    """

    def __init__(
        self,
        model: GPT,
        source: BatchSource,
        settings: TrainingSettings,
        *,
        world: ProcessGroup,
        device: torch.device,
    ) -> None:
        self.model = model
        self.source = source
        self.settings = settings
        self.world = world
        self.device = device
        self.step = 0
        self.buckets = GradientBuckets(model.parameters(), bucket_bytes=settings.bucket_bytes)
        self.optimizer = build_optimizer(model, settings.lr)

    @classmethod
    def build(
        cls,
        config: GPTConfig,
        settings: TrainingSettings,
        blocks: NDArray[np.uint8],
        *,
        world: ProcessGroup,
    ) -> Trainer:
        """Make this rank's model and its share of the data, and start from rank 0's weights."""
        device = choose_device(world)
        torch.manual_seed(settings.seed)
        source = BatchSource(
            blocks=blocks,
            num_sequences=settings.batch,
            context=config.context,
            seed=settings.seed,
            rank=world.rank,
            world_size=world.size,
        )
        trainer = cls(GPT(config).to(device), source, settings, world=world, device=device)
        trainer.broadcast_parameters()
        return trainer

    def broadcast_parameters(self) -> None:
        """Give every rank rank 0's weights, so that all start from the same point."""
        for parameter in self.model.parameters():
            self.world.broadcast(parameter.detach(), root=0)

    def train_step(self) -> float:
        """Train on one batch and return the loss, averaged over the global batch."""
        recorder.step(self.step)
        tokens, targets = self.next_batch()
        self.buckets.zero()
        loss = self.compute_loss(tokens, targets)
        loss.backward()
        self.average_gradients()
        self.update()
        mean_loss = self.average_loss(loss)
        self.step += 1
        return mean_loss

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Wait for this step's batch, and say so in the record while it lasts."""
        with recorder.span("data_wait"):
            tokens, targets = self.fetch_batch()
        return tokens.to(self.device), targets.to(self.device)

    def fetch_batch(self) -> tuple[Tensor, Tensor]:
        """Get this step's batch from the source."""
        return self.source.batch_at(self.step)

    def compute_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return this rank's term of the loss; the average of the terms is the global mean.

        Dividing by the fair share, not by the tokens at hand, keeps that true where the batch does
        not divide evenly among the ranks.
        """
        fair_share = self.settings.batch * targets.shape[1] / self.world.size
        return self.summed_loss(tokens, targets) / fair_share

    def summed_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy summed over all tokens, in nats."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.bf16):
            logits = self.model(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")

    def average_gradients(self) -> None:
        """Average each bucket over the ranks, in place."""
        for flat in self.buckets.flats:
            self.average_bucket(flat)

    def average_bucket(self, flat: Tensor) -> None:
        """Average one bucket of gradients over the ranks, in place."""
        self.world.all_reduce(flat, op="avg")

    def update(self) -> None:
        """Clip the gradients and let the optimizer take its step."""
        settings = self.settings
        self.buckets.clip(settings.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(
                self.step,
                peak=settings.lr,
                num_warmup=settings.warmup,
                num_steps=settings.steps,
            )
        self.optimizer.step()

    def average_loss(self, loss: Tensor) -> float:
        """Average the ranks' terms of the loss: the mean over the global batch."""
        mean_loss = loss.detach().reshape(1).clone()
        self.world.all_reduce(mean_loss, op="avg")
        return mean_loss.item()

    @torch.no_grad()
    def validate(self, windows: NDArray[np.uint8]) -> float:
        """Return the mean loss over all `windows` [N, T + 1]; each rank works through its share."""
        mine = windows[share(len(windows), self.world.rank, self.world.size)]
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        for first in range(0, len(mine), EVALUATION_SEQUENCES):
            tokens, targets = tokens_and_targets(mine[first : first + EVALUATION_SEQUENCES])
            total += self.summed_loss(tokens.to(self.device), targets.to(self.device))
        self.world.all_reduce(total, op="sum")
        return total.item() / (len(windows) * (windows.shape[1] - 1))

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes in training; the position in the data is the step itself."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where `state_dict` was taken."""
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
