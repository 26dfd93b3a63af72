"""Train with weights that have the same bits on any number of ranks.

One rank computes each micro-batch in its own shape and with its own random numbers. Gradients,
losses and the norm are added in the canonical tree over the numbers of the micro-batches. Sharded
units stay gathered while a step's micro-batches are computed, so that ranks may have different
numbers of micro-batches.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import echelon.dist as dist
from echelon.dist.canonical import Run, TreeSums, agree_runs, even_runs, tree_sum
from echelon.dist.fsdp import reshard, unshard
from echelon.dist.fsdp.parameters.flat import member_of
from echelon.dist.fsdp.parameters.unit import units_of
from echelon.dist.group import ProcessGroup
from echelon.errors import NotReproducibleError
from echelon.train.optimizers.muon import Muon
from echelon.train.same_bits.fingerprint_log import FingerprintLog
from echelon.train.same_bits.micro_random import micro_batch_random
from echelon.train.same_bits.norm import grad_norm
from echelon.train.same_bits.vectors import vectors_of

Compute = Callable[[int], torch.Tensor]


class SameBits:
    """Computes gradients, losses and norms that do not depend on the number of ranks.

    Creating a `SameBits` is collective, because unsharded parameters and buffers are copied from
    the group's first rank.

    Args:
        model: the model, which may be sharded by `fully_shard` among ranks of `group`.
        optimizer: the optimizer of the model's parameters.
        micro_batches: the number of micro-batches per step, over all ranks. The bits depend on this
            number. They do not depend on the number of ranks, which need not divide it.
        group: the ranks that share the micro-batches; None means the world.
        seed: the seed of the run. Random numbers depend on this seed, the step and the number of
            the micro-batch.
        run: this rank's micro-batches. The runs of the ranks must be contiguous. None means an even
            division.
        probe: whether to check, at the first step, that a micro-batch gives the same bits twice and
            on all ranks.
        fingerprints: a folder, such as RUN/fingerprints, in which to record a hash of each
            parameter's gradient in each micro-batch, for `fr-analyze --compare`. This reads every
            gradient once. With None, nothing is recorded.

    Attributes:
        run: this rank's micro-batches.

    Raises:
        ValueError: an argument is invalid, the optimizer is fused or Muon, the model uses
            DistributedDataParallel or tensor parallelism, or its results cannot be reproduced.
        CollectiveMismatchError: the ranks' runs are not contiguous parts of the same total.

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
        _check_optimizer(optimizer)
        _check_model(model)
        self._model = model
        self._group = dist.world() if group is None else group
        self._seed = seed
        self._must_probe = probe
        self._step = 0
        self._log: FingerprintLog | None = None
        if fingerprints is not None:
            self._log = FingerprintLog(fingerprints, dist.world().rank)
        if run is None:
            run = even_runs(micro_batches, self._group.size)[self._group.rank]
        self.run = run
        self._runs = agree_runs(self._group, run)
        whole = Run(0, micro_batches, micro_batches)
        if Run(self._runs[0].start, self._runs[-1].stop, run.total) != whole:
            raise ValueError(f"runs {list(self._runs)} do not cover {micro_batches} micro-batches")
        self._vectors = vectors_of(model, self._group, self._runs)
        if not self._vectors:
            raise ValueError("no parameter of the model requires a gradient")
        self._device = self._vectors[0].device
        self._copy_whole_parameters()

    def backward(self, step: int, compute: Compute) -> float:
        """Compute this rank's micro-batches of a step and put the average gradients into `.grad`.

        Earlier gradients are dropped. The method is collective and blocks until all ranks have
        computed their micro-batches, at most for the group's timeout.

        Args:
            step: the number of the optimizer step, which is part of the key of the random numbers.
            compute: a function that takes the number of a micro-batch within the step and returns
                the micro-batch's loss, a tensor without dims. It must depend only on that number,
                not on how often or on which rank it is called, and must always compute in the same
                shape.

        Returns:
            The mean of the micro-batches' losses, with the same bits on every rank.

        Raises:
            NotReproducibleError: at the first step, a micro-batch gave different bits when it was
                computed again or on another rank; raised on all ranks.
            ValueError: a loss has dims, or a forward pass changed a buffer of the model.
            CollectiveError: a rank is lost or did not join.
        """
        self._check_trained()
        self._step = step
        with self._held():
            if self._must_probe:
                self._probe(step, compute)
                self._must_probe = False
            sums = [TreeSums(self.run, one.numel, one.dtype, one.device) for one in self._vectors]
            present = [[False] * len(one.owners) for one in self._vectors]
            losses = []
            for number in self.run.numbers:
                losses.append(self._compute(step, number, compute))
                if self._log is not None:
                    self._log.micro_batch(step, number, losses[-1], _gradients(self._model))
                for vector, total, flags in zip(self._vectors, sums, present, strict=True):
                    gradients, some = vector.take()
                    total.add(number, gradients)
                    flags[:] = [a or b for a, b in zip(flags, some, strict=True)]
        self._reduce(sums, present)
        return self.mean(losses)

    def mean(self, values: list[float]) -> float:
        """Return the mean of one value per micro-batch, such as a metric, in the tree's order.

        Collective; the result has the same bits on every rank.

        Args:
            values: the values of this rank's micro-batches, in order of their numbers.

        Raises:
            ValueError: the number of values differs from the number of this rank's micro-batches.
        """
        if len(values) != len(self.run):
            raise ValueError(f"{len(values)} values for the {len(self.run)} micro-batches here")
        rows = self._group.all_gather_object([float(value) for value in values])
        every = [value for row in rows for value in row]
        total: float = tree_sum(every, lambda left, right: left + right)
        return total / self.run.total

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their 2-norm is at most `max_norm`. Collective.

        Args:
            max_norm: the upper bound; with infinity, the norm is only measured.

        Returns:
            The norm before scaling, with the same bits on every rank.

        Raises:
            ValueError: `max_norm` is negative or not a number.
        """
        if not max_norm >= 0:
            raise ValueError(f"max_norm {max_norm!r} must be >= 0")
        norm = grad_norm(self._model)
        if self._log is not None:
            self._log.norm(self._step, norm)
        scale = max_norm / (norm + 1e-6)
        if math.isinf(max_norm) or scale >= 1.0:
            return norm
        for vector in self._vectors:
            for owner in vector.owners:
                if owner.grad is not None:
                    owner.grad.mul_(scale)
        return norm

    def _check_trained(self) -> None:
        """Refuse a parameter that began to require gradients later and is thus in no vector."""
        known = {id(owner) for vector in self._vectors for owner in vector.owners}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise ValueError(
                    f"parameter {name!r} did not require gradients when SameBits was made, or was "
                    "added since: make a new SameBits"
                )

    # ---- one micro-batch ----

    def _compute(self, step: int, number: int, compute: Compute) -> float:
        with micro_batch_random(self._seed, step, number, self._device):
            before = {name: (one, one._version) for name, one in self._model.named_buffers()}
            loss = compute(number)
            if not isinstance(loss, torch.Tensor) or loss.dim():
                raise ValueError(f"compute({number}) must return a loss without dims, got {loss!r}")
            after = {name: (one, one._version) for name, one in self._model.named_buffers()}
            changed = [name for name, was in before.items() if not _is_same(was, after.get(name))]
            if changed:
                raise ValueError(
                    f"the forward changed buffer {changed[0]!r}: its value would depend on which "
                    "micro-batches a rank computes. Freeze such statistics, as with eval()"
                )
            torch.autograd.backward(loss)
            return float(loss.detach())

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Keep sharded units gathered in the context, and drop gradients left by an exception."""
        for vector in self._vectors:
            vector.drop()
        sharded = bool(units_of(self._model))
        if sharded:
            unshard(self._model)
        try:
            yield
        except BaseException:
            for vector in self._vectors:
                vector.drop()
            raise
        finally:
            if sharded:
                reshard(self._model)

    # ---- over the ranks ----

    def _reduce(self, sums: list[TreeSums], present: list[list[bool]]) -> None:
        mine = torch.tensor([flag for flags in present for flag in flags], dtype=torch.int32)
        flags = mine.to(self._device)
        if self._group.size > 1:
            self._group.all_reduce(flags, op="max")
        rows = torch.split(flags.bool(), [len(one.owners) for one in self._vectors])
        while sums:  # each vector's memory is released before the next one is reduced
            index = len(self._vectors) - len(sums)
            self._vectors[index].give(sums.pop(0), rows[index].tolist())

    def _copy_whole_parameters(self) -> None:
        if self._group.size == 1:
            return
        tensors = [one for one in self._model.parameters() if member_of(one) is None]
        for tensor in [*tensors, *self._model.buffers()]:
            self._group.broadcast(tensor.detach(), root=0)

    # ---- the probe ----

    def _probe(self, step: int, compute: Compute) -> None:
        """Compute micro-batch 0 twice on every rank, another one in between; compare the bits."""
        first = self._digest(step, 0, compute)
        if self.run.total > 1:
            self._digest(step, self.run.total - 1, compute)
        again = self._digest(step, 0, compute)
        rows = self._group.all_gather_object([first, again])
        ranks = self._group.ranks
        unstable = [rank for rank, (one, two) in zip(ranks, rows, strict=True) if one != two]
        if unstable:
            raise NotReproducibleError(
                f"micro-batch 0 of step {step} gave different bits when computed again, on rank "
                f"{unstable[0]}. Does compute() depend on more than the number, or use a "
                "non-deterministic operation? See torch.use_deterministic_algorithms(True)",
                ranks=unstable,
            )
        strays = [rank for rank, row in zip(ranks, rows, strict=True) if row[0] != rows[0][0]]
        if strays:
            raise NotReproducibleError(
                f"micro-batch 0 of step {step} gave different bits on rank {strays[0]} and on rank "
                f"{ranks[0]}: do they have the same processors, libraries, number of threads "
                "(OMP_NUM_THREADS), and data by the micro-batch's number?",
                ranks=strays,
            )

    def _digest(self, step: int, number: int, compute: Compute) -> str:
        """Return a hash of a micro-batch's loss and gradients."""
        found = hashlib.sha256(repr(self._compute(step, number, compute)).encode())
        for vector in self._vectors:
            gradients, present = vector.take()
            found.update(bytes(present))
            found.update(_bytes(gradients))
        return found.hexdigest()


def _is_same(was: tuple[torch.Tensor, int], now: tuple[torch.Tensor, int] | None) -> bool:
    return now is not None and now[0] is was[0] and now[1] == was[1]


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return one micro-batch's gradients keyed by the parameters' names, in the model's order."""
    found = {}
    for name, parameter in model.named_parameters():
        member = member_of(parameter)
        aside = None if member is None else member.aside
        gradient = parameter.grad if aside is None else aside
        if gradient is not None:
            found[name] = gradient
    return found


def _bytes(vector: torch.Tensor) -> bytes:
    return vector.cpu().view(torch.uint8).numpy().tobytes()


def _check_model(model: nn.Module) -> None:
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "DistributedDataParallel adds gradients in an order that depends on the ranks: pass "
            "SameBits the module in it"
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"parameter {name!r} is a DTensor: with tensor parallelism the bits depend on the "
                "number of parts, which SameBits does not cover"
            )


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, Muon):
        raise ValueError("SameBits does not cover Muon: its matrices are divided among the ranks")
    if any(group.get("fused") for group in optimizer.param_groups):
        raise ValueError(
            f"{type(optimizer).__name__}(fused=True) rounds the last elements of a tensor "
            "differently from the others, so bits depend on where shards end: use fused=False"
        )
