"""Manage this rank's receives from one peer during a step.

A channel's messages arrive in the order in which the peer computes their data, according to the
peer's row of the plan. Receives are posted in the same order, a few computations before the data
is needed.

A receive for outputs can be posted before the outputs' header has arrived, because both ends
remember how large these outputs were in the previous step. If they are larger in this step, they
follow in a separate message. In the first step, a receive for outputs can be posted only after
their header has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from echelon.dist.channel import Channel
from echelon.dist.pipeline.execute.messages.header import (
    HEADER_BYTES,
    HEADER_NUMBERS,
    Header,
    Place,
    Spec,
    Tensors,
    unpack,
)
from echelon.dist.pipeline.execute.messages.links import Link
from echelon.dist.pipeline.plan.needs import Product, Thing
from echelon.dist.work import Work


@dataclass
class _Arrival:
    """The receives for one result (see `Thing`).

    Attributes:
        works: the receives for the result's data.
        header: for outputs, the receive for the header, and the buffer that it fills.
        specs: the contents of the header, once it has been read.
        payload: for outputs, the buffer for the payload.
        tensors: for gradients, the tensors into which the gradients are received.
    """

    works: list[Work] = field(default_factory=list)
    header: tuple[Work, torch.Tensor] | None = None
    specs: tuple[Spec, ...] = ()
    payload: torch.Tensor | None = None
    tensors: Tensors = field(default_factory=list)


class Incoming:
    """The receives from one peer.

    Args:
        link: the link to the peer.
        order: the results that the peer sends in this step, in the order in which they are sent.
        device: the device of the data.
    """

    def __init__(self, link: Link, order: Sequence[Thing], device: torch.device) -> None:
        self.rank = link.rank
        self._link = link
        self._order = order
        self._place = {thing: number for number, thing in enumerate(order)}
        self._device = device
        self._num_wanted = 0  # so many of `order` may be posted
        self._num_headers = 0  # of so many of `order` the header's receive is posted
        self._num_posted = 0  # so many of `order` are posted
        self._num_read = 0  # so many of `order` have their header read
        self._arrivals: dict[Thing, _Arrival] = {}
        self._expected: dict[Thing, Tensors] = {}

    def want(self, thing: Thing) -> None:
        """Mark results up to `thing` as needed, and post all receives that can be posted now."""
        if self._place[thing] >= self._num_wanted:
            self._num_wanted = self._place[thing] + 1
            self.advance()

    def expect(self, thing: Thing, outputs: Sequence[torch.Tensor]) -> None:
        """Record the shapes of a micro-batch's gradients, which equal those of the outputs sent."""
        self._expected[thing] = [
            torch.empty(one.shape, dtype=one.dtype, device="meta")
            for one in outputs
            if one.requires_grad
        ]
        self.advance()

    def advance(self) -> None:
        """Post all receives that can be posted now. Does not block."""
        while self._num_headers < self._num_wanted:
            self._post_header(self._order[self._num_headers])
            self._num_headers += 1
        while self._num_posted < self._num_wanted and self._post(self._order[self._num_posted]):
            self._num_posted += 1

    def is_here(self, thing: Thing) -> bool:
        """Return whether `take` would return immediately.

        On a device, it is sufficient that the header has arrived, because the host does not wait
        for the data.
        """
        if self._place[thing] >= self._num_posted:
            return False
        arrival = self._arrivals[thing]
        if arrival.header is not None:
            if not arrival.header[0].done:
                return False
            self._read_headers(thing)
        return self._device.type != "cpu" or all(work.done for work in arrival.works)

    def take(self, thing: Thing) -> Tensors:
        """Return the tensors of a result, blocking until they have arrived.

        On a device, only the current stream waits for the data.

        Raises:
            CollectiveError: the peer was lost, or did not send within the group's timeout.
        """
        self.want(thing)
        self.advance()
        while self._place[thing] >= self._num_posted:
            before = self._order[self._num_posted]
            assert before.product is Product.OUTPUT, f"{before} is sent before {thing}, unexpected"
            self._read_headers(before)
            self.advance()
        self._read_headers(thing)
        arrival = self._arrivals.pop(thing)
        for work in arrival.works:
            work.wait()
        if arrival.header is None:
            return arrival.tensors
        assert arrival.payload is not None, thing
        return unpack(arrival.specs, arrival.payload)

    def _read_headers(self, thing: Thing) -> None:
        """Read the headers of all results up to and including `thing`, waiting for each header.

        Headers are read in the order in which the peer sends them, because receives from the spill
        channel must also be posted in this order.
        """
        while self._num_read <= self._place[thing]:
            one = self._order[self._num_read]
            if one.product is Product.OUTPUT:
                self._read(one, self._arrivals[one])
            self._num_read += 1

    def _read(self, thing: Thing, arrival: _Arrival) -> None:
        assert arrival.header is not None, thing
        work, numbers = arrival.header
        work.wait()
        header = Header.decode(numbers.tolist())
        arrival.specs = header.specs
        size = header.payload_bytes
        key = (thing.stage, thing.microbatch)
        if header.place is Place.SPILL:
            arrival.payload = self._room(size)
            arrival.works += self._receive(self._link.spill, arrival.payload)
        self._link.received[key] = size

    def _post_header(self, thing: Thing) -> None:
        if thing.product is not Product.OUTPUT:
            return
        self._arrivals[thing] = _Arrival()
        if self._link.is_joined and self._size(thing) is not None:
            return  # it arrives in front of the data
        numbers = torch.empty(HEADER_NUMBERS, dtype=torch.int64)
        (work,) = self._receive(self._link.headers, numbers)
        self._arrivals[thing].header = work, numbers

    def _size(self, thing: Thing) -> int | None:
        """Return the size in bytes of a micro-batch's outputs in the previous step, else None."""
        return self._link.received.get((thing.stage, thing.microbatch))

    def _post(self, thing: Thing) -> bool:
        """Post the receives for a result's data; return False if the sizes are not yet known."""
        if thing.product is not Product.OUTPUT:
            return self._post_gradients(thing)
        arrival = self._arrivals[thing]
        size = self._size(thing)
        if size is None:
            assert arrival.header is not None, thing
            if not arrival.header[0].done:
                return False
            self._read_headers(thing)
            size = self._link.received[thing.stage, thing.microbatch]
        front = HEADER_BYTES if arrival.header is None else 0
        message = self._room(front + size)
        arrival.works += self._receive(self._link.data, message)
        if front:
            arrival.header = arrival.works[0], message[:front].view(torch.int64)
        arrival.payload = message[front:]
        return True

    def _post_gradients(self, thing: Thing) -> bool:
        expected = self._expected.pop(thing, None)
        if expected is None:
            return False
        tensors = [torch.empty_like(one, device=self._device) for one in expected]
        works = [work for one in tensors for work in self._receive(self._link.data, one)]
        self._arrivals[thing] = _Arrival(works=works, tensors=tensors)
        return True

    def _room(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    @staticmethod
    def _receive(channel: Channel, tensor: torch.Tensor) -> list[Work]:
        if tensor.numel() == 0:  # both ends know
            return []
        work = channel.recv(tensor, async_op=True)
        assert work is not None
        return [work]
