"""Define the settings of `fully_shard`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPrecisionPolicy:
    """The dtypes in which a unit computes and communicates.

    Attributes:
        param_dtype: the dtype of the gathered parameters. None means the dtype of the shards.
        reduce_dtype: the dtype in which gradients are summed. None means the dtype of the gathered
            parameters.
        output_dtype: the dtype to which the unit's floating-point outputs are cast. None leaves the
            outputs unchanged.
        cast_forward_inputs: whether to cast the unit's floating-point inputs to `param_dtype`.

    Example:
        >>> policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        >>> fully_shard(model, mp_policy=policy)(tokens).dtype
        torch.bfloat16
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        """Raise a ValueError if a dtype is not a floating-point dtype."""
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise ValueError(f"{name} must be a floating-point torch.dtype, got {dtype!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CPUOffloadPolicy:
    """A policy that keeps shards, their gradients and optimizer state in host memory.

    Attributes:
        pin_memory: whether to use page-locked memory, which is copied to the device asynchronously.

    Example:
        >>> policy = CPUOffloadPolicy(pin_memory=False)
        >>> with warnings.catch_warnings(record=True):  # the model is already in host memory
        ...     model = fully_shard(model, offload_policy=policy)
    """

    pin_memory: bool = True
