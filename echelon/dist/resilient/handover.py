"""Send the training state from the lowest rank that has it to a joining rank.

The state is sent as the following messages:

    head: the tree of values, in which a reference replaces each tensor, and the tensors' dtypes and
          shapes
    each tensor's elements, one message per tensor
    tail: one message with the CRC of each tensor

The tree is plain data, so nothing is unpickled. The joining rank checks names and dtypes against
its own model before it adopts the state. Then all ranks compare hashes of their states.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from echelon.dist.channel import Channel
from echelon.dist.checkpoint.disk.tensor_bytes import as_bytes
from echelon.dist.checkpoint.state.plain import pack, unpack
from echelon.dist.group import ProcessGroup
from echelon.dist.resilient.copies.filling import crc_of
from echelon.dist.resilient.digest import digest
from echelon.dist.resilient.parcel import Parcel
from echelon.errors import CollectiveError

_NAME = "handover"
_OWN = ("buffer ", "also")  # a rank may have its own, such as the statistics of its batches


def send_state(group: ProcessGroup, peer: int, contents: Callable[[], dict[str, Any]]) -> None:
    """Send a tree of values to a joining rank; block until the whole tree has been sent.

    Args:
        group: the world that the rank joins.
        peer: the joining rank, as numbered within the group.
        contents: a function that returns the tree; see `Parcel`. If the function fails, or the tree
            cannot be sent, the text of the error is sent instead, and this rank continues.

    Raises:
        CollectiveError: the joining rank was lost.
    """
    channel = group.channel(peer, _NAME)
    try:
        parcel = Parcel.of(contents())
        crcs = _crcs(parcel)
    except Exception as err:  # noqa: BLE001 -- of the user's objects
        _send_bytes(channel, pack({"error": str(err) or type(err).__qualname__}, "the error"))
        return
    _send_bytes(channel, parcel.head)
    for tensor in parcel.tensors:
        content = _elements(tensor)
        if content.numel():
            channel.send(content)
    channel.send(crcs)


def receive_state(group: ProcessGroup, peer: int) -> dict[str, Any]:
    """Return the tree that a rank sends with `send_state`; block until all of it has arrived.

    Raises:
        ValueError: the sending rank reported that it could not send the state.
        CollectiveError: the sending rank was lost, or the state was damaged in transit.
    """
    channel = group.channel(peer, _NAME)
    head = _receive_bytes(channel)
    error = unpack(head).get("error")
    if error is not None:
        raise ValueError(f"this rank cannot join: {error}")
    parcel = Parcel.to_fill(head)
    for tensor in parcel.tensors:
        if tensor.numel():
            channel.recv(tensor.reshape(-1).view(torch.uint8))
    crcs = np.zeros(len(parcel.tensors) + 1, np.int64)
    channel.recv(crcs)
    if not np.array_equal(crcs, _crcs(parcel)):
        raise _damaged()
    return parcel.contents()


def check_alike(
    group: ProcessGroup, source: int, newcomers: Sequence[int], parts: Mapping[str, Any]
) -> None:
    """Compare the state on all ranks after the joining ranks have received it. Collective.

    Args:
        group: the world, including the joining ranks.
        source: the rank within the group that sent the state.
        newcomers: the ranks within the group that received the state.
        parts: this rank's state, keyed by description.

    Raises:
        ValueError: the state that this rank received differs from the state that was sent, or a
            part of the state other than buffers and the `also` objects differs between ranks that
            were already in the world.
        CollectiveError: a rank was lost.
    """
    rows = group.all_gather_object({what: _hash(value) for what, value in parts.items()})
    for what, sent in rows[source].items():
        others = [place for place, row in enumerate(rows) if row.get(what) != sent]
        if group.rank in others and group.rank in newcomers:
            raise ValueError(f"this rank cannot join: {what} differs from what was sent")
        apart = [group.ranks[place] for place in others if place not in newcomers]
        if not apart:
            continue
        text = (
            f"{what} of rank {group.ranks[source]} differs on other ranks "
            f"({', '.join(map(str, apart))})"
        )
        if not what.startswith(_OWN):
            if group.rank in newcomers:  # not at fault, and not to be blamed
                raise CollectiveError(f"this rank cannot join: {text}", ranks=apart)
            raise ValueError(f"{text}: no rank can join the training of this model")
        if group.rank == source:
            warnings.warn(
                f"{text}: ranks that join receive the values of rank {group.ranks[source]}",
                RuntimeWarning,
                stacklevel=2,
            )


def _hash(value: Any) -> str:
    try:
        return digest(value)
    except ValueError:
        return ""  # no rank can compare it


def _crcs(parcel: Parcel) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the CRCs of all tensors, plus a final zero so that the message is never empty."""
    return np.array([*(crc_of(_elements(one)) for one in parcel.tensors), 0], np.int64)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as bytes in host memory, [num_bytes] of uint8."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(as_bytes(tensor), dtype=torch.uint8)


def _damaged() -> CollectiveError:
    return CollectiveError("the training state was damaged on its way to the rank that joins")


def _send_bytes(channel: Channel, data: bytes) -> None:
    channel.send(np.array([len(data), zlib.crc32(data)], np.int64))
    channel.send(np.frombuffer(bytearray(data), np.uint8))


def _receive_bytes(channel: Channel) -> bytes:
    facts = np.zeros(2, np.int64)  # the length and the CRC
    channel.recv(facts)
    found = np.empty(int(facts[0]), np.uint8)
    channel.recv(found)
    data = found.tobytes()
    if zlib.crc32(data) != facts[1]:
        raise _damaged()
    return data
