"""Objects between ranks: plain data as msgpack, never a pickle. Sizes go first, then the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from echelon.dist.group import ProcessGroup


def encode(obj: Any) -> bytes:
    """Turn plain data into bytes.

    Raises:
        TypeError: the object holds what msgpack does not.
    """
    import msgpack

    try:
        data: bytes = msgpack.packb(obj, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as err:
        raise TypeError(f"only plain data (msgpack) can be sent as an object: {err}") from err
    return data


def decode(data: bytes) -> Any:
    """Read what `encode` wrote."""
    import msgpack

    return msgpack.unpackb(data, raw=False, strict_map_key=False)


def broadcast(group: ProcessGroup, data: bytes | None, root: int) -> Any:
    """Return the root's object on every rank."""
    size = np.array([0 if data is None else len(data)], np.int64)
    group.broadcast(size, root)
    content: npt.NDArray[np.uint8] = np.empty(int(size[0]), np.uint8)
    if data is not None:
        content[:] = np.frombuffer(data, np.uint8)
    group.broadcast(content, root)
    return decode(content.tobytes())


def all_gather(group: ProcessGroup, data: bytes) -> list[Any]:
    """Return every rank's object, in rank order."""
    sizes: npt.NDArray[np.int64] = np.empty(group.size, np.int64)
    group.all_gather(sizes, np.array([len(data)], np.int64))
    longest = int(sizes.max())
    mine: npt.NDArray[np.uint8] = np.zeros(longest, np.uint8)
    mine[: len(data)] = np.frombuffer(data, np.uint8)
    contents: npt.NDArray[np.uint8] = np.empty((group.size, longest), np.uint8)
    group.all_gather(contents, mine)
    pairs = zip(contents, sizes.tolist(), strict=True)
    return [decode(content[:length].tobytes()) for content, length in pairs]
