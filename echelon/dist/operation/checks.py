"""Check the caller's arguments. A failed check raises an error that describes the argument."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from echelon.dist.operation.arrays import DeviceFlat, View, is_floating, is_numeric
from echelon.dist.operation.operation import REDUCE_OPS

_BITWISE = frozenset({"band", "bor", "bxor"})
# On bool, sum and prod would leave the type. As in torch, they mean "or" and "and"; every library
# has those as the maximum and the minimum of bytes that are 0 or 1.
_ON_BOOL = {
    "sum": "max", "max": "max", "bor": "max", "prod": "min", "min": "min", "band": "min",
    "bxor": "bxor",
}  # fmt: skip
_LONGEST_TIMEOUT_S = 1e9  # about 30 years: infinity does not fit any library's clock
_LARGEST_TAG = (1 << 31) - 3  # the engines use the two above


def check_reduce_op(op: str, dtype: str) -> str:
    """Check that a reduction is defined for a dtype.

    Returns:
        The reduction that engines perform. For bool, sum, max and bor become "max", and prod, min
        and band become "min". For other dtypes, the reduction is `op`.

    Raises:
        ValueError: the reduction is unknown, or is not defined for the dtype.
    """
    if op not in REDUCE_OPS:
        raise ValueError(f"unknown op {op!r}; use one of {', '.join(REDUCE_OPS)}")
    if not is_numeric(dtype):
        raise ValueError(f"op {op!r} is not defined on {dtype}, which can be moved but not reduced")
    if op in _BITWISE and is_floating(dtype):
        raise ValueError(f"op {op!r} needs integers or bool, got {dtype}")
    if dtype != "bool":
        return op
    if op not in _ON_BOOL:
        raise ValueError(
            f"op {op!r} is not defined on bool; use 'sum' (logical or) or 'prod' (logical and)"
        )
    return _ON_BOOL[op]


def check_pair(
    call: str, large_name: str, large: View, small_name: str, small: View, size: int, rank: int
) -> None:
    """Check that `large` is `size` times as long as `small`, and that they do not overlap.

    The only permitted overlap is that of an in-place operation, in which the small array is exactly
    shard `rank` of the large array.

    Raises:
        ValueError: the dtypes, devices or sizes do not match, or the arrays overlap in another way.
    """
    _check_alike(call, large_name, large, small_name, small)
    if len(large.data) != size * len(small.data):
        raise ValueError(
            f"{call}: {large_name} must be {size} times as long as {small_name}, but "
            f"{large_name} is {large}, and {small_name} is {small}"
        )
    check_overlap(call, large_name, large, small_name, small, rank * small.num_bytes)


def check_rows(call: str, out: View, x: View) -> None:
    """Check that two arrays are on the same device and that their rows match in dtype and shape.

    Raises:
        ValueError: the devices, the dtypes or the shapes of the rows differ.
    """
    _check_alike(call, "out", out, "x", x)
    if out.shape[1:] != x.shape[1:]:
        raise ValueError(f"{call}: out is {out}, but x is {x}: their rows differ in shape")


def _check_alike(call: str, a_name: str, a: View, b_name: str, b: View) -> None:
    if a.dtype != b.dtype:
        raise ValueError(f"{call}: {a_name} is {a}, but {b_name} is {b}: their dtypes differ")
    places = [_place(a), _place(b)]
    if places[0] != places[1]:
        raise ValueError(f"{call}: {a_name} is on {places[0]}, but {b_name} is on {places[1]}")


def _place(data: View) -> str:
    flat: Any = data.data
    return f"{data.device}:{flat.index}" if isinstance(flat, DeviceFlat) else data.device


def check_overlap(
    call: str, large_name: str, large: View, small_name: str, small: View, offset: int = -1
) -> None:
    """Check by address that two arrays, even from different libraries, do not share memory.

    Args:
        offset: the only allowed position of `small`, in bytes from the start of `large`; -1 if no
            overlap is allowed.

    Raises:
        ValueError: the arrays overlap at another position.
    """
    starts = _shared_starts(large, small)
    if starts is None or starts[1] - starts[0] == offset >= 0:
        return
    allowed = ""
    if offset >= 0:
        allowed = f"; {small_name} may only be exactly this rank's part of {large_name}"
    raise ValueError(
        f"{call}: {large_name} ({large}) and {small_name} ({small}) overlap in memory{allowed}"
    )


def _shared_starts(a: View, b: View) -> tuple[int, int] | None:
    """Return the start addresses of both arrays if they share memory, or None."""
    if a.device == "cpu" and not np.may_share_memory(a.data, b.data):  # bounds only: it is fast
        return None
    starts = [_address(a), _address(b)]
    if not (a.num_bytes and b.num_bytes):
        return None
    if starts[0] + a.num_bytes <= starts[1] or starts[1] + b.num_bytes <= starts[0]:
        return None
    return starts[0], starts[1]


def _address(data: View) -> int:
    flat: Any = data.data
    return int(flat.pointer if isinstance(flat, DeviceFlat) else flat.ctypes.data)


def check_splits(name: str, splits: Sequence[int] | None, data: View, size: int) -> tuple[int, ...]:
    """Check the splits of an array; return the number of elements for each rank.

    Args:
        name: the name of the argument, for error messages.
        splits: the number of rows (dim 0) for each rank; None means equal splits.

    Raises:
        ValueError: `splits` is not one integer >= 0 per rank, or does not add up to the number of
            rows.
    """
    rows = data.shape[0] if data.shape else 1
    if splits is None:
        if rows % size:
            raise ValueError(
                f"{name}: {rows} rows of {data} cannot be divided evenly among {size} ranks"
            )
        splits = [rows // size] * size
    counts = [check_index(count, name) for count in splits]
    if len(counts) != size or min(counts) < 0 or sum(counts) != rows:
        raise ValueError(
            f"{name} {counts}: expected {size} numbers that add up to the {rows} rows of {data}"
        )
    width = len(data.data) // rows if rows else 0
    return tuple(count * width for count in counts)


def check_uneven(
    call: str,
    whole: tuple[str, View],
    part: tuple[str, View],
    splits: tuple[str, Sequence[int]],
    size: int,
    rank: int,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Check an array with uneven splits, together with this rank's shard.

    Args:
        whole, part, splits: the arguments, each as a pair of its name and its value.

    Returns:
        The number of rows in each rank's shard, and the number of elements in each rank's shard.

    Raises:
        ValueError: the splits do not add up to the number of rows of `whole`; `part` does not have
            this rank's number of rows; the dtypes, the devices or the shapes of the rows differ; or
            the arrays overlap, and `part` is not exactly this rank's shard of `whole`.
    """
    (whole_name, large), (part_name, small) = whole, part
    _check_alike(call, whole_name, large, part_name, small)
    if large.shape[1:] != small.shape[1:]:
        raise ValueError(
            f"{call}: {whole_name} is {large}, but {part_name} is {small}: their rows differ in "
            "shape"
        )
    rows = tuple(check_index(count, splits[0]) for count in splits[1])
    counts = check_splits(splits[0], rows, large, size)
    if len(small.data) != counts[rank] or (small.shape[0] if small.shape else 1) != rows[rank]:
        raise ValueError(
            f"{call}: {splits[0]} {list(rows)} assign {rows[rank]} rows to rank {rank}, but "
            f"{part_name} is {small}"
        )
    itemsize = small.num_bytes // len(small.data) if len(small.data) else 0
    check_overlap(call, whole_name, large, part_name, small, sum(counts[:rank]) * itemsize)
    return rows, counts


