"""The trainer's settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from echelon.train.schedules import Schedule, make_schedule
from gpt.training.gradients import FOUR_MIB

FLOOR = 0.1  # of the peak rate; a rate of 0 would waste the last steps


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The settings of training; the model's sizes are in its configuration."""

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
    tp: int = 1  # ranks that divide each layer
    sequence: bool = False  # and, by positions, what is outside of the divided layers
    compile: bool = False  # each block, by torch.compile
    pipeline: int = 1  # stages, one after the other
    microbatches: int = 1  # into which a rank's share of the batch is split, in a pipeline
    optimizer: str = "adamw"  # or "muon": of hidden matrices, AdamW for the rest
    schedule: str = "cosine"  # of the learning rate: "cosine", "wsd" or "constant"
    accumulate: int = 1  # forward and backward passes, of a part of the batch each, per step
    max_skipped: int = 10  # steps in a row whose gradients were not finite, before it is an error
    activations: str = "none"  # which to compute again: "none", "full" or "selective"
    activations_every: int = 1  # of every n-th block
    chunked_loss: bool = False  # never the logits of all tokens at once
    ema: float | None = None  # decay of an average of the weights, by which the run is judged
    init_from: str | None = None  # a Hugging Face folder: its weights are those to begin with
    mask_documents: bool = False  # neither attention nor loss crosses from document to document
    pack_documents: bool = False  # samples hold whole documents; with mask_documents
    workers: int = 1  # threads that read ahead
    bucket_bytes: int = FOUR_MIB

    @property
    def is_divided(self) -> bool:
        """True if the model is split, so that a rank has only a part of it."""
        return self.shard or self.pipeline > 1 or self.tp > 1

    @property
    def num_parts(self) -> int:
        """The number of parts into which a rank's slice of a batch is split."""
        return self.microbatches if self.pipeline > 1 else self.accumulate

    def make_schedule(self) -> Schedule:
        """Return the function that maps a step to the factor of the learning rate."""
        if self.schedule == "constant":
            return make_schedule("constant", num_warmup=self.warmup)
        # a run that is shorter than its warm-up only rises
        num_steps = max(self.steps, self.warmup)
        return make_schedule(
            self.schedule, num_steps=num_steps, num_warmup=self.warmup, floor=FLOOR
        )

    @property
    def half(self) -> torch.dtype | None:
        """The 16-bit compute dtype, or None for float32."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else None
