"""View the caller's arrays as tensors, and find the streams on which the caller uses them."""

from __future__ import annotations

from typing import Any

from echelon.dist.backends.device.runtime import DeviceRuntime
from echelon.dist.operation.arrays import DeviceFlat
from echelon.dist.operation.operation import Operation


def tensor_of(runtime: DeviceRuntime, data: Any) -> Any:
    """Return a flat tensor view of an operation's array, or None if the array is None."""
    if data is None:
        return None
    assert isinstance(data, DeviceFlat)
    is_torch = isinstance(data.owner, runtime.torch.Tensor)
    flat = (data.owner if is_torch else runtime.as_tensor(data.owner, data.index)).reshape(-1)
    return flat if flat.numel() else flat.new_empty(0)  # one of any strides cannot be viewed


def callers(runtime: DeviceRuntime, operation: Operation) -> list[Any]:
    """Return torch's current stream and other libraries' streams that use the operation's arrays.

    CuPy and Numba store an array's stream in `__cuda_array_interface__`. The numbers 1 and 2 stand
    for the two default streams.
    """
    streams = [runtime.accelerator.current_stream()]
    arrays: list[Any] = [operation.source, operation.target]
    for data in arrays:
        if data is None or isinstance(data.owner, runtime.torch.Tensor):
            continue
        pointer = getattr(data.owner, "__cuda_array_interface__", {}).get("stream")
        if pointer is not None:
            streams.append(runtime.foreign_stream(int(pointer), data.index))
    return streams
