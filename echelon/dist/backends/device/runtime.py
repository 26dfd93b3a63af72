"""Wrap torch's device runtime for the engines."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from echelon.host.identity import host_identity


class DeviceRuntime:
    """The streams, events and memory of one kind of device, accessed through torch.

    Attributes:
        device: the kind of device, such as "cuda" or "xpu".
        accelerator: torch's module for that kind of device.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.torch: Any = importlib.import_module("torch")
        self.accelerator: Any = self.find_accelerator()
        self._modes = _capture_modes() if device == "cuda" else None

    def find_accelerator(self) -> Any:
        """Return torch's module for this kind of device."""
        return getattr(self.torch, self.device)

    def identity(self, index: int) -> str:
        """Return a name that identifies the device and is the same in every process."""
        host = host_identity()["boot"]
        properties = self.accelerator.get_device_properties(index)
        number = getattr(properties, "uuid", None) or index
        return f"{host}/{self.device}/{number}"

    def as_tensor(self, owner: Any, index: int) -> Any:
        """View another library's array as a tensor."""
        return self.torch.as_tensor(owner, device=f"{self.device}:{index}")

    def run(self, stream: Any, job: Callable[[], object]) -> None:
        """Call `job` with `stream` as torch's current stream."""
        with self.accelerator.stream(stream):
            job()

    def empty_like(self, tensor: Any, length: int, stream: Any) -> Any:
        """Return an uninitialized flat tensor with the dtype of `tensor`, allocated on `stream`."""
        with self.accelerator.stream(stream):
            return tensor.new_empty(length)

    def copy(self, tensor: Any, callers: Sequence[Any]) -> Any:
        """Queue a copy of a tensor behind the work on the caller's streams; return the copy."""
        for stream in callers[1:]:
            callers[0].wait_stream(stream)
        return tensor.clone()

    def on_device(self, tensor: Any, index: int) -> Any:
        """Copy a host tensor to a device."""
        return tensor.to(f"{self.device}:{index}")

    def foreign_stream(self, pointer: int, index: int) -> Any:
        """Return another library's stream as a torch stream."""
        return self.accelerator.ExternalStream(pointer, device=f"{self.device}:{index}")

    def is_capturing(self) -> bool:
        """Return whether this thread's current stream is capturing a graph."""
        ask = getattr(self.accelerator, "is_current_stream_capturing", None)
        return ask is not None and bool(ask())

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        """Let this thread query events while another thread captures a graph."""
        if self._modes is None:
            yield
            return
        exchange, relaxed = self._modes
        _, before = exchange(relaxed)
        try:
            yield
        finally:
            exchange(before)

    def has_happened(self, event: Any) -> bool:
        """Return whether an event has completed.

        During a graph capture, the result is False, because queries are forbidden.
        """
        if self.is_capturing():
            return False
        with self.relaxed():
            return bool(event.query())

    # ---- memory of the host that the device can copy to and from while others compute ----

    def pinned(self, num_bytes: int) -> Any:
        """Return a tensor of bytes in pinned host memory."""
        return self.torch.empty(num_bytes, dtype=self.torch.uint8, pin_memory=True)

    def copy_over(self, target: Any, source: Any, stream: Any) -> None:
        """Queue, on a stream, a copy of bytes between device memory and pinned host memory."""
        with self.accelerator.stream(stream):
            target.copy_(source, non_blocking=True)


def _capture_modes() -> tuple[Any, Any] | None:
    """Return the CUDA function that sets a thread's capture mode, and the value for relaxed mode.

    Return None if the CUDA bindings are not installed.
    """
    try:
        runtime: Any = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return None
    mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    return runtime.cudaThreadExchangeStreamCaptureMode, mode
