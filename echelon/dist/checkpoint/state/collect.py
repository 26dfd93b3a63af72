"""From a state to what is written of it: tensors that this rank holds, and plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.dist.checkpoint.disk.manifest import dtype_bytes
from echelon.dist.checkpoint.state.entries import (
    MODULE,
    OBJECT,
    OPTIMIZER,
    RANDOM,
    entries,
    module_state,
    optimizer_names,
    parameter_names,
)
from echelon.dist.checkpoint.state.held import Held, dtype_name
from echelon.dist.checkpoint.state.plain import TensorAt, pack
from echelon.dist.checkpoint.state.shards import local


class Contents:
    """Tensors and plain values by path.

    Attributes:
        kinds: what each entry is, by path.
        held: the tensors, each once.
        aliases: further paths of tensors in `held`.
        values: packed plain values by path.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self.held: list[Held] = []
        self.aliases: dict[str, str] = {}
        self.values: dict[str, bytes] = {}
        self._known: dict[tuple[Any, ...], str] = {}

    def add_value(self, path: str, value: Any) -> None:
        """Add a tree of plain values and tensors.

        Raises:
            TypeError: it holds something else.
        """
        self.values[path] = pack(self._without_tensors(path, value), path)

    def _without_tensors(self, path: str, value: Any) -> Any:
        """Return a tree with a reference in place of each tensor and array."""
        if isinstance(value, Tensor):
            self.add_tensor(path, value)
            return TensorAt(path)
        if isinstance(value, np.ndarray):
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
        """Add a tensor, divided among the ranks as `like` is, or as it is itself.

        Raises:
            ValueError: it cannot be saved.
        """
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise ValueError(f"{path}: a checkpoint holds dense tensors with storage, not {tensor}")
        dtype_bytes(dtype_name(tensor.dtype))  # refuses what cannot be stored
        data, shape, start, sharded = local(tensor)
        if like is not None:
            _, shape, start, sharded = local(like)
        one = Held(path, shape, data, start, sharded)
        where = (data.data_ptr(), tuple(data.shape), data.stride(), shape, start, one.dtype)
        known = self._known.setdefault(where, path) if one.length else path
        if known == path:
            self.held.append(one)
        else:
            self.aliases[path] = known


def collect(state: Mapping[str, Any], rank: int) -> Contents:
    """Return what this rank holds of a state.

    Raises:
        TypeError: the state holds something that cannot be saved.
        ValueError: a tensor that cannot be saved.
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
            contents.add_value(path, value.state_dict())
        else:
            contents.add_value(path, value)
    return contents


def _add_module(contents: Contents, path: str, module: torch.nn.Module) -> None:
    for name, value in module_state(module).items():
        if isinstance(value, Tensor):
            contents.add_tensor(f"{path}/{name}", value)
        else:
            contents.add_value(f"{path}/{name}", value)


def _add_optimizer(
    contents: Contents, path: str, optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> None:
    for index, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key != "params"}
        contents.add_value(f"{path}/group/{index}", settings)
    for parameter, name, group_index, position in optimizer_names(optimizer, names):
        contents.add_value(f"{path}/parameter/{name}", [group_index, position])
        for key, value in optimizer.state.get(parameter, {}).items():
            where = f"{path}/state/{name}/{key}"
            if is_part(key, value, parameter.shape):
                contents.add_tensor(where, value, like=parameter)
                contents.values[where] = pack(TensorAt(where, "part"), where)
            elif isinstance(value, Tensor) and value.dim() > 0 and local(parameter).sharded:
                raise ValueError(
                    f"{where}: shape {list(value.shape)} beside a shard of "
                    f"{list(parameter.shape)}: only elementwise optimizers can be sharded"
                )
            else:
                contents.add_value(where, value)


def is_part(key: str, value: Any, shape: tuple[int, ...]) -> bool:
    """Say whether an optimizer keeps an element of `value` for each element of a parameter.

    The shape tells, but for parameters of one element; there the name of torch's step count does.
    """
    return isinstance(value, Tensor) and tuple(value.shape) == tuple(shape) and key != "step"


def as_tensor(array: np.ndarray[Any, Any], where: str) -> Tensor:
    """Return a tensor with an array's elements.

    Raises:
        TypeError: torch knows no such dtype.
    """
    ordered = np.ascontiguousarray(array).reshape(array.shape)
    try:
        return torch.from_numpy(ordered if ordered.flags.writeable else ordered.copy())
    except (TypeError, ValueError):
        raise TypeError(f"{where}: a checkpoint holds no arrays of dtype {array.dtype}") from None
