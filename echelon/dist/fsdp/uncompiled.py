"""Functions that torch.compile leaves alone: hooks, guards and public calls run outside of graphs.

They start collectives, look at attributes of tensors and keep state, none of which belongs in a
compiled graph. A graph that reaches one is split there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo

_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """Return a function that is never traced, and neither is what it calls. Loads torch._dynamo."""
    disabled: _Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def uncompiled_call(function: _Function) -> _Function:
    """Return the same for a public function of a module; loads torch._dynamo at its first call.

    Not for closures and methods: torch keeps the result as an attribute of `function`.
    """
    disabled: _Function = _disable_dynamo(function)  # type: ignore[assignment]
    return disabled
