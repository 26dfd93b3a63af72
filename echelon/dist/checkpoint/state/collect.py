"""Collect the contents of a state: the tensors that this rank holds, and plain values.

Module buffers, modules' extra state and objects' states can differ between ranks, so the ranks
first compare these values. Values that are equal on all ranks are stored once. Other values are
stored once per rank.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Container, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.dist.checkpoint.disk.manifest import dtype_bytes
from echelon.dist.checkpoint.state.checksum import checksum
from echelon.dist.checkpoint.state.entries import (
    MODULE,
    OBJECT,
    OPTIMIZER,
    RANDOM,
    entries,
    module_state,
    optimizer_names,
    parameter_names,
    rank_path,
)
from echelon.dist.checkpoint.state.held import Held, dtype_name
from echelon.dist.checkpoint.state.plain import TensorAt, pack
from echelon.dist.checkpoint.state.shards import is_divided, owner, pieces, pieces_like


class Contents:
    """The tensors and plain values of a state, keyed by path.

    Attributes:
        kinds: the kind of each entry, keyed by path.
        held: the tensors that this rank holds, each listed once.
        aliases: the additional paths of tensors in `held`.
        values: the packed plain values, keyed by path.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self.held: list[Held] = []
        self.aliases: dict[str, str] = {}
        self.values: dict[str, bytes] = {}
        self._local: dict[str, Any] = {}
        self._known: dict[tuple[Any, ...], str] = {}
        self._paths: set[str] = set()

    def set_local(self, path: str, value: Any) -> None:
        """Stage a value that might differ between ranks, for a later call to `add_local`."""
        self._local[path] = value

    def local_checksums(self) -> dict[str, int]:
        """Return the checksums of the staged values, keyed by path.

        Raises:
            TypeError: a value holds something that cannot be saved.
        """
        return {path: _tree_checksum(path, value) for path, value in self._local.items()}

    def add_local(self, differing: Container[str], rank: int) -> None:
        """Add the staged values to these contents.

        A value that differs between ranks is stored once per rank.
        """
        for path, value in self._local.items():
            where = rank_path(path, rank) if path in differing else path
            if isinstance(value, Tensor):
                self.add_tensor(where, value)
            else:
                self.add_value(where, value)
        self._local.clear()

    def add_value(self, path: str, value: Any) -> None:
        """Add a tree of plain values and tensors.

        Raises:
            TypeError: the tree holds a value of an unsupported type.
        """
        self.values[path] = pack(self._without_tensors(path, value), path)

    def _without_tensors(self, path: str, value: Any) -> Any:
        """Return the tree with each tensor and array replaced by a reference."""
        if isinstance(value, (Tensor, np.ndarray)):
            while path in self._paths:  # {"a": {"b": x}} and {"a/b": y} are two tensors
                path += "+"
            if isinstance(value, Tensor):
                self.add_tensor(path, value)
                return TensorAt(path)
            self.add_tensor(path, as_tensor(value, path))
            return TensorAt(path, "array")
        if isinstance(value, dict):
            return {
                key: self._without_tensors(f"{path}/{key}", child) for key, child in value.items()
            }
        if isinstance(value, (list, tuple)):
            parts = [self._without_tensors(f"{path}/{i}", child) for i, child in enumerate(value)]
            return tuple(parts) if isinstance(value, tuple) else parts
        return value

    def add_tensor(self, path: str, tensor: Tensor, like: Tensor | None = None) -> None:
        """Add a tensor. If `like` is given, the tensor is sharded in the same way as `like`.

        Raises:
            ValueError: the tensor cannot be saved.
        """
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise ValueError(f"{path}: only dense tensors with storage can be saved, not {tensor}")
        dtype_bytes(dtype_name(tensor.dtype))  # refuses what cannot be stored
        assert path not in self._paths, path
        self._paths.add(path)
        parts = pieces(tensor) if like is None else pieces_like(like, tensor)
        held = [
            Held(path, one.shape, one.data, one.start, one.sharded, one.repeats) for one in parts
        ]
        first, start = held[0], held[0].start
        where: tuple[Any, ...]
        if isinstance(tensor, torch.nn.Parameter):  # outlives this; may have no element here
            where = (id(owner(tensor)), first.shape, start, first.dtype)
        elif any(one.length for one in held):
            layout = (tuple(first.data.shape), first.data.stride(), first.shape, start)
            where = (first.data.data_ptr(), first.dtype, *layout, first.repeats)
        else:
            where = (path,)
        known = self._known.setdefault(where, path)
        if known == path:
            self.held += held
        else:
            self.aliases[path] = known


