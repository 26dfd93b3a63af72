"""Keep gradients in a few large flat buffers, so that averaging takes a few large operations.

Each parameter's `.grad` is a view into its bucket's buffer for the whole run: backward accumulates
directly into the buffer, the all_reduce averages the buffer in place, and the optimizer reads the
views. A step packs, unpacks and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

FOUR_MIB = 4 * 1024 * 1024


class GradientBuckets:
    """The gradient buffers of parameters of one dtype and device.

    Attributes:
        flats: the 1D buffers; a bucket contains whole parameters, in the given order.
    """

    def __init__(self, parameters: Iterable[Parameter], *, bucket_bytes: int = FOUR_MIB) -> None:
        self.flats = [adopt(bucket) for bucket in fill_buckets(parameters, bucket_bytes)]

    def zero(self) -> None:
        """Zero the gradients in place; `zero_grad` would drop the views."""
        for flat in self.flats:
            flat.zero_()

    def norm(self) -> float:
        """Return the joint 2-norm of the gradients."""
        norms = torch.stack([torch.linalg.vector_norm(flat) for flat in self.flats])
        return torch.linalg.vector_norm(norms).item()


def fill_buckets(parameters: Iterable[Parameter], bucket_bytes: int) -> list[list[Parameter]]:
    """Group parameters in order into buckets of at most `bucket_bytes` or one parameter."""
    buckets: list[list[Parameter]] = []
    used_bytes = 0
    for parameter in parameters:
        if not buckets or used_bytes + parameter.nbytes > bucket_bytes:
            buckets.append([])
            used_bytes = 0
        buckets[-1].append(parameter)
        used_bytes += parameter.nbytes
    return buckets


def adopt(bucket: list[Parameter]) -> Tensor:
    """Create one zeroed buffer for these parameters, and make each `.grad` a view of it."""
    first = bucket[0]
    flat = torch.zeros(sum(p.numel() for p in bucket), dtype=first.dtype, device=first.device)
    pieces = flat.split([parameter.numel() for parameter in bucket])
    for parameter, piece in zip(bucket, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)
    return flat
