"""Recompute activations in the backward pass instead of storing them in the forward pass.

    full         a block stores only its inputs, and the backward pass repeats the block's forward
                 pass. This requires memory for every block's inputs and one block's activations,
                 and about a third more computation.
    every n-th   full for every n-th block; the other blocks store all activations.
    selective    a block stores its inputs and the results of matrix products and attention, which
                 are the most expensive to recompute, and recomputes all other results.

The recomputed forward pass repeats the first forward pass operation by operation, with the same
random numbers, so the gradients are bitwise identical to those without recomputation. Only a
block's `forward` is replaced, not its hooks. Therefore, `fully_shard` gathers a unit for both
forward passes, and can be called before or after `checkpoint_activations`. Modules are not wrapped,
so the names in a state dict do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

MODES = ("none", "full", "selective")

# By name, because no version of torch has all of them.
_COSTLY = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_attention_math_for_mps",
    "_scaled_dot_product_fused_attention_overrideable",
)


def checkpoint_activations(
    blocks: Iterable[nn.Module],
    mode: str = "full",
    *,
    every: int = 1,
    keep: Sequence[Any] | None = None,
) -> int:
    """Make blocks discard activations in the forward pass and recompute them in the backward pass.

    In a pipeline, each rank passes the blocks of its own stages, and `every` counts only these
    blocks.

    Args:
        blocks: the model's blocks in order, such as `model.blocks`.
        mode: "full", "selective", or "none", which leaves the blocks unchanged.
        every: n; the first block and every n-th block after it are checkpointed.
        keep: for "selective", the operations (`torch.ops.aten.mm.default`, ...) whose results are
            stored; None means `costly_operations()`.

    Returns:
        The number of blocks that are now checkpointed.

    Raises:
        ValueError: an argument is invalid, or a block is already checkpointed.

    Example:
        >>> checkpoint_activations(model.blocks, "selective", every=2)
        1
    """
    given = list(blocks)
    _check(given, mode, every, keep)
    if mode == "none":
        return 0
    kept = None
    if mode == "selective":
        kept = frozenset(costly_operations() if keep is None else keep)
    chosen = given[::every]
    for block in chosen:
        block.forward = _Checkpointed(block.forward, kept)
    return len(chosen)


def costly_operations() -> list[Any]:
    """Return all overloads of this torch version's matrix products and attention operations.

    Example:
        >>> torch.ops.aten.mm.default in costly_operations()
        True
    """
    found = (getattr(torch.ops.aten, name, None) for name in _COSTLY)
    packets = [packet for packet in found if packet is not None]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


class _Checkpointed:
    """A replacement for a block's `forward` that, unlike a closure, is copied with the block."""

    def __init__(self, forward: Callable[..., Any], kept: frozenset[Any] | None) -> None:
        self._forward = forward
        self._settings: dict[str, Any] = {}
        if kept is not None:
            self._settings["context_fn"] = functools.partial(_contexts, kept)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, **self._settings, **kwargs)


def _contexts(kept: frozenset[Any]) -> tuple[Any, Any]:
    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001
        if operation in kept:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    make: Any = create_selective_checkpoint_contexts  # it has no type annotations
    contexts: tuple[Any, Any] = make(policy)
    return contexts


def _check(blocks: list[nn.Module], mode: str, every: int, keep: Sequence[Any] | None) -> None:
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every= must be an int >= 1, got {every!r}")
    if keep is not None and mode != "selective":
        raise ValueError(f"keep= requires mode 'selective', got mode {mode!r}")
    for block in blocks:
        if not isinstance(block, nn.Module):
            raise ValueError(f"blocks must be modules, got {type(block).__name__}")
        if isinstance(block, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"a {type(block).__name__} has no forward of its own: pass the modules inside it"
            )
        if isinstance(block.forward, _Checkpointed):
            raise ValueError(f"this {type(block).__name__} is already checkpointed")
