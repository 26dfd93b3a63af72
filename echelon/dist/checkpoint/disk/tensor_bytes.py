"""View a tensor's elements as bytes, without a copy if they are contiguous on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype with this name.

    Raises:
        ValueError: this version of torch does not have such a dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this version of torch does not have dtype {name}")
    return dtype


def is_plain(data: Tensor) -> bool:
    """Return whether a tensor's elements can be read and written in place as bytes."""
    return (
        data.device.type == "cpu"
        and data.is_contiguous()
        and not data.is_conj()
        and not data.is_neg()
    )


def as_bytes(data: Tensor) -> memoryview:
    """Return a tensor's elements as bytes in row-major order: a view if `is_plain`, else a copy."""
    flat = data.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
