"""Zero-copy views of the arrays that users pass: NumPy, torch on the CPU, anything with DLPack.

A view is one flat NumPy array over the caller's own memory, plus the true dtype's name: NumPy knows
no bfloat16, so such data is carried as uint16 and named "bfloat16". What cannot be viewed without a
copy is refused here, before anything is sent. torch is never imported: if a tensor was passed, it
is loaded already.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Flat = npt.NDArray[Any]

_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
NUMERIC = _INTEGERS | _FLOATS | {"bool"}


@dataclass(frozen=True, slots=True)
class View:
    """An array as the backends see it.

    `data`: [numel], over the caller's memory; dtype uint16 where `dtype` is "bfloat16".
    """

    data: Flat
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the data in bytes."""
        return int(self.data.nbytes)

    def __str__(self) -> str:
        """Show it as a person would write it: `float32[1024, 4096]`."""
        return f"{self.dtype}{list(self.shape)}"


def is_floating(dtype: str) -> bool:
    """Tell whether a dtype's name is a floating-point one."""
    return dtype in _FLOATS


def view(array: Any, name: str, *, writable: bool) -> View:
    """View an array's memory without copying it.

    Args:
        array: the caller's array, of any shape.
        name: the argument's name, for the error.
        writable: whether the result of an operation goes into it.

    Raises:
        ValueError: not contiguous, not writable, not on the CPU, a dtype that is not numeric, or
            no array at all.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _view_torch(torch, array, name)
    if not isinstance(array, np.ndarray):
        array = _from_dlpack(array, name)
    return _view_numpy(array, name, writable=writable)


def _view_numpy(array: Flat, name: str, *, writable: bool) -> View:
    dtype = array.dtype.name
    if dtype not in NUMERIC:
        raise ValueError(f"{name}: dtype {dtype} cannot be carried; use one of {sorted(NUMERIC)}")
    if not array.dtype.isnative:
        raise ValueError(f"{name}: dtype {array.dtype.str} is not in this machine's byte order")
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name}: a {dtype}{list(array.shape)} array with strides {array.strides} is not "
            "contiguous; pass numpy.ascontiguousarray(...) of it"
        )
    if writable and not array.flags.writeable:
        raise ValueError(f"{name}: the array is read-only, and the result goes into it")
    flat = array.reshape(-1)
    return View(flat.view(np.uint16) if dtype == "bfloat16" else flat, dtype, array.shape)


def _view_torch(torch: Any, tensor: Any, name: str) -> View:
    if tensor.device.type != "cpu":
        raise ValueError(f"{name}: a tensor on {tensor.device}; this backend carries CPU tensors")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in NUMERIC:
        raise ValueError(f"{name}: dtype {dtype} cannot be carried; use one of {sorted(NUMERIC)}")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: a {dtype}{list(tensor.shape)} tensor that is not contiguous; "
            "pass tensor.contiguous()"
        )
    flat = tensor.detach().reshape(-1)
    if dtype == "bfloat16":
        flat = flat.view(torch.int16)
    data = flat.numpy()
    return View(data.view(np.uint16) if dtype == "bfloat16" else data, dtype, tuple(tensor.shape))


def _from_dlpack(array: Any, name: str) -> Flat:
    if not hasattr(array, "__dlpack__"):
        raise ValueError(
            f"{name}: expected a NumPy array, a torch tensor or an array with DLPack, "
            f"got {type(array).__name__}"
        )
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError) as err:
        raise ValueError(f"{name}: {type(array).__name__} cannot be viewed: {err}") from err
