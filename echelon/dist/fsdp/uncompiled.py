"""Keep torch.compile from tracing functions that start collectives or keep state.

A graph that reaches such a function is split into two graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo

_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """Wrap a function so that torch never traces the function or its callees.

    Calling `uncompiled` loads torch._dynamo.
    """
    disabled: _Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def uncompiled_call(function: _Function) -> _Function:
    """Wrap a function as `uncompiled` does, but load torch._dynamo only at the first call.

    The function must be defined at module level, because torch stores the result as an attribute of
    the function.
    """
    disabled: _Function = _disable_dynamo(function)  # type: ignore[assignment]
    return disabled
