"""What goes between two neighbouring stages on different ranks: outputs forth, gradients back.

    header      int64[96]: how many tensors, and of each its dtype, dims and whether it wants a
                gradient; so a micro-batch may have any shape, and the next step another
    outputs     one message a tensor
    gradients   one message for each output that wanted one; their shapes are known

Each kind has a tag of its own, so they never wait for one another. Within a tag messages come in
the sender's order, which the receiver knows from the plan: it posts its receives in that order,
whatever order it needs them in. Nothing here blocks but `take`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
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
_HEADER = 1 + _MAX_TENSORS * _RECORD

Tensors = list[torch.Tensor]


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

    def outputs(self, boundary: int, to: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send a micro-batch's outputs."""
        header = encode(tensors).to(tensors[0].device)
        self._send(header, to, _tag(boundary, 0))
        for tensor in tensors:
            self._send(tensor, to, _tag(boundary, 1))

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

    def want_all(self) -> None:
        """Let every receive be posted."""
        self._wanted = len(self._order)

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

    def _post(self, tensors: Tensors, tag: int) -> None:
        works = [self._receive(tensor, tag) for tensor in tensors]
        self._arrivals[self._order[self._posted]] = _Arrival(tensors, works)
        self._posted += 1

    def _receive(self, tensor: torch.Tensor, tag: int) -> Work:
        work = self._group.recv(tensor, self.source, tag, async_op=True)
        assert work is not None
        return work


class OutputInbox(Inbox):
    """Receives the outputs of the stage before: a header first, then what it announces."""

    def __init__(
        self,
        group: ProcessGroup,
        source: int,
        order: Sequence[int],
        boundary: int,
        device: torch.device,
    ) -> None:
        super().__init__(group, source, order)
        self._boundary = boundary
        self._device = device
        self._header: tuple[torch.Tensor, Work] | None = None

    def advance(self) -> None:
        """Post the next header, and the tensors of one that has come."""
        while self._posted < self._wanted:
            if self._header is None:
                header = torch.empty(_HEADER, dtype=torch.int64, device=self._device)
                self._header = header, self._receive(header, _tag(self._boundary, 0))
            header, work = self._header
            if not work.done:
                return
            work.wait()
            self._header = None
            self._post(decode(header, self._device), _tag(self._boundary, 1))

    def _before_arrival(self) -> Work | None:
        return None if self._header is None else self._header[1]


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
            expected = self._expected.pop(self._order[self._posted])
            room = [torch.empty_like(one, device=self._device) for one in expected]
            self._post(room, _tag(self._boundary, 2))


def encode(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the header of a micro-batch's outputs.

    Raises:
        ValueError: there are too many, or one has too many dims or a dtype that does not travel.
    """
    if len(tensors) > _MAX_TENSORS:
        raise ValueError(f"a stage returned {len(tensors)} tensors; at most {_MAX_TENSORS} go on")
    header = [len(tensors)]
    for tensor in tensors:
        if tensor.dtype not in _DTYPES or tensor.dim() > _MAX_DIMS:
            raise ValueError(
                f"a stage returned {tensor.dtype} with {tensor.dim()} dims; what goes on has at "
                f"most {_MAX_DIMS} and a plain dtype"
            )
        dims = [*tensor.shape, *[0] * (_MAX_DIMS - tensor.dim())]
        header += [_DTYPES.index(tensor.dtype), tensor.requires_grad, tensor.dim(), *dims]
    return torch.tensor(header + [0] * (_HEADER - len(header)), dtype=torch.int64)


def decode(header: torch.Tensor, device: torch.device) -> Tensors:
    """Make room for what a header announces; tensors that want gradients require them."""
    numbers = header.tolist()
    tensors: Tensors = []
    for at in range(1, 1 + numbers[0] * _RECORD, _RECORD):
        dtype, wants, num_dims, *dims = numbers[at : at + _RECORD]
        tensor = torch.empty(dims[:num_dims], dtype=_DTYPES[dtype], device=device)
        tensors.append(tensor.requires_grad_(bool(wants)))
    return tensors
