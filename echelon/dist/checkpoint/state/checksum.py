"""Compute a checksum of a tensor's elements on the tensor's device."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from echelon.dist.checkpoint.disk.tensor_bytes import as_bytes

_COLUMNS = 1024
_CHUNK_ROWS = 1 << 13  # 32 MiB on a device, 64 MiB while they are added


def checksum(data: Tensor) -> int:
    """Return a 32-bit checksum, which is the same for equal tensors on the same kind of device.

    On the CPU, the checksum is the CRC-32 of the bytes. On other devices, it is the CRC-32 of
    `sums`.
    """
    if data.device.type == "cpu":
        return zlib.crc32(as_bytes(data))
    return zlib.crc32(as_bytes(sums(data)))


def sums(data: Tensor) -> Tensor:
    """Return the column and row sums of a matrix that contains the tensor's bytes.

    Each row of the matrix has 1024 32-bit words. The result is an int64 vector on the tensor's
    device: the number of bytes, the column sums and the row sums. For a large tensor, the result is
    about 1/500 of the size of the data. Any change to at most three words changes at least one sum.
    """
    flat = data.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % (4 * _COLUMNS)))
    words = padded.view(torch.int32).view(-1, _COLUMNS)
    columns = torch.zeros(_COLUMNS, dtype=torch.int64, device=data.device)
    rows = []
    for chunk in torch.split(words, _CHUNK_ROWS):
        wide = chunk.to(torch.int64)
        columns += wide.sum(0)
        rows.append(wide.sum(1))
    length = torch.tensor([flat.numel()], dtype=torch.int64, device=data.device)
    return torch.cat([length, columns, *rows])
