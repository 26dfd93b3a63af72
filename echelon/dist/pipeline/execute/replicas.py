"""Average the gradients of unsharded parameters over a pipeline's replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from echelon.dist.group import ProcessGroup
from echelon.dist.pipeline.execute.parameters import whole_parameters
from echelon.dist.pipeline.execute.stage import Stage

_BUCKET_BYTES = 32 << 20


def average_gradients(stages: Sequence[Stage], group: ProcessGroup) -> None:
    """Average the gradients over all replicas, counting missing gradients as zero.

    Collective. If the group has `reduction="rank_ordered"`, gradients are added in rank order.

    Raises:
        CollectiveError: a replica was lost or did not join.
    """
    parameters = [p for stage in stages for p in whole_parameters(stage)]
    for bucket in _buckets(list(dict.fromkeys(parameters))):
        flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in bucket])
        group.all_reduce(flat, "avg")
        parts = torch.split(flat, [parameter.numel() for parameter in bucket])
        for parameter, part in zip(bucket, parts, strict=True):
            _gradient(parameter).copy_(part.view_as(parameter))


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters of the same dtype and device into buckets of limited size."""
    buckets: list[list[nn.Parameter]] = []
    room: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        key = (parameter.dtype, parameter.device)
        bucket, used = room.get(key, ([], _BUCKET_BYTES))
        if used >= _BUCKET_BYTES:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        room[key] = bucket, used + parameter.numel() * parameter.element_size()
    return buckets
