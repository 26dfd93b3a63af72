"""Detect torch DTensors without importing the module that defines them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Any) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # slow to load, and then there are none
    return module is not None and isinstance(tensor, module.DTensor)
