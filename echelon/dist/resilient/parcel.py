"""Encode a tree of values as bytes and tensors, and decode it into values of the same types.

A container is encoded as a list that begins with the container's kind, and a tensor as a reference.
A NumPy scalar therefore does not become a float, and a Counter does not become a dict. Values that
cannot be reproduced exactly are rejected. Nothing is pickled.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from torch import nn
from typing_extensions import Self

from echelon.dist.checkpoint.disk.tensor_bytes import dtype_named
from echelon.dist.checkpoint.state.plain import pack, unpack

_PLAIN = (int, float, str, bytes, bool, type(None))
_LISTS: dict[str, Any] = {"list": list, "tuple": tuple, "size": torch.Size}
_DICTS: dict[str, Any] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_NAMES = {kind: name for name, kind in (_LISTS | _DICTS).items()}
_ALLOWED = "numbers, strings, lists, tuples, dicts, dense tensors and NumPy arrays"


class Parcel:
    """A tree of values, encoded as bytes and the tensors to which the bytes refer.

    Args:
        head: the encoded tree, and the tensors' dtypes and shapes.
        tensors: the tensors, in the order of their references.
    """

    def __init__(self, head: bytes, tensors: list[torch.Tensor]) -> None:
        self.head = head
        self.tensors = tensors

    @classmethod
    def of(cls, contents: dict[str, Any]) -> Self:
        """Encode a tree of values as a parcel that shares the tensors' memory.

        Raises:
            ValueError: a value cannot be reproduced exactly.
        """
        packing = _Packing()
        try:
            tree = {name: packing.told(value, name) for name, value in contents.items()}
            tensors = packing.tensors
            kinds = [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in tensors]
            return cls(pack({"tree": tree, "kinds": kinds}, "the state"), tensors)
        except RecursionError:
            raise ValueError("a value is nested too deeply, or contains itself") from None
        except TypeError as err:
            raise ValueError(str(err).partition(";")[0]) from None

    @classmethod
    def to_fill(cls, head: bytes) -> Self:
        """Return a parcel with uninitialized tensors of the dtypes and shapes listed in `head`.

        Raises:
            ValueError: `head` is not the head of a parcel.
        """
        kinds = unpack(head)["kinds"]
        return cls(head, [torch.empty(shape, dtype=dtype_named(dtype)) for dtype, shape in kinds])

    def contents(self) -> dict[str, Any]:
        """Decode and return the tree of values, whose tensors share the parcel's memory."""
        tree = unpack(self.head)["tree"]
        return {name: _rebuilt(told, self.tensors) for name, told in tree.items()}


class _Packing:
    """An encoder of values that also collects the tensors in them."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}  # by the tensor's id

    def told(self, value: Any, where: str) -> Any:
        """Return the encoded form of a value; `where` names the value in error messages."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in (torch.Tensor, nn.Parameter):
            return self._tensor(value, where)
        if kind is np.ndarray:
            content = torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())
            return ["array", self._add(content), _dtype_of(value, where), list(value.shape)]
        if isinstance(value, np.generic):
            return ["scalar", _dtype_of(value, where), value.tobytes()]
        name = _NAMES.get(kind)
        if name is None:
            raise _refused(where, f"has type {kind.__qualname__}")
        if name in _LISTS:
            return [name, *(self.told(one, f"{where}[{at}]") for at, one in enumerate(value))]
        others = getattr(value, "__dict__", {})  # such as the versions in a module's state_dict
        items = [
            [self.told(key, where), self.told(one, f"{where}[{key!r}]")]
            for key, one in value.items()
        ]
        return [name, items, self.told(others, where) if others else None]

    def _tensor(self, value: torch.Tensor, where: str) -> Any:
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            raise _refused(where, "is a sparse, quantized or meta tensor")
        name = "parameter" if isinstance(value, nn.Parameter) else "tensor"
        return [name, self._add(value), value.requires_grad]

    def _add(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._places:
            self._places[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._places[id(tensor)]


def _dtype_of(value: Any, where: str) -> str:
    dtype = value.dtype
    if dtype.hasobject or not dtype.itemsize or np.dtype(dtype.str) != dtype:
        raise _refused(where, f"has dtype {dtype}")
    return str(dtype.str)


def _refused(where: str, what: str) -> ValueError:
    return ValueError(f"{where} {what}, where only {_ALLOWED} can be sent")


def _rebuilt(told: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(told, list):
        return told
    name, *rest = told
    if name in _LISTS:
        return _LISTS[name]([_rebuilt(one, tensors) for one in rest])
    if name in _DICTS:
        items, others = rest
        found = _DICTS[name]()
        for key, one in items:
            found[_rebuilt(key, tensors)] = _rebuilt(one, tensors)
        if others is not None:
            vars(found).update(_rebuilt(others, tensors))
        return found
    if name == "scalar":
        dtype, content = rest
        return np.frombuffer(content, dtype)[0]
    if name == "array":
        at, dtype, shape = rest
        return tensors[at].numpy().view(dtype).reshape(shape)
    at, trains = rest
    if name == "parameter":
        return nn.Parameter(tensors[at], requires_grad=trains)
    return tensors[at].requires_grad_(trains)
