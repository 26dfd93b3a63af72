"""Split a step's batch into micro-batches along dim 0."""

from __future__ import annotations

from typing import Any

import torch

from echelon.dist.pipeline.execute.stage import Stage


def split_batch(what: str, batch: Any, num_microbatches: int) -> list[list[torch.Tensor]]:
    """Return the tensors of each micro-batch; micro-batch sizes differ by at most one row.

    Args:
        what: the name of the argument, for error messages.
        batch: a tensor or a tuple of tensors, each of shape [batch_size, ...].
        num_microbatches: the number of micro-batches.

    Raises:
        ValueError: there are no tensors, their batch sizes differ, or there are fewer rows than
            micro-batches.
    """
    tensors = list(batch) if isinstance(batch, tuple | list) else [batch]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
            found = f"a value of type {type(tensor).__name__}"
            found = f"a {tensor.dim()}-dim tensor" if isinstance(tensor, torch.Tensor) else found
            raise ValueError(
                f"{what}: expected tensors whose dim 0 is the batch dimension, got {found}"
            )
    sizes = {len(tensor) for tensor in tensors}
    if len(sizes) != 1:
        raise ValueError(f"{what}: the tensors must have equal batch sizes, got {sorted(sizes)}")
    if min(sizes) < num_microbatches:
        raise ValueError(
            f"{what}: a batch of {min(sizes)} cannot be split into {num_microbatches} micro-batches"
        )
    parts = [tensor.tensor_split(num_microbatches) for tensor in tensors]
    return [list(part) for part in zip(*parts, strict=True)]


def cut_off(inputs: Any) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Replace each input that has an autograd history with a detached tensor, which is a new leaf.

    Each micro-batch runs its own backward pass, which stops at the leaves. `pass_on` then runs the
    backward pass of the caller's graph once, with the gradients from all micro-batches.

    Returns:
        The inputs after replacement, and an (original input, new leaf) pair per replaced input.
    """
    listed = list(inputs) if isinstance(inputs, tuple | list) else [inputs]
    computed = []
    for place, one in enumerate(listed):
        if isinstance(one, torch.Tensor) and one.requires_grad and not one.is_leaf:
            listed[place] = one.detach().requires_grad_()
            computed.append((one, listed[place]))
    if not computed:
        return inputs, []
    return tuple(listed) if isinstance(inputs, tuple | list) else listed[0], computed


def pass_on(computed: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Run the backward pass of the caller's graph, given the pairs that `cut_off` returned."""
    some = [(one, leaf.grad) for one, leaf in computed if leaf.grad is not None]
    if some:
        torch.autograd.backward([one for one, _ in some], [gradient for _, gradient in some])


def check_batch(stages: list[Stage], inputs: Any, targets: Any, *, needs_targets: bool) -> None:
    """Check that the caller passed the tensors that this rank's stages need.

    Raises:
        ValueError: tensors are missing, or the inputs and targets on one rank have different
            numbers of rows.
    """
    if any(stage.is_first for stage in stages) and inputs is None:
        raise ValueError("step: the rank of the first stage must pass inputs")
    if needs_targets and any(stage.is_last for stage in stages) and targets is None:
        raise ValueError(
            "step: the rank of the last stage must pass targets, because there is a loss_fn"
        )
    sizes = [size for one in (inputs, targets) if (size := _num_rows(one)) is not None]
    if needs_targets and len(set(sizes)) > 1:
        raise ValueError(f"step: inputs have {sizes[0]} rows in dim 0, but targets have {sizes[1]}")


def _num_rows(batch: Any) -> int | None:
    first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    return len(first) if isinstance(first, torch.Tensor) and first.dim() else None