def collect(state: Mapping[str, Any], rank: int) -> Contents:
    """Return the part of a state's contents that this rank holds.

    Raises:
        TypeError: the state contains an object of a type that cannot be saved.
        ValueError: the state contains a tensor that cannot be saved.
    """
    contents = Contents()
    found = list(entries(state))
    names = parameter_names(found)
    for path, kind, value in found:
        contents.kinds[path] = kind
        if kind == MODULE:
            _add_module(contents, path, value)
        elif kind == OPTIMIZER:
            _add_optimizer(contents, path, value, names)
        elif kind == RANDOM:
            contents.add_value(f"{path}/{rank}", value.state_dict())
        elif kind == OBJECT:
            contents.set_local(path, value.state_dict())
        else:
            contents.add_value(path, value)
    return contents


def _add_module(contents: Contents, path: str, module: torch.nn.Module) -> None:
    buffers = {id(buffer) for buffer in module.buffers()}
    for name, value in module_state(module).items():
        if not isinstance(value, Tensor) or (id(value) in buffers and not is_divided(value)):
            contents.set_local(f"{path}/{name}", value)
        else:
            contents.add_tensor(f"{path}/{name}", value)


def _add_optimizer(
    contents: Contents, path: str, optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> None:
    marks = []
    for index, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key != "params"}
        contents.add_value(f"{path}/group/{index}", settings)
        packed = contents.values[f"{path}/group/{index}"]
        marks.append(hashlib.blake2b(packed, digest_size=8).hexdigest())
        contents.values[f"{path}/settings/{marks[-1]}"] = packed
    for parameter, name, group_index, position in optimizer_names(optimizer, names):
        # Group 0 of one stage may have other settings than group 0 of another.
        contents.add_value(f"{path}/parameter/{name}", [group_index, position, marks[group_index]])
        for key, value in optimizer.state.get(parameter, {}).items():
            where = f"{path}/state/{name}/{key}"
            if is_part(key, value, parameter.shape):
                contents.add_tensor(where, value, like=parameter)
                contents.values[where] = pack(TensorAt(where, "part"), where)
            elif isinstance(value, Tensor) and value.dim() > 0 and is_divided(parameter):
                raise ValueError(
                    f"{where}: the state has shape {list(value.shape)}, but the parameter's "
                    f"shard has {list(parameter.shape)}: only elementwise optimizers can be "
                    "sharded"
                )
            else:
                contents.add_value(where, value)


def _tree_checksum(path: str, value: Any) -> int:
    contents = Contents()
    if isinstance(value, Tensor):
        contents.add_tensor(path, value)
    else:
        contents.add_value(path, value)
    crc = zlib.crc32(contents.values.get(path, b""))
    for one in contents.held:
        line = f"{one.path} {one.dtype} {one.shape} {checksum(one.data)}"
        crc = zlib.crc32(line.encode(), crc)
    return zlib.crc32(repr(sorted(contents.aliases.items())).encode(), crc)


def is_part(key: str, value: Any, shape: tuple[int, ...]) -> bool:
    """Return whether an optimizer's `value` has one element for each element of a parameter.

    The decision is based on the shape. Step counts are excluded by name.
    """
    return isinstance(value, Tensor) and tuple(value.shape) == tuple(shape) and key != "step"


def as_tensor(array: np.ndarray[Any, Any], where: str) -> Tensor:
    """Convert a NumPy array to a tensor.

    Raises:
        TypeError: torch does not support the array's dtype.
    """
    ordered = np.ascontiguousarray(array).reshape(array.shape)
    try:
        return torch.from_numpy(ordered if ordered.flags.writeable else ordered.copy())
    except (TypeError, ValueError):
        raise TypeError(f"{where}: cannot save arrays of dtype {array.dtype}") from None
