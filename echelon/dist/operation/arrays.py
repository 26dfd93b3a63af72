"""View users' arrays (NumPy, torch, CuPy, or any array that supports DLPack) without copying them.

A view is a flat NumPy array over the caller's own memory, plus the name of the true dtype. NumPy
does not have bfloat16, so such data is represented as uint16 and named "bfloat16". Data that can be
moved but not summed (complex64, float8, ...) is represented as bytes. An array in device memory is
represented by its address. Arrays that cannot be viewed without being copied are rejected here,
before any data is sent. This module never imports torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Flat = npt.NDArray[Any]


class Array(Protocol):
    """An array that a group's calls accept: NumPy, torch, CuPy, or any array that supports DLPack.

    The array's memory must be contiguous, and writable if a result is stored in it. JAX arrays are
    read-only, so they can only be inputs.

    Example:
        >>> def total(parts: Array) -> None:
        ...     dist.world().all_reduce(parts)
        >>> total(np.ones(3))
        >>> total(torch.ones(3))
    """

    def __dlpack__(self) -> Any:
        """Return the array as a DLPack capsule."""

    def __dlpack_device__(self) -> tuple[Any, int]:
        """Return the type and index of the device that holds the array."""


# What can be reduced, in the order of the C core's `enum ec_dtype`.
DTYPES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_NUMERIC = frozenset(DTYPES)
_DLPACK_HOST = 1  # kDLCPU
# NumPy builds a dtype's name on every access, which takes as long as all the rest.
_PLAIN = {np.dtype(name): name for name in DTYPES if name != "bfloat16"}
# Called with a torch tensor before an operation writes to it: torch does not count such changes.
before_write: Callable[[Any], None] | None = None
_TYPES = {name: "<u2" if name == "bfloat16" else np.dtype(name).str for name in DTYPES}


@dataclass(frozen=True, slots=True)
class DeviceFlat:
    """Contiguous memory on a device: the counterpart of a flat NumPy array on the host.

    Attributes:
        pointer: the address of the data on the device.
        length: the number of elements.
        itemsize: the size of one element in bytes.
        index: the index of the device among the devices of its kind.
        owner: the caller's array, which is kept alive.
    """

    pointer: int
    length: int
    itemsize: int
    index: int
    owner: Any

    def __len__(self) -> int:
        """Return the number of elements."""
        return self.length

    @property
    def nbytes(self) -> int:
        """The size of the array's data, in bytes."""
        return self.length * self.itemsize


@dataclass(slots=True)  # not frozen: that makes each one three times as expensive
class View:
    """A view of an array, in the form that backends use.

    Attributes:
        data: a flat array of shape [numel] over the caller's memory. The array is uint16 if `dtype`
            is "bfloat16", and uint8 of shape [numel * itemsize] if `dtype` is not one of `DTYPES`.
            On a device other than "cpu", `data` is a `DeviceFlat`.
    """

    data: Flat
    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu"

    @property
    def num_bytes(self) -> int:
        """The size of the data in bytes."""
        return int(self.data.nbytes)

    def __str__(self) -> str:
        """Return a readable form of the view: `float32[1024, 4096]`."""
        return f"{self.dtype}{list(self.shape)}"


def is_floating(dtype: str) -> bool:
    """Return whether `dtype` is the name of a floating-point dtype."""
    return dtype in _FLOATS


def is_numeric(dtype: str) -> bool:
    """Return whether arrays of a dtype can be reduced, not just moved."""
    return dtype in _NUMERIC


def view(array: Any, name: str, *, writable: bool) -> View:
    """View an array's memory without copying it.

    Args:
        array: the caller's array, of any shape.
        name: the name of the argument, for error messages.
        writable: whether the result of an operation is stored in the array.

    Raises:
        ValueError: `array` is not an array, is masked, is not contiguous, has elements that cannot
            be sent (Python objects, for example), or is read-only although `writable` is True.
    """
    if type(array) is np.ndarray:
        dtype = _PLAIN.get(array.dtype)
        flags = array.flags
        if dtype is not None and flags.c_contiguous and (flags.writeable or not writable):
            return View(array if array.ndim == 1 else array.reshape(-1), dtype, array.shape)
        return _view_numpy(array, name, writable=writable)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        if writable and before_write is not None:
            before_write(array)
        return _view_torch(torch, array, name)
    if not isinstance(array, np.ndarray):
        if hasattr(array, "__cuda_array_interface__"):
            return _view_cuda(array, name, writable=writable)
        array = _from_other_library(array, name, writable=writable)
    return _view_numpy(array, name, writable=writable)


