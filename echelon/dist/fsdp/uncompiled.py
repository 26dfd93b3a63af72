"""Keep torch.compile from tracing hooks, guards and public calls, which run outside graphs.

These functions start collectives, inspect attributes of tensors and keep state. None of this
belongs in a compiled graph, so a graph that reaches one of these functions is split there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo

_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """Wrap a function so that torch never traces the function or its callees.

    Loads torch._dynamo.
    """
    disabled: _Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def uncompiled_call(function: _Function) -> _Function:
    """Wrap a module's public function as `uncompiled` does, but load torch._dynamo on first call.

    This must not be used for closures and methods, because torch stores the result as an attribute
    of `function`.
    """
    disabled: _Function = _disable_dynamo(function)  # type: ignore[assignment]
    return disabled
