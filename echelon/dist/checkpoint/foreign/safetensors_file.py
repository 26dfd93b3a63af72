"""Read and write safetensors files.

A file consists of eight bytes that hold the header's length, a JSON header (names, dtypes, shapes
and offsets), and the data. The file has no checksums.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from echelon.dist.checkpoint.disk.files import NewFile
from echelon.dist.checkpoint.disk.manifest import Manifest, StoredTensor, dtype_bytes
from echelon.dist.checkpoint.disk.pattern import Repeats
from echelon.dist.checkpoint.disk.source import runs
from echelon.dist.checkpoint.disk.tensor_bytes import as_bytes
from echelon.dist.checkpoint.state.entries import MODULE, only_module
from echelon.errors import CheckpointError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_ALIGNMENT = 8
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32",
    "I64": "int64", "U64": "uint64", "F64": "float64", "C64": "complex64",
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class SafetensorsFile:
    """A .safetensors file from which the only module of a state is loaded.

    Raises:
        CheckpointError: the file cannot be read or is not a .safetensors file.
        ValueError: the state does not have exactly one module.
    """

    def __init__(self, path: Path, state: Mapping[str, Any]) -> None:
        self.path = path
        key = only_module(state, path)
        try:
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}", path=path) from None
        try:
            tensors = self._read_header()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.close()
            raise CheckpointError(
                f"{path} is not a safetensors file ({error})", path=path
            ) from None
        self.manifest = Manifest(
            world_size=1,
            kinds={key: MODULE},
            tensors={f"{key}/{name}": stored for name, (stored, _) in tensors.items()},
        )
        self._offsets = {f"{key}/{name}": offset for name, (_, offset) in tensors.items()}

    def read(self, path: str, start: int, out: Tensor, repeats: Repeats = ()) -> None:
        """Fill `out` with a tensor's elements, starting at element `start`.

        Raises:
            CheckpointError: the file is truncated.
        """
        for first, piece in runs(start, out, repeats):
            self._read_run(path, first, piece)

    def _read_run(self, path: str, start: int, out: Tensor) -> None:
        target = as_bytes(out)
        offset = self._offsets[path] + start * out.element_size()
        while target:
            count = os.preadv(self._descriptor, [target], offset)
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: the file is truncated: it ends at byte {offset}", path=self.path
                )
            offset, target = offset + count, target[count:]

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read_header(self) -> dict[str, tuple[StoredTensor, int]]:
        size = os.fstat(self._descriptor).st_size
        length = int.from_bytes(os.pread(self._descriptor, _LENGTH_BYTES, 0), "little")
        first = _LENGTH_BYTES + length
        if size < _LENGTH_BYTES or length > _MAX_HEADER_BYTES or first > size:
            raise ValueError(
                f"the file declares a header of {length} bytes, but is only {size} bytes long"
            )
        header = json.loads(os.pread(self._descriptor, length, _LENGTH_BYTES))
        header.pop("__metadata__", None)
        return {
            name: (_stored(name, entry, size - first), first + entry["data_offsets"][0])
            for name, entry in header.items()
        }


def _stored(name: str, entry: dict[str, Any], limit: int) -> StoredTensor:
    shape = tuple(int(length) for length in entry["shape"])
    begin, end = entry["data_offsets"]
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"{name}: dtype {entry['dtype']} is not supported")
    num_bytes = math.prod(shape) * dtype_bytes(dtype)
    if not 0 <= begin <= end <= limit or end - begin != num_bytes or min(shape, default=0) < 0:
        raise ValueError(
            f"{name}: bytes {begin} to {end} of {limit} do not fit a tensor of {num_bytes} bytes"
        )
    return StoredTensor(shape, dtype, ())


def write(
    file: NewFile, tensors: Mapping[str, StoredTensor], read: Callable[[str], Tensor]
) -> None:
    """Write tensors to a new file, one at a time.

    Args:
        file: the file to write to.
        tensors: the shape and dtype of each tensor, keyed by name.
        read: a function that returns the tensor with a given name.

    Raises:
        ValueError: the format does not support a tensor's dtype.
    """
    refused = [name for name, stored in tensors.items() if stored.dtype not in _NAMES]
    if refused:
        raise ValueError(
            f"{refused[0]}: safetensors cannot store dtype {tensors[refused[0]].dtype}"
        )
    order = sorted(tensors, key=lambda name: (-dtype_bytes(tensors[name].dtype), name))
    file.write(_header(order, tensors))
    for name in order:
        file.write(as_bytes(read(name)))


def _header(order: list[str], tensors: Mapping[str, StoredTensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        stored = tensors[name]
        end = offset + stored.numel * dtype_bytes(stored.dtype)
        entries[name] = {
            "dtype": _NAMES[stored.dtype],
            "shape": list(stored.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text
