"""Reduce the gradients of the parameters that every tensor-parallel rank holds in full."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from echelon.dist.group import ProcessGroup
from echelon.dist.parallel.tensor.divide import Undivided

_BUCKET_BYTES = 32 << 20


class SharedGradients:
    """The gradients of the unsplit parameters, which are reduced at the end of each step.

    Args:
        undivided: the parameters of the whole model that are not split.
        held: the parameters or shards whose `.grad` this rank's optimizer uses.
        group: the tensor-parallel ranks, which all hold the unsplit parameters.
    """

    def __init__(
        self, undivided: Undivided, held: Sequence[nn.Parameter], group: ProcessGroup
    ) -> None:
        partial, equal = (
            {id(one) for one in kind} for kind in (undivided.partial, undivided.equal)
        )
        self.parameters = [one for one in held if id(one) in partial | equal]
        self._is_equal = {id(one): id(one) in equal for one in self.parameters}
        self._group = group
        self._kept: dict[int, Tensor] = {}

    def set_aside(self) -> None:
        """Set aside the gradients of earlier steps, which are already reduced."""
        if self._group.size > 1:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    self._kept[id(parameter)] = parameter.grad
                    parameter.grad = None

    def drop(self) -> None:
        """Discard the gradients of a failed step, and restore those that were set aside."""
        if self._group.size > 1:
            for parameter in self.parameters:
                parameter.grad = self._kept.pop(id(parameter), None)

    def reduce(self) -> None:
        """Sum or average the step's gradients over the group, and add those of earlier steps.

        Parameters that have no gradient on any rank are skipped. Collective.

        Raises:
            CollectiveError: a rank was lost or did not join.
        """
        if self._group.size == 1:
            return
        trained = [one for one in self.parameters if one.requires_grad and one.numel()]
        for bucket in _buckets(trained):
            self._reduce(bucket)
        for parameter in self.parameters:
            before = self._kept.pop(id(parameter), None)
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

    def _reduce(self, bucket: list[nn.Parameter]) -> None:
        """All-reduce a bucket's gradients as one vector.

        The vector ends with one flag per parameter: 1 if this rank has a gradient for it, else 0.
        """
        flags = [torch.full_like(_first(one), float(one.grad is not None)) for one in bucket]
        gradients = [_gradient(one).reshape(-1) for one in bucket]
        flat = torch.cat([*gradients, *flags])
        self._group.all_reduce(flat)
        sizes = [one.numel() for one in bucket]
        *parts, found = torch.split(flat, [*sizes, len(bucket)])
        for parameter, part, has_any in zip(bucket, parts, found.tolist(), strict=True):
            if not has_any:
                continue
            if self._is_equal[id(parameter)]:
                part.div_(self._group.size)
            if parameter.grad is None:
                parameter.grad = part.view_as(parameter).clone()
            else:
                parameter.grad.copy_(part.view_as(parameter))


def _first(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().reshape(-1)[:1]


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters of the same dtype on the same device into buckets of limited size."""
    buckets: list[list[nn.Parameter]] = []
    open_ones: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        key = (parameter.dtype, parameter.device)
        bucket, used = open_ones.get(key, ([], _BUCKET_BYTES))
        if used >= _BUCKET_BYTES:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        open_ones[key] = bucket, used + parameter.numel() * parameter.element_size()
    return buckets
