"""Avoid repeated recomputation when a backward pass with activation checkpointing is split in two.

The weight half of a backward pass runs many small parts of the graph, each in a separate call.
Torch recomputes a checkpointed region in every call, unless the calls are declared to be one group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import checkpoint

_Group: Any = getattr(checkpoint, "GraphExecGroup", None)  # of newer versions of torch


def recomputed_once() -> AbstractContextManager[object]:
    """Make the backward calls inside the block recompute each checkpointed region only once.

    The calls inside one block must not use a saved tensor twice. Each half of a backward pass
    therefore needs its own block.
    """
    if _Group is None or _Group._get_current_group() is not None:
        return nullcontext()
    group: AbstractContextManager[object] = _Group()
    return group


@contextlib.contextmanager
def recomputations(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield a list to which each submodule is added when its forward pass runs inside the block."""
    own = {id(part) for part in module.modules()}
    seen: list[nn.Module] = []

    def note(part: nn.Module, _: Any) -> None:
        if id(part) in own:
            seen.append(part)

    handle = register_module_forward_pre_hook(note)
    try:
        yield seen
    finally:
        handle.remove()
