"""Reject training setups whose results depend on the number of ranks or are not reproducible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import echelon.dist as dist
from echelon.dist.canonical import Run, agree_runs, even_runs
from echelon.dist.dtensor import is_dtensor
from echelon.dist.fsdp.parameters.member import member_of
from echelon.dist.group import ProcessGroup
from echelon.errors import NotReproducibleError
from echelon.train.optimizers.muon import Muon


def check_model(model: nn.Module) -> None:
    """Reject models whose results depend on the number of ranks.

    Raises:
        ValueError: the model uses DistributedDataParallel or tensor parallelism.
    """
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "DistributedDataParallel adds gradients in an order that depends on the ranks: "
            "pass the module inside it (ddp.module) to SameBits"
        )
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            raise ValueError(
                f"parameter {name!r} is a DTensor: SameBits does not support tensor parallelism, "
                "because the bits of the results depend on the number of tensor-parallel ranks"
            )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Reject optimizers whose results depend on how parameters are sharded.

    Raises:
        ValueError: the optimizer is Muon or fused.
    """
    if isinstance(optimizer, Muon):
        raise ValueError(
            "SameBits does not support Muon, whose matrices are distributed across the ranks"
        )
    if any(group.get("fused") for group in optimizer.param_groups):
        raise ValueError(
            f"{type(optimizer).__name__}(fused=True) rounds the last elements of a tensor "
            "differently from the rest, so the results depend on where shards end: use fused=False"
        )


def runs_of(group: ProcessGroup, micro_batches: int, run: Run | None) -> tuple[Run, ...]:
    """Exchange ranges of micro-batches, and return the range of every rank. Collective.

    If this rank passes None, the micro-batches are split evenly.

    Raises:
        ValueError: the ranges do not cover all micro-batches.
        CollectiveMismatchError: the ranks' ranges are not contiguous or differ in `total`.
    """
    if run is None:
        run = even_runs(micro_batches, group.size)[group.rank]
    runs = agree_runs(group, run)
    whole = Run(0, micro_batches, micro_batches)
    if Run(runs[0].start, runs[-1].stop, run.total) != whole:
        raise ValueError(
            f"the ranks' runs must cover exactly {micro_batches} micro-batches, got {list(runs)}"
        )
    return runs


def copy_whole_parameters(module: nn.Module, group: ProcessGroup) -> None:
    """Broadcast unsharded parameters and all buffers from the group's first rank. Collective."""
    if group.size == 1:
        return
    tensors = [one for one in module.parameters() if member_of(one) is None]
    for tensor in [*tensors, *module.buffers()]:
        group.broadcast(tensor.detach(), root=0)


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Raise an error if a buffer changes inside the context.

    Raises:
        ValueError: a buffer was written, replaced or removed.
    """
    before = {name: (one, one._version) for name, one in module.named_buffers()}
    yield
    after = {name: (one, one._version) for name, one in module.named_buffers()}
    changed = [name for name, was in before.items() if not _is_same(was, after.get(name))]
    if changed:
        raise ValueError(
            f"the forward pass changed buffer {changed[0]!r}, so its value would depend on which "
            "micro-batches a rank computes. Freeze running statistics, for example with eval()"
        )


@contextmanager
def no_collectives(group: ProcessGroup) -> Iterator[None]:
    """Raise an error if a collective on the world or on `group` is called inside the context.

    Raises:
        ValueError: a collective was called; its result would depend on the number of ranks.
    """
    groups = list(dict.fromkeys([dist.world(), group]))
    before = [one.num_collectives for one in groups]
    yield
    for one, count in zip(groups, before, strict=True):
        if one.num_collectives != count:
            raise ValueError(
                f"a micro-batch called a collective of group {one.name!r}, whose result depends on "
                "the set of ranks. To average one value per micro-batch, call mean() after the step"
            )


def _is_same(was: tuple[torch.Tensor, int], now: tuple[torch.Tensor, int] | None) -> bool:
    return now is not None and now[0] is was[0] and now[1] == was[1]


def check_reproducible(step: int, rows: Sequence[Sequence[str]], ranks: Sequence[int]) -> None:
    """Compare the digests from each rank's two computations of micro-batch 0.

    Args:
        step: the number of the step, for the error message.
        rows: the first and the second digest of each rank.
        ranks: the global rank of each row.

    Raises:
        NotReproducibleError: a rank's two digests differ, or different ranks' digests differ.
    """
    unstable = [rank for rank, (one, two) in zip(ranks, rows, strict=True) if one != two]
    if unstable:
        raise NotReproducibleError(
            f"micro-batch 0 of step {step} gave different bits when rank {unstable[0]} computed it "
            "again. Does your code depend on anything but the micro-batch's number, or "
            "use a non-deterministic operation? See torch.use_deterministic_algorithms(True)",
            ranks=unstable,
        )
    strays = [rank for rank, row in zip(ranks, rows, strict=True) if row[0] != rows[0][0]]
    if strays:
        raise NotReproducibleError(
            f"micro-batch 0 of step {step} produced different bits on rank {strays[0]} than on "
            f"rank {ranks[0]}; check that these ranks have the same processors, libraries and "
            "number of threads (OMP_NUM_THREADS), and that your code selects data by the "
            "micro-batch's index",
            ranks=strays,
        )
