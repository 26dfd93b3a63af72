"""Encode plain values as msgpack, so that nothing in a checkpoint is ever unpickled.

In addition to msgpack's own types, the encoding supports tuples, integers of any size, and
references to tensors. Saving any other value raises an error.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

_TUPLE, _BIG_INT = 1, 2
_ROLES = {3: "tensor", 4: "array", 5: "part"}
_CODES = {role: code for code, role in _ROLES.items()}
_MAX_DEPTH = 64


@dataclass(frozen=True)
class TensorAt:
    """A placeholder in a tree of values for a tensor that is stored under `path`.

    Attributes:
        role: "tensor" for a tensor, "array" for a NumPy array, or "part" for optimizer state that
            is sharded like its parameter.
    """

    path: str
    role: str = "tensor"


def pack(value: Any, where: str) -> bytes:
    """Encode a tree of plain values and `TensorAt` objects as bytes.

    Raises:
        TypeError: the tree holds a value of an unsupported type.
    """
    try:
        return _pack(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(
            f"{where}: {error}; a checkpoint holds tensors, modules, optimizers, objects with "
            "state_dict and load_state_dict, and plain values"
        ) from None


def unpack(data: bytes) -> Any:
    """Decode the bytes that `pack` produced.

    Raises:
        ValueError: the data was not produced by `pack`.
    """
    return _unpack(data, 0)


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, default=_encode, strict_types=True, use_bin_type=True)
    return packed


def _encode(value: Any) -> Any:
    """Return the encoding of a value that msgpack does not support natively."""
    if isinstance(value, TensorAt):
        return msgpack.ExtType(_CODES[value.role], value.path.encode())
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, _pack(list(value)))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, enum.Enum):
        raise TypeError(f"cannot save the enum value {value!r}")
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list):
        return list(value)
    if type(value) is int:
        return msgpack.ExtType(_BIG_INT, str(value).encode())
    raise TypeError(f"cannot save an object of type {type(value).__qualname__}")


def _unpack(data: bytes, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError("the value is nested too deeply")

    def decode(code: int, content: bytes) -> Any:
        if code == _TUPLE:
            return tuple(_unpack(content, depth + 1))
        if code in _ROLES:
            return TensorAt(content.decode(), _ROLES[code])
        if code == _BIG_INT:
            return int(content)
        raise ValueError(f"the value contains an unknown msgpack extension ({code})")

    try:
        return msgpack.unpackb(data, ext_hook=decode, raw=False, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ValueError(f"cannot decode the value: {error}") from None
