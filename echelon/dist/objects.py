"""Exchange objects between ranks as msgpack, without pickling.

Each call consists of two collectives. The first exchanges the objects' sizes, and the second
exchanges the objects' bytes, padded to the size of the largest object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from echelon.dist.calls.base import Timeout
    from echelon.dist.group import ProcessGroup

    Bytes = npt.NDArray[np.uint8]


def encode(obj: Any) -> bytes:
    """Encode plain data as bytes.

    Raises:
        TypeError: the object holds a value that msgpack does not support.
    """
    import msgpack

    try:
        data: bytes = msgpack.packb(obj, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as err:
        raise TypeError(f"only plain data (msgpack) can be sent as an object: {err}") from err
    return data


def decode(data: bytes) -> Any:
    """Decode bytes that `encode` returned."""
    import msgpack

    return msgpack.unpackb(data, raw=False, strict_map_key=False)


def broadcast(group: ProcessGroup, data: bytes | None, root: int, timeout_s: Timeout) -> Any:
    """Return the root's object on every rank."""
    size = np.array([0 if data is None else len(data)], np.int64)
    group.broadcast(size, root, timeout_s=timeout_s)
    content: npt.NDArray[np.uint8] = np.empty(int(size[0]), np.uint8)
    if data is not None:
        content[:] = np.frombuffer(data, np.uint8)
    group.broadcast(content, root, timeout_s=timeout_s)
    return decode(content.tobytes())


def all_gather(group: ProcessGroup, data: bytes, timeout_s: Timeout) -> list[Any]:
    """Return every rank's object, in rank order."""
    sizes = _sizes(group, data, timeout_s)
    rows = _rows(group.size, sizes)
    group.all_gather(rows, _row(data, sizes), timeout_s=timeout_s)
    return _decoded(rows, sizes)


def gather(group: ProcessGroup, data: bytes, root: int, timeout_s: Timeout) -> list[Any] | None:
    """Return all ranks' objects on the root, in rank order; return None on other ranks."""
    sizes = _sizes(group, data, timeout_s)
    rows = _rows(group.size, sizes) if group.rank == root else None
    group.gather(rows, _row(data, sizes), root, timeout_s=timeout_s)
    return None if rows is None else _decoded(rows, sizes)


def scatter(group: ProcessGroup, parts: list[bytes] | None, root: int, timeout_s: Timeout) -> Any:
    """Return this rank's object from the root's list."""
    sizes = np.array([len(part) for part in parts or [b""] * group.size], np.int64)
    group.broadcast(sizes, root, timeout_s=timeout_s)
    rows = None
    if parts is not None:
        rows = np.stack([_row(part, sizes) for part in parts])
    own: Bytes = np.empty(int(sizes.max()), np.uint8)
    group.scatter(own, rows, root, timeout_s=timeout_s)
    return decode(own[: sizes[group.rank]].tobytes())


def _sizes(group: ProcessGroup, data: bytes, timeout_s: Timeout) -> npt.NDArray[np.int64]:
    sizes: npt.NDArray[np.int64] = np.empty(group.size, np.int64)
    group.all_gather(sizes, np.array([len(data)], np.int64), timeout_s=timeout_s)
    return sizes


def _rows(count: int, sizes: npt.NDArray[np.int64]) -> Bytes:
    return np.empty((count, int(sizes.max())), np.uint8)


def _row(data: bytes, sizes: npt.NDArray[np.int64]) -> Bytes:
    row: Bytes = np.zeros(int(sizes.max()), np.uint8)
    row[: len(data)] = np.frombuffer(data, np.uint8)
    return row


def _decoded(rows: Bytes, sizes: npt.NDArray[np.int64]) -> list[Any]:
    pairs = zip(rows, sizes.tolist(), strict=True)
    return [decode(row[:length].tobytes()) for row, length in pairs]
