"""Manage this rank's sends to one peer; only `Outgoing.finish` blocks, at the end of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from echelon.dist.channel import Channel
from echelon.dist.pipeline.execute.messages.header import (
    HEADER_BYTES,
    Header,
    Place,
    describe,
    pack,
)
from echelon.dist.pipeline.execute.messages.links import Link
from echelon.dist.pipeline.plan.needs import Thing
from echelon.dist.work import Work


class Outgoing:
    """The sends to one peer, each of which is retained until it completes."""

    def __init__(self, link: Link) -> None:
        self.rank = link.rank
        self._link = link
        self._sent: deque[Work] = deque()

    def outputs(self, thing: Thing, tensors: Sequence[torch.Tensor]) -> None:
        """Send a micro-batch's outputs.

        The receiver might already have posted a receive of the previous step's size. Exactly this
        number of bytes is therefore sent over the data channel. If the outputs are larger, all of
        their bytes are also sent over the spill channel.

        Raises:
            ValueError: the tensors cannot be sent.
        """
        specs = describe(tensors)
        key = (thing.stage, thing.microbatch)
        expected = self._link.sent.get(key)
        header = Header(specs)
        size = header.payload_bytes
        is_spilled = expected is not None and size > expected
        if is_spilled:
            header = Header(specs, Place.SPILL)
        front = HEADER_BYTES if self._link.is_joined and expected is not None else 0
        room = size if expected is None else max(size, expected)
        message = torch.empty(front + room, dtype=torch.uint8, device=tensors[0].device)
        if front:
            message[:front].view(torch.int64).copy_(header.encode())
        else:
            self._send(self._link.headers, header.encode())
        pack(tensors, message[front:])
        self._send(self._link.data, message[: front + (room if expected is None else expected)])
        if is_spilled:
            self._send(self._link.spill, message[front:])
        self._link.sent[key] = size

    def gradients(self, tensors: Iterable[torch.Tensor]) -> None:
        """Send the gradients of a micro-batch's inputs; the receiver already has their shapes."""
        for tensor in tensors:
            self._send(self._link.data, tensor)

    @property
    def is_done(self) -> bool:
        """True if all sends have completed."""
        return all(work.done for work in self._sent)

    def finish(self) -> None:
        """Block until all sends have completed. The group's timeout applies to each send.

        Raises:
            CollectiveError: the peer was lost or did not receive the data.
        """
        while self._sent:
            self._sent.popleft().wait()

    def _send(self, channel: Channel, tensor: torch.Tensor) -> None:
        if tensor.numel() == 0:  # both ends know
            return
        work = channel.send(tensor.detach().contiguous(), async_op=True)
        assert work is not None
        self._sent.append(work)