def _view_numpy(array: Flat, name: str, *, writable: bool) -> View:
    if isinstance(array, np.ma.MaskedArray):
        raise ValueError(
            f"{name}: the mask of a masked array cannot be sent; pass the array's .data"
        )
    array = np.asarray(array)  # without the subclass: np.matrix never becomes flat
    dtype = array.dtype.name
    if array.dtype.hasobject:
        raise ValueError(f"{name}: dtype {dtype} cannot be sent, because its elements are objects")
    if not array.dtype.isnative:
        raise ValueError(
            f"{name}: dtype {array.dtype.str} is not in this machine's byte order; pass "
            "array.astype(array.dtype.newbyteorder('='))"
        )
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name}: a {dtype}{list(array.shape)} array with strides {array.strides} is not "
            "contiguous; pass numpy.ascontiguousarray(array)"
        )
    if writable and not array.flags.writeable:
        raise ValueError(f"{name}: the array is read-only, but the result is written to it")
    flat = array.reshape(-1)
    if dtype == "bfloat16":
        flat = flat.view(np.uint16)
    elif dtype not in _NUMERIC:
        flat = flat.view(np.uint8)
    return View(flat, dtype, array.shape)


def _view_torch(torch: Any, tensor: Any, name: str) -> View:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type == "meta":
        raise ValueError(f"{name}: a tensor on {tensor.device} has no memory that can be sent")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: a {dtype}{list(tensor.shape)} tensor is not contiguous; pass "
            "tensor.contiguous()"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name}: the tensor is lazily conjugated or negated; pass tensor.clone()")
    if tensor.device.type != "cpu":
        flat = tensor.detach().reshape(-1)
        data: Any = DeviceFlat(
            flat.data_ptr(), flat.numel(), flat.element_size(), tensor.device.index or 0, flat
        )
        return View(data, dtype, tuple(tensor.shape), tensor.device.type)
    data = np.asarray(_HostMemory(tensor, dtype))
    return View(data, dtype, tuple(tensor.shape))


class _HostMemory:
    """A tensor's memory as a flat buffer for NumPy. The buffer keeps the tensor alive.

    `Tensor.numpy()` is not used because it marks the storage as not resizable, and FSDP1 and
    PowerSGD resize tensors after sending them.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Any, dtype: str) -> None:
        self._tensor = tensor
        length, kind = tensor.numel(), _TYPES.get(dtype)
        if kind is None:
            length, kind = length * tensor.element_size(), "|u1"
        self.__array_interface__ = {
            "version": 3, "shape": (length,), "typestr": kind, "data": (tensor.data_ptr(), False),
        }  # fmt: skip


def _view_cuda(array: Any, name: str, *, writable: bool) -> View:
    """View an array from CuPy or a similar library through `__cuda_array_interface__`."""
    facts = array.__cuda_array_interface__
    dtype, shape = np.dtype(facts["typestr"]), tuple(facts["shape"])
    pointer, read_only = facts["data"]
    strides = facts.get("strides")
    if strides is not None and not _are_contiguous(shape, tuple(strides), dtype.itemsize):
        raise ValueError(f"{name}: a {dtype.name}{list(shape)} device array is not contiguous")
    if writable and read_only:
        raise ValueError(f"{name}: the array is read-only, but the result is written to it")
    index = _device_index(getattr(array, "device", None))
    data: Any = DeviceFlat(pointer, math.prod(shape), dtype.itemsize, index, array)
    return View(data, dtype.name, shape, "cuda")


def _device_index(device: Any) -> int:
    """Return a device's index on this host.

    JAX's `id` is not used, because it is an index across all processes.
    """
    local = getattr(device, "local_hardware_id", None)
    return int(getattr(device, "id", 0) if local is None else local)


def _are_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    expected = itemsize
    if 0 in shape:
        return True
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _from_other_library(array: Any, name: str, *, writable: bool) -> Flat:
    """View an array through DLPack or, if NumPy's DLPack support is insufficient, `__array__`."""
    kind = f"{type(array).__module__.partition('.')[0]}.{type(array).__name__}"
    if not hasattr(array, "__dlpack__"):
        raise ValueError(
            f"{name}: expected a NumPy array, a torch tensor or an array that supports DLPack, "
            f"got {type(array).__name__}"
        )
    if not _lies_on_host(array):
        raise ValueError(
            f"{name}: {kind} is on a device; copy the data to the host or to a torch tensor"
        )
    try:
        viewed = np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError) as err:
        if writable or not hasattr(array, "__array__"):
            raise ValueError(f"{name}: {kind} cannot be viewed as a NumPy array: {err}") from err
        viewed = np.asarray(array)  # JAX's bfloat16, say: NumPy's DLPack has no such type
    if writable and not viewed.flags.writeable:
        raise ValueError(
            f"{name}: {kind} is read-only, but the result is written to it; pass a NumPy array"
        )
    return viewed


def _lies_on_host(array: Any) -> bool:
    try:
        return int(array.__dlpack_device__()[0]) == _DLPACK_HOST
    except (AttributeError, BufferError, RuntimeError, TypeError):
        return True  # `from_dlpack` has the last word
