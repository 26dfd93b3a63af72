"""Serialize a rank's parts of a model, and restore parts that are sharded differently.

The parts are shards, or full tensors of a pipeline's stages. They are serialized into one byte
buffer:

    length of the index, 8 bytes | index | padding | the index's tensors | ranges of elements

Tensors and ranges are aligned to 64 bytes. The ranges that `ShardsWriter.write_rest` writes are at
the end. For each part, the index lists one range of the part's elements, and one range for each
tensor of the optimizer's state that is sharded in the same way as the part. Each rank restores its
elements from the ranges that contain them, so the parts can be restored on any number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from echelon.dist.resilient.copies.filling import Piece, fill
from echelon.dist.resilient.copies.index import Index, Run
from echelon.dist.resilient.copies.parts import Part
from echelon.dist.resilient.parcel import Parcel

_GRAIN = 64
_LENGTH_BYTES = 8


class ShardsWriter:
    """A writer for a rank's parts of a model and the optimizer's state for these parts.

    Only the optimizer writes to its state, so `write_rest`, which writes this state to the buffer,
    can run on another thread while the next step computes. `write_first` writes everything else
    beforehand, because a program can change parameters at the start of a step, even through
    `.data`, which bypasses torch's version counters. `write_first` also writes optimizer tensors
    that share memory with parameters or gradients.

    Args:
        parts: the parts, by name.
        optimizer: the optimizer of the parts' tensors.
        exposed: the data pointers of the storages that a forward or backward pass can write to.
        facts: other values to store in the index.

    Attributes:
        num_bytes: the size of the buffer that `write` needs, in bytes.

    Raises:
        ValueError: a value of the optimizer's state cannot be reproduced exactly.
    """

    def __init__(
        self,
        parts: Mapping[str, Part],
        optimizer: torch.optim.Optimizer,
        *,
        exposed: set[int],
        facts: dict[str, Any] | None = None,
    ) -> None:
        self._tensors: list[torch.Tensor] = []
        self._index = Index(facts=facts or {})
        self._end = 0
        self._later: list[tuple[Part, str, torch.Tensor, int]] = []  # with its version
        for name, part in parts.items():
            self._add(part, "", part.data)
            state = optimizer.state.get(part.tensor)
            if state is None:
                continue
            self._index.keys[name] = list(state)
            values = self._index.values[name] = {}
            for key, value in state.items():
                if part.divides(value):
                    if _is_private(value, exposed):
                        self._later.append((part, key, value, value._version))
                    else:
                        self._add(part, key, value)
                elif not self._index.scalars.takes(name, key, value):
                    values[key] = value
        self._storages = {_storage_of(value) for _, _, value, _ in self._later} - {0}  # of none
        self._num_first, self._first_end = len(self._tensors), self._end
        for part, key, value, _ in self._later:
            self._add(part, key, value)
        self._parcel = self._index.parcel()
        self._start = _places(self._parcel)[-1]
        self.num_bytes = self._start + self._end

    def _add(self, part: Part, key: str, data: torch.Tensor) -> None:
        run = Run(part.name, key, part.start, part.length, data.dtype, self._end)
        self._index.runs.append(run)
        self._tensors.append(data.detach().reshape(-1))
        self._end += _rounded(run.num_bytes)

    def write(self, content: torch.Tensor) -> int:
        """Write the parts into a byte buffer, [num_bytes] of uint8; return the buffer's CRC-32."""
        return self.write_rest(content, self.write_first(content))

    @torch.no_grad()
    def write_first(self, content: torch.Tensor) -> int:
        """Write the data that can change after the next step begins; return the data's CRC-32."""
        length = len(self._parcel.head).to_bytes(_LENGTH_BYTES, "little")
        head = torch.frombuffer(bytearray(length + self._parcel.head), dtype=torch.uint8)
        own = zip(_places(self._parcel), (one.cpu() for one in self._parcel.tensors), strict=False)
        pieces: list[Piece] = [(0, head), *own]
        pieces += self._pieces(0, self._num_first, self._start)
        return fill(content[: self._start + self._first_end], pieces)

    @torch.no_grad()
    def write_rest(self, content: torch.Tensor, crc: int) -> int:
        """Write the rest of the optimizer's state; return the buffer's CRC-32.

        Args:
            content: the buffer that was passed to `write_first`.
            crc: the result of `write_first`.
        """
        pieces = self._pieces(self._num_first, len(self._tensors), -self._first_end)
        return fill(content[self._start + self._first_end :], pieces, crc)

    def _pieces(self, first: int, stop: int, shift: int) -> list[Piece]:
        runs = zip(self._index.runs[first:stop], self._tensors[first:stop], strict=True)
        return [(run.offset + shift, data) for run, data in runs]

    def count_change(self, tensor: torch.Tensor) -> None:
        """Increment the version counter of a tensor that a collective is about to change.

        Tensors whose memory `write_rest` does not read are ignored.
        """
        if tensor.device.type == "cpu" and _storage_of(tensor) in self._storages:
            torch.autograd.graph.increment_version(tensor)

    def changed(self) -> str:
        """Return the name of a tensor that has changed since `__init__`, or "" if none has.

        Only tensors that `write_rest` copies are checked. A change is detected only if
        torch or `count_change` has counted it.
        """
        for part, key, value, version in self._later:
            if value._version != version:
                return f"{part.name!r} {key}"
        return ""


