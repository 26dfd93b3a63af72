"""One rank's part of a model that `parallelize` has distributed."""

from __future__ import annotations

import contextlib
import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import echelon.dist as dist
from echelon.dist.fsdp import clip_grad_norm_, gradient_sync
from echelon.dist.mesh import DeviceMesh
from echelon.dist.parallel import whole
from echelon.dist.parallel.axes import Axes
from echelon.dist.parallel.tensor.gradients import SharedGradients
from echelon.dist.pipeline import Pipeline
from echelon.dist.pipeline.execute.batch import split_batch
from echelon.dist.pipeline.execute.failure import ending_on_failure
from echelon.dist.pipeline.execute.stage import LossFn


class Parallel:
    """One rank's part of a model, with methods to train it. Created by `parallelize`.

    Attributes:
        model: this rank's module, whose parameters are named as in the whole model; in a pipeline,
            it contains this rank's stages. To save a checkpoint, include this module in the state:
            `{"model": parallel.model, ...}`.
        mesh: the mesh with the axes "pp", "replicate", "shard" and "tp".
        data: this rank's data-parallel index, and the data-parallel size. Ranks with equal `data`
            must be given the same data.
        pipeline: the pipeline that runs the stages; None if axis "pp" has size 1.

    Example:
        >>> mesh = DeviceMesh((1, 2), ("pp", "shard"))  # on each of 2 ranks
        >>> parallel = parallelize(model, mesh, loss_fn=loss_fn, num_microbatches=2)
        >>> parallel.data == (dist.world().rank, 2)  # which part of a batch this rank takes
        True
        >>> loss = parallel.step(tokens, targets)
        >>> norm = parallel.clip_grad_norm_(1.0)
    """

    def __init__(
        self,
        axes: Axes,
        model: nn.Module,
        pipeline: Pipeline | None,
        shared: SharedGradients,
        *,
        loss_fn: LossFn | None,
        num_microbatches: int,
        copies: Sequence[nn.Parameter],
        names: dict[str, str],
    ) -> None:
        self.model = model
        self.mesh: DeviceMesh = axes.mesh
        self.data = axes.data_place
        self.pipeline = pipeline
        self.num_microbatches = num_microbatches
        self._axes = axes
        self._shared = shared
        self._loss_fn = loss_fn
        self._names = names
        self._numbers = itertools.count()
        self._has_compared = False
        # Counted by another rank when a norm is taken over all of them.
        self._aliases = [*copies, *(shared.parameters if axes.tensor.rank else ())]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that this rank's optimizer trains."""
        return self.model.parameters()

    @property
    def has_loss(self) -> bool:
        """True if this rank holds the last stage and therefore computes losses."""
        return self.pipeline is None or self.pipeline.has_last

    def step(self, inputs: Any, targets: Any = None, *, loss_scale: float = 1.0) -> Tensor:
        """Run forward and backward passes on this rank's local batch, and reduce the gradients.

        The gradients of the mean loss over all ranks' data are added to `.grad`. Collective among
        all ranks; each operation blocks for at most its group's timeout.

        Args:
            inputs: a tensor or a tuple of tensors, [batch_size, ...], the same on all ranks with
                equal `data`. Stages after the first ignore them.
            targets: the targets for the loss, in the same form; stages before the last ignore them.
            loss_scale: the current scale of a gradient scaler, which must be the same on all ranks.
                It multiplies the gradients but not the losses.

        Returns:
            This rank's contribution to the mean loss, a detached scalar. The mean loss is the sum
            of all ranks' contributions; the contribution is 0 on ranks without a loss
            (`has_loss`).

        Raises:
            ValueError: an argument is invalid, or ranks of axis "tp" were given different data.
            CollectiveError: a rank was lost or did not join.
        """
        if not (loss_scale > 0 and math.isfinite(loss_scale)):
            raise ValueError(f"loss_scale must be positive and finite, got {loss_scale!r}")
        self._compare(inputs, targets)
        self._shared.set_aside()
        try:
            if self.pipeline is not None:
                with self._ending_on_failure("step"):
                    losses = self.pipeline.step(inputs, targets, loss_scale=loss_scale)
            else:
                losses = self._accumulate(inputs, targets, loss_scale)
            self._shared.reduce()
        except BaseException:
            self._shared.drop()
            raise
        return self._term(losses)

    def evaluate(self, inputs: Any, targets: Any = None) -> Tensor:
        """Run only the forward pass on this rank's local batch, without gradients.

        Args:
            inputs: as in `step`.
            targets: as in `step`.

        Returns:
            This rank's contribution to the mean loss, as in `step`.

        Raises:
            ValueError, CollectiveError: as in `step`.
        """
        if self.has_loss and self._loss_fn is not None and targets is None:
            raise ValueError("evaluate() needs targets, because a loss_fn is set")
        self._compare(inputs, targets)
        if self.pipeline is not None:
            with self._ending_on_failure("evaluate"):
                return self._term(self.pipeline.evaluate(inputs, targets))
        with torch.no_grad():
            return self._term([self._loss(*one) for one in self._microbatches(inputs, targets)])

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale all gradients so that their total norm is at most `max_norm`.

        Each element of the whole model is counted once, no matter how many ranks hold it.
        Collective across all ranks.

        Returns:
            The norm before scaling, bitwise identical on every rank.

        Raises:
            ValueError: an argument is invalid.
            CollectiveError: a rank was lost or did not join.
        """
        return clip_grad_norm_(
            self.model, max_norm, norm_type, over=dist.world(), aliases=self._aliases
        )

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's parameters and buffers, in host memory on every rank.

        Collective.

        Raises:
            CollectiveError: a rank was lost or did not join.
        """
        return whole.full_state_dict(self.model, self._axes, self._names)

    # ---- one rank's step ----

    def _accumulate(self, inputs: Any, targets: Any, loss_scale: float) -> list[Tensor]:
        losses = []
        parts = self._microbatches(inputs, targets)
        for number, (part, target) in enumerate(parts, 1):
            is_last = number == len(parts)
            with contextlib.nullcontext() if is_last else gradient_sync(self.model, enabled=False):
                loss = self._loss(part, target)
                (loss * (loss_scale / len(parts))).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return losses

    def _loss(self, inputs: list[Tensor], targets: list[Tensor] | None) -> Tensor:
        output = self.model(*inputs)
        if self._loss_fn is not None and targets is not None:
            output = self._loss_fn(output, targets[0] if len(targets) == 1 else tuple(targets))
        if not isinstance(output, Tensor) or output.numel() != 1:
            found = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"the loss of a micro-batch must be a scalar tensor, got {found}")
        return output

    def _microbatches(
        self, inputs: Any, targets: Any
    ) -> list[tuple[list[Tensor], list[Tensor] | None]]:
        num = self.num_microbatches
        if self._loss_fn is not None and targets is None:
            raise ValueError("step() needs targets, because a loss_fn is set")
        parts = split_batch("inputs", inputs, num)
        if targets is None:
            return [(part, None) for part in parts]
        aims = split_batch("targets", targets, num)
        for part, aim in zip(parts, aims, strict=True):
            if len(part[0]) != len(aim[0]):
                raise ValueError("step: inputs and targets must have the same size in dim 0")
        return list(zip(parts, aims, strict=True))

    def _term(self, losses: list[Tensor] | None) -> Tensor:
        if losses is None:
            return torch.zeros((), device=self._device)
        share = self.data[1] * self._axes.tensor.size
        return torch.stack([loss.detach().float() for loss in losses]).mean() / share

    @property
    def _device(self) -> torch.device:
        first = next(self.model.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def _compare(self, inputs: Any, targets: Any) -> None:
        """Check on the first call that all ranks of axis "tp" were given the same data."""
        group = self._axes.tensor
        if self._has_compared or group.size == 1:
            return
        self._has_compared = True
        sums = group.all_gather_object(_checksum((inputs, targets)))
        if len(set(sums)) > 1:
            other = next(rank for rank, one in enumerate(sums) if one != sums[0])
            raise ValueError(
                f"ranks {group.ranks[0]} and {group.ranks[other]} were given different data, "
                "but all ranks of axis tp need the same data. Divide the data with "
                "parallel.data, not by rank"
            )

    def _ending_on_failure(self, call: str) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that aborts the group of axis "tp" if a pipeline call fails.

        The group must be aborted because its other ranks might be waiting for this rank.
        """
        group = self._axes.tensor
        rank = group.ranks[group.rank]
        return ending_on_failure(call, next(self._numbers), rank, lambda: [group])


def _checksum(batch: Any) -> int:
    if isinstance(batch, tuple | list):
        return zlib.crc32(repr([_checksum(one) for one in batch]).encode())
    if isinstance(batch, Tensor):
        raw = batch.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        content: Any = raw.numpy()  # a buffer, which its type does not say
        return zlib.crc32(content, zlib.crc32(repr(tuple(batch.shape)).encode()))
    return zlib.crc32(type(batch).__name__.encode())
