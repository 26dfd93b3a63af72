"""What goes between two neighbouring stages on different ranks: outputs forth, gradients back.

    letter      a micro-batch's outputs in one message: a header that says how many tensors, and of
                each its dtype, dims and whether it wants a gradient; then their data
    parcel      the data alone, where a letter had no room for it
    gradients   one message for each output that wanted one; their shapes are known

A letter can be received before its header is read, because both ends know how much room it has: as
much as this micro-batch took in the step before. So a micro-batch may have any shape, and the next
step another: a change costs one more message, and in the first step each one is a change.

Each kind has a tag of its own, so they never wait for one another. Within a tag messages come in
the sender's order, which the receiver knows from the plan: it posts its receives in that order,
whatever order it needs them in. Nothing here blocks but `take`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from echelon.dist.group import ProcessGroup
from echelon.dist.work import Work

_FIRST_TAG = 1 << 24  # out of the way of the user's own
_KINDS = 3
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_MAX_TENSORS, _MAX_DIMS = 8, 8
_RECORD = 3 + _MAX_DIMS
_NUMBERS = 96  # of a header: two, and a record for each tensor
_HEADER_BYTES = 8 * _NUMBERS
_ALIGNMENT = 64

Tensors = list[torch.Tensor]
Room = dict[int, int]  # micro-batch -> bytes that its letter has for data


@dataclass
class _Arrival:
    """A micro-batch's tensors and the receives that fill them."""

    tensors: Tensors
    works: list[Work]


def _tag(boundary: int, kind: int) -> int:
    return _FIRST_TAG + _KINDS * boundary + kind


class Outbox:
    """Sends, and keeps what is sent until it is gone."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._sent: deque[tuple[Work, int]] = deque()

    def outputs(
        self, boundary: int, to: int, microbatch: int, tensors: Sequence[torch.Tensor], room: Room
    ) -> None:
        """Send a micro-batch's outputs, and remember how much room they took."""
        there, size = room.get(microbatch, 0), _data_bytes(tensors)
        letter = _bytes(_HEADER_BYTES + there, tensors[0].device)
        header = encode(tensors, is_inside=size <= there)
        letter[:_HEADER_BYTES].view(torch.int64).copy_(header)
        if size <= there:
            _write(tensors, letter[_HEADER_BYTES:])
        self._send(letter, to, _tag(boundary, 0))
        if size > there:
            parcel = _bytes(size, letter.device)
            _write(tensors, parcel)
            self._send(parcel, to, _tag(boundary, 1))
        room[microbatch] = size

    def gradients(self, boundary: int, to: int, tensors: Iterable[torch.Tensor]) -> None:
        """Send the gradients of what came over this boundary."""
        for tensor in tensors:
            self._send(tensor, to, _tag(boundary, 2))

    def pending(self) -> int | None:
        """Return the rank whose receive the oldest message waits for; None if all are gone."""
        while self._sent and self._sent[0][0].done:
            self._sent.popleft()[0].wait()
        return self._sent[0][1] if self._sent else None

    def wait(self) -> None:
        """Block until the oldest message is gone, within the group's timeout."""
        self._sent.popleft()[0].wait()

    def _send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        work = self._group.send(tensor.detach().contiguous(), to, tag, async_op=True)
        assert work is not None
        self._sent.append((work, to))


class Inbox:
    """Receives one kind of thing over one boundary, in the order in which it is sent."""

    def __init__(self, group: ProcessGroup, source: int, order: Sequence[int]) -> None:
        self.source = source
        self._group = group
        self._order = list(order)
        self._wanted = 0  # so many of them may be posted
        self._posted = 0
        self._arrivals: dict[int, _Arrival] = {}

    def want(self, microbatch: int) -> None:
        """Let receives be posted up to this micro-batch's."""
        self._wanted = max(self._wanted, self._order.index(microbatch) + 1)

    def advance(self) -> None:
        """Post what can be posted."""
        raise NotImplementedError

    def next_work(self, microbatch: int) -> Work | None:
        """Return what to wait for before `microbatch` can be taken; None if it is there."""
        arrival = self._arrivals.get(microbatch)
        if arrival is None:
            return self._before_arrival()
        return next((work for work in arrival.works if not work.done), None)

    def has(self, microbatch: int) -> bool:
        """Whether receives for a micro-batch's tensors are posted."""
        return microbatch in self._arrivals

    def take(self, microbatch: int) -> Tensors:
        """Return a micro-batch's tensors; `next_work` has said that they are there."""
        arrival = self._arrivals.pop(microbatch)
        for work in arrival.works:
            work.wait()
        return arrival.tensors

    def _before_arrival(self) -> Work | None:
        return None

    def _receive(self, tensor: torch.Tensor, tag: int) -> Work:
        work = self._group.recv(tensor, self.source, tag, async_op=True)
        assert work is not None
        return work


