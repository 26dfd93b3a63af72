"""Differentiable collectives that enter and leave the tensor-parallel region of a model.

Outside the tensor-parallel region, every rank holds the same activations or, with `sequence`, an
equal share of each sequence's positions. Each function runs at most one collective in the forward
pass. In the backward pass, it runs the operation that gives every rank the gradient of its input:

    enter               identity                    backward: all_reduce
    enter, sequence     all_gather of positions     backward: reduce_scatter
    leave               all_reduce                  backward: identity
    leave, sequence     reduce_scatter              backward: all_gather
    gather              all_gather along a dim      backward: this rank's slice, no communication

All communication uses the collectives of `group`. Without `sequence`, a pair of `enter` and `leave`
runs one all-reduce in each pass. All functions block for at most the group's timeout, and raise
the group's `CollectiveError`s. In a compiled module, each function causes a graph break.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from echelon.dist.fsdp.uncompiled import uncompiled_call
from echelon.dist.group import ProcessGroup

POSITIONS = -2  # the dim of a sequence's positions: features are last


@uncompiled_call
def enter(x: Tensor, group: ProcessGroup, *, sequence: bool) -> Tensor:
    """Return the full input of the tensor-parallel region on every rank: [..., T, C]."""
    if sequence:
        return cast(Tensor, _EnterSequence.apply(x, group))  # type: ignore[no-untyped-call]
    return cast(Tensor, _Enter.apply(x, group))  # type: ignore[no-untyped-call]


@uncompiled_call
def leave(x: Tensor, group: ProcessGroup, *, sequence: bool) -> Tensor:
    """Return the sum of all ranks' partial results: [..., T, C].

    With `sequence`, return the sum at this rank's positions only: [..., T / n, C].

    Raises:
        ValueError: the positions cannot be split evenly across the ranks.
    """
    if sequence:
        return cast(Tensor, _LeaveSequence.apply(x, group))  # type: ignore[no-untyped-call]
    return cast(Tensor, _Leave.apply(x, group))  # type: ignore[no-untyped-call]


@uncompiled_call
def gather(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Concatenate all ranks' slices along `dim`; the result is the same on all ranks."""
    return cast(Tensor, _Gather.apply(x, group, dim))  # type: ignore[no-untyped-call]


@uncompiled_call
def own_positions(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's slice of the positions: [..., T, C] -> [..., T / n, C].

    Raises:
        ValueError: the positions cannot be split evenly across the ranks.
    """
    _check_positions(x, group)
    return x.chunk(group.size, POSITIONS)[group.rank]


def _check_positions(x: Tensor, group: ProcessGroup) -> None:
    if x.shape[POSITIONS] % group.size:
        raise ValueError(
            f"sequence parallelism cannot divide {x.shape[POSITIONS]} positions evenly among "
            f"the {group.size} ranks of group {group.name!r}: pad the sequences"
        )


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    # A copy: autograd may pass one gradient to several functions.
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total)
    return total


def _all_gather(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    parts = x.new_empty(group.size, *x.shape)
    group.all_gather(parts.view(-1), x.contiguous().view(-1))
    return torch.cat(parts.unbind(0), dim)


def _reduce_scatter(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    parts = torch.stack(x.chunk(group.size, dim))
    own = parts.new_empty(parts.shape[1:])
    group.reduce_scatter(own.view(-1), parts.view(-1))
    return own


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(gradient, ctx.group), None


class _EnterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group, POSITIONS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(gradient, ctx.group, POSITIONS), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ARG004
        return _all_reduce(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradient, None


class _LeaveSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        _check_positions(x, group)
        ctx.group = group
        return _reduce_scatter(x, group, POSITIONS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_gather(gradient, ctx.group, POSITIONS), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.chunk(ctx.group.size, ctx.dim)[ctx.group.rank], None, None
