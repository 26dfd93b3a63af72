"""Serialize a rank's shards, and restore shards that are divided differently.

A rank's shards are serialized into one byte buffer:

    length of the index, 8 bytes | index | padding | the index's tensors | runs of elements

Tensors and runs are aligned to 64 bytes. The index lists a run of elements for each parameter, and
for each tensor of the optimizer that is divided in the same way. Each rank restores its elements
from the runs that contain them, so the shards can be restored on any number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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
        for name, shard in shards(model).items():
            self._add(shard, "", shard.data)
            state = optimizer.state.get(shard.parameter)
            if state is None:
                continue
            self._index.keys[name] = list(state)
            values = self._index.values[name] = {}
            for key, value in state.items():
                if is_part(value, shard):
                    self._add(shard, key, value.detach().reshape(-1))
                elif not self._index.scalars.takes(name, key, value):
                    values[key] = value
        self._parcel = self._index.parcel()
        self._start = _places(self._parcel)[-1]
        self.num_bytes = self._start + self._end

    def _add(self, shard: Shard, key: str, data: torch.Tensor) -> None:
        run = Run(shard.name, key, shard.start, shard.length, data.dtype, self._end)
        self._index.runs.append(run)
        self._tensors.append(data)
        self._end += _rounded(run.num_bytes)

    @torch.no_grad()
    def write(self, content: torch.Tensor) -> int:
        """Write the shards into a byte buffer, [num_bytes] of uint8; return the buffer's CRC-32."""
        length = len(self._parcel.head).to_bytes(_LENGTH_BYTES, "little")
        head = torch.frombuffer(bytearray(length + self._parcel.head), dtype=torch.uint8)
        own = zip(_places(self._parcel), (one.cpu() for one in self._parcel.tensors), strict=False)
        runs = zip(self._index.runs, self._tensors, strict=True)
        pieces: list[Piece] = [(0, head), *own]
        return fill(content, pieces + [(self._start + run.offset, one) for run, one in runs])


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
