"""Encode and decode an index of the shards that a buffer contains, without using pickle.

A buffer can come from another host, so decoding its index must never execute code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import Self

from echelon.dist.checkpoint.disk.tensor_bytes import dtype_named
from echelon.dist.checkpoint.state.plain import pack, unpack
from echelon.dist.resilient.parcel import Parcel


@dataclass(frozen=True, slots=True)
class Run:
    """A range of a flattened tensor's elements.

    Attributes:
        name: the name of the parameter or buffer.
        key: the key in the optimizer's state for this parameter; "" for the parameter or buffer
            itself.
        start: the index of the range's first element in the flattened tensor.
        length: the number of elements.
        dtype: the dtype of the elements.
        offset: the first element's offset within the buffer's section of ranges, in bytes.
    """

    name: str
    key: str
    start: int
    length: int
    dtype: torch.dtype
    offset: int

    @property
    def num_bytes(self) -> int:
        """The size of the range in bytes."""
        return self.length * self.dtype.itemsize


class Scalars:
    """Zero-dimensional tensors, such as step counts, combined into one vector per dtype.

    An optimizer often has one such tensor per parameter, and encoding them one by one takes longer
    than encoding one vector.
    """

    def __init__(self) -> None:
        self.places: list[list[Any]] = []  # name, key, dtype, and the place in the dtype's vector
        self._values: dict[str, Any] = defaultdict(list)

    @classmethod
    def of(cls, places: list[list[Any]], vectors: dict[str, torch.Tensor]) -> Self:
        """Return the scalars whose positions in the vectors are listed in `places`."""
        scalars = cls()
        scalars.places, scalars._values = places, vectors
        return scalars

    def takes(self, name: str, key: str, value: Any) -> bool:
        """Add a value if it is a 0-dim tensor in host memory; return whether it was added."""
        if type(value) is not torch.Tensor or value.dim() or value.device.type != "cpu":
            return False
        dtype = str(value.dtype)
        values = self._values[dtype]
        self.places.append([name, key, dtype, len(values)])
        values.append(value.detach())
        return True

    def vectors(self) -> dict[str, torch.Tensor]:
        """Return copies of the values that were added, as one vector per dtype."""
        return {dtype: torch.stack(values) for dtype, values in self._values.items()}

    def items(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield each added scalar as (parameter name, state key, copy of the scalar)."""
        for name, key, dtype, place in self.places:
            yield name, key, self._values[dtype][place].clone()


@dataclass(slots=True)
class Index:
    """The index of a buffer of shards.

    Attributes:
        runs: the ranges of elements.
        values: the values in the optimizer's state that `runs` and `scalars` do not cover, by
            parameter name and key.
        scalars: the zero-dimensional tensors of the optimizer's state.
        keys: the keys of each parameter's optimizer state, in order.
        facts: other values; see `ShardsWriter`.
    """

    runs: list[Run] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    scalars: Scalars = field(default_factory=Scalars)
    keys: dict[str, list[str]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def parcel(self) -> Parcel:
        """Encode the index as a `Parcel`, which consists of bytes and tensors.

        Raises:
            ValueError: a value of the optimizer's state cannot be reproduced exactly.
        """
        runs = [
            [run.name, run.key, run.start, run.length, str(run.dtype), run.offset]
            for run in self.runs
        ]
        plain = [runs, self.keys, self.scalars.places]
        return Parcel.of(
            {
                "plain": pack(plain, "the index"),
                "the optimizer's state": self.values,
                "scalars": self.scalars.vectors(),
                "facts": self.facts,
            }
        )

    @classmethod
    def of(cls, parcel: Parcel) -> Self:
        """Decode the index from a `Parcel` whose tensors have been filled."""
        told = parcel.contents()
        runs, keys, places = unpack(told["plain"])
        return cls(
            runs=[
                Run(name, key, start, length, dtype_named(dtype.removeprefix("torch.")), offset)
                for name, key, start, length, dtype, offset in runs
            ],
            values=told["the optimizer's state"],
            scalars=Scalars.of(places, told["scalars"]),
            keys=keys,
            facts=told["facts"],
        )
