"""Checks of what a caller passes: each raises a ValueError that says what was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echelon.dist.operation.arrays import View, is_floating, is_numeric
from echelon.dist.operation.operation import REDUCE_OPS

_BITWISE = frozenset({"band", "bor", "bxor"})


def check_reduce_op(op: str, dtype: str) -> None:
    """Check that a reduction is defined on a dtype."""
    if op not in REDUCE_OPS:
        raise ValueError(f"op {op!r} is not known; use one of {', '.join(REDUCE_OPS)}")
    if not is_numeric(dtype):
        raise ValueError(f"op {op!r} is not defined on {dtype}: it can be moved, not reduced")
    if op == "avg" and not is_floating(dtype):
        raise ValueError(f"op 'avg' needs a floating-point array, got {dtype}")
    if op in _BITWISE and is_floating(dtype):
        raise ValueError(f"op {op!r} needs integers or bool, got {dtype}")
    if dtype == "bool" and op in ("sum", "prod"):
        raise ValueError(f"op {op!r} is not defined on bool; use bor or band")


def check_pair(
    call: str, large_name: str, large: View, small_name: str, small: View, size: int
) -> None:
    """Check that one array holds as many elements as `size` of the other."""
    if large.dtype != small.dtype:
        raise ValueError(f"{call}: {large_name} is {large}, {small_name} is {small}: dtypes differ")
    if large.device != small.device:
        raise ValueError(f"{call}: {large_name} is on {large.device}, {small_name} is not")
    if len(large.data) != size * len(small.data):
        raise ValueError(
            f"{call}: {large_name} must hold {size} times {small_name}: "
            f"{large_name} is {large}, {small_name} is {small}"
        )


def check_splits(name: str, splits: Sequence[int] | None, data: View, size: int) -> tuple[int, ...]:
    """Return how many items of `data.data` belong to each rank."""
    rows = data.shape[0] if data.shape else 1
    if splits is None:
        if rows % size:
            raise ValueError(f"{name}: {rows} rows of {data} do not divide among {size} ranks")
        splits = [rows // size] * size
    counts = [int(count) for count in splits]
    if len(counts) != size or min(counts) < 0 or sum(counts) != rows:
        raise ValueError(
            f"{name} {counts}: expected {size} numbers that add up to the {rows} rows of {data}"
        )
    width = len(data.data) // rows if rows else 0
    return tuple(count * width for count in counts)


def check_tag(tag: Any) -> int:
    """Check a message's tag.

    Raises:
        ValueError: it is no number from 0 to 2^31 - 3; backends use the two above.
    """
    if not isinstance(tag, int) or not 0 <= tag < (1 << 31) - 2:
        raise ValueError(f"tag {tag!r} is no number from 0 to {(1 << 31) - 3}")
    return tag


def check_ranks(ranks: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Check the members of a new group.

    Raises:
        ValueError: none, one twice, or one that is no rank of the world.
    """
    members = tuple(int(rank) for rank in ranks)
    if not members:
        raise ValueError("a group needs at least one rank")
    if len(set(members)) != len(members):
        raise ValueError(f"ranks {list(members)}: one comes twice")
    outside = [rank for rank in members if not 0 <= rank < world_size]
    if outside:
        raise ValueError(f"ranks {outside} are not in the world (0-{world_size - 1})")
    return members
