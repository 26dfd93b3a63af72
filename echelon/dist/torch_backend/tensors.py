"""Convert torch's tensors to the form that groups accept: one contiguous input and one output.

Torch passes lists of tensors, non-contiguous tensors, and complex tensors. Tensors that already
form one contiguous piece of memory are used in place. For other tensors, the operation uses a
buffer, from which `finish` copies the result back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensor = Any
Finish = Callable[[], None]


def only(data: Any, call: str) -> Tensor:
    """Return the only tensor in a list from torch, or the argument itself if it is a tensor."""
    if isinstance(data, torch.Tensor):
        return data
    if len(data) != 1:
        raise ValueError(f"{call}: expected one tensor per rank, got {len(data)}")
    return data[0]


def only_list(data: Any, call: str) -> Sequence[Tensor]:
    """Return the only list in torch's list of lists, or the argument if it is a flat list."""
    if data and isinstance(data[0], torch.Tensor):
        return list(data)
    if len(data) != 1:
        raise ValueError(f"{call}: expected one list of tensors per rank, got {len(data)}")
    return list(data[0])


def flat_source(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors into one: a view if they are adjacent in memory, otherwise a copy."""
    whole = _as_one_piece(tensors)
    if whole is not None:
        return whole
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def flat_target(tensors: Sequence[Tensor]) -> tuple[Tensor, Finish | None]:
    """Return a flat buffer for the results of all `tensors`, and a function that fills `tensors`.

    The function copies the buffer's contents into `tensors`. The function is None if `tensors`
    already form one contiguous piece of memory, which then serves as the buffer.
    """
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
    """Return a contiguous tensor: the argument itself, or a copy."""
    return tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()


def target(tensor: Tensor) -> tuple[Tensor, Finish | None]:
    """Return a contiguous buffer for a result, and a function that copies the result into `tensor`.

    The function is None if `tensor` itself is contiguous and serves as the buffer.
    """
    if tensor.is_contiguous():
        return tensor.detach(), None
    buffer = tensor.detach().contiguous()
    return buffer, lambda: _copy_all([tensor], [buffer])


def both(finishes: Sequence[Finish | None]) -> Finish | None:
    """Return a function that calls all given functions, or None if all of them are None."""
    some = [finish for finish in finishes if finish is not None]
    if not some:
        return None

    def finish() -> None:
        for one in some:
            one()

    return finish


def check_own(tensors: Sequence[Tensor], own: Tensor, rank: int, what: str) -> None:
    """Check that this rank's entry in a list of tensors has the size of the rank's own tensor.

    Raises:
        ValueError: the sizes differ.
    """
    if tensors[rank].numel() != own.numel():
        raise ValueError(
            f"{what}: the list's tensor for rank {rank} of the group has "
            f"{tensors[rank].numel()} elements, but the rank's own tensor has {own.numel()}"
        )


def splits(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return the number of elements of each tensor in a list, or None if all numbers are equal."""
    numels = [tensor.numel() for tensor in tensors]
    return numels if len(set(numels)) > 1 else None


def same_sizes(tensors: Sequence[Tensor], what: str) -> None:
    """Check that all tensors in a list have the same number of elements.

    Raises:
        ValueError: the numbers of elements differ.
    """
    numels = {tensor.numel() for tensor in tensors}
    if len(numels) > 1:
        raise ValueError(
            f"{what}: the tensors must have equal numbers of elements, got {sorted(numels)}"
        )


def _copy_all(tensors: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    # Inference mode may write to tensors of either kind, and records nothing for autograd.
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