def check_index(value: Any, name: str) -> int:
    """Return an integer as a Python int. Integers from NumPy and other libraries are accepted.

    Raises:
        ValueError: the value is not an integer; floats, strings and bools are rejected.
    """
    if type(value) is int:
        return value
    if not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise ValueError(f"{name}: {value!r} is not an integer")


def check_rank(rank: Any, name: str, group: str, size: int) -> int:
    """Check that a value is a rank of a group, and return it as a Python int.

    Raises:
        ValueError: the value is not a rank of the group.
    """
    number = check_index(rank, name)
    if not 0 <= number < size:
        raise ValueError(f"{name} {rank!r} is not a rank of group {group!r} (0-{size - 1})")
    return number


def check_timeout(timeout_s: float | timedelta) -> float:
    """Return a timeout in seconds, capped at about 30 years.

    Raises:
        ValueError: the timeout is not a number of seconds or a `timedelta`, or is not positive.
    """
    seconds = _seconds(timeout_s)
    if seconds > 0:
        return min(seconds, _LONGEST_TIMEOUT_S)
    raise ValueError(f"timeout_s must be a number of seconds above 0, got {timeout_s!r}")


def check_wait(timeout_s: float | timedelta | None) -> float | None:
    """Return the maximum time to wait for an operation, in seconds, or None for no limit.

    Raises:
        ValueError: the value is not a number of seconds or a `timedelta`, or is negative.
    """
    if timeout_s is None:
        return None
    seconds = _seconds(timeout_s)
    if seconds >= 0:
        return min(seconds, _LONGEST_TIMEOUT_S)
    raise ValueError(f"timeout_s must be a number of seconds >= 0, got {timeout_s!r}")


def _seconds(timeout_s: Any) -> float:
    """Return a timeout in seconds, or NaN if it is neither a number nor a timedelta."""
    if isinstance(timeout_s, timedelta):
        return timeout_s.total_seconds()
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, numbers.Real):
        return math.nan
    return float(timeout_s)


def check_tag(tag: Any) -> int:
    """Check a message's tag, and return it as a Python int.

    Raises:
        ValueError: the tag is not an integer from 0 to 2^31 - 3.
    """
    number = check_index(tag, "tag")
    if not 0 <= number <= _LARGEST_TAG:
        raise ValueError(f"tag must be from 0 to {_LARGEST_TAG}, got {tag!r}")
    return number


def check_name(name: Any) -> str | None:
    """Check and return the name that a caller gave to a group.

    Raises:
        TypeError: the name is not a str.
    """
    if name is None or isinstance(name, str):
        return name
    raise TypeError(f"name must be a str, got {name!r}")


def check_ranks(ranks: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Check and return the members of a new group.

    Raises:
        TypeError: `ranks` is not a sequence.
        ValueError: the list is empty, a rank is listed twice, or a number is not a rank of the
            world.
    """
    try:
        given = list(ranks)
    except TypeError:
        raise TypeError(f"ranks must be a list of ranks, got {ranks!r}") from None
    members = tuple(check_index(rank, "ranks") for rank in given)
    if not members:
        raise ValueError("a group needs at least one rank")
    if len(set(members)) != len(members):
        raise ValueError(f"ranks {list(members)} list the same rank twice")
    outside = [rank for rank in members if not 0 <= rank < world_size]
    if outside:
        raise ValueError(f"ranks {outside} are not in the world (0-{world_size - 1})")
    return members
