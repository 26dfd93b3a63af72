"""Prevent torch.compile from tracing functions that start collectives or have internal state.

A call to such a function causes a graph break.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo

_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """Wrap a function so that torch.compile never traces it or its callees.

    Calling `uncompiled` imports torch._dynamo.
    """
    disabled: _Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def uncompiled_call(function: _Function) -> _Function:
    """Wrap a function as `uncompiled` does, but import torch._dynamo only on the first call.

    The function must be defined at module level, because torch stores the result as an attribute of
    the function.
    """
    disabled: _Function = _disable_dynamo(function)  # type: ignore[assignment]
    return disabled