class OutputInbox(Inbox):
    """Receives the outputs of the stage before."""

    def __init__(
        self,
        group: ProcessGroup,
        source: int,
        order: Sequence[int],
        boundary: int,
        device: torch.device,
        room: Room,
    ) -> None:
        super().__init__(group, source, order)
        self._boundary = boundary
        self._device = device
        self._room = room
        self._letters: deque[tuple[int, torch.Tensor, Work]] = deque()

    def advance(self) -> None:
        """Post letters, and parcels that letters announce."""
        while self._posted < self._wanted:
            microbatch = self._order[self._posted]
            letter = _bytes(_HEADER_BYTES + self._room.get(microbatch, 0), self._device)
            work = self._receive(letter, _tag(self._boundary, 0))
            self._letters.append((microbatch, letter, work))
            self._posted += 1
        while self._letters and self._letters[0][2].done:
            microbatch, letter, work = self._letters.popleft()
            work.wait()
            self._open(microbatch, letter)

    def _open(self, microbatch: int, letter: torch.Tensor) -> None:
        numbers = letter[:_HEADER_BYTES].view(torch.int64).tolist()
        data, works = letter[_HEADER_BYTES:], []
        size = _size_of(numbers)
        if not numbers[1]:
            data = _bytes(size, self._device)
            works = [self._receive(data, _tag(self._boundary, 1))]
        self._room[microbatch] = size
        self._arrivals[microbatch] = _Arrival(decode(numbers, data), works)

    def _before_arrival(self) -> Work | None:
        return self._letters[0][2] if self._letters else None


class GradientInbox(Inbox):
    """Receives the gradients of what was sent to the stage after."""

    def __init__(
        self, group: ProcessGroup, source: int, order: Sequence[int], boundary: int
    ) -> None:
        super().__init__(group, source, order)
        self._boundary = boundary
        self._expected: dict[int, Tensors] = {}
        self._device = torch.device("cpu")

    def expect(self, microbatch: int, outputs: Sequence[torch.Tensor]) -> None:
        """Make room for the gradients of a micro-batch's outputs, which go out now."""
        self._expected[microbatch] = [
            torch.empty(one.shape, dtype=one.dtype, device="meta")
            for one in outputs
            if one.requires_grad
        ]
        self._device = outputs[0].device

    def advance(self) -> None:
        """Post the receives whose shapes are known."""
        while self._posted < self._wanted and self._order[self._posted] in self._expected:
            microbatch = self._order[self._posted]
            expected = self._expected.pop(microbatch)
            tensors = [torch.empty_like(one, device=self._device) for one in expected]
            works = [self._receive(one, _tag(self._boundary, 2)) for one in tensors]
            self._arrivals[microbatch] = _Arrival(tensors, works)
            self._posted += 1


def encode(tensors: Sequence[torch.Tensor], *, is_inside: bool) -> torch.Tensor:
    """Return the header of a micro-batch's outputs.

    Args:
        tensors: the outputs.
        is_inside: whether their data is in the letter, and not in a parcel.

    Raises:
        ValueError: there are too many, or one has too many dims or a dtype that does not travel.
    """
    if len(tensors) > _MAX_TENSORS:
        raise ValueError(f"a stage returned {len(tensors)} tensors; at most {_MAX_TENSORS} go on")
    numbers: list[int] = [len(tensors), is_inside]
    for tensor in tensors:
        if tensor.dtype not in _DTYPES or tensor.dim() > _MAX_DIMS:
            raise ValueError(
                f"a stage returned {tensor.dtype} with {tensor.dim()} dims; what goes on has at "
                f"most {_MAX_DIMS} and a plain dtype"
            )
        dims = [*tensor.shape, *[0] * (_MAX_DIMS - tensor.dim())]
        numbers += [_DTYPES.index(tensor.dtype), tensor.requires_grad, tensor.dim(), *dims]
    return torch.tensor(numbers + [0] * (_NUMBERS - len(numbers)), dtype=torch.int64)


def decode(numbers: list[int], data: torch.Tensor) -> Tensors:
    """Return the tensors that a header describes, in place in its data: [num_bytes], uint8.

    Those that want gradients require them.
    """
    tensors: Tensors = []
    at = 0
    for dtype, wants, shape in _records(numbers):
        size = math.prod(shape) * dtype.itemsize
        tensor = data[at : at + size].view(dtype).view(shape)
        tensors.append(tensor.requires_grad_(wants))
        at += _aligned(size)
    return tensors


def _records(numbers: list[int]) -> Iterator[tuple[torch.dtype, bool, list[int]]]:
    for at in range(2, 2 + numbers[0] * _RECORD, _RECORD):
        dtype, wants, num_dims, *dims = numbers[at : at + _RECORD]
        yield _DTYPES[dtype], bool(wants), dims[:num_dims]


def _size_of(numbers: list[int]) -> int:
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for dtype, _, shape in _records(numbers))


def _data_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(_aligned(tensor.numel() * tensor.element_size()) for tensor in tensors)


def _write(tensors: Sequence[torch.Tensor], data: torch.Tensor) -> None:
    at = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        data[at : at + size].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        at += _aligned(size)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _bytes(number: int, device: torch.device) -> torch.Tensor:
    return torch.empty(number, dtype=torch.uint8, device=device)
