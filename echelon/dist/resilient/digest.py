"""Compute a hash of values that should be equal on all ranks."""

from __future__ import annotations

import copyreg
import hashlib
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from echelon.dist.checkpoint.disk.tensor_bytes import as_bytes

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_NAMED = (type, FunctionType, BuiltinFunctionType)


def digest(value: Any) -> str:
    """Return a hash of a tree of tensors, arrays and other values.

    Equal values of the same types have equal hashes on all ranks. The order of sets and dicts does
    not matter. Objects are hashed by their pickled state.

    Raises:
        ValueError: an object cannot be pickled, or refers to itself.
    """
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Tensor):
        text = f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(as_bytes(value)).hexdigest()}"
    elif numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        text = _of_array(value)
    elif isinstance(value, dict):
        items = sorted(f"{digest(key)}: {digest(one)}" for key, one in value.items())
        text = " ".join([type(value).__qualname__, *items])
    elif isinstance(value, (list, tuple)):
        text = " ".join([type(value).__qualname__, *map(digest, value)])
    elif isinstance(value, (set, frozenset)):
        text = " ".join(sorted(map(digest, value)))
    elif type(value) in _PLAIN:
        text = repr(value)
    elif isinstance(value, _NAMED):
        text = f"{value.__module__}.{value.__qualname__}"
    else:
        text = " ".join(_of_object(value))
    return hashlib.sha256(text.encode()).hexdigest()


def _of_array(value: Any) -> str:
    content = value.tolist() if value.dtype.hasobject else value.tobytes()
    return f"{value.dtype} {value.shape} {digest(content)}"


def _of_object(value: Any) -> Iterator[str]:
    kind = type(value).__qualname__
    parts: Any
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        parts = value.__reduce_ex__(4) if reduce is None else reduce(value)
        yield kind
        for part in [parts] if isinstance(parts, str) else parts:
            # The last two are iterators over the items of lists and dicts.
            yield digest(list(part) if hasattr(part, "__next__") else part)
    except (TypeError, AttributeError, RecursionError) as err:
        text = f"a value of type {kind} cannot be compared between ranks"
        raise ValueError(f"{text}: {err}") from err
