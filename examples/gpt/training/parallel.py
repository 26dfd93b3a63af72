"""Run training over the ranks, as replicas of the model or with the model split over them.

Both variants average the gradients over the ranks, and provide the norm of all gradients and the
whole model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echelon.dist.fsdp import GradScaler, MixedPrecisionPolicy
from echelon.dist.mesh import DeviceMesh
from echelon.dist.parallel import parallelize
from echelon.train.models import Transformer
from gpt.model.transformer import GPT
from gpt.training.gradients import GradientBuckets
from gpt.training.loss import summed_loss, token_losses

if TYPE_CHECKING:
    from echelon.dist.group import ProcessGroup
    from gpt.text.data import Batch
    from gpt.training.settings import TrainingSettings


class Replicas:
    """Replicas of the model on all ranks, with gradients that are averaged in flat buckets.

    Attributes:
        flats: the gradient buffers that are yet to be averaged over the ranks.
        trained: the argument for an optimizer that works on whole matrices.
        data: this rank's (rank, size) in data parallelism, which splits the batch.
        scaler: the loss scaler, which only float16 needs.
    """

    def __init__(
        self, model: GPT | Transformer, world: ProcessGroup, settings: TrainingSettings
    ) -> None:
        self.model = self.trained = model
        self.data = (world.rank, world.size)
        self.scaler = GradScaler(over=world, enabled=settings.half is torch.float16)
        for parameter in model.parameters():  # all start from rank 0's weights
            world.broadcast(parameter.detach(), root=0)
        self.buckets = GradientBuckets(model.parameters(), bucket_bytes=settings.bucket_bytes)
        self.flats = self.buckets.flats

    def zero(self) -> None:
        """Zero the gradients."""
        self.buckets.zero()

    def norm(self) -> float:
        """Return the joint 2-norm of the gradients."""
        return self.buckets.norm()

    def whole(self) -> GPT | Transformer:
        """Return a copy of the whole model in host memory."""
        model = type(self.model)(self.model.config)
        model.load_state_dict(self.model.state_dict())
        return model


class Divided:
    """A model split into stages, shards and tensor-parallel slices, in any combination.

    Attributes:
        model: the part of the model that this rank trains.
        trained: the same with its mesh, for an optimizer that works on whole matrices.
        data: this rank's (rank, size) in data parallelism, which splits the batch.
        scaler: the loss scaler, which makes the same decisions on all ranks.
    """

    flats: list[Tensor] = []  # noqa: RUF012 -- none is left to average

    def __init__(
        self, model: GPT | Transformer, world: ProcessGroup, settings: TrainingSettings
    ) -> None:
        half, stages, slices = settings.half, settings.pipeline, settings.tp
        self.config, self.kind, self.settings = model.config, type(model), settings
        self.divisor = 1.0
        if settings.chunked_loss:
            model.forward = self.chunked_loss(model)  # where its weights are gathered
        across = "shard" if settings.shard else "replicate"
        mesh = DeviceMesh((stages, world.size // stages // slices, slices), ("pp", across, "tp"))
        precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        self.parallel = self.trained = parallelize(
            model,
            mesh,
            loss_fn=None if settings.chunked_loss else self.loss,
            num_microbatches=settings.num_parts,
            sequence=settings.sequence,
            mp_policy=precision if half is not None else None,
        )
        self.model, self.data = self.parallel.model, self.parallel.data
        self.scaler = GradScaler(over=world, enabled=half is torch.float16)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return a micro-batch's loss, divided by `divisor`."""
        return token_losses(logits, targets) / self.divisor

    def chunked_loss(self, model: GPT | Transformer) -> Any:
        """Return a forward that computes a micro-batch's loss without the logits of all tokens."""
        hidden = model.hidden

        def forward(tokens: Tensor, targets: Tensor, *documents: Tensor) -> Tensor:
            features = hidden(tokens, *documents)
            return summed_loss(model, features, targets) / self.divisor

        return forward

    def step(self, batch: Batch, fair_share: float) -> Tensor:
        """Run forward and backward; return this rank's term of the average loss."""
        self.divisor = fair_share / self.settings.num_parts  # as parts are averaged
        term = self.parallel.step(*self._inputs(batch), loss_scale=self.scaler.get_scale())
        return term * self.parallel.mesh.size

    def evaluate(self, batch: Batch) -> Tensor:
        """Return this rank's term of the loss summed over all targets."""
        self.divisor = 1.0 / self.settings.num_parts
        return self.parallel.evaluate(*self._inputs(batch)) * self.data[1]

    def _inputs(self, batch: Batch) -> tuple[tuple[Tensor, ...], Tensor | None]:
        documents = (batch.documents,) if self.settings.mask_documents else ()
        if self.settings.chunked_loss:
            return (batch.tokens, batch.targets, *documents), None
        return (batch.tokens, *documents), batch.targets

    def zero(self) -> None:
        """Drop the gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def norm(self) -> float:
        """Return the joint 2-norm of the gradients. Collective."""
        return self.parallel.clip_grad_norm_(math.inf)

    def whole(self) -> GPT | Transformer:
        """Return the whole model in host memory. Collective."""
        model = self.kind(self.config)
        model.load_state_dict(self.parallel.full_state_dict())
        return model
