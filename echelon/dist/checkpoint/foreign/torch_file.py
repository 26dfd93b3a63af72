"""Load tensors from a file written by `torch.save`, without executing code from the file."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.dist.checkpoint.disk.manifest import Manifest, StoredTensor
from echelon.dist.checkpoint.disk.pattern import Repeats
from echelon.dist.checkpoint.disk.source import runs
from echelon.dist.checkpoint.state.collect import Contents, is_part
from echelon.dist.checkpoint.state.entries import (
    MODULE,
    OPTIMIZER,
    entries,
    only_module,
    optimizer_names,
    parameter_names,
    plain_name,
)
from echelon.dist.checkpoint.state.plain import TensorAt, pack
from echelon.dist.checkpoint.state.shards import whole_shape
from echelon.errors import CheckpointError


class TorchFile:
    """A file written by `torch.save`, as a source for a given state.

    Args:
        path: the path of the file.
        state: the state to fill. A single state_dict is loaded into the state's only module.

    Raises:
        CheckpointError: the file cannot be read without unpickling objects.
        ValueError: the file holds a single state_dict, but the state does not have exactly one
            module.
    """

    def __init__(self, path: Path, state: Mapping[str, Any]) -> None:
        self.path = path
        content = _read(path)
        if any(isinstance(value, Tensor) for value in content.values()):
            content = {only_module(state, path): content}
        contents = _as_contents(content, state)
        self._tensors = {one.path: one.data for one in contents.held}
        self.manifest = Manifest(
            world_size=1,
            kinds=contents.kinds,
            tensors={one.path: StoredTensor(one.shape, one.dtype, ()) for one in contents.held},
            aliases=contents.aliases,
            values=contents.values,
        )

    def read(self, path: str, start: int, out: Tensor, repeats: Repeats = ()) -> None:
        """Fill `out` with a tensor's elements from index `start` onward."""
        stored = self._tensors[self.manifest.aliases.get(path, path)].reshape(-1)
        for first, piece in runs(start, out, repeats):
            piece.copy_(stored[first : first + piece.numel()])

    def close(self) -> None:
        """Release the tensors."""
        self._tensors = {}


def _read(path: Path) -> dict[str, Any]:
    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # torch's older format cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", path=path) from None
    except pickle.UnpicklingError:
        reason = (
            "the file was not written by torch.save, or contains objects other than "
            "tensors and plain values"
        )
        raise CheckpointError(f"{path}: {reason}", path=path) from None
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path}: the file was not written by torch.save ({reason})", path=path
        ) from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise CheckpointError(f"{path}: the file does not contain a dict of states", path=path)
    return content


def _as_contents(content: dict[str, Any], state: Mapping[str, Any]) -> Contents:
    """Convert the contents of a file to the form that `collect` returns."""
    contents = Contents()
    found = list(entries(state))
    names = parameter_names(found)
    kinds = {path: (kind, value) for path, kind, value in found}
    for path, value in content.items():
        kind, wanted = kinds.get(path, ("value", None))
        contents.kinds[path] = kind
        if kind == MODULE:
            for name, one in value.items():
                _add(contents, f"{path}/{plain_name(name)}", one)
        elif kind == OPTIMIZER:
            _add_optimizer(contents, path, value, wanted, names)
        else:
            contents.add_value(path, value)
    return contents


def _add(contents: Contents, path: str, value: Any) -> None:
    if isinstance(value, Tensor):
        contents.add_tensor(path, value)
    else:
        contents.add_value(path, value)


def _add_optimizer(
    contents: Contents,
    path: str,
    content: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    names: dict[int, str],
) -> None:
    """Add an optimizer's state to `contents`, replacing parameter numbers with names."""
    known = {
        (group, place): (name, whole_shape(parameter))
        for parameter, name, group, place in optimizer_names(optimizer, names)
    }
    for index, group in enumerate(content["param_groups"]):
        settings = {key: value for key, value in group.items() if key != "params"}
        contents.add_value(f"{path}/group/{index}", settings)
        for position, number in enumerate(group["params"]):
            name, shape = known.get((index, position), (f"{index}.{position}", None))
            contents.add_value(f"{path}/parameter/{name}", [index, position])
            for key, value in content["state"].get(number, {}).items():
                where = f"{path}/state/{name}/{key}"
                contents.add_value(where, value)
                if shape is not None and is_part(key, value, shape):
                    contents.values[where] = pack(TensorAt(where, "part"), where)