class ShardsReader:
    """A reader for the index and the ranges of one buffer.

    Args:
        content: the buffer, as written by `ShardsWriter`.

    Raises:
        ValueError: the buffer does not begin with an index.
    """

    def __init__(self, content: torch.Tensor) -> None:
        length = int.from_bytes(content[:_LENGTH_BYTES].numpy().tobytes(), "little")
        head = content[_LENGTH_BYTES : _LENGTH_BYTES + length].numpy().tobytes()
        parcel = Parcel.to_fill(head)
        *places, start = _places(parcel)
        for place, tensor in zip(places, parcel.tensors, strict=True):
            tensor.copy_(_elements(content, place, tensor.nbytes, tensor.dtype).view(tensor.shape))
        self._content = content
        self._start = start
        self.index = Index.of(parcel)

    def runs(self) -> Iterator[tuple[Run, torch.Tensor]]:
        """Yield each range in the buffer, with its elements as a tensor."""
        for run in self.index.runs:
            first = self._start + run.offset
            yield run, _elements(self._content, first, run.num_bytes, run.dtype)


class IncompleteCopiesError(Exception):
    """The copies do not cover all elements of a parameter."""


class ShardsRestore:
    """An object that restores this rank's parts and their optimizer state from several buffers.

    A buffer can contain parts that this rank does not need, and several buffers can contain the
    same range.

    Args:
        parts: the parts to overwrite, by name.
        optimizer: the optimizer of the parts' tensors.
    """

    def __init__(self, parts: Mapping[str, Part], optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parts = parts
        self._states: dict[str, dict[str, Any]] = {}
        self._seen: set[tuple[str, str, int, int]] = set()  # runs
        self._num_filled: Counter[tuple[str, str]] = Counter()
        self._scattered: dict[tuple[str, str], torch.Tensor] = {}  # flat; until `finish`

    @torch.no_grad()
    def add(self, vector: torch.Tensor) -> Index:
        """Read a buffer, copying the elements that this rank needs; return the buffer's index."""
        reader = ShardsReader(vector)
        index = reader.index
        for name, keys in index.keys.items():
            if name in self._parts:
                state = self._states.setdefault(name, dict.fromkeys(keys))
                state.update(index.values[name])
        for name, key, value in index.scalars.items():
            if name in self._parts:
                self._states[name][key] = value
        for run, data in reader.runs():
            place = (run.name, run.key, run.start, run.length)
            if run.name in self._parts and place not in self._seen:
                self._seen.add(place)
                self._fill(self._parts[run.name], run, data)
        return index

    def _fill(self, part: Part, run: Run, data: torch.Tensor) -> None:
        first = max(run.start, part.start)
        last = min(run.start + run.length, part.start + part.length)
        target = self._flat(part, run)
        if first < last:
            taken = data[first - run.start : last - run.start]
            target[first - part.start : last - part.start].copy_(taken)
            self._num_filled[run.name, run.key] += last - first

    def _flat(self, part: Part, run: Run) -> torch.Tensor:
        """Return the flat tensor, [length], into which the elements of a part are copied."""
        target = self._target(part, run)
        if target.is_contiguous():
            return target.view(-1)
        place = (run.name, run.key)
        if place not in self._scattered:
            self._scattered[place] = torch.empty(part.length, dtype=target.dtype)
        return self._scattered[place]

    def _target(self, part: Part, run: Run) -> torch.Tensor:
        if not run.key:
            return part.data
        state = self._states[part.name]
        if state[run.key] is None:
            state[run.key] = torch.zeros_like(part.tensor, dtype=run.dtype, requires_grad=False)
        target: torch.Tensor = state[run.key]
        return target

    @torch.no_grad()
    def finish(self) -> None:
        """Load the restored state into the optimizer after all buffers have been added.

        Raises:
            IncompleteCopiesError: an element that this rank needs is missing from the buffers.
        """
        for name, part in self._parts.items():
            state = self._states.get(name)
            keys = [key for key, value in (state or {}).items() if part.divides(value)]
            for key in ["", *keys]:
                num_filled = self._num_filled[name, key]
                if num_filled != part.length:
                    raise IncompleteCopiesError(
                        f"the copies hold {num_filled} of {part.length} elements of {name!r} {key}"
                    )
        for (name, key), flat in self._scattered.items():
            target = self._states[name][key] if key else self._parts[name].data
            target.copy_(flat.view(target.shape))
        for name, part in self._parts.items():
            self._optimizer.state.pop(part.tensor, None)
            if name in self._states:
                self._optimizer.state[part.tensor] = self._states[name]


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_private(value: torch.Tensor, exposed: set[int]) -> bool:
    """Return whether only the optimizer writes to a tensor; if so, `write_rest` may copy it."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and not value.is_inference()  # torch does not count its changes
        and _storage_of(value) not in exposed
    )


def _places(parcel: Parcel) -> list[int]:
    """Return the byte offset of each tensor in the index, then the offset of the element ranges."""
    places = [_rounded(_LENGTH_BYTES + len(parcel.head))]
    for tensor in parcel.tensors:
        places.append(places[-1] + _rounded(tensor.nbytes))
    return places


def _elements(
    content: torch.Tensor, first: int, num_bytes: int, dtype: torch.dtype
) -> torch.Tensor:
    return content[first : first + num_bytes].view(dtype)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _GRAIN) * _GRAIN
