"""Encode the headers that describe a micro-batch's outputs.

A header contains the channel of the payload, the number of tensors that a stage returned and, for
each tensor, the dtype, the shape and `requires_grad`. The header is read on the host before the
tensors are created, so it is always a host tensor, even if the payload is on a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

Tensors = list[torch.Tensor]

_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_MAX_TENSORS, _MAX_DIMS = 8, 8
_RECORD = 3 + _MAX_DIMS
HEADER_NUMBERS = 96  # two, and a record for each tensor
HEADER_BYTES = 8 * HEADER_NUMBERS
_ALIGNMENT = 64


class Place(IntEnum):
    """The channel that carries the payload described by a header."""

    MAIN = 0  # on the data channel
    SPILL = 1  # on the spill channel: the receive posted for it on the data channel is too small


@dataclass(frozen=True, slots=True)
class Spec:
    """The information needed to create one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """The size of the tensor in bytes, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Header:
    """The description of a micro-batch's outputs."""

    specs: tuple[Spec, ...]
    place: Place = Place.MAIN

    @property
    def payload_bytes(self) -> int:
        """The size of the payload in bytes, including the padding of each tensor."""
        return sum(_aligned(spec.num_bytes) for spec in self.specs)

    def encode(self) -> torch.Tensor:
        """Return the header as an int64 tensor of shape [HEADER_NUMBERS] on the host."""
        numbers = [len(self.specs), int(self.place)]
        for spec in self.specs:
            dims = [*spec.shape, *[0] * (_MAX_DIMS - len(spec.shape))]
            numbers += [_DTYPES.index(spec.dtype), spec.requires_grad, len(spec.shape), *dims]
        numbers += [0] * (HEADER_NUMBERS - len(numbers))
        return torch.tensor(numbers, dtype=torch.int64)

    @staticmethod
    def decode(numbers: Sequence[int]) -> Header:
        """Decode a header from the numbers that `encode` returned."""
        specs = []
        for at in range(2, 2 + numbers[0] * _RECORD, _RECORD):
            dtype, requires_grad, num_dims, *dims = numbers[at : at + _RECORD]
            specs.append(Spec(_DTYPES[dtype], tuple(dims[:num_dims]), bool(requires_grad)))
        return Header(tuple(specs), Place(numbers[1]))


def describe(tensors: Sequence[torch.Tensor]) -> tuple[Spec, ...]:
    """Return the `Spec` of each tensor.

    Raises:
        ValueError: there are too many tensors, or a tensor has too many dims or an unsupported
            dtype.
    """
    if len(tensors) > _MAX_TENSORS:
        raise ValueError(
            f"a stage returned {len(tensors)} tensors; at most {_MAX_TENSORS} can be sent"
        )
    for tensor in tensors:
        if tensor.dtype not in _DTYPES or tensor.dim() > _MAX_DIMS:
            raise ValueError(
                f"a stage returned a tensor of dtype {tensor.dtype} with {tensor.dim()} dims, but "
                f"only tensors of a supported real dtype with at most {_MAX_DIMS} dims can be sent"
            )
    return tuple(Spec(one.dtype, tuple(one.shape), one.requires_grad) for one in tensors)


def pack(tensors: Iterable[torch.Tensor], payload: torch.Tensor) -> None:
    """Copy tensors into `payload`, a uint8 tensor of at least `payload_bytes` elements."""
    at = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        payload[at : at + size].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        at += _aligned(size)


def unpack(specs: Iterable[Spec], payload: torch.Tensor) -> Tensors:
    """Return a payload's tensors as views; each is a leaf with its spec's `requires_grad`."""
    tensors: Tensors = []
    at = 0
    for spec in specs:
        tensor = payload[at : at + spec.num_bytes].view(spec.dtype).view(spec.shape)
        tensors.append(tensor.requires_grad_(spec.requires_grad))
        at += _aligned(spec.num_bytes)
    return tensors


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
