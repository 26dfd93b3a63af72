"""Torch's tensors in the shape that our groups take: one contiguous array each way.

Torch passes lists of tensors, tensors with gaps, and complex ones. What lies in memory as one piece
already is used as it is; anything else goes through a buffer, and `finish` brings the result back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensor = Any
Finish = Callable[[], None]


def only(data: Any, call: str) -> Tensor:
    """Return the one tensor of torch's list, or the tensor itself."""
    if isinstance(data, torch.Tensor):
        return data
    if len(data) != 1:
        raise ValueError(f"{call}: one tensor a rank is supported, got {len(data)}")
    return data[0]


def only_list(data: Any, call: str) -> Sequence[Tensor]:
    """Return the one list of torch's list of lists, or the list itself."""
    if data and isinstance(data[0], torch.Tensor):
        return list(data)
    if len(data) != 1:
        raise ValueError(f"{call}: one list of tensors a rank is supported, got {len(data)}")
    return list(data[0])


def flat_source(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors, one after the other, as one: in place if they lie so, else a copy."""
    whole = _as_one_piece(tensors)
    if whole is not None:
        return whole
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def flat_target(tensors: Sequence[Tensor]) -> tuple[Tensor, Finish | None]:
    """Return one tensor for results that belong into several, and what brings them there."""
    whole = _as_one_piece(tensors)
    if whole is not None:
        return whole, None
    first = tensors[0]
    numels = [tensor.numel() for tensor in tensors]
    buffer = torch.empty(sum(numels), dtype=first.dtype, device=first.device)

    def finish() -> None:
        _copy_all(tensors, torch.split(buffer, numels))

    return buffer, finish


def source(tensor: Tensor) -> Tensor:
    """Return a tensor's data in one piece: itself, or a copy."""
    return tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()


def target(tensor: Tensor) -> tuple[Tensor, Finish | None]:
    """Return where a result goes, in one piece, and what brings it into the tensor."""
    if tensor.is_contiguous():
        return tensor.detach(), None
    buffer = tensor.detach().contiguous()
    return buffer, lambda: _copy_all([tensor], [buffer])


def both(finishes: Sequence[Finish | None]) -> Finish | None:
    """Return one finish for several."""
    some = [finish for finish in finishes if finish is not None]
    if not some:
        return None

    def finish() -> None:
        for one in some:
            one()

    return finish


def padded_source(tensors: Sequence[Tensor], length: int) -> Tensor:
    """Return a copy of several tensors as one, each padded with zeros to `length` elements."""
    first = tensors[0]
    rows = torch.zeros((len(tensors), length), dtype=first.dtype, device=first.device)
    for row, tensor in zip(rows, tensors, strict=True):
        row[: tensor.numel()] = tensor.detach().reshape(-1)
    return rows.view(-1)


def padded_target(tensors: Sequence[Tensor], length: int) -> tuple[Tensor, Finish]:
    """Return a buffer of `length` elements per tensor, and what fills the tensors from it."""
    first = tensors[0]
    rows = torch.empty((len(tensors), length), dtype=first.dtype, device=first.device)

    def finish() -> None:
        pieces = [row[: one.numel()] for row, one in zip(rows, tensors, strict=True)]
        _copy_all(tensors, pieces)

    return rows.view(-1), finish


def longest(tensors: Sequence[Tensor], own: Tensor, rank: int, what: str) -> int:
    """Return the largest number of elements in a list that holds one tensor per rank.

    Raises:
        ValueError: this rank's own tensor does not have the size that the list gives it.
    """
    numels: list[int] = [tensor.numel() for tensor in tensors]
    if numels[rank] != own.numel():
        raise ValueError(
            f"{what}: the list has {numels[rank]} elements for rank {rank} of the group, "
            f"whose own tensor has {own.numel()}"
        )
    return max(numels)


def is_even(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors of a list hold equally many elements."""
    return all(tensor.numel() == tensors[0].numel() for tensor in tensors)


def same_sizes(tensors: Sequence[Tensor], what: str) -> None:
    """Check that all tensors of a list hold equally many elements.

    Raises:
        ValueError: they do not.
    """
    numels = {tensor.numel() for tensor in tensors}
    if len(numels) > 1:
        raise ValueError(f"{what}: tensors of equal size are needed, got {sorted(numels)} elements")


def _copy_all(tensors: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    # Inference mode may write into tensors of either kind, and records nothing for autograd.
    with torch.inference_mode():
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view(tensor.shape))


def _as_one_piece(tensors: Sequence[Tensor]) -> Tensor | None:
    first = tensors[0]
    if len(tensors) == 1:
        return first.detach().reshape(-1) if first.is_contiguous() else None
    place = first.data_ptr()
    storage = first.untyped_storage().data_ptr()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.dtype != first.dtype or tensor.data_ptr() != place:
            return None
        if tensor.untyped_storage().data_ptr() != storage:
            return None
        place += tensor.numel() * tensor.element_size()
    return first.detach().as_strided((sum(tensor.numel() for tensor in tensors),), (1,))
