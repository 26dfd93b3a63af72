"""Serialize a rank's shards, and restore shards that are divided differently.

A rank's shards are serialized into one byte buffer:

    length of the index, 8 bytes | index | padding | the index's tensors | runs of elements

Tensors and runs are aligned to 64 bytes. Runs that may be written later than the others are at the
end; see `ShardsWriter`. The index lists a run of elements for each parameter, and
for each tensor of the optimizer that is divided in the same way. Each rank restores its elements
from the runs that contain them, so the shards can be restored on any number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from echelon.dist.fsdp.states import Shard, is_part, shards
from echelon.dist.resilient.copies.filling import Piece, fill
from echelon.dist.resilient.copies.index import Index, Run
from echelon.dist.resilient.parcel import Parcel

_GRAIN = 64
_LENGTH_BYTES = 8


class ShardsWriter:
    """A writer of one model's shards and of the optimizer's state for these shards.

    `write_rest` writes the optimizer's state, and may be called on another thread while the next
    step computes, because only the optimizer writes to that state. All else is written by
    `write_first`: a program may change parameters at the start of a step, and through `.data`, of
    which torch keeps no version. Tensors of the optimizer that share memory with parameters or
    gradients are not left to `write_rest` either.

    Args:
        model: a sharded model.
        optimizer: the optimizer of the model's parameters.

    Attributes:
        num_bytes: the size of the buffer that `write` needs.

    Raises:
        ValueError: a value of the optimizer's state cannot be reproduced exactly.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._tensors: list[torch.Tensor] = []
        self._index = Index()
        self._end = 0
        self._later: list[tuple[Shard, str, torch.Tensor, int]] = []  # with its version
        every = shards(model)
        exposed = _storages(model, every.values())
        for name, shard in every.items():
            self._add(shard, "", shard.data)
            state = optimizer.state.get(shard.parameter)
            if state is None:
                continue
            self._index.keys[name] = list(state)
            values = self._index.values[name] = {}
            for key, value in state.items():
                if is_part(value, shard):
                    if _is_private(value, exposed):
                        self._later.append((shard, key, value, value._version))
                    else:
                        self._add(shard, key, value)
                elif not self._index.scalars.takes(name, key, value):
                    values[key] = value
        self._num_first, self._first_end = len(self._tensors), self._end
        for shard, key, value, _ in self._later:
            self._add(shard, key, value)
        self._parcel = self._index.parcel()
        self._start = _places(self._parcel)[-1]
        self.num_bytes = self._start + self._end

    def _add(self, shard: Shard, key: str, data: torch.Tensor) -> None:
        run = Run(shard.name, key, shard.start, shard.length, data.dtype, self._end)
        self._index.runs.append(run)
        self._tensors.append(data.detach().reshape(-1))
        self._end += _rounded(run.num_bytes)

    def write(self, content: torch.Tensor) -> int:
        """Write the shards into a byte buffer, [num_bytes] of uint8; return the buffer's CRC-32."""
        return self.write_rest(content, self.write_first(content))

    @torch.no_grad()
    def write_first(self, content: torch.Tensor) -> int:
        """Write what may change once the next step begins; return the CRC-32 up to there."""
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
            content: the buffer.
            crc: the result of `write_first`.
        """
        pieces = self._pieces(self._num_first, len(self._tensors), -self._first_end)
        return fill(content[self._start + self._first_end :], pieces, crc)

    def _pieces(self, first: int, stop: int, shift: int) -> list[Piece]:
        runs = zip(self._index.runs[first:stop], self._tensors[first:stop], strict=True)
        return [(run.offset + shift, data) for run, data in runs]

    def changed(self) -> str:
        """Return the name of a tensor that was to be written later, and has changed since; or "".

        Only changes that torch counts are noticed.
        """
        for shard, key, value, version in self._later:
            if value._version != version:
                return f"{shard.name!r} {key}"
        return ""


class ShardsReader:
    """A reader of the runs in one buffer.

    Args:
        content: a buffer that `ShardsWriter` wrote.

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
        """Yield each run with its elements."""
        for run in self.index.runs:
            first = self._start + run.offset
            yield run, _elements(self._content, first, run.num_bytes, run.dtype)


class IncompleteCopiesError(Exception):
    """The copies do not cover all elements of a parameter."""


class ShardsRestore:
    """An object that restores this rank's shards and their optimizer state from several buffers.

    Args:
        model: a sharded model, whose shards are overwritten.
        optimizer: the optimizer of the model's parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._shards = shards(model)
        self._states: dict[str, dict[str, Any]] = {}
        self._num_filled: Counter[tuple[str, str]] = Counter()

    @torch.no_grad()
    def add(self, vector: torch.Tensor) -> None:
        """Copy the elements that this rank needs from one buffer."""
        reader = ShardsReader(vector)
        index = reader.index
        for name, keys in index.keys.items():
            state = self._states.setdefault(name, dict.fromkeys(keys))
            state.update(index.values[name])
        for name, key, value in index.scalars.items():
            self._states[name][key] = value
        for run, data in reader.runs():
            shard = self._shards[run.name]
            first = max(run.start, shard.start)
            last = min(run.start + run.length, shard.start + shard.length)
            target = self._target(shard, run)
            if first < last:
                taken = data[first - run.start : last - run.start]
                target[first - shard.start : last - shard.start].copy_(taken)
                self._num_filled[run.name, run.key] += last - first

    def _target(self, shard: Shard, run: Run) -> torch.Tensor:
        if not run.key:
            return shard.data
        state = self._states[shard.name]
        if state[run.key] is None:
            state[run.key] = torch.zeros(shard.parameter.shape, dtype=run.dtype)
        target: torch.Tensor = state[run.key]
        return target.view(-1)

    def finish(self) -> None:
        """Load the restored state into the optimizer.

        Raises:
            IncompleteCopiesError: an element that this rank needs was not in any of the buffers.
        """
        for name, shard in self._shards.items():
            state = self._states.get(name)
            keys = [key for key, value in (state or {}).items() if is_part(value, shard)]
            for key in ["", *keys]:
                num_filled = self._num_filled[name, key]
                if num_filled != shard.length:
                    raise IncompleteCopiesError(
                        f"the copies hold {num_filled} of {shard.length} elements of {name!r} {key}"
                    )
            self._optimizer.state.pop(shard.parameter, None)
            if state is not None:
                self._optimizer.state[shard.parameter] = state


def _storages(model: nn.Module, every: Iterable[Shard]) -> set[int]:
    """Return the addresses of the memory to which a forward or backward pass may write."""
    found = [*model.parameters(), *model.buffers()]
    for shard in every:
        found += [shard.data, shard.parameter]
    found += [one.grad for one in found if one.grad is not None]
    return {one.untyped_storage().data_ptr() for one in found}


def _is_private(value: torch.Tensor, exposed: set[int]) -> bool:
    """Return whether only the optimizer writes to a tensor, as far as can be known."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and not value.is_inference()  # torch does not count its changes
        and value.untyped_storage().data_ptr() not in exposed
    )


def _places(parcel: Parcel) -> list[int]:
    """Return where each of an index's tensors begins, and then where the runs begin."""
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
