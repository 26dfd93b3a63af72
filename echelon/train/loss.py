"""Compute a language model's cross-entropy without holding the logits of all tokens at once.

The logits [N, V] of a batch are often the largest tensor of a step. With 8,192 tokens and a
vocabulary of 50,304, they take 1.6 GB in float32, and the softmax and its gradient each take as
much again. Here, one chunk of tokens at a time passes through the head, the softmax and, if
gradients are needed, both products of the backward pass. Only the gradients [N, C] and [V, C]
remain (Hsu et al. 2024, Liger Kernel).

There are two ways to compute the gradients:

    in forward     three products of [N, C] x [C, V], as in plain autograd. The gradient of the
                   weight is in memory from the forward pass to the backward pass.
    recomputed     four products, because the backward pass computes the logits again. Only `hidden`
                   and one number per token are stored. float16 requires recomputation: gradients
                   computed in the forward pass, before the loss is scaled, would underflow to zero.

Sums over tokens and chunks are in float64 if the products are in float64, and in float32 otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon.dist.fsdp.parameters.slices import slice_of

_CHUNK_BYTES = 64 << 20  # of a chunk's logits: large enough for full matrix products


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_tokens: int | None = None,
    recompute: bool | None = None,
) -> Tensor:
    """Compute `F.cross_entropy(F.linear(hidden, weight).float(), targets)` in chunks of tokens.

    Under `torch.autocast`, the products use autocast's dtype. `torch.compile` captures the function
    without a graph break and unrolls the loop over chunks. Second derivatives are not supported.

    Args:
        hidden: [..., C], the input of the head.
        weight: [V, C], the weight of the head, possibly shared with the embedding.
        targets: the target tokens: [...], int64.
        ignore_index: tokens with this target are excluded from the loss and from the mean.
        reduction: "sum", or "mean" over the tokens that are not ignored (NaN if all are ignored, as
            in torch).
        chunk_tokens: the number of tokens per chunk; None chooses a size at which a chunk's
            logits take about 64 MiB.
        recompute: whether the backward pass recomputes the logits, as described at the top of this
            module; None means only for float16. If gradients are computed in the forward pass, a
            second backward pass over the same graph raises a RuntimeError.

    Returns:
        The loss, a float32 scalar (float64 if the products are in float64).

    Raises:
        ValueError: shapes or dtypes do not match, or an argument is invalid.
        IndexError: a target is not in the vocabulary. Such targets are detected only on the CPU and
            outside compiled code; elsewhere, the kernel reports the error.

    Example:
        >>> loss = chunked_cross_entropy(model.hidden(tokens), model.head.weight, targets)
        >>> bool(torch.isclose(loss, loss_fn(model(tokens), targets)))
        True
    """
    _check(hidden, weight, targets, reduction, chunk_tokens)
    vocabulary, width = weight.shape
    flat = targets.reshape(-1)
    counts = flat != ignore_index
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_targets(flat, counts, vocabulary)
    dtype = _product_dtype(hidden, weight)
    plan = _Plan(
        dtype=dtype,
        sum_dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        chunk_tokens=chunk_tokens or max(1, _CHUNK_BYTES // (4 * vocabulary)),
        recompute=dtype == torch.float16 if recompute is None else recompute,
        wants_gradients=torch.is_grad_enabled(),
    )
    share = counts.to(plan.sum_dtype)
    if reduction == "mean":
        share = share / share.sum()  # NaN if no token counts, and so is the loss
    function: Any = _ChunkedLoss  # its apply has no type annotations
    result: Tensor = function.apply(
        hidden.reshape(-1, width), weight, flat.where(counts, 0), counts, share, plan
    )
    return result


@dataclass(frozen=True, kw_only=True)
class _Plan:
    dtype: torch.dtype  # of the products
    sum_dtype: torch.dtype
    chunk_tokens: int
    recompute: bool
    wants_gradients: bool


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, C]
        weight: Tensor,  # [V, C]
        targets: Tensor,  # [N], 0 where it does not count
        counts: Tensor,  # [N], bool
        share: Tensor,  # [N], of each token's loss in the result
        plan: _Plan,
    ) -> Tensor:
        wants = tuple(plan.wants_gradients and one for one in ctx.needs_input_grad[:2])
        in_forward = any(wants) and not plan.recompute
        sums = _Gradients(hidden, weight, plan, wants) if in_forward else None
        losses = share.new_zeros(len(hidden))
        norms = share.new_zeros(len(hidden))
        with torch.autocast(hidden.device.type, enabled=False):
            matrix = weight.to(plan.dtype)
            for part in _parts(len(hidden), plan.chunk_tokens):
                states = _states(hidden[part], counts[part], plan)
                logits = (states @ matrix.t()).to(plan.sum_dtype)
                norms[part] = logits.logsumexp(1)
                picked = logits.gather(1, targets[part, None]).squeeze(1)
                losses[part] = (norms[part] - picked) * share[part]
                if sums is not None:
                    sums.add(part, states, matrix, logits, norms, targets, share)
                del logits  # before the next chunk's logits are made
        ctx.plan, ctx.wants, ctx.gradients = plan, wants, sums
        if plan.recompute and any(wants):
            ctx.save_for_backward(hidden, weight, targets, counts, share, norms)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        if ctx.plan.recompute:
            sums = _recompute(ctx, upstream)
        else:
            sums, ctx.gradients = ctx.gradients, None
            if sums is None:
                raise RuntimeError(
                    "chunked_cross_entropy keeps its gradients for only one backward pass: set "
                    "recompute=True to allow another"
                )
            sums.scale(upstream)
        return sums.of_hidden, sums.result_of_weight(), None, None, None, None


def _recompute(ctx: Any, upstream: Tensor) -> _Gradients:
    plan = ctx.plan
    hidden, weight, targets, counts, share, norms = ctx.saved_tensors
    sums = _Gradients(hidden, weight, plan, ctx.wants)
    scaled = share * upstream
    with torch.autocast(hidden.device.type, enabled=False):
        matrix = weight.to(plan.dtype)
        for part in _parts(len(hidden), plan.chunk_tokens):
            states = _states(hidden[part], counts[part], plan)
            logits = (states @ matrix.t()).to(plan.sum_dtype)
            sums.add(part, states, matrix, logits, norms, targets, scaled)
            del logits
    return sums


class _Gradients:
    """The gradients of `hidden` and `weight`, computed in chunks. An unneeded one is None."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, plan: _Plan, wants: tuple[bool, ...]
    ) -> None:
        self._plan = plan
        self._dtype = weight.dtype
        self.of_hidden = torch.zeros_like(hidden) if wants[0] else None
        self.of_weight = torch.zeros_like(weight, dtype=plan.sum_dtype) if wants[1] else None

    def add(
        self,
        part: slice,
        states: Tensor,  # [n, C]
        matrix: Tensor,  # [V, C]
        logits: Tensor,  # [n, V]; overwritten
        norms: Tensor,  # [N], the logarithm of each token's sum of exponentials
        targets: Tensor,
        share: Tensor,
    ) -> None:
        """Store one chunk's gradient of `hidden`, and add its gradient of `weight` to the sum.

        The gradient of the logits is (softmax - one-hot target) times each token's weight in the
        loss.
        """
        probabilities = logits.sub_(norms[part, None]).exp_()
        ones = probabilities.new_full((len(states), 1), -1.0)
        probabilities.scatter_add_(1, targets[part, None], ones)
        slopes = probabilities.mul_(share[part, None]).to(self._plan.dtype)
        if self.of_hidden is not None:
            self.of_hidden[part] = slopes @ matrix
        if self.of_weight is None:
            return
        if slopes.dtype == self.of_weight.dtype:
            self.of_weight.addmm_(slopes.t(), states)
        else:
            self.of_weight.add_(slopes.t() @ states)

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradients by `factor` in place; a copy could be as large as the weight."""
        for one in (self.of_hidden, self.of_weight):
            if one is not None:
                one.mul_(factor)

    def result_of_weight(self) -> Tensor | None:
        return None if self.of_weight is None else self.of_weight.to(self._dtype)


def _parts(numel: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, numel)) for start in range(0, numel, size)]


def _states(hidden: Tensor, counts: Tensor, plan: _Plan) -> Tensor:
    """Return a chunk of `hidden` in the dtype of the matrix products, with ignored tokens zeroed.

    A weight of 0 in the loss would not be enough to exclude these tokens, because a NaN multiplied
    by 0 is still NaN.
    """
    return hidden.to(plan.dtype).masked_fill(counts.logical_not()[:, None], 0.0)


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(kind)
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype}, but weight is {weight.dtype}: convert one of them, or "
            "use autocast"
        )
    return hidden.dtype


def _check(
    hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str, chunk_tokens: int | None
) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must have shape [..., C] and weight [V, C], got {list(hidden.shape)} and "
            f"{list(weight.shape)}"
        )
    part = slice_of(weight)
    if part is not None:
        raise ValueError(
            f"weight holds only rows {part.index * len(weight)} to "
            f"{(part.index + 1) * len(weight) - 1} of the head's {part.shape[0]} rows, because "
            "axis tp splits the head: leave the head out of plan.tensor"
        )
    if hidden.shape[:-1] != targets.shape or targets.dtype != torch.int64:
        raise ValueError(
            f"targets must be int64 of shape {list(hidden.shape[:-1])}, one per hidden state, got "
            f"{targets.dtype} {list(targets.shape)}"
        )
    if not hidden.is_floating_point() or not weight.is_floating_point():
        raise ValueError(
            f"hidden and weight must be floating-point, got {hidden.dtype} and {weight.dtype}"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if chunk_tokens is not None and (
        isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, int) or chunk_tokens < 1
    ):
        raise ValueError(f"chunk_tokens must be an int >= 1 or None, got {chunk_tokens!r}")


def _check_targets(targets: Tensor, counts: Tensor, vocabulary: int) -> None:
    wrong = counts & ((targets < 0) | (targets >= vocabulary))
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise IndexError(
            f"target {int(targets[first])} of token {first} is outside the vocabulary of "
            f"{vocabulary}"
        )
