"""Serialize a rank's shards, and restore shards that are divided differently.

A rank's shards are serialized into one byte buffer:

    length of the index, 8 bytes | index | padding | tensors, each aligned to 64 bytes

The index lists a run of elements for each parameter, and for each tensor of the optimizer that is
divided in the same way. Each rank restores its elements from the runs that contain them, so the
shards can be restored on any number of ranks.
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echelon.dist.fsdp.states import Shard, is_part, shards
from echelon.dist.resilient.copies.filling import fill

_GRAIN = 64
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of a flattened tensor's elements.

    Attributes:
        name: the parameter's name.
        key: the name within the optimizer's state; "" for the parameter itself.
        start: the index of the first element.
        length: the number of elements.
        dtype: the dtype of the elements.
        offset: the position of the first element in the buffer, in bytes after the index.
    """

    name: str
    key: str
    start: int
    length: int
    dtype: torch.dtype
    offset: int

    @property
    def num_bytes(self) -> int:
        """The size of the run in bytes."""
        return self.length * self.dtype.itemsize


class _Scalars:
    """Zero-dimensional tensors, such as step counts, combined into one vector per dtype.

    An optimizer often has one such tensor per parameter, and pickling each one takes 0.1 ms.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], tuple[torch.dtype, int]] = {}
        self._values: dict[torch.dtype, Any] = defaultdict(list)

    def takes(self, name: str, key: str, value: Any) -> bool:
        """Take a value if it is a 0-dim tensor on the host; return whether it was taken."""
        if type(value) is not torch.Tensor or value.dim() or value.device.type != "cpu":
            return False
        values = self._values[value.dtype]
        self._places[name, key] = (value.dtype, len(values))
        values.append(value.detach())
        return True

    def pack(self) -> None:
        """Copy the values that were taken. No further values can be taken afterwards."""
        self._values = {dtype: torch.stack(values) for dtype, values in self._values.items()}

    def items(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield the parameter's name, the key and the tensor for each value."""
        for (name, key), (dtype, place) in self._places.items():
            yield name, key, self._values[dtype][place].clone()


@dataclass(frozen=True, slots=True)
class _Index:
    """The index of a buffer.

    Attributes:
        runs: the runs of elements.
        values: the optimizer's undivided values except `scalars`, keyed by parameter and key.
        scalars: the optimizer's zero-dimensional tensors.
        keys: the keys of each parameter's optimizer state, in order.
    """

    runs: list[_Run]
    values: dict[str, dict[str, Any]]
    scalars: _Scalars
    keys: dict[str, list[str]]


class ShardsWriter:
    """A writer of one model's shards and of the optimizer's state for these shards.

    Args:
        model: a sharded model.
        optimizer: the optimizer of the model's parameters.

    Attributes:
        num_bytes: the size of the buffer that `write` needs.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._tensors: list[torch.Tensor] = []
        self._runs: list[_Run] = []
        self._end = 0
        values: dict[str, dict[str, Any]] = {}
        keys: dict[str, list[str]] = {}
        scalars = _Scalars()
        for name, shard in shards(model).items():
            self._add(shard, "", shard.data)
            state = optimizer.state.get(shard.parameter)
            if state is None:
                continue
            keys[name] = list(state)
            values[name] = {}
            for key, value in state.items():
                if is_part(value, shard):
                    self._add(shard, key, value.detach().reshape(-1))
                elif not scalars.takes(name, key, value):
                    values[name][key] = value
        scalars.pack()
        self._index = pickle.dumps(_Index(self._runs, values, scalars, keys))
        self._start = _rounded(_LENGTH_BYTES + len(self._index))
        self.num_bytes = self._start + self._end

    def _add(self, shard: Shard, key: str, data: torch.Tensor) -> None:
        run = _Run(shard.name, key, shard.start, shard.length, data.dtype, self._end)
        self._runs.append(run)
        self._tensors.append(data)
        self._end += _rounded(run.num_bytes)

    @torch.no_grad()
    def write(self, content: torch.Tensor) -> int:
        """Write the shards into a byte buffer, [num_bytes] of uint8; return the buffer's CRC-32."""
        length = len(self._index).to_bytes(_LENGTH_BYTES, "little")
        head = torch.frombuffer(bytearray(length + self._index), dtype=torch.uint8)
        runs = zip(self._runs, self._tensors, strict=True)
        return fill(content, [(0, head), *((self._start + run.offset, one) for run, one in runs)])


class ShardsReader:
    """A reader of the runs in one buffer.

    Args:
        content: a buffer that `ShardsWriter` wrote.
    """

    def __init__(self, content: torch.Tensor) -> None:
        length = int.from_bytes(content[:_LENGTH_BYTES].numpy().tobytes(), "little")
        stop = _LENGTH_BYTES + length
        index: _Index = pickle.loads(content[_LENGTH_BYTES:stop].numpy().tobytes())  # noqa: S301 -- written by a rank of this job, and never leaves its memory
        self._content = content
        self._start = _rounded(stop)
        self.index = index

    def runs(self) -> Iterator[tuple[_Run, torch.Tensor]]:
        """Yield each run with its elements."""
        for run in self.index.runs:
            yield run, _elements(self._content, self._start, run)


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

    def _target(self, shard: Shard, run: _Run) -> torch.Tensor:
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


def _elements(content: torch.Tensor, start: int, run: _Run) -> torch.Tensor:
    first = start + run.offset
    return content[first : first + run.num_bytes].view(run.dtype)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _GRAIN) * _GRAIN
