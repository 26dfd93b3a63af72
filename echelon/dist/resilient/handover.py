"""Send the training state to a joining rank, from the lowest rank that has the state.

    head: one message with the tree of values, in which a reference stands for each tensor, and the
          tensors' dtypes and shapes
    each tensor's elements, one message per tensor
    tail: one message with the CRC of each tensor

The tree is plain data, as in a checkpoint: nothing is unpickled. The joining rank checks names,
dtypes and shapes against its own model before it accepts any data.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from echelon.dist.channel import Channel
from echelon.dist.checkpoint.disk.tensor_bytes import as_bytes, dtype_named
from echelon.dist.checkpoint.state.plain import TensorAt, pack, unpack
from echelon.dist.group import ProcessGroup
from echelon.dist.resilient.copies.filling import crc_of
from echelon.errors import CollectiveError

_NAME = "handover"


def send_state(group: ProcessGroup, peer: int, contents: Any) -> None:
    """Send a tree of values to a rank; block until it has been sent.

    Args:
        group: the world in which the rank joins.
        peer: the rank within the group.
        contents: dicts, lists and tuples of plain values, tensors and NumPy arrays. If there is a
            value of any other kind, the error is sent instead.

    Raises:
        CollectiveError: the rank was lost.
    """
    channel = group.channel(peer, _NAME)
    tensors: list[torch.Tensor] = []
    try:
        head = pack({"tree": _referring(contents, tensors), "kinds": _kinds(tensors)}, "the state")
    except TypeError as err:
        _send_bytes(channel, pack({"error": str(err)}, "the error"))
        return
    _send_bytes(channel, head)
    crcs = np.zeros(len(tensors) + 1, np.int64)
    for i, tensor in enumerate(tensors):
        content = _elements(tensor)
        crcs[i] = crc_of(content)
        if content.numel():
            channel.send(content)
    channel.send(crcs)


def receive_state(group: ProcessGroup, peer: int) -> Any:
    """Return the tree that a rank sends with `send_state`; block until all of it has arrived.

    Raises:
        ValueError: the state holds a value that cannot be sent.
        CollectiveError: the rank was lost, or the state arrived damaged.
    """
    channel = group.channel(peer, _NAME)
    head = unpack(_receive_bytes(channel))
    if "error" in head:
        raise ValueError(f"this rank cannot join: {head['error']}")
    contents = [_received(channel, *kind) for kind in head["kinds"]]
    crcs = np.zeros(len(contents) + 1, np.int64)
    channel.recv(crcs)
    if any(crc_of(_elements(one)) != crc for one, crc in zip(contents, crcs[:-1], strict=True)):
        raise CollectiveError("the training state was damaged on its way to the rank that joins")
    return _resolved(head["tree"], contents)


def _kinds(tensors: list[torch.Tensor]) -> list[Any]:
    return [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in tensors]


def _referring(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a tree with references in the place of tensors, which are appended to the list."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return TensorAt(str(len(tensors) - 1))
    if isinstance(value, np.ndarray):
        tensors.append(torch.from_numpy(value.copy()))
        return TensorAt(str(len(tensors) - 1), "array")
    if isinstance(value, dict):
        return {key: _referring(one, tensors) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        found = [_referring(one, tensors) for one in value]
        return tuple(found) if isinstance(value, tuple) else found
    return value


def _resolved(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, TensorAt):
        found = tensors[int(value.path)]
        return found.numpy() if value.role == "array" else found
    if isinstance(value, dict):
        return {key: _resolved(one, tensors) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        found_all = [_resolved(one, tensors) for one in value]
        return tuple(found_all) if isinstance(value, tuple) else found_all
    return value


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as bytes, on the host: [num_bytes] of uint8."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(as_bytes(tensor), dtype=torch.uint8)


def _received(channel: Channel, dtype: str, shape: list[int]) -> torch.Tensor:
    found = torch.empty(shape, dtype=dtype_named(dtype))
    if found.numel():
        channel.recv(found.reshape(-1).view(torch.uint8))
    return found


def _send_bytes(channel: Channel, data: bytes) -> None:
    channel.send(np.array([len(data)], np.int64))
    channel.send(np.frombuffer(bytearray(data), np.uint8))


def _receive_bytes(channel: Channel) -> bytes:
    length = np.zeros(1, np.int64)
    channel.recv(length)
    data = np.empty(int(length[0]), np.uint8)
    channel.recv(data)
    return data.tobytes()
