"""Train to bitwise identical weights on any number of ranks.

Each micro-batch has its own random numbers and is computed separately by one rank. Gradients,
losses and the norm are summed in the order of the canonical tree (`dist/canonical/tree.py`), which
depends only on the numbers of the micro-batches. Sharded units stay gathered while a step's
micro-batches are computed, so that ranks can have different numbers of micro-batches.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import echelon.dist as dist
from echelon.dist.canonical import Run, tree_sum
from echelon.dist.group import ProcessGroup
from echelon.train.same_bits.checks import (
    check_model,
    check_optimizer,
    check_reproducible,
    copy_whole_parameters,
    no_collectives,
    runs_of,
    unchanged_buffers,
)
from echelon.train.same_bits.fingerprint_log import FingerprintLog
from echelon.train.same_bits.gradients import Gradients, digest
from echelon.train.same_bits.micro_random import micro_batch_random
from echelon.train.same_bits.norm import norm_of, square_sums

Compute = Callable[[int], torch.Tensor]


class SameBits:
    """A wrapper around a model that makes gradients and losses independent of the number of ranks.

    Creating a `SameBits` is collective, because unsharded parameters and buffers are copied from
    the group's first rank.

    Args:
        model: the model, optionally sharded by `fully_shard` among ranks of `group`.
        optimizer: the optimizer of the model's parameters.
        micro_batches: the number of micro-batches per step, over all ranks. The bits depend on this
            number, but not on the number of ranks.
        group: the ranks across which the micro-batches are split; None means the world.
        seed: the seed of the run. Random numbers depend on this seed, the step and the number of
            the micro-batch.
        run: this rank's micro-batches. Each rank's range must begin where the previous rank's range
            ends. None means an even split.
        probe: whether to check, at the first step, that a micro-batch gives the same bits when
            repeated, and on every rank.
        fingerprints: a folder, such as RUN/fingerprints, in which to record a hash of each
            parameter's gradient in each micro-batch, for `fr-analyze --compare`. Recording reads
            every gradient once. With None, nothing is recorded.

    Attributes:
        run: this rank's micro-batches.

    Raises:
        ValueError: an argument is invalid, the optimizer is fused or Muon, the model uses
            DistributedDataParallel or tensor parallelism, no parameter requires gradients, or a
            unit is sharded across ranks that together do not hold all micro-batches.
        CollectiveMismatchError: the ranks' ranges are not contiguous, or their `Run.total` differs.

    Example:
        >>> same = SameBits(model, optimizer, micro_batches=24, seed=1)
        >>> for step in range(1000):
        ...     loss = same.backward(step, lambda number: loss_of(model, data.batch(step, number)))
        ...     norm = same.clip_grad_norm_(1.0)
        ...     optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        micro_batches: int,
        group: ProcessGroup | None = None,
        seed: int = 0,
        run: Run | None = None,
        probe: bool = True,
        fingerprints: str | Path | None = None,
    ) -> None:
        check_optimizer(optimizer)
        check_model(model)
        self._model = model
        self._group = dist.world() if group is None else group
        self._seed = seed
        self._must_probe = probe
        self._step = 0
        self._log: FingerprintLog | None = None
        if fingerprints is not None:
            self._log = FingerprintLog(fingerprints, dist.world().rank)
        self._runs = runs_of(self._group, micro_batches, run)
        self.run = self._runs[self._group.rank]
        self._gradients = Gradients(model, self._group, self._runs)
        if self._gradients.device is None:
            raise ValueError("no parameter of the model requires a gradient")
        self._device = self._gradients.device
        copy_whole_parameters(model, self._group)

    def backward(self, step: int, compute: Compute) -> float:
        """Compute this rank's micro-batches of a step and put the average gradients into `.grad`.

        Earlier gradients are dropped. The method is collective. It blocks until all ranks have
        computed their micro-batches or the group's timeout expires.

        Args:
            step: the number of the optimizer step, which is part of the random numbers' seed.
            compute: a function that takes the number of a micro-batch within the step and returns
                the micro-batch's loss, a scalar tensor. The loss must depend only on the number,
                and must always be computed from data of the same shape.

        Returns:
            The mean of the micro-batches' losses, with the same bits on every rank.

        Raises:
            NotReproducibleError: at the first step, a micro-batch gave different bits when it was
                recomputed, or computed on another rank; raised on all ranks.
            ValueError: a loss is not a scalar, a forward pass changed a buffer of the model, or a
                micro-batch called a collective.
            CollectiveError: a rank was lost or did not join.
        """
        gradients = self._gradients
        gradients.check_trained()
        self._step = step
        with gradients.held():
            if self._must_probe:
                self._probe(step, compute)
                self._must_probe = False
            losses = []
            for number in self.run.numbers:
                losses.append(self._compute(step, number, compute))
                taken = gradients.take()
                if self._log is not None:
                    self._log.micro_batch(step, number, losses[-1], gradients.named(taken))
                gradients.add(number, taken)
        return self._mean(gradients.reduce(losses))

    def mean(self, values: list[float]) -> float:
        """Average one value per micro-batch, such as a metric, adding the values in a fixed order.

        Collective. The result has the same bits on every rank.

        Args:
            values: the values of this rank's micro-batches, in order of their numbers.

        Raises:
            ValueError: the number of values differs from the number of this rank's micro-batches.
        """
        if len(values) != len(self.run):
            raise ValueError(
                f"got {len(values)} values, but this rank has {len(self.run)} micro-batches"
            )
        rows = self._group.all_gather_object([float(value) for value in values])
        return self._mean([value for row in rows for value in row])

    def _mean(self, values: list[float]) -> float:
        total: float = tree_sum(values, lambda left, right: left + right)
        return total / self.run.total

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their 2-norm is at most `max_norm`. Collective.

        Args:
            max_norm: the upper bound; if it is infinite, the gradients are not scaled.

        Returns:
            The norm before scaling, with the same bits on every rank.

        Raises:
            ValueError: `max_norm` is negative or not a number.
        """
        if not max_norm >= 0:
            raise ValueError(f"max_norm must be >= 0, got {max_norm!r}")
        norm = norm_of(square_sums(self._model, self._group))
        if self._log is not None:
            self._log.norm(self._step, norm)
        scale = max_norm / (norm + 1e-6)
        if not math.isinf(max_norm) and scale < 1.0:
            self._gradients.scale_(scale)
        return norm

    # ---- one micro-batch ----

    def _compute(self, step: int, number: int, compute: Compute) -> float:
        keyed = micro_batch_random(self._seed, step, number, self._device)
        with keyed, no_collectives(self._group):
            with unchanged_buffers(self._model):
                loss = compute(number)
            if not isinstance(loss, torch.Tensor) or loss.dim():
                raise ValueError(f"compute({number}) must return a scalar loss, got {loss!r}")
            torch.autograd.backward(loss)
            return float(loss.detach())

    # ---- the probe ----

    def _probe(self, step: int, compute: Compute) -> None:
        """Compute micro-batch 0 twice on every rank, and compare the results."""
        first = self._digest(step, 0, compute)
        if self.run.total > 1:
            self._digest(step, self.run.total - 1, compute)
        again = self._digest(step, 0, compute)
        rows = self._group.all_gather_object([first, again])
        check_reproducible(step, rows, self._group.ranks)

    def _digest(self, step: int, number: int, compute: Compute) -> str:
        """Return a hash of a micro-batch's loss and gradients."""
        loss = self._compute(step, number, compute)
        text = f"{loss!r} {digest(self._gradients.take())}"
        return hashlib.sha256(text.encode()).hexdigest()
